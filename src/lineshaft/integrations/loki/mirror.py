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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.events import NOW
from lineshaft.engine.guards.rules import read_breakers
from lineshaft.errors import CursorExpiredError, InvalidInputError, LineshaftError
from lineshaft.ids import new_id
from lineshaft.integrations.loki import changes, locks, signals
from lineshaft.integrations.loki.claimer import BREAKERS, MIRROR_LOCK
from lineshaft.integrations.loki.files import Files
from lineshaft.integrations.loki.folder import (
    Folder,
    UnreadableFileError,
    read_object,
    write_object,
)
from lineshaft.integrations.loki.holdings import FOLDER_AGENT, HEARTBEAT_SEC, Holdings
from lineshaft.integrations.loki.importing import order
from lineshaft.integrations.loki.records import (
    COMPLETED,
    DEAD_LETTER,
    HELD_BACK,
    IN_PROGRESS,
    PENDING,
    Record,
    current,
    new_task,
    queue_of,
    record_of,
)
from lineshaft.integrations.loki.view import KEEP, View, as_record
from lineshaft.model.breaker import document_of
from lineshaft.model.reviews import Resolution, ResolutionRequest
from lineshaft.model.states import LIVE, Status
from lineshaft.types import Event, Task, TaskFilter
from lineshaft.types.page import MAX_LIMIT

_log = logging.getLogger("lineshaft.loki")

OFFER = 10
#: The folder's own state: its name among instances of agents.
STATE = "state/lineshaft.json"
_CREATOR = "system:loki"
#: Tasks that are read at once, events of a page, and pages of one round.
_CHUNK, _PAGE, _PAGES = 500, 500, 40
#: How often a round begins again because a program has changed a file in the meantime.
_TRIES = 5
#: Offers that aren't taken go to agents of Lineshaft that are free, after this time.
WITHDRAW_SEC = 10.0
#: In any case they are made again before their claim expires.
_RENEW_SEC = 300.0
_OFFER_EVERY = timedelta(seconds=1)
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
        #: Tasks that were read, for tests and logs.
        self.tasks_read = 0
        self._engine = engine
        self._now = now
        self._leading: ExitStack | None = None
        self._attached = False
        self._reset()

    def _reset(self) -> None:
        self.view = View(self.options.keep)
        self._files = Files(self.folder, self.view, failed=self.options.failed)
        self.holdings = Holdings(self._engine, "")
        self._cursor = NOW
        #: Tasks to read, and events to report, since the last round that succeeded.
        self._stale: dict[str, None] = {}
        self._unreported: list[Event] = []
        self._dependencies: dict[str, list[str]] = {}
        self._withdrawing: set[str] = set()
        self._offer_size = self.options.offer
        self._offer_after: datetime | None = None
        self._rest_until: datetime | None = None
        self._beat_at: datetime | None = None
        self._paused = False

    @property
    def is_leading(self) -> bool:
        """Whether this is the mirror that writes."""
        return self._leading is not None

    async def run_once(self) -> Mapping[str, int]:
        if self._leading is None and not self._lead():
            return {}
        first = not self._attached
        if first:
            self._reset()
            await self._attach()
        await self._follow()
        await self._heartbeat()
        await self._refresh(self._stale)
        self._stale.clear()
        counts: Counter[str] = Counter()
        for _ in range(_TRIES):
            await self._pause()
            counts["changes of files"] += await self._take_over(first=first)
            first = False
            await self._offer()
            if await asyncio.to_thread(self._files.write):
                break
        await self._give_up()
        await self._report()
        self._attached = True
        return counts

    async def close(self) -> None:
        """Withdraw offers and let another mirror lead; what was taken stays held for a while."""
        if self._leading is None:
            return
        try:
            if self._attached:
                self._withdrawing.update(self.holdings.offered)
                for _ in range(_TRIES):
                    await self._take_over(first=False)
                    self._hold_back(self._withdrawing)
                    if await asyncio.to_thread(self._files.write):
                        await self._give_up()
                        break
        finally:
            self._leading.close()
            self._leading, self._attached = None, False

    def _lead(self) -> bool:
        with ExitStack() as stack:
            if stack.enter_context(locks.held_alone(self.folder.root / MIRROR_LOCK)):
                self._leading = stack.pop_all()
        return self._leading is not None

    # Attaching.

    async def _attach(self) -> None:
        await asyncio.to_thread(self.folder.create)
        self.holdings = Holdings(self._engine, self._instance())
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
        await self._refresh(ids)
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
            found = new_id("loki")
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

    async def _refresh(self, names: Iterable[str]) -> None:
        """Read these tasks and put them where they belong."""
        wanted = list(dict.fromkeys(names))
        for start in range(0, len(wanted), _CHUNK):
            chunk = wanted[start : start + _CHUNK]
            tasks = await self._engine.read.tasks_by_id(chunk)
            self.tasks_read += len(tasks)
            found = set()
            for task in tasks:
                found.add(task.id)
                if task.claim.instance == self.holdings.instance and task.claim.agent_id is not None:
                    await self.holdings.agent(task.claim.agent_id)
                self.holdings.observe(task)
                self._place(task)
            for name in chunk:
                if name not in found and not self.view.is_foreign(name):
                    self._drop(name)

    def _place(self, task: Task) -> None:
        held = self.holdings[task.id]
        is_free = held is not None and not held.taken
        offered = is_free and task.id not in self._withdrawing
        record = record_of(task, offered=is_free)
        if is_free and not offered:
            record["claimedBy"] = HELD_BACK
        queue, encoded = PENDING if is_free else queue_of(task), msgspec.json.encode(record)
        self.view.put(queue, task.id, encoded)
        if offered:
            self.view.offered.setdefault(task.id)
            self._dependencies[task.id] = task.depends_on
        else:
            self.view.offered.pop(task.id, None)
            self._dependencies.pop(task.id, None)
        self._files.note(task, queue, encoded)

    def _drop(self, name: str) -> None:
        """A task that was deleted."""
        self.view.remove(name)
        self.view.offered.pop(name, None)
        self.holdings.forget(name)
        self._files.forget(name)
        self._dependencies.pop(name, None)

    # From the files to the queue.

    async def _take_over(self, *, first: bool) -> int:
        """Carry out what programs have done to the files; returns how many records they changed."""
        looked = await asyncio.to_thread(self._files.look)
        found: dict[str, dict[str, Raw]] = {}
        for name, file in looked.items():
            found[name], missing = self.view.differences(name, file.records)
            for gone in missing:
                if self.view.is_foreign(gone):
                    self.view.remove(gone)
            if found[name] or missing:
                self.view.changed.add(name)
        seen = changes.sightings(found)
        if not seen:
            return 0
        known = await self._known([name for name in seen if not name.startswith("?")])
        unknown: dict[str, tuple[str, Raw]] = {}
        for name, (queue, raw) in seen.items():
            if name in known:
                await self._act(name, queue, raw, first=first)
            else:
                unknown[name] = queue, raw
        await self._import(unknown)
        await self._refresh([name for name in seen if name in known])
        return len(seen)

    async def _known(self, names: Sequence[str]) -> set[str]:
        """Those that are tasks."""
        known = {
            name for name in names if self.view.place(name) is not None and not self.view.is_foreign(name)
        }
        rest = [name for name in names if name not in known]
        for start in range(0, len(rest), _CHUNK):
            tasks = await self._engine.read.tasks_by_id(rest[start : start + _CHUNK])
            known.update(task.id for task in tasks)
        return known

    async def _act(self, name: str, queue: str, raw: Raw, *, first: bool) -> None:
        held = self.holdings[name]
        about = None if held is None else changes.Known(held.taken, held.since)
        act = changes.act_of(name, queue, raw, self.view, about, first=first)
        try:
            await self._carry_out(act)
        except LineshaftError as error:
            # The queue decides: the record is written again as it should be.
            _log.warning("%s in %s: %s", name, self.folder.queue(queue), error)

    async def _carry_out(self, act: changes.Act | None) -> None:
        match act:
            case changes.Claimed(name, by):
                await self.holdings.take(name, by)
                self._offer_size = min(self.options.offer, 2 * self._offer_size)
            case changes.Completed(name, result):
                await self.holdings.complete(name, result)
            case changes.Failed(name, error):
                await self.holdings.fail(name, error)
            case changes.Released(name):
                await self.holdings.withdraw([name])
            case changes.Cancelled(name, reason):
                self.holdings.forget(name)
                await self._engine.cancel.cancel(name, reason)
            case changes.Retried(name):
                decision = ResolutionRequest(
                    resolution=Resolution.RETRY, reviewer=FOLDER_AGENT, note="moved back to pending.json"
                )
                await self._engine.dead_letters.resolve(name, decision)
            case None:
                pass

    async def _import(self, unknown: Mapping[str, tuple[str, Raw]]) -> None:
        """Records that aren't tasks yet: those that wait or are in progress become tasks."""
        waiting: dict[str, Record] = {}
        for name, (queue, raw) in unknown.items():
            record = as_record(raw)
            if record is None or queue not in {PENDING, IN_PROGRESS}:
                self.view.put(queue, name, bytes(raw), foreign=True)
            else:
                waiting[name] = current(record)
        history = set(self._completed_outside(waiting))
        placed = order(waiting)
        for name in dict.fromkeys([*placed, *waiting]):
            queue, raw = unknown[name]
            record = waiting[name]
            listed = record.get("dependencies")
            if isinstance(listed, list):
                record["dependencies"] = [other for other in listed if other not in history]
            try:
                await self._submit(name, record)
            except LineshaftError as error:
                _log.warning("%s in %s isn't imported: %s", name, self.folder.queue(queue), error)
                self.view.put(queue, name, bytes(raw), foreign=True)

    def _completed_outside(self, waiting: Mapping[str, Record]) -> Iterable[str]:
        """Dependencies that the folder says are completed, and which aren't tasks."""
        for record in waiting.values():
            for other in record.get("dependencies") or ():
                if self.view.is_foreign(other) and self.view.place(other) == COMPLETED:
                    yield other

    async def _submit(self, name: str, record: Record) -> None:
        new = new_task(record)
        if new.created_by is None:
            new = msgspec.structs.replace(new, created_by=_CREATOR)
        by = record.get("claimedBy")
        submitted = None
        if isinstance(by, str) and by.strip() and by != HELD_BACK:
            submitted = await self.holdings.submit_taken(new, by)
        if submitted is None:
            (submitted,) = await self._engine.submission.submit([new])
        if submitted.duplicate:
            _log.info("Duplicate task detected: %s is task %s", name, submitted.id)
        self.view.remove(name)
        await self._refresh([submitted.id])

    # Offers.

    async def _offer(self) -> None:
        offered = self.holdings.offered
        now = self._now()
        if self._paused or not self.options.offer:
            self._withdrawing.update(offered)
        else:
            if any(event.kind == "queue.paused" for event in self._unreported):
                self._withdrawing.update(offered)
            await self._withdraw_stale(now)
            room = min(self._offer_size, self.options.offer) - len(offered)
            is_new = any(event.kind in _CLAIMABLE for event in self._unreported)
            is_due = is_new or self._offer_after is None or now >= self._offer_after
            is_resting = self._rest_until is not None and now < self._rest_until
            if room > 0 and is_due and not is_resting and not self._withdrawing:
                made = await self.holdings.offer(room)
                await self._refresh(made)
                if len(made) < room:
                    self._offer_after = now + _OFFER_EVERY
        self._hold_back(self._withdrawing)
        await self._pin()

    async def _withdraw_stale(self, now: datetime) -> None:
        ages = {name: (now - held.since).total_seconds() for name, held in self.holdings.offered.items()}
        self._withdrawing.update(name for name, age in ages.items() if age > _RENEW_SEC)
        stale = [name for name, age in ages.items() if age > WITHDRAW_SEC]
        if stale and await self.holdings.others_are_free():
            self._withdrawing.update(stale)
            # Fewer, as long as they aren't taken.
            self._offer_size = max(1, self._offer_size // 2)

    def _hold_back(self, names: Iterable[str]) -> None:
        for name in names:
            record = self.view.record(name)
            if record is not None and self.view.place(name) == PENDING:
                held_back = msgspec.json.decode(record) | {"claimedBy": HELD_BACK}
                self.view.put(PENDING, name, msgspec.json.encode(held_back))
            self.view.offered.pop(name, None)

    async def _give_up(self) -> None:
        """Release offers that no file shows any more."""
        gone = [name for name in self._withdrawing if name in self.holdings.offered]
        if gone and not self.view.changed:
            await self.holdings.withdraw(gone)
            # First agents may have them.
            self._rest_until = self._now() + _OFFER_EVERY
            self._withdrawing.clear()

    async def _pin(self) -> None:
        """Keep what offers depend on in completed.json: programs look for it there."""
        needed = {name for offered in self.view.offered for name in self._dependencies.get(offered, ())}
        if needed != self.view.pinned:
            self.view.pinned = frozenset(needed)
            await self._refresh([name for name in needed if self.view.place(name) is None])

    async def _pause(self) -> None:
        """PAUSE and STOP: while one of them is there, nothing new is claimed."""
        by = self.folder.paused_by
        mine = f"in {self.folder.root}"
        if (by is not None) == self._paused and self._attached:
            return
        self._paused = by is not None
        pauses = [pause for pause in await self._engine.read.pauses() if pause.type == "*"]
        if by is not None and not pauses:
            await self._engine.pauses.pause(None, reason=f"{by} {mine}")
        elif by is None and any((pause.reason or "").endswith(mine) for pause in pauses):
            await self._engine.pauses.resume(None, reason=f"removed {mine}")

    async def _heartbeat(self) -> None:
        now = self._now()
        if self._beat_at is not None and (now - self._beat_at).total_seconds() < _HEARTBEAT_EVERY_SEC:
            return
        self._beat_at = now
        await self._refresh(await self.holdings.heartbeat())

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


#: Events after which there may be more to offer.
_CLAIMABLE = frozenset({"task.ready", "queue.resumed", "breaker.closed", "lock.expired"})
#: Events after which breakers may have other counts.
_COUNTED = frozenset({"task.completed", "task.failed"})
#: Events after which there are other dead letters.
_DEAD = frozenset({"task.dead_lettered", "task.resolved", "task.cancelled", "task.ready", "task.created"})
