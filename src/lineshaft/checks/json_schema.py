"""Whether an output fits a JSON Schema.

Schemas come from whoever submits tasks, so they are kept within bounds. They refer to nothing but themselves:
no address is fetched and no file read. Patterns are matched in linear time. A schema whose references,
written out, come to more than a hundred thousand parts is refused: each part costs time for each value.

The library keeps the interpreter to itself while it looks at an output, and a server with it. What may take
more than a moment is looked at by a process of its own, for a limited time.
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

from lineshaft.checks.verdict import MAX_REASONS, PASSED, CandidateOutput, NoVerdict, Verdict, refused

MAX_BYTES = 256 << 10
MAX_DEPTH = 100
MAX_PARTS = 100_000
_PATTERN_BYTES = 1 << 20
#: Parts of the schema times values of the output: what is looked at in this process, in about half a second.
MOST_HERE = 2_000_000
LONGEST_SEC = 30.0
#: Keywords whose members are named by the schema's author, so that a member called `enum` is a schema.
_NAMED_PARTS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
#: Keywords that hold data, in which nothing is a reference.
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def fault(schema: Any) -> str | None:
    """What is wrong with a schema; None: it can be used."""
    if not isinstance(schema, dict | bool):
        return f"must be a JSON Schema (an object, or true or false), got {type(schema).__name__}"
    try:
        encoded = msgspec.json.encode(schema)
    except (TypeError, ValueError, RecursionError) as error:
        return f"must be JSON: {error}"
    return _fault_in(encoded)


def check(schema: Any, handed_in: CandidateOutput) -> Verdict:
    encoded = msgspec.json.encode(schema)
    _, _, parts = _validator(encoded)
    if _holds_more_than(MOST_HERE // parts, handed_in.data):
        return _check_apart(encoded, handed_in.data)
    return check_here(encoded, handed_in.data)


def check_here(schema: bytes, data: Any) -> Verdict:
    validator, refers, _ = _validator(schema)
    try:
        if validator.is_valid(data):
            return PASSED
        # With references, looking for every error can take exponential time; for the first one it doesn't.
        if refers:
            return refused(_told(_first_error(validator, data)))
        errors = islice(validator.iter_errors(data), MAX_REASONS)
        return refused(*(_told(error) for error in errors))
    except ValueError as error:
        if isinstance(error, jsonschema_rs.ValidationError):
            raise
        return refused(f"output.data can't be checked: {error}")


def _check_apart(schema: bytes, data: Any) -> Verdict:
    question = msgspec.json.encode([msgspec.Raw(schema), data])
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "lineshaft.checks.json_schema_process"],
            input=question,
            stdout=subprocess.PIPE,
            timeout=LONGEST_SEC,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return refused(
            f"output.data can't be checked against the schema within {LONGEST_SEC:g} s: hand in less, or let "
            "fewer parts of the schema apply to each value"
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoVerdict(f"the process that checks large outputs failed: {error}") from error
    reasons = msgspec.json.decode(answer.stdout, type=list[str] | None)
    return PASSED if reasons is None else refused(*reasons)


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
    raise AssertionError("it was not valid a moment ago")


def _told(error: jsonschema_rs.ValidationError) -> str:
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
            f"refers to {remote!r}, but nothing is fetched or read: "
            "a $ref must point into the schema itself, as in #/$defs/NAME"
        )
    if _too_many_parts(schema):
        return (
            f"comes to more than {MAX_PARTS} parts when its references are written out; "
            "let fewer definitions refer to each other"
        )
    try:
        _validator(encoded)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        message = error.message if isinstance(error, jsonschema_rs.ValidationError) else str(error)
        place = "".join(f"/{part}" for part in getattr(error, "instance_path", ()))
        return f"is no valid JSON Schema: {message}" + (f" (at {place})" if place else "")
    return None


@lru_cache(maxsize=1_000)
def _validator(encoded: bytes) -> tuple[jsonschema_rs.Validator, bool, int]:
    """The compiled schema, whether it has references, and how many parts."""
    schema = msgspec.json.decode(encoded)
    validator = jsonschema_rs.validator_for(
        schema,
        offline=True,
        validate_formats=True,
        pattern_options=jsonschema_rs.RegexOptions(size_limit=_PATTERN_BYTES),
    )
    return validator, any(True for part in _all_parts(schema) for _ in _refs(part)), _written_out(schema)


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
        return _written_out(schema) > MAX_PARTS
    except RecursionError:
        # References that follow each other hundreds deep.
        return True


def _written_out(schema: Any) -> int:
    """How many parts it has with each reference replaced by what it points to; a circle is followed once."""
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
    """What a reference points to; one that points nowhere is reported when the schema is compiled."""
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
