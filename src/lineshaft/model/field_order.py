"""The order of a schema's properties, which PostgreSQL doesn't keep: `jsonb` sorts the keys of objects.

A stored schema lists the names where the order would be lost. A schema that is read has its order again, and
no list.
"""

from typing import Any

import msgspec

#: The keyword of the list, beside `properties`; validators ignore it.
ORDER = "x-lineshaft-order"
#: Levels of a schema whose order is kept: a form has fewer.
_DEPTH = 8
#: Parts of a schema that have schemas by name.
_PARTS = ("properties", "$defs", "definitions")


def with_order(schema: Any, depth: int = _DEPTH) -> Any:
    """The schema as it is stored: with the order of its properties where it would be lost."""
    if not isinstance(schema, dict) or depth == 0:
        return schema
    made = {name: part for name, part in schema.items() if name != ORDER}
    for name in _PARTS:
        if isinstance(parts := schema.get(name), dict):
            made[name] = {key: with_order(part, depth - 1) for key, part in parts.items()}
    if isinstance(properties := schema.get("properties"), dict):
        names = [name for name in properties if isinstance(name, str)]
        if len(names) == len(properties) and names != sorted(names, key=_as_stored):
            made[ORDER] = names
    return made


def _as_stored(name: str) -> tuple[int, bytes]:
    written = name.encode(errors="surrogatepass")
    return len(written), written


def restored(json: bytes | None) -> bytes | None:
    """The JSON of schemas as it was submitted."""
    if json is None or ORDER.encode() not in json:
        return json
    return msgspec.json.encode(_restored(msgspec.json.decode(json)))


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {name: _restored(part) for name, part in value.items() if name != ORDER}
    if isinstance(names := value.get(ORDER), list) and isinstance(properties := made.get("properties"), dict):
        made["properties"] = {name: properties[name] for name in names if name in properties} | properties
    return made
