"""How a request travels over HTTP: the client encodes what the server decodes.

A field that the path names is part of the path. Of the others, one marked `Body` is the JSON body, and one
marked `Header` is the header `Idempotency-Key`. The rest is the query of GET and DELETE, and of a request
whose body is a field of its own; otherwise it is the JSON body. Fields that have their defaults are not sent.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_origin
from urllib.parse import quote, urlencode

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo, fields

Req = TypeVar("Req", bound=Struct)
T = TypeVar("T")

_BODY, _HEADER = "the body", "a header"
Body = Annotated[T, _BODY]
#: The key of a request that must create only once.
Header = Annotated[str | None, _HEADER]

_PARAMETER = re.compile(r"\{([a-z_]+)(?::path)?\}")
#: Money in full; the server accepts strings and numbers.
encode = msgspec.json.Encoder().encode


class Encoded(NamedTuple):
    target: str
    body: bytes | None
    key: str | None


class Wire(Generic[Req]):
    def __init__(self, method: str, path: str, request: type[Req], *, reads_body: bool = False) -> None:
        self._request = request
        self._path = _PARAMETER.sub(r"{\1}", path)
        self.names = tuple(_PARAMETER.findall(path))
        by_name = {field.name: field for field in fields(request)}
        self._body_name = _marked(by_name, _BODY)
        self._header_name = _marked(by_name, _HEADER)
        named = {*self.names, self._body_name, self._header_name}
        rest = [field for field in by_name.values() if field.name not in named]
        in_query = method in {"GET", "DELETE"} or reads_body or self._body_name is not None
        #: The rest as a type: the request itself, the base class with these fields, or a type made of them.
        kind = _kind_of(request, tuple(field.name for field in rest)) if rest or not in_query else None
        #: How the query is decoded; None: it isn't looked at.
        self.query: Any = kind if in_query else None
        #: How the body is decoded; None: there is none, or the handler reads it.
        self.body: Any = None if in_query else kind
        if self._body_name is not None:
            self.body = get_args(by_name[self._body_name].type)[0]
        self._rest = [(field.name, field.encode_name, _default_of(field)) for field in rest]
        self._is_rest = len(rest) == len(by_name)

    @property
    def takes_key(self) -> bool:
        return self._header_name is not None

    def request(self, path: Mapping[str, str], query: Any, body: Any, key: str | None) -> Req:
        """The request of decoded parts."""
        rest = query if self.query is not None or self._body_name is not None else body
        if self._is_rest and rest is not None:
            whole: Req = rest
            return whole
        values: dict[str, Any] = {name: getattr(rest, name) for name, _, _ in self._rest}
        for name in self.names:
            values[name] = path[name]
        if self._body_name is not None:
            values[self._body_name] = body
        if self._header_name is not None:
            values[self._header_name] = key
        return self._request(**values)

    def encoded(self, request: Req) -> Encoded:
        target = self._path
        if self.names:
            target = target.format_map({name: quote(getattr(request, name), safe="") for name in self.names})
        key = None if self._header_name is None else getattr(request, self._header_name)
        given = {
            sent: value
            for name, sent, default in self._rest
            if (value := getattr(request, name)) is not default and value != default
        }
        body = given if self.query is None else None
        if self.query is not None and given:
            query = {name: _in_query(value) for name, value in given.items() if value is not None}
            target += "?" + urlencode(query, doseq=True)
        if self._body_name is not None:
            body = getattr(request, self._body_name)
        if self.body is None:
            return Encoded(target, None, key)
        return Encoded(target, encode(body), key)


def _marked(by_name: Mapping[str, FieldInfo], mark: str) -> str | None:
    return next((name for name, field in by_name.items() if mark in _marks(field)), None)


def _marks(field: FieldInfo) -> tuple[Any, ...]:
    return getattr(field.type, "__metadata__", ())


@cache
def _kind_of(request: Any, names: tuple[str, ...]) -> Any:
    origin = get_origin(request) or request
    for base in origin.__mro__:
        if issubclass(base, Struct) and base is not Struct and set(base.__struct_fields__) == set(names):
            return request if base is origin else base
    return msgspec.defstruct(
        origin.__name__,
        [(field.name, field.type, field.default) for field in fields(request) if field.name in names],
        namespace={"__doc__": origin.__dict__.get("__doc__")},
        module=origin.__module__,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _default_of(field: FieldInfo) -> Any:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()


def _in_query(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
