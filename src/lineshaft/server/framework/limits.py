"""Limits on the size and the nesting depth of a request body."""

from functools import cache
from itertools import accumulate
from typing import Any

from msgspec import inspect

from lineshaft.errors import InvalidInputError, PayloadTooLargeError

#: Objects and arrays within each other.
MAX_DEPTH = 100
#: A value of a few bytes takes ten times as many in memory.
MAX_VALUES = 1_000_000
#: Objects and arrays: each garbage collection visits all of them.
MAX_CONTAINERS = 250_000
#: For calls whose body has neither lists nor data of the caller's choice.
SMALL_BODY_BYTES = 256 << 10
#: Larger bodies are decoded in a thread.
LARGE_BODY_BYTES = 64 << 10

_OTHER = bytes(byte for byte in range(256) if byte not in b'[]{}",')
_AS_ARRAYS = bytes.maketrans(b"{}", b"[]")
#: Between [ and ]: the difference to it is the change in depth.
_MIDDLE = ord("[") + 1
#: Scanned at once; other threads run in between.
_PIECE = 64 << 10


def too_large(limit: int, setting: str = "LINESHAFT_MAX_BODY_BYTES") -> PayloadTooLargeError:
    if limit == SMALL_BODY_BYTES:
        return PayloadTooLargeError(f"The body is larger than {limit} bytes, the limit of this call.")
    found = f"The body is larger than {limit} bytes ({setting})."
    if setting != "LINESHAFT_MAX_BODY_BYTES":
        return PayloadTooLargeError(found)
    return PayloadTooLargeError(
        f"{found} Send less at once, or put large data into an artifact and refer to it."
    )


@cache
def has_only_small_fields(body: Any) -> bool:
    """Whether a body has only single texts and numbers, so that a large one is never needed."""
    return _is_small(inspect.type_info(body))


_LARGE = (
    inspect.AnyType
    | inspect.RawType
    | inspect.CustomType
    | inspect.CollectionType
    | inspect.TupleType
    | inspect.DictType
)


def _is_small(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.Metadata):
        return _is_small(kind.type)
    if isinstance(kind, inspect.UnionType):
        return all(map(_is_small, kind.types))
    if isinstance(kind, inspect.StructType):
        return all(_is_small(field.type) for field in kind.fields)
    return not isinstance(kind, _LARGE)


def check_structure(body: bytes) -> None:
    """Refuse JSON that is nested too deeply, before anything recurses into it, or has too many values.

    One pass over the brackets and commas outside of strings; whether they are valid JSON is checked later.
    Unclosed brackets count too: the decoder recurses into them before it finds the error.
    """
    if body.count(b"{") + body.count(b"[") <= MAX_DEPTH and body.count(b",") < MAX_VALUES:
        return
    signs = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_AS_ARRAYS, _OTHER)
    depth, values, containers, in_string = 0, 0, 0, False
    for start in range(0, len(signs), _PIECE):
        parts = signs[start : start + _PIECE].split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0
        brackets = outside.translate(None, b",")
        opened = brackets.count(b"[")
        if depth + opened > MAX_DEPTH:
            deepest = max(accumulate(map(_MIDDLE.__sub__, brackets), initial=depth))
            if deepest > MAX_DEPTH:
                raise InvalidInputError(errors=[("", f"is nested more than {MAX_DEPTH} levels deep")])
        depth += 2 * opened - len(brackets)
        values += len(outside) - len(brackets)
        containers += opened
        if values > MAX_VALUES or containers > MAX_CONTAINERS:
            most = f"{MAX_VALUES} values or {MAX_CONTAINERS} objects and arrays"
            raise InvalidInputError(errors=[("", f"has more than {most}; send less at once")])
