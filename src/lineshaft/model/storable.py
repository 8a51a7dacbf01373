"""Values that PostgreSQL can't store: the character U+0000, lone surrogates, NaN and the infinities.

Text for people (reasons, errors) is repaired, so that one bad character doesn't lose a whole message.
Data (outputs, steps, checkpoints) is rejected: a reader gets exactly what was submitted, or nothing.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from lineshaft.errors import InvalidInputError

NOT_FINITE = "must not contain NaN or an infinity, which JSON can't hold"

#: Matches each escape of a JSON text as a whole, so that an escaped backslash followed by u0000 is not taken
#: for one. The group matches escapes that can't be stored.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u0000|u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def check_storable(**named: str) -> None:
    """Reject text that can't be stored; the error names the field."""
    for name, text in named.items():
        if not is_storable(text):
            fault = f"contains a character that PostgreSQL can't store, got {text[:100]!r}. Remove it"
            raise InvalidInputError(errors=[(name, fault)])


def replace_unstorable(text: str) -> str:
    """The text with U+FFFD or ? in place of each character that can't be stored."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def json_fault(encoded: bytes) -> str | None:
    """What is wrong with a JSON text, or None. Nearly every text passes the first test, which is cheap."""
    if b"\\u" not in encoded:
        return None
    if not (found := next((match[1] for match in _ESCAPE.finditer(encoded) if match[1]), None)):
        return None
    if found == b"u0000":
        return "must not contain the character U+0000, which PostgreSQL can't store; remove it or encode it"
    return (
        f"must not contain half of a surrogate pair (\\{found.decode()}), which is not a character; remove it"
    )


def check_json(**named: bytes | None) -> None:
    """Reject JSON that can't be stored; the error names the field."""
    for name, encoded in named.items():
        if encoded is not None and (fault := json_fault(encoded)):
            raise InvalidInputError(errors=[(name, fault)])


def contains_nan(value: Any, encoded: bytes, enc_hook: Callable[[Any], Any] | None = None) -> bool:
    """Whether any float in a value is NaN or infinite: msgspec silently encodes it as null."""
    if b"null" not in encoded:
        return False
    waiting = [msgspec.to_builtins(value, enc_hook=enc_hook)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return True
        if isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
    return False


def readable_json(name: str, encoded: bytes) -> bytes:
    """Return `encoded` or raise InvalidInputError: 1e999 could be stored but never decoded again."""
    try:
        msgspec.json.decode(encoded)
    except msgspec.MsgspecError as error:
        raise InvalidInputError(errors=[(name, f"must be JSON that can be read again: {error}")]) from None
    return encoded
