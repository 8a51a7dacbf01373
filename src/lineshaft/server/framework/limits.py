"""Limits on the size and the nesting depth of a request body."""

import re

from lineshaft.errors import InvalidInputError, PayloadTooLargeError

#: Objects and arrays within each other.
MAX_DEPTH = 100

_OTHER = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_AS_ARRAYS = bytes.maketrans(b"{}", b"[]")
_TEXTS = re.compile(rb'"[^"]*"')


def too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"The body is larger than {limit} bytes (LINESHAFT_MAX_BODY_BYTES). Send less at once, or put large "
        "data into an artifact and refer to it."
    )


def check_depth(body: bytes) -> None:
    """Refuse JSON that is nested too deeply, before anything recurses into it.

    Takes a few passes over the bytes; whether they are valid JSON is checked later.
    """
    if body.count(b"{") + body.count(b"[") <= MAX_DEPTH:
        return
    brackets = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_AS_ARRAYS, _OTHER)
    # Empty strings hold no brackets; without them few strings are left to match.
    brackets = _TEXTS.sub(b"", brackets.replace(b'""', b""))
    for _ in range(MAX_DEPTH):
        # Each pass removes the innermost level.
        brackets, before = brackets.replace(b"[]", b""), brackets
        if len(brackets) == len(before):
            break
    # Unclosed brackets count too: the decoder recurses into them before it finds the error.
    if b"[]" in brackets or brackets.count(b"[") > MAX_DEPTH:
        raise InvalidInputError(errors=[("", f"is nested more than {MAX_DEPTH} levels deep")])
