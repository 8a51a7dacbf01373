"""How large and how deep a request may be."""

import re

from lineshaft.errors import InvalidInputError, PayloadTooLargeError

#: Objects and arrays within each other.
MAX_DEPTH = 100

_OTHER = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_AS_ARRAYS = bytes.maketrans(b"{}", b"[]")
_TEXTS = re.compile(rb'"[^"]*"')


def too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"The body has more than {limit} bytes (LINESHAFT_MAX_BODY_BYTES). Send less at once, or put large "
        "data into an artifact and name it."
    )


def check_depth(body: bytes) -> None:
    """Refuse JSON that is nested too deeply, before anything recurses into it.

    Takes a few passes over the bytes, whatever they are; whether they are JSON at all is seen later.
    """
    if body.count(b"{") + body.count(b"[") <= MAX_DEPTH:
        return
    brackets = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_AS_ARRAYS, _OTHER)
    brackets = _TEXTS.sub(b"", brackets)
    for _ in range(MAX_DEPTH):
        # Each pass takes away what contains nothing more.
        brackets, before = brackets.replace(b"[]", b""), brackets
        if len(brackets) == len(before):
            break
    # What is never closed counts too: the decoder would follow it down before it finds out.
    if b"[]" in brackets or brackets.count(b"[") > MAX_DEPTH:
        raise InvalidInputError(errors=[("", f"is nested more than {MAX_DEPTH} levels deep")])
