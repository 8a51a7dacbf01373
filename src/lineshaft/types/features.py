"""Features: optional fields of requests, which servers announce, so that newer clients work with older ones.

A server refuses fields that it doesn't know. So a new field of an existing request, which a client may do
without, is sent only to servers that announce its feature. It takes one name in FEATURES and one annotation:

    accounts: Annotated[tuple[str, ...], Needs("accounts")] = ()

A field that must not be left out silently, because its caller relies on it, has no annotation: a server that
doesn't know it refuses the request.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, TypeVar

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields, replace

#: The category `error`. A server that doesn't know it would not take it for a crash.
ERROR_CATEGORY = "error_category"
#: Accounts with providers, and instants at which rate limits end.
ACCOUNTS = "accounts"
#: What this version announces as a server.
FEATURES: frozenset[str] = frozenset({ERROR_CATEGORY, "task_defaults", ACCOUNTS})


class Needs(NamedTuple):
    """Marks a field that is sent only to servers that announce the feature."""

    feature: str


T = TypeVar("T")


def fitting(request: T, announced: Collection[str]) -> T:
    """The request without fields that need other features; the same object if there are none."""
    if isinstance(request, Struct):
        changes = dict(_changes(request, announced))
        return replace(request, **changes) if changes else request
    if isinstance(request, list | tuple):
        items: Any = [fitting(item, announced) for item in request]
        return request if all(map(_is_same, items, request)) else items
    if isinstance(request, dict):
        # Only these parts of it: the rest may be data of users.
        parts = {name: fitting(part, announced) for name, part in request.items() if isinstance(part, Struct)}
        return {**request, **parts}  # type: ignore[return-value]
    return request


def _is_same(one: object, other: object) -> bool:
    return one is other


def _changes(request: Struct, announced: Collection[str]) -> Iterator[tuple[str, Any]]:
    for field in fields(request):
        value = getattr(request, field.name)
        needs = [mark for mark in getattr(field.type, "__metadata__", ()) if isinstance(mark, Needs)]
        if any(mark.feature not in announced for mark in needs):
            default = field.default if field.default_factory is NODEFAULT else field.default_factory()
            fitted = value if value == default else default
        else:
            fitted = fitting(value, announced) if isinstance(value, Struct | list | tuple) else value
        if fitted is not value:
            yield field.name, fitted
