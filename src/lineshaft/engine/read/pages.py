"""Pages of a list: filters and cursors.

A cursor is the key of the last row of a page, as JSON in URL-safe base 64. The tag of its type says which
list it belongs to.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import shown
from lineshaft.model.storable import is_storable

Key = TypeVar("Key", bound=msgspec.Struct)


def refuse_unstorable(**filters: Sequence[str]) -> None:
    faults = [
        (name, f"must be text that PostgreSQL can hold, got {shown(value)}")
        for name, values in filters.items()
        for value in values
        if not is_storable(value)
    ]
    if faults:
        raise InvalidInputError(errors=faults)


def encode_cursor(key: msgspec.Struct) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(key)).rstrip(b"=").decode("ascii")


def decode_cursor(text: str | None, kind: type[Key]) -> Key | None:
    if text is None:
        return None
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        key = msgspec.json.decode(base64.b64decode(padded, altchars=b"-_", validate=True), type=kind)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise invalid_cursor(text) from None
    if not all(is_storable(value) for value in msgspec.structs.astuple(key) if isinstance(value, str)):
        raise invalid_cursor(text)
    return key


def invalid_cursor(text: str) -> InvalidInputError:
    fault = f"must be the next_cursor of the same list and order, unchanged, got {shown(text)}"
    return InvalidInputError(errors=[("cursor", fault)])
