"""The `json-schema` check: an output conforms to a JSON Schema.

Schemas come from submitters of tasks, so their cost is limited. A schema can only refer to itself: no URL is
fetched and no file is read. Patterns are matched in linear time. A schema that has more than a hundred
thousand parts with its references expanded is rejected: each part costs time for each value.

The library holds the interpreter lock while it validates. A check that may take longer runs in a separate
process, with a time limit.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any
from urllib.parse import unquote

import jsonschema_rs
import msgspec

from lineshaft.checks.verdict import MAX_REASONS, PASSED, CandidateOutput, NoVerdict, Verdict, rejected

MAX_BYTES = 256 << 10
MAX_DEPTH = 100
MAX_PARTS = 100_000
_PATTERN_BYTES = 1 << 20
#: Parts of the schema times values of the output that are validated in this process, in about half a second.
MAX_HERE = 2_000_000
LONGEST_SEC = 30.0
#: Keywords whose members have names chosen by the author, so that a member named `enum` is a schema.
_NAMED_PARTS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
#: Keywords that contain data, never references.
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def fault(schema: Any) -> str | None:
    """What is wrong with a schema, or None."""
    if not isinstance(schema, dict | bool):
        return f"must be a JSON Schema (an object, or true or false), got {type(schema).__name__}"
    try:
        encoded = msgspec.json.encode(schema)
    except (TypeError, ValueError, RecursionError) as error:
        return f"must be JSON: {error}"
    return _fault_in(encoded)


def check(schema: Any, candidate: CandidateOutput) -> Verdict:
    encoded = msgspec.json.encode(schema)
    _, _, parts = _validator(encoded)
    if _holds_more_than(MAX_HERE // parts, candidate.data):
        return _check_in_process(encoded, candidate.data)
    return check_here(encoded, candidate.data)


def check_here(schema: bytes, data: Any) -> Verdict:
    validator, refers, _ = _validator(schema)
    try:
        if validator.is_valid(data):
            return PASSED
        # With references, finding all errors can take exponential time; finding the first one doesn't.
        if refers:
            return rejected(_reason(_first_error(validator, data)))
        errors = islice(validator.iter_errors(data), MAX_REASONS)
        return rejected(*(_reason(error) for error in errors))
    except ValueError as error:
        if isinstance(error, jsonschema_rs.ValidationError):
            raise
        return rejected(f"output.data can't be checked: {error}")


def _check_in_process(schema: bytes, data: Any) -> Verdict:
    request = msgspec.json.encode([msgspec.Raw(schema), data])
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "lineshaft.checks.json_schema_process"],
            input=request,
            stdout=subprocess.PIPE,
            timeout=LONGEST_SEC,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return rejected(
            f"output.data can't be checked against the schema within {LONGEST_SEC:g} s: submit less data, or "
            "let fewer parts of the schema apply to each value"
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoVerdict(f"the process that checks large outputs failed: {error}") from error
    reasons = msgspec.json.decode(finished.stdout, type=list[str] | None)
    return PASSED if reasons is None else rejected(*reasons)


def _holds_more_than(most: int, data: Any) -> bool:
    seen, waiting = 0, [data]
    while waiting and seen <= most:
        value = waiting.pop()
        seen += 1
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return seen + len(waiting) > most


def _first_error(validator: jsonschema_rs.Validator, data: Any) -> jsonschema_rs.ValidationError:
    try:
        validator.validate(data)
    except jsonschema_rs.ValidationError as error:
        return error
    raise AssertionError("the same data was invalid before")


def _reason(error: jsonschema_rs.ValidationError) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
    return f"output.data{place}: {error.message}"


@lru_cache(maxsize=1_000)
def _fault_in(encoded: bytes) -> str | None:
    if len(encoded) > MAX_BYTES:
        return f"must be at most {MAX_BYTES} bytes of JSON, got {len(encoded)}"
    schema = msgspec.json.decode(encoded)
    if _depth(schema) > MAX_DEPTH:
        return f"must be nested at most {MAX_DEPTH} deep"
    remote = next(
        (ref for part in _all_parts(schema) for ref in _refs(part) if not ref.startswith("#")), None
    )
    if remote is not None:
        return (
            f"refers to {remote!r}, but remote references are not allowed: "
            "a $ref must point into the schema itself, as in #/$defs/NAME"
        )
    if _too_many_parts(schema):
        return (
            f"has more than {MAX_PARTS} parts with its references expanded; "
            "let fewer definitions refer to each other"
        )
    try:
        _validator(encoded)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        message = error.message if isinstance(error, jsonschema_rs.ValidationError) else str(error)
        place = "".join(f"/{part}" for part in getattr(error, "instance_path", ()))
        return f"is not a valid JSON Schema: {message}" + (f" (at {place})" if place else "")
    return None


@lru_cache(maxsize=1_000)
def _validator(encoded: bytes) -> tuple[jsonschema_rs.Validator, bool, int]:
    """The compiled schema, whether it has references, and its number of parts."""
    schema = msgspec.json.decode(encoded)
    validator = jsonschema_rs.validator_for(
        schema,
        offline=True,
        validate_formats=True,
        pattern_options=jsonschema_rs.RegexOptions(size_limit=_PATTERN_BYTES),
    )
    return validator, any(True for part in _all_parts(schema) for _ in _refs(part)), _expanded_parts(schema)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            item
            for node in level
            if isinstance(node, dict | list)
            for item in (node.values() if isinstance(node, dict) else node)
        ]
    return depth


def _refs(part: Mapping[str, Any]) -> Iterator[str]:
    return (part[name] for name in _REFERENCES if isinstance(part.get(name), str))


def _parts(schema: Any) -> Iterator[Any]:
    """The schemas directly within a schema."""
    if isinstance(schema, list):
        yield from schema
    elif isinstance(schema, dict):
        for keyword, value in schema.items():
            if keyword in _NAMED_PARTS and isinstance(value, dict):
                yield from value.values()
            elif keyword not in _DATA and isinstance(value, dict | list):
                yield value


def _all_parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
        waiting.extend(_parts(part))


def _too_many_parts(schema: Any) -> bool:
    try:
        return _expanded_parts(schema) > MAX_PARTS
    except RecursionError:
        # A chain of hundreds of references.
        return True


def _expanded_parts(schema: Any) -> int:
    """The number of parts with all references expanded; a cycle is followed once."""
    anchors = {
        part[name]: part
        for part in _all_parts(schema)
        for name in ("$anchor", "$dynamicAnchor")
        if isinstance(part.get(name), str)
    }
    sizes: dict[int, int] = {}

    def size(part: Any) -> int:
        if not isinstance(part, dict | list):
            return 1
        if id(part) not in sizes:
            sizes[id(part)] = 1
            targets = [_target(schema, anchors, ref) for ref in _refs(part)] if isinstance(part, dict) else []
            sizes[id(part)] = 1 + sum(map(size, [*_parts(part), *targets]))
        return sizes[id(part)]

    return size(schema)


def _target(schema: Any, anchors: Mapping[str, Any], ref: str) -> Any:
    """The target of a reference. A dangling one is reported when the schema is compiled."""
    pointer = unquote(ref[1:])
    if pointer and not pointer.startswith("/"):
        return anchors.get(pointer)
    target = schema
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            return None
    return target
