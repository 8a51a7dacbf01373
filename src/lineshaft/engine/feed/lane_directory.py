"""The lanes that each waiter is interested in: agents specify types, capabilities and models, not lanes.

An unknown lane is looked up when it has work, so that the first task of a new kind wakes an agent as quickly
as the thousandth.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from lineshaft import background
from lineshaft.engine.feed.redis_dispatch import RedisDispatch
from lineshaft.engine.feed.waiter import Waiter
from lineshaft.engine.feed.wakeups import Wakeups
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.postgres.rows import fetch_rows
from lineshaft.errors import LineshaftError

_SQL = catalog.load(__name__)


class _LaneInfo(Struct, frozen=True):
    id: int
    type: str
    required_capabilities: list[str]
    models: list[str]


class Interest:
    """What one agent may claim, and the known lanes with such tasks."""

    def __init__(
        self, types: Sequence[str] | None, capabilities: Sequence[str], models: Sequence[str]
    ) -> None:
        """`types`: None is any."""
        self.types = None if types is None else frozenset(types)
        self._capabilities = frozenset(capabilities)
        self._models = frozenset(models)
        self.lanes: set[int] = set()

    def learn(self, lane: _LaneInfo) -> None:
        if (
            (self.types is None or lane.type in self.types)
            and self._capabilities.issuperset(lane.required_capabilities)
            and (not self._models or not lane.models or not self._models.isdisjoint(lane.models))
        ):
            self.lanes.add(lane.id)


class LaneDirectory:
    def __init__(
        self, database: Database, *, listen: bool = True, redis: RedisDispatch | None = None
    ) -> None:
        """The caller opens and closes `wakeups`; see there for `listen` and `redis`."""
        self._database = database
        self.wakeups = Wakeups(
            database.dsn,
            listen=listen,
            on_unwanted=self._look_up,
            on_listening=self._look_again,
            redis=redis,
        )
        self._interests: set[Interest] = set()
        self._known: set[int] = set()
        #: Lanes that are being looked up.
        self._unknown: set[int] = set()
        #: Lanes may have been announced while this process didn't listen.
        self._may_miss_some = False
        self._lookup: asyncio.Task[None] | None = None

    async def enter(self, interest: Interest) -> None:
        self._interests.add(interest)
        try:
            lanes = await self._lanes_of([interest])
        except BaseException:
            self._interests.discard(interest)
            raise
        for lane in lanes:
            self._known.add(lane.id)
            interest.learn(lane)

    @contextlib.contextmanager
    def waiter(self, interest: Interest) -> Iterator[Waiter]:
        with self.wakeups.waiter(interest.lanes) as waiter:
            try:
                yield waiter
            finally:
                self._interests.discard(interest)

    async def close(self) -> None:
        if self._lookup is not None:
            await background.stop(self._lookup)

    def _look_up(self, lane: int) -> None:
        if lane in self._known:
            return
        self._unknown.add(lane)
        self._start_lookup()

    def _look_again(self) -> None:
        if self._interests:
            self._may_miss_some = True
            self._start_lookup()

    def _start_lookup(self) -> None:
        if self._lookup is None or self._lookup.done():
            self._lookup = asyncio.get_running_loop().create_task(self._learn())

    async def _learn(self) -> None:
        # If the database is unavailable, waiters poll.
        with contextlib.suppress(LineshaftError):
            while self._unknown or self._may_miss_some:
                unknown, self._unknown = self._unknown, set()
                self._may_miss_some = False
                for lane in await self._lanes_of(self._interests):
                    for interest in self._interests:
                        interest.learn(lane)
                # Including lanes that interest no waiter: one look-up is enough.
                self._known |= unknown
                for lane_id in unknown:
                    self.wakeups.wake(lane_id)

    async def _lanes_of(self, interests: Iterable[Interest]) -> list[_LaneInfo]:
        async with self._database.connection() as connection:
            return await fetch_rows(connection, _LaneInfo, _SQL["lanes_of"], {"types": _types_of(interests)})


def _types_of(interests: Iterable[Interest]) -> list[str] | None:
    """The types of all interests; None: one of them takes any type."""
    found: set[str] = set()
    for interest in interests:
        if interest.types is None:
            return None
        found |= interest.types
    return sorted(found)
