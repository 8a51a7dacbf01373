"""Guards as the outside sees them: document locks, breakers, slowdowns, pauses."""

from typing import Any, TypeVar

import msgspec

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.pages import decode_cursor, encode_cursor, invalid_cursor
from lineshaft.engine.read.snapshot import Reader
from lineshaft.types import Breaker, Lock, Page, Pause, Slowdown
from lineshaft.types.guards import ShortDag
from lineshaft.types.page import check_limit

#: Waiters for one lock that are counted.
_MOST_WAITING = 10_000

_SQL = catalog.load(__name__)
Guard = TypeVar("Guard", Lock, Breaker, Slowdown)


class _NameKey(msgspec.Struct, frozen=True, array_like=True, tag="name"):
    #: Which list.
    of: str
    after: str
    #: Of a lock: its holder, because readers share it.
    after_holder: str | None = None


async def read_locks(reader: Reader, limit: int, cursor: str | None) -> Page[Lock]:
    return await _page(reader, "locks", Lock, limit, cursor, most=_MOST_WAITING)


async def read_breakers(reader: Reader, limit: int, cursor: str | None) -> Page[Breaker]:
    return await _page(reader, "breakers", Breaker, limit, cursor)


async def read_breaker(reader: Reader, key: str) -> Breaker:
    """A breaker without a row has never counted a failure: it is closed."""
    found = await reader.rows(_SQL["breaker"], key=key)
    if not found:
        return Breaker(key, "closed", 0, None, None, None, None, forced=False)
    return Breaker(**found[0])


async def read_slowdowns(reader: Reader, limit: int, cursor: str | None) -> Page[Slowdown]:
    return await _page(reader, "slowdowns", Slowdown, limit, cursor)


async def read_pauses(reader: Reader) -> list[Pause]:
    return [Pause(**row) for row in await reader.rows(_SQL["pauses"])]


async def read_short_dags(reader: Reader, limit: int) -> list[ShortDag]:
    """DAGs whose budget keeps READY tasks waiting, with the most waiting first."""
    rows = await reader.rows(_SQL["short_dags"], most=_MOST_WAITING, limit=limit)
    return [ShortDag(**row) for row in rows]


async def _page(
    reader: Reader, statement: str, kind: type[Guard], limit: int, cursor: str | None, **parameters: Any
) -> Page[Guard]:
    """A page of a list that is sorted by its key."""
    check_limit(limit)
    key = decode_cursor(cursor, _NameKey)
    if key is not None and key.of != statement:
        raise invalid_cursor(cursor or "")
    place = {"after": None, "after_holder": None} if key is None else msgspec.structs.asdict(key)
    rows = await reader.rows(_SQL[statement], **place, limit=limit + 1, **parameters)
    items = [kind(**row) for row in rows[:limit]]
    if len(rows) <= limit:
        return Page(items, None)
    last = items[-1]
    return Page(items, encode_cursor(_NameKey(statement, last.key, getattr(last, "holder_task_id", None))))
