"""Document locks that are shared with other programs through Redis, as document 003 has them.

Lineshaft's own lock is a row, and decides among its tasks. While such a row is held, this module holds the
lock in Redis too: it takes it when a task is claimed, before the agent gets the task; it renews it while the
row is there, and releases it within a moment after the row is gone. So it doesn't matter how an agent is
connected, or which process its claims and outcomes go through: each process follows the rows.

A document that another program holds is marked in Lineshaft's lock table as held from outside: its tasks
stay READY, keep their place and use no attempt, and `why` names the holder. The mark ends when the lock is
free, or on its own if this process ends.

What can't be known is decided for safety, within limits. While Redis is away, and after it has lost its data,
a program may still be working under a lock that cannot be read: tasks with a document wait for `grace_sec`.
Then they run under Lineshaft's own lock.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping

from lineshaft import background
from lineshaft.engine.guards.outside import OutsideRows
from lineshaft.errors import SettingsError, UnavailableError
from lineshaft.ids import new_id
from lineshaft.integrations.officeplane_redis.lock_keys import Grant, LockKeys
from lineshaft.integrations.redis.connection import RedisServer, RedisUnavailableError
from lineshaft.model.lock_keys import DOCUMENT_PREFIX, document_of
from lineshaft.settings import Settings

#: How often rows and locks are compared while there are any, and how often locks are renewed.
LOOK_EVERY_SEC = 0.25
RENEW_EVERY_SEC = 15.0
#: How often a process that serves others looks for locks that a lost process leaves.
ADOPT_EVERY_SEC = 60.0
#: A mark lasts so long without this process.
MARK_SEC = 15.0
#: The holder of a document that can't be known.
UNKNOWN = "redis is away"

_log = logging.getLogger("lineshaft.locks")


def of(settings: Settings, *, adopts: bool = False) -> "DocumentLocks | None":
    """None: they aren't shared."""
    if not settings.officeplane_locks:
        return None
    if settings.redis_url is None:
        raise SettingsError("LINESHAFT_OFFICEPLANE_LOCKS needs LINESHAFT_REDIS_URL: the locks are there.")
    return DocumentLocks(
        RedisServer(settings.redis_url),
        prefix=settings.officeplane_prefix,
        grace_sec=settings.officeplane_lock_grace_sec,
        adopts=adopts,
    )


class DocumentLocks:
    """Implements `engine.guards.outside.OutsideLocks`."""

    def __init__(
        self,
        server: RedisServer,
        *,
        prefix: str = "officeplane:",
        grace_sec: float = 30.0,
        adopts: bool = False,
    ) -> None:
        """`adopts`: also renew locks whose process may be gone."""
        self._server = server
        self._prefix = prefix
        self._grace_sec = grace_sec
        self._adopts = adopts
        self._held: dict[str, Grant] = {}
        #: Documents that others hold, or may hold, by document.
        self._marked: dict[str, str] = {}
        self._unknown = _Unknown(grace_sec)
        #: The id of Redis' data; empty: it isn't known yet.
        self._data = ""
        self._renewed_at = -math.inf
        self._work = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._conflicts: set[tuple[str, str]] = set()

    async def open(self, rows: OutsideRows) -> None:
        self._rows = rows
        self._client = self._server.connect("lineshaft-locks")
        self._keys = LockKeys(self._client, self._prefix)
        self._running = asyncio.create_task(self._run(), name="lineshaft document locks")

    async def close(self) -> None:
        if self._running is not None:
            await background.stop(self._running)
            with contextlib.suppress(UnavailableError):
                await self._compare()
            await self._client.aclose()

    # At a claim.

    async def take(self, lock_keys: Collection[str]) -> Mapping[str, str]:
        """Take the locks of these keys, which rows have just granted; returns the holders of the others."""
        refused: dict[str, str] = {}
        for grant in await self._grants(lock_keys):
            holder = await self._take(grant)
            if holder is None:
                self._held[grant.document] = grant
            else:
                refused[DOCUMENT_PREFIX + grant.document] = holder
        self._work.set()
        return refused

    async def mark(self, holders: Mapping[str, str]) -> None:
        """The tasks of these keys were given back: keep them from being claimed until the locks are free."""
        await self._rows.mark(holders, MARK_SEC)
        self._marked |= {str(document_of(key)): holder for key, holder in holders.items()}
        self._work.set()

    async def _take(self, grant: Grant) -> str | None:
        """The other holder; None: it is taken, or there is none to ask."""
        if self._unknown.waits:
            return UNKNOWN
        if self._unknown.is_away:
            return None
        try:
            with self._server.reporting():
                return await self._ask(grant)
        except RedisUnavailableError as error:
            self._away(error)
            return await self._take(grant)

    async def _ask(self, grant: Grant, former: str = "") -> str | None:
        found = await self._keys.take(grant, new_data=new_id("data"), known_data=self._data, former=former)
        if found.outcome == "lost":
            self._lost(found.data)
            return UNKNOWN
        if found.outcome == "taken":
            self._data = found.data
            return None
        # The row was another task's a moment ago, whose release hasn't reached Redis yet.
        if found.by_lineshaft and not former and await self._rows.is_task(found.holder):
            return await self._ask(grant, former=found.holder)
        return found.holder

    async def _grants(self, lock_keys: Collection[str]) -> list[Grant]:
        found = await self._rows.granted(lock_keys)
        return [Grant(str(document_of(row.key)), row.holder_task_id, row.token) for row in found]

    # In the background.

    async def _run(self) -> None:
        adopted_at = -ADOPT_EVERY_SEC
        while True:
            try:
                if self._adopts and time.monotonic() >= adopted_at + ADOPT_EVERY_SEC:
                    adopted_at = time.monotonic()
                    for grant in await self._grants(await self._rows.documents()):
                        self._held.setdefault(grant.document, grant)
                await self._compare()
            except RedisUnavailableError as error:
                self._away(error)
            except Exception as error:  # noqa: BLE001 - without this task locks would expire
                _log.warning("Document locks can't be compared, retrying: %s", error)
            await self._pause()

    async def _pause(self) -> None:
        if not (self._held or self._marked or self._unknown.is_away):
            self._work.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._work.wait(), ADOPT_EVERY_SEC if self._adopts else None)
        await asyncio.sleep(LOOK_EVERY_SEC)

    async def _compare(self) -> None:
        """Bring Redis into line with the rows, and the marks into line with Redis."""
        if not self._unknown.waits:
            # No program relies on a lock that it got before: tasks that wait for one that is unknown may run.
            await self._unmark([document for document, holder in self._marked.items() if holder == UNKNOWN])
        documents = [*self._held, *self._marked]
        with self._server.reporting():
            found = await self._keys.holders(documents) if documents else {}
            if not documents:
                await self._client.ping()
        if self._unknown.answers():
            _log.info("Redis at %s answers again", self._server.place)
        await self._compare_held(found)
        await self._compare_marked(found)

    async def _compare_held(self, found: Mapping[str, str | None]) -> None:
        held = dict(self._held)
        keys = [DOCUMENT_PREFIX + name for name in held]
        rows = {grant.document: grant for grant in await self._grants(keys)}
        due = time.monotonic() >= self._renewed_at + RENEW_EVERY_SEC
        for document, known in held.items():
            row = rows.get(document)
            with self._server.reporting():
                if row is None or row.holder != known.holder:
                    await self._keys.release(known)
                    if self._held.get(document) == known:
                        del self._held[document]
                    continue
                if due or found.get(document, row.holder) != row.holder:
                    self._check(row, await self._keys.renew(row))
            if self._held.get(document) == known:
                self._held[document] = row
        if due:
            self._renewed_at = time.monotonic()

    async def _compare_marked(self, found: Mapping[str, str | None]) -> None:
        if self._marked and not self._unknown.waits:
            rows = await self._grants([DOCUMENT_PREFIX + name for name in self._marked])
            ours = {grant.document for grant in rows}
            for document in [name for name in self._marked if name in found]:
                holder = found[document]
                if holder is None or document in ours:
                    await self._unmark([document])
                else:
                    self._marked[document] = holder
        await self._rows.mark(self._marks(), MARK_SEC)

    async def _unmark(self, documents: Iterable[str]) -> None:
        if names := list(documents):
            await self._rows.unmark([DOCUMENT_PREFIX + name for name in names])
            for name in names:
                self._marked.pop(name, None)

    def _marks(self) -> dict[str, str]:
        return {DOCUMENT_PREFIX + document: holder for document, holder in self._marked.items()}

    def _check(self, grant: Grant, other: str) -> None:
        """Say once that a lock which was lost with Redis' data has another holder now."""
        if other and (grant.document, other) not in self._conflicts:
            self._conflicts.add((grant.document, other))
            _log.error(
                "Document %r is locked by %r in Redis while task %s works on it: Redis lost the lock, and "
                "another program took it. Check the document.",
                grant.document,
                other,
                grant.holder,
            )

    # What is known about Redis.

    def _away(self, error: RedisUnavailableError) -> None:
        if self._unknown.begin(away=True):
            _log.warning(
                "%s Tasks with a document wait for %g s; then they run under Lineshaft's own lock alone.",
                error,
                self._grace_sec,
            )

    def _lost(self, data: str) -> None:
        self._data = data
        self._unknown.begin(away=False)
        _log.warning(
            "Redis at %s has lost its data, and with them the document locks of other programs. Tasks with a "
            "document wait for %g s.",
            self._server.place,
            self._grace_sec,
        )


class _Unknown:
    """Whether the locks of other programs can't be known, because Redis is away or has lost its data."""

    def __init__(self, grace_sec: float) -> None:
        self._grace_sec = grace_sec
        self.is_away = False
        self._until = -math.inf

    @property
    def waits(self) -> bool:
        """Such a lock may still be in force."""
        return time.monotonic() < self._until

    def begin(self, *, away: bool) -> bool:
        """Whether it begins now."""
        if away and self.is_away:
            return False
        self.is_away = away
        self._until = time.monotonic() + self._grace_sec
        return True

    def answers(self) -> bool:
        """Redis answers; whether it was away. The next take asks whether it has kept its data."""
        if not self.is_away:
            return False
        self.is_away, self._until = False, -math.inf
        return True
