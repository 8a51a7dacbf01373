"""JSON that stays encoded until a caller asks for it.

A field that holds JSON is a `Raw`: the engine puts the bytes of the database into it, the server copies them
into the response, and only a property of the type decodes them. A missing value is `NULL`, never None.
"""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from lineshaft.model.storable import readable_json

NULL = Raw(b"null")


def null() -> Raw:
    return NULL


def empty_list() -> Raw:
    return Raw(b"[]")


def raw(json: bytes | None) -> Raw:
    return NULL if json is None else Raw(json)


def json_or_none(name: str, json: Raw) -> bytes | None:
    """The JSON as the engine takes it, where null means nothing."""
    given = bytes(json)
    return None if given == b"null" else readable_json(name, given)


def decoded(json: Raw) -> Any:
    return msgspec.json.decode(json)


class JsonStruct(Struct, frozen=True, dict=True):
    """A type with JSON fields: `NAME_json` is encoded, `NAME` decodes it."""

    def __repr__(self) -> str:
        shown = []
        for name in self.__struct_fields__:
            plain = name.removesuffix("_json")
            value = getattr(self, plain if isinstance(getattr(self, name), Raw) else name)
            shown.append(f"{plain}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


#: Money is a number on the wire.
encode = msgspec.json.Encoder(decimal_format="number").encode
