"""Separate process of a JSON Schema check: reads a schema and data, writes a verdict and the reasons.

The verdict comes first: the description of what is wrong may exceed the limits on memory and time.
"""

import resource
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import jsonschema_rs
import msgspec

from lineshaft.checks.json_schema import compile_schema, has_references, patterns_of
from lineshaft.checks.verdict import MAX_REASON, MAX_REASONS

_MEMORY_BYTES = 512 << 20


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    # A process that is ended for its use of memory leaves no file behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    schema, data = msgspec.json.decode(sys.stdin.buffer.read())
    validator, _ = compile_schema(schema, len(patterns_of(schema)))
    try:
        is_valid = validator.is_valid(data)
    except ValueError as error:
        _write(b"false\n")
        _write(msgspec.json.encode([f"output.data can't be checked: {error}"]))
        return
    _write(b"true\n" if is_valid else b"false\n")
    if not is_valid:
        # With references, finding all errors can take exponential time; finding the first one doesn't.
        errors = _first_error(validator, data) if has_references(schema) else validator.iter_errors(data)
        _write(msgspec.json.encode([_reason(error) for error in islice(errors, MAX_REASONS)]))


def _write(said: bytes) -> None:
    sys.stdout.buffer.write(said)
    sys.stdout.buffer.flush()


def _first_error(validator: jsonschema_rs.Validator, data: Any) -> Iterator[jsonschema_rs.ValidationError]:
    try:
        validator.validate(data)
    except jsonschema_rs.ValidationError as error:
        yield error


def _reason(error: jsonschema_rs.ValidationError) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
    # One more than is kept, so that the end is marked as cut.
    return f"output.data{place}: {error.message}"[: MAX_REASON + 1]


if __name__ == "__main__":
    main()
