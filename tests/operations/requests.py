"""Requests of any operation, made of the types of their fields."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import Raw, inspect

_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
_MONEY = st.decimals(0, 10_000, places=2)
_TIMES = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
_JSON = st.dictionaries(_TEXT, st.one_of(st.none(), st.booleans(), st.integers(-9, 9), _TEXT), max_size=3)


def instances(kind: Any) -> st.SearchStrategy[Any]:
    return _of(inspect.type_info(kind))


def _of(kind: inspect.Type) -> st.SearchStrategy[Any]:  # noqa: C901, PLR0911, PLR0912 - one case for each type
    match kind:
        case inspect.Metadata():
            return _of(kind.type)
        case inspect.UnionType():
            # Where one text or several are taken, several: one is the same as a list of one.
            several = any(isinstance(part, inspect.CollectionType) for part in kind.types)
            parts = [part for part in kind.types if not (several and isinstance(part, inspect.StrType))]
            return st.one_of([_of(part) for part in parts])
        case inspect.StructType():
            return _structs(kind)
        case inspect.EnumType():
            return st.sampled_from(list(kind.cls))
        case inspect.LiteralType():
            return st.sampled_from(list(kind.values))
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.StrType():
            return _texts(kind)
        case inspect.IntType():
            return st.integers(max(kind.ge or 0, 0), min(kind.le or 500, 500))
        case inspect.FloatType():
            return st.floats(kind.ge or 0, min(kind.le or 100, 100), allow_subnormal=False)
        case inspect.DecimalType():
            return _MONEY
        case inspect.DateTimeType():
            return _TIMES
        case inspect.RawType():
            return _JSON.map(lambda value: Raw(msgspec.json.encode(value)))
        case inspect.AnyType():
            return _JSON
        case inspect.DictType():
            return st.dictionaries(_TEXT, _of(kind.value_type), max_size=3)
        case inspect.TupleType():
            return st.tuples(*map(_of, kind.item_types))
        case inspect.VarTupleType():
            return st.lists(_of(kind.item_type), min_size=1, max_size=3).map(tuple)
        case inspect.CollectionType():
            return st.lists(_of(kind.item_type), min_size=1, max_size=3)
    raise NotImplementedError(kind)


def _texts(kind: inspect.StrType) -> st.SearchStrategy[str]:
    if kind.pattern is not None:
        return st.from_regex(kind.pattern, fullmatch=True).map(lambda text: text.removesuffix("\n"))
    return _TEXT.filter(lambda text: len(text) >= (kind.min_length or 0))


#: Tasks within tasks are not needed, and would be large.
_LEFT_OUT = {"children"}


def _structs(kind: inspect.StructType) -> st.SearchStrategy[Any]:
    required = {field.name: _of(field.type) for field in kind.fields if field.required}
    others = [field for field in kind.fields if not field.required and field.name not in _LEFT_OUT]
    optional = {field.name: _of(field.type) for field in others}
    return st.fixed_dictionaries(required, optional=optional).map(lambda fields: kind.cls(**fields))
