"""Keeps a `.loki` folder and a queue alike, in both directions.

The queue decides; the files show it. A round reads the events since the last one and the tasks that they are
about, looks at the files that programs have changed, carries out what these changes ask for, and replaces the
files whose content is no longer right. So a round costs what has changed, and the size of the files that it
touches; files of ended tasks have a bound.

**Who takes a task.** What waits is shown claimed by `lineshaft`, except the offers: tasks that the mirror has
claimed before it shows them (`holdings`). A program that claims an offer can't meet an agent, and the claim
is handed over within one transaction. An offer is withdrawn in this order: first from the file, then from the
claim.

**Who writes.** One mirror at a time: it holds a lock of the folder, which the kernel releases when its
process dies. Every server of a database may have one; the next one goes on with what the first one held.

**Races with programs.** Files are read and replaced under the locks of the folder. If a file isn't as the
mirror last saw it when it is to be replaced, nothing is written, and the round begins again with that change.
No database call is made while the locks are held, so programs never wait for a database.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.events import NOW
from lineshaft.engine.guards.rules import read_breakers
from lineshaft.errors import CursorExpiredError, InvalidInputError
from lineshaft.ids import new_id
from lineshaft.integrations.loki import locks, signals
from lineshaft.integrations.loki.claimer import BREAKERS, MIRROR_LOCK
from lineshaft.integrations.loki.folder import (
    Folder,
    UnreadableFileError,
    read_object,
    write_object,
)
from lineshaft.integrations.loki.holdings import FOLDER_AGENT, HEARTBEAT_SEC, Holdings
from lineshaft.integrations.loki.intake import Intake
from lineshaft.integrations.loki.offers import Offers
from lineshaft.integrations.loki.records import (
    DEAD_LETTER,
)
from lineshaft.integrations.loki.shown import Shown
from lineshaft.integrations.loki.view import KEEP, View
from lineshaft.model.breaker import document_of
from lineshaft.model.states import LIVE, Status
from lineshaft.types import Event, TaskFilter
from lineshaft.types.page import MAX_LIMIT

_log = logging.getLogger("lineshaft.loki")

OFFER = 10
#: The folder's own state: its name among instances of agents.
STATE = "state/lineshaft.json"
#: Tasks that are read at once, events of a page, and pages of one round.
_CHUNK, _PAGE, _PAGES = 500, 500, 40
#: How often a round begins again because a program has changed a file in the meantime.
_TRIES = 5
_HEARTBEAT_EVERY_SEC = HEARTBEAT_SEC / 3


class Options(Struct, frozen=True, kw_only=True):
    offer: int = OFFER
    keep: int = KEEP
    wrapper: bool = False
    #: Dead letters are written to `failed.json` too, where some programs look for them.
    failed: bool = False


class Mirror:
    """A duty: `run_once` is a round."""

    name = "loki mirror"
    interval_sec = 0.25

    def __init__(
        self,
        engine: Engine,
        root: Path,
        options: Options | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.folder = Folder(root, wrapper=(options or Options()).wrapper)
        self.options = options or Options()
        self._engine = engine
        self._now = now
        self._leading: ExitStack | None = None
        #: The file whose lock it holds.
        self._lock: int | None = None
        self._said_that_it_waits = self._attached = False
        self._reset()

    def _reset(self, instance: str = "") -> None:
        self._shown = Shown(
            self._engine, self.folder, instance, keep=self.options.keep, failed=self.options.failed
        )
        self._offers = Offers(self._engine, self._shown, self.options.offer, self._now)
        self._intake = Intake(self._engine, self._shown, self._offers)
        self._cursor = NOW
        #: Tasks to read, and events to report, since the last round that succeeded.
        self._stale: dict[str, None] = {}
        self._unreported: list[Event] = []
        self._beat_at: datetime | None = None

    @property
    def view(self) -> View:
        return self._shown.view

    @property
    def holdings(self) -> Holdings:
        return self._shown.holdings

    @property
    def tasks_read(self) -> int:
        return self._shown.tasks_read

    @property
    def is_leading(self) -> bool:
        """Whether this is the mirror that writes."""
        return self._leading is not None

    async def run_once(self) -> Mapping[str, int]:
        if not await self._still_leads() and not self._lead():
            return {}
        first = not self._attached
        if first:
            await self._attach()
        await self._follow()
        await self._heartbeat()
        await self._shown.refresh(self._stale)
        self._stale.clear()
        counts: Counter[str] = Counter()
        for _ in range(_TRIES):
            await self._offers.pause()
            counts["changes of files"] += await self._intake.take_over(first=first)
            first = False
            await self._offers.offer(self._unreported)
            if await asyncio.to_thread(self._shown.files.write):
                break
        await self._offers.give_up()
        await self._report()
        self._attached = True
        return counts

    async def close(self) -> None:
        """Withdraw offers and let another mirror lead; what was taken stays held for a while."""
        if not await self._still_leads():
            return
        try:
            if self._attached:
                self._shown.withdrawing.update(self.holdings.offered)
                for _ in range(_TRIES):
                    await self._intake.take_over(first=False)
                    self._shown.hold_back(self._shown.withdrawing)
                    if await asyncio.to_thread(self._shown.files.write):
                        await self._offers.give_up()
                        break
        finally:
            self._let_others_lead()

    def _lead(self) -> bool:
        path = self.folder.root / MIRROR_LOCK
        with ExitStack() as stack:
            if stack.enter_context(locks.held_alone(path)):
                self._lock = locks.inode(path)
                self._leading = stack.pop_all()
            elif not self._said_that_it_waits:
                _log.info("Another process mirrors %s; this one goes on when that ends", self.folder.root)
        self._said_that_it_waits = self._leading is None
        return self._leading is not None

    async def _still_leads(self) -> bool:
        """Whether the lock that it holds is that of the folder: another mirror leads in a new one."""
        if self._leading is not None and locks.inode(self.folder.root / MIRROR_LOCK) != self._lock:
            _log.warning("%s was removed or replaced", self.folder.root)
            self._let_others_lead()
            # No file shows them any more.
            await self.holdings.withdraw(list(self.holdings.offered))
        return self._leading is not None

    def _let_others_lead(self) -> None:
        if self._leading is not None:
            self._leading.close()
        self._leading, self._attached = None, False

    # Attaching.

    async def _attach(self) -> None:
        await asyncio.to_thread(self.folder.create)
        self._reset(self._instance())
        await self._configure_breakers()
        self._cursor = await self._place_in_feed()
        live = [str(status) for status in (*LIVE, Status.DEAD_LETTERED)]
        ids = await self._engine.read.task_ids(TaskFilter(status=live))
        for status in (Status.COMPLETED, Status.CANCELLED):
            page = await self._engine.read.tasks(
                TaskFilter(status=status), limit=min(max(1, self.options.keep), MAX_LIMIT)
            )
            ids += [task.id for task in reversed(page.items)]
        await self.holdings.agent(FOLDER_AGENT)
        await self._shown.refresh(ids)
        _log.info("Mirroring %d tasks to %s", len(ids), self.folder.root)

    async def _place_in_feed(self) -> str:
        """Where the events of the folder end, if they are of this queue; else now."""
        place = await asyncio.to_thread(signals.last_place, self.folder.root)
        if place is not None and await self._engine.read.tasks_by_id([place.task_id]):
            try:
                await self._engine.events.read(place.cursor, limit=1)
            except (CursorExpiredError, InvalidInputError):
                _log.warning("Events since the last mirror of %s are lost", self.folder.root)
            else:
                return place.cursor
        return (await self._engine.events.read(NOW, limit=1)).next_cursor

    def _instance(self) -> str:
        """The folder's name, wherever it is mounted."""
        path = self.folder.root / STATE
        try:
            found = read_object(path).get("folder")
        except UnreadableFileError:
            found = None
        if not isinstance(found, str):
            # A folder that was removed while it was mirrored keeps its name, and what programs hold.
            found = self.holdings.instance or new_id("loki")
            write_object(path, {"folder": found})
        return found

    async def _configure_breakers(self) -> None:
        """The thresholds of the folder are those of the installation, as a server's settings are."""
        path = self.folder.root / BREAKERS
        policy = read_breakers(path) if path.exists() else None
        if policy is not None:
            document = msgspec.json.encode(document_of(policy))
            await self._engine.limits.apply({"breakers": document}, server=f"loki {self.folder.root}")

    # From the queue to the view.

    async def _follow(self) -> None:
        """Read the events since the last round."""
        for _ in range(_PAGES):
            try:
                page = await self._engine.events.read(self._cursor, limit=_PAGE)
            except CursorExpiredError:
                # What it has missed is read with everything else.
                self._attached = False
                self._unreported.clear()
                raise
            self._unreported += page.items
            for event in page.items:
                if event.task_id is not None:
                    # In the order of their last events.
                    self._stale.pop(event.task_id, None)
                    self._stale[event.task_id] = None
            self._cursor = page.next_cursor
            if page.caught_up:
                break

    async def _heartbeat(self) -> None:
        now = self._now()
        if self._beat_at is not None and (now - self._beat_at).total_seconds() < _HEARTBEAT_EVERY_SEC:
            return
        self._beat_at = now
        await self._shown.refresh(await self.holdings.heartbeat())

    # Besides queue files.

    async def _report(self) -> None:
        events = self._unreported
        kinds = {event.kind for event in events}
        if not self._attached or kinds & _COUNTED or any(kind.startswith("breaker.") for kind in kinds):
            page = await self._engine.read.breakers(limit=500)
            await asyncio.to_thread(signals.write_breakers, self.folder.root, page.items)
        if not self._attached or kinds & _DEAD:
            dead = [name for name in self.view.names(DEAD_LETTER) if not self.view.is_foreign(name)]
            await asyncio.to_thread(signals.write_review_needed, self.folder.root, dead, self._now())
        if events:
            await asyncio.to_thread(signals.write, self.folder.root, events)
            self._unreported = []


#: Events after which breakers may have other counts.
_COUNTED = frozenset({"task.completed", "task.failed"})
#: Events after which there are other dead letters.
_DEAD = frozenset({"task.dead_lettered", "task.resolved", "task.cancelled", "task.ready", "task.created"})
