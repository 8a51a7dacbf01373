"""The order of a schema's properties, which PostgreSQL doesn't keep: `jsonb` sorts the keys of objects."""

from collections.abc import Mapping
from typing import Any

#: The keyword in which the order is kept, beside `properties`; validators ignore it.
ORDER = "x-order"
#: Levels of a schema whose order is kept: a form has fewer.
_DEPTH = 8


def with_order(schema: Any, depth: int = _DEPTH) -> Any:
    """The schema, with the order of its properties where it would be lost."""
    if not isinstance(schema, dict) or depth == 0:
        return schema
    made = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(parts := schema.get(name), dict):
            made[name] = {key: with_order(part, depth - 1) for key, part in parts.items()}
    if ORDER not in schema and isinstance(properties := schema.get("properties"), dict):
        names = [name for name in properties if isinstance(name, str)]
        if len(names) == len(properties) and names != sorted(names, key=_as_stored):
            made[ORDER] = names
    return made


def _as_stored(name: str) -> tuple[int, bytes]:
    written = name.encode(errors="surrogatepass")
    return len(written), written


def in_order(schema: Mapping[str, Any]) -> list[str]:
    """The names of its properties: in the order that was given, then required ones, then all others."""
    properties = schema["properties"]
    given, required = ([*_names(schema.get(word))] for word in (ORDER, "required"))
    known = [name for name in given if name in properties]
    return list(dict.fromkeys([*known, *required, *properties]))


def _names(listed: Any) -> list[str]:
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
