"""What requests and responses are made of."""

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.inspect import StructType, Type, type_info

from lineshaft.server.framework.routing import ItemsOf


def _parts_of(kind: Any, seen: set[int]) -> Iterator[Any]:
    """A type and all types that it is made of. A type that contains itself is described by one object."""
    if id(kind) in seen:
        return
    seen.add(id(kind))
    yield kind
    if isinstance(kind, StructType):
        inner: Iterable[Any] = [field.type for field in kind.fields]
    else:
        inner = [getattr(kind, name) for name in kind.__struct_fields__]
    for found in inner:
        for part in found if isinstance(found, tuple) else (found,):
            if isinstance(part, Type):
                yield from _parts_of(part, seen)


def wire_types(kinds: Iterable[Any]) -> list[Any]:
    """All types that requests or responses are made of, some of them several times."""
    seen: set[int] = set()
    found = [part for kind in kinds for part in (kind.kinds if isinstance(kind, ItemsOf) else (kind,))]
    described = [type_info(kind) for kind in found if kind is not None and not isinstance(kind, str)]
    return [part for kind in described for part in _parts_of(kind, seen)]
