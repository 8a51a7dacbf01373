"""The tasks of a queue as a folder shows them: read, and put where they belong."""

from collections.abc import Iterable

import msgspec

from lineshaft.engine.engine import Engine
from lineshaft.integrations.loki.files import Files
from lineshaft.integrations.loki.folder import Folder
from lineshaft.integrations.loki.holdings import Holdings
from lineshaft.integrations.loki.records import HELD_BACK, PENDING, queue_of, record_of
from lineshaft.integrations.loki.view import View
from lineshaft.types import Task

#: Tasks that are read at once.
CHUNK = 500


class Shown:
    def __init__(self, engine: Engine, folder: Folder, instance: str, *, keep: int, failed: bool) -> None:
        self.folder = folder
        self.view = View(keep)
        self.files = Files(folder, self.view, failed=failed)
        self.holdings = Holdings(engine, instance)
        #: Offers that are shown as claimed, before they are given up.
        self.withdrawing: set[str] = set()
        #: What offers depend on.
        self.dependencies: dict[str, list[str]] = {}
        #: Tasks that were read, for tests and logs.
        self.tasks_read = 0
        self._engine = engine

    async def refresh(self, names: Iterable[str]) -> None:
        """Read these tasks and put them where they belong."""
        wanted = list(dict.fromkeys(names))
        for start in range(0, len(wanted), CHUNK):
            chunk = wanted[start : start + CHUNK]
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
        offered = is_free and task.id not in self.withdrawing
        record = record_of(task, offered=is_free)
        if is_free and not offered:
            record["claimedBy"] = HELD_BACK
        queue, encoded = PENDING if is_free else queue_of(task), msgspec.json.encode(record)
        self.view.put(queue, task.id, encoded)
        if offered:
            self.view.offered.setdefault(task.id)
            self.dependencies[task.id] = task.depends_on
        else:
            self.view.offered.pop(task.id, None)
            self.dependencies.pop(task.id, None)
        self.files.note(task, queue, encoded)

    def _drop(self, name: str) -> None:
        """A task that was deleted."""
        self.view.remove(name)
        self.view.offered.pop(name, None)
        self.holdings.forget(name)
        self.files.forget(name)
        self.dependencies.pop(name, None)

    def hold_back(self, names: Iterable[str]) -> None:
        for name in names:
            record = self.view.record(name)
            if record is not None and self.view.place(name) == PENDING:
                held_back = msgspec.json.decode(record) | {"claimedBy": HELD_BACK}
                self.view.put(PENDING, name, msgspec.json.encode(held_back))
            self.view.offered.pop(name, None)
