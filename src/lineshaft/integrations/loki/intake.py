"""Carries out what programs have done to the files."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Raw

from lineshaft.engine.engine import Engine
from lineshaft.errors import LineshaftError, UnavailableError
from lineshaft.integrations.loki import changes
from lineshaft.integrations.loki.folder import QueueFile, as_record
from lineshaft.integrations.loki.holdings import FOLDER_AGENT
from lineshaft.integrations.loki.importing import order, without_completed
from lineshaft.integrations.loki.offers import Offers
from lineshaft.integrations.loki.records import (
    COMPLETED,
    HELD_BACK,
    IN_PROGRESS,
    PENDING,
    Record,
    current,
    dependencies_of,
    new_task,
)
from lineshaft.integrations.loki.shown import CHUNK, Shown
from lineshaft.model.reviews import Resolution, ResolutionRequest

_log = logging.getLogger("lineshaft.loki")
_CREATOR = "system:loki"


class Intake:
    def __init__(self, engine: Engine, shown: Shown, offers: Offers) -> None:
        self._engine = engine
        self._shown = shown
        self._offers = offers

    async def take_over(self, *, first: bool) -> int:
        """Carry out what programs have done to the files; returns how many records they changed."""
        looked = await asyncio.to_thread(self._shown.files.look)
        try:
            return await self._carry_out_all(looked, first=first)
        except BaseException:
            # The database is away, say. What programs did is looked at again before anything is written.
            self._shown.files.look_again(looked)
            raise

    async def _carry_out_all(self, looked: Mapping[str, QueueFile], *, first: bool) -> int:
        found: dict[str, dict[str, Raw]] = {}
        for name, file in looked.items():
            found[name], missing = self._shown.view.differences(name, file.records)
            for gone in missing:
                if self._shown.view.is_foreign(gone):
                    self._shown.view.remove(gone)
            if found[name] or missing:
                self._shown.view.changed.add(name)
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
        await self._shown.refresh([name for name in seen if name in known])
        return len(seen)

    async def _known(self, names: Sequence[str]) -> set[str]:
        """Those that are tasks."""
        known = {
            name
            for name in names
            if self._shown.view.place(name) is not None and not self._shown.view.is_foreign(name)
        }
        rest = [name for name in names if name not in known]
        for start in range(0, len(rest), CHUNK):
            tasks = await self._engine.read.tasks_by_id(rest[start : start + CHUNK])
            known.update(task.id for task in tasks)
        return known

    async def _act(self, name: str, queue: str, raw: Raw, *, first: bool) -> None:
        held = self._shown.holdings[name]
        about = None if held is None else changes.Known(held.taken, held.since)
        act = changes.act_of(name, queue, raw, self._shown.view, about, first=first)
        try:
            await self._carry_out(act)
        except UnavailableError:
            raise
        except LineshaftError as error:
            # The queue decides: the record is written again as it should be.
            _log.warning("%s in %s: %s", name, self._shown.folder.queue(queue), error)

    async def _carry_out(self, act: changes.Act | None) -> None:
        match act:
            case changes.Claimed(name, by):
                await self._shown.holdings.take(name, by)
                self._offers.grow()
            case changes.Completed(name, result):
                await self._shown.holdings.complete(name, result)
            case changes.Failed(name, error):
                await self._shown.holdings.fail(name, error)
            case changes.Released(name):
                await self._shown.holdings.withdraw([name])
            case changes.Cancelled(name, reason):
                self._shown.holdings.forget(name)
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
                self._shown.view.put(queue, name, bytes(raw), foreign=True)
            else:
                waiting[name] = current(record)
        history = set(self._completed_outside(waiting))
        placed = order(waiting)
        for name in dict.fromkeys([*placed, *waiting]):
            queue, raw = unknown[name]
            try:
                await self._submit(name, without_completed(waiting[name], history))
            except UnavailableError:
                raise
            except LineshaftError as error:
                _log.warning("%s in %s isn't imported: %s", name, self._shown.folder.queue(queue), error)
                self._shown.view.put(queue, name, bytes(raw), foreign=True)

    def _completed_outside(self, waiting: Mapping[str, Record]) -> Iterable[str]:
        """Dependencies that the folder says are completed, and which aren't tasks."""
        for record in waiting.values():
            for other in dependencies_of(record) or ():
                if self._shown.view.is_foreign(other) and self._shown.view.place(other) == COMPLETED:
                    yield other

    async def _submit(self, name: str, record: Record) -> None:
        new = new_task(record)
        if new.created_by is None:
            new = msgspec.structs.replace(new, created_by=_CREATOR)
        by = record.get("claimedBy")
        submitted = None
        if not (isinstance(by, str) and by.strip()):
            # Programs see it: until the file says otherwise, no agent of Lineshaft may have it.
            submitted = await self._shown.holdings.submit_offered(new)
        elif by != HELD_BACK:
            submitted = await self._shown.holdings.submit_taken(new, by)
        if submitted is None:
            (submitted,) = await self._engine.submission.submit([new])
        if submitted.duplicate:
            _log.info("Duplicate task detected: %s is task %s", name, submitted.id)
        self._shown.view.remove(name)
        await self._shown.refresh([submitted.id])
