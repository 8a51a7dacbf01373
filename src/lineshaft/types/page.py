"""One page of a list."""

from typing import Generic, TypeVar

from msgspec import Struct

from lineshaft.errors import InvalidInputError

T = TypeVar("T")

DEFAULT_LIMIT, MAX_LIMIT = 50, 500


class Page(Struct, Generic[T], frozen=True):
    items: list[T]
    #: Continue with this. A page may be short, even empty, and still have more behind it: rare matches are
    #: searched for in a bounded part of the history at a time.
    next_cursor: str | None = None


def check_limit(limit: int) -> None:
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidInputError(errors=[("limit", f"must be from 1 to {MAX_LIMIT}, got {limit}")])
