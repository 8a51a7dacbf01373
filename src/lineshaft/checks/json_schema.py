"""The `json-schema` check: an output conforms to a JSON Schema.

Schemas come from submitters of tasks, so their cost is limited. A schema can only refer to itself: no URL is
fetched and no file is read. Patterns are matched in linear time, and limited in number, length and compiled
size, all taken together. A schema that has more than a hundred thousand parts with its references expanded is
rejected: each part costs time for each value.

The library holds the interpreter lock while it validates. This process therefore only asks whether an output
is valid, which takes bounded time. A separate process with limits on time and memory describes what is wrong:
the errors of nested `anyOf` can take exponential space. It also makes the checks that may take longer.
"""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import jsonschema_rs
import msgspec
from msgspec import Struct

from lineshaft.checks.bounded_cache import BoundedCache
from lineshaft.checks.verdict import PASSED, CandidateOutput, NoVerdict, Verdict, rejected

MAX_BYTES = 256 << 10
MAX_DEPTH = 100
MAX_PARTS = 100_000
MAX_PATTERNS = 200
#: Characters of all patterns of a schema.
MAX_PATTERN_TEXT = 10_000
#: Classes in all patterns, such as \w, \pL and [a-z]: they are expensive to compile, more so without case.
MAX_CLASSES = 200
MAX_CLASSES_IGNORING_CASE = 20
#: The compiled patterns of a schema, in sum.
MAX_COMPILED_BYTES = 2 << 20
#: Parts of the schema times values of the output that are validated in this process, in about half a second.
MAX_HERE = 2_000_000
#: Characters of the output that are matched in this process, if the schema has patterns.
MAX_TEXT_HERE = 10_000
LONGEST_SEC = 30.0
#: For describing what is wrong with an invalid output.
DESCRIPTION_SEC = 5.0
_CACHE_BYTES = 32 << 20
_NO_DESCRIPTION = "output.data doesn't match the schema"
#: The separate processes take turns, so that their memory is limited too.
_PROCESSES = threading.BoundedSemaphore(2)
_CLASS = re.compile(r"\\[pPwWdDsS]|\[")
_IGNORES_CASE = re.compile(r"\(\?[A-Za-z]*i")
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
    compiled = _compiled(encoded)
    most_text = MAX_TEXT_HERE if compiled.has_patterns else None
    if _holds_more_than(MAX_HERE // compiled.parts, most_text, candidate.data):
        return _check_in_process(encoded, candidate.data)
    try:
        if compiled.validator.is_valid(candidate.data):
            return PASSED
    except ValueError as error:
        return rejected(f"output.data can't be checked: {error}")
    _, reasons = _ask_process(encoded, candidate.data, DESCRIPTION_SEC)
    return rejected(*(reasons or [_NO_DESCRIPTION]))


def _check_in_process(schema: bytes, data: Any) -> Verdict:
    is_valid, reasons = _ask_process(schema, data, LONGEST_SEC)
    if is_valid is None:
        return rejected(
            f"output.data can't be checked against the schema within {LONGEST_SEC:g} s: submit less data, or "
            "let fewer parts of the schema apply to each value"
        )
    return PASSED if is_valid else rejected(*(reasons or [_NO_DESCRIPTION]))


def _ask_process(schema: bytes, data: Any, limit_sec: float) -> tuple[bool | None, list[str]]:
    """Whether the data is valid (None: unknown within the limits), and what is wrong as far as is known."""
    request = msgspec.json.encode([msgspec.Raw(schema), data])
    try:
        with _PROCESSES:
            said = subprocess.run(
                [sys.executable, "-m", "lineshaft.checks.json_schema_process"],
                input=request,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=limit_sec,
                check=False,
            ).stdout
    except subprocess.TimeoutExpired as expired:
        said = expired.stdout or b""
    except OSError as error:
        raise NoVerdict(f"the process that checks outputs can't be started: {error}") from error
    verdict, _, reasons = said.partition(b"\n")
    if not verdict:
        return None, []
    return verdict == b"true", msgspec.json.decode(reasons, type=list[str]) if reasons else []


def _holds_more_than(most: int, most_text: int | None, data: Any) -> bool:
    """Whether data has more values, or more characters, than this."""
    seen, text, waiting = 0, 0, [data]
    while waiting and seen <= most:
        value = waiting.pop()
        seen += 1
        if isinstance(value, dict):
            waiting.extend(value.values())
            text += sum(map(len, value)) if most_text is not None else 0
        elif isinstance(value, list):
            waiting.extend(value)
        elif isinstance(value, str):
            text += len(value)
        if most_text is not None and text > most_text:
            return True
    return seen + len(waiting) > most


def _fault_in(encoded: bytes) -> str | None:
    if len(encoded) > MAX_BYTES:
        return f"must be at most {MAX_BYTES} bytes of JSON, got {len(encoded)}"
    if _COMPILED.get(encoded) is not None:
        return None
    schema = msgspec.json.decode(encoded)
    return _excess(schema) or _pattern_fault(patterns_of(schema)) or _compiler_fault(encoded, schema)


def _excess(schema: Any) -> str | None:
    """What makes a schema too expensive, or reach beyond itself."""
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
    return None


def _compiler_fault(encoded: bytes, schema: Any) -> str | None:
    try:
        _compiled(encoded)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        message = error.message if isinstance(error, jsonschema_rs.ValidationError) else str(error)
        place = "".join(f"/{part}" for part in getattr(error, "instance_path", ()))
        if 'is not a "regex"' in message:
            number = len(patterns_of(schema))
            message += (
                f". A pattern must be one that is matched in linear time; all patterns of the schema "
                f"({number}) may take {MAX_COMPILED_BYTES} bytes in sum when compiled"
            )
        return f"is not a valid JSON Schema: {message}" + (f" (at {place})" if place else "")
    return None


class _Compiled(Struct, frozen=True):
    validator: jsonschema_rs.Validator
    #: With all references expanded.
    parts: int
    has_patterns: bool


_COMPILED: BoundedCache[bytes, _Compiled] = BoundedCache(_CACHE_BYTES)


def _compiled(encoded: bytes) -> _Compiled:
    known = _COMPILED.get(encoded)
    if known is None:
        schema = msgspec.json.decode(encoded)
        number = len(patterns_of(schema))
        validator, pattern_bytes = compile_schema(schema, number)
        known = _Compiled(validator, _expanded_parts(schema), number > 0)
        # A compiled part takes about twenty times the space of its text.
        _COMPILED.put(encoded, known, 20 * len(encoded) + pattern_bytes)
    return known


def compile_schema(schema: Any, patterns: int) -> tuple[jsonschema_rs.Validator, int]:
    """The validator, and how much memory its patterns take at most."""
    if patterns == 0:
        return _validator(schema, MAX_COMPILED_BYTES), 0
    # The library doesn't report the size of a pattern, only that it is above a limit.
    for share in (MAX_COMPILED_BYTES // 256, MAX_COMPILED_BYTES // 16):
        try:
            # With its tables for matching a pattern takes about four times its compiled size.
            return _validator(schema, share // patterns), 4 * share
        except (jsonschema_rs.ValidationError, ValueError):
            continue
    return _validator(schema, MAX_COMPILED_BYTES // patterns), 4 * MAX_COMPILED_BYTES


def _validator(schema: Any, pattern_bytes: int) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(
        schema,
        offline=True,
        validate_formats=True,
        pattern_options=jsonschema_rs.RegexOptions(size_limit=pattern_bytes, dfa_size_limit=pattern_bytes),
    )


def patterns_of(schema: Any) -> list[str]:
    found: list[str] = []
    for part in _all_parts(schema):
        if isinstance(part.get("pattern"), str):
            found.append(part["pattern"])
        if isinstance(part.get("patternProperties"), dict):
            found += part["patternProperties"]
    return found


def _pattern_fault(patterns: list[str]) -> str | None:
    if len(patterns) > MAX_PATTERNS:
        return f"must have at most {MAX_PATTERNS} patterns, got {len(patterns)}"
    text = sum(map(len, patterns))
    if text > MAX_PATTERN_TEXT:
        return f"must have at most {MAX_PATTERN_TEXT} characters in all its patterns, got {text}"
    classes = [(len(_CLASS.findall(pattern)), _IGNORES_CASE.search(pattern)) for pattern in patterns]
    if sum(number for number, _ in classes) > MAX_CLASSES:
        return f"must have at most {MAX_CLASSES} classes such as \\w or [a-z] in all its patterns"
    if sum(number for number, ignores_case in classes if ignores_case) > MAX_CLASSES_IGNORING_CASE:
        return (
            f"must have at most {MAX_CLASSES_IGNORING_CASE} classes such as \\w or [a-z] in all its patterns "
            "that ignore case (?i)"
        )
    return None


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


def has_references(schema: Any) -> bool:
    return any(True for part in _all_parts(schema) for _ in _refs(part))


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
