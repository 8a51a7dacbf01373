"""The executions of one agent, and how much room there is for more."""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable

from lineshaft.agent.execution import Execution
from lineshaft.agent.handlers import Handler

#: From this many slots on, a third is claimed at a time: one third is claimed, one runs, one is written.
_MANY_SLOTS = 30
#: A call costs as much as some fifty of its tasks; larger ones would only delay the start of the first.
_MOST_AT_ONCE = 500


class Slots:
    def __init__(self, limit: int, handlers: Iterable[Handler]) -> None:
        self.limit = limit
        handlers = list(handlers)
        self.types = frozenset(handler.type for handler in handlers)
        #: Handlers with a limit of their own.
        self.limited = [handler for handler in handlers if handler.concurrency is not None]
        #: Types whose handlers may fill all slots.
        self.unlimited_types = [handler.type for handler in handlers if handler.concurrency is None]
        self._executions: dict[str, Execution] = {}
        self._running_of: Counter[str] = Counter()
        #: Executions that have ended with spending that no outcome has reported, as the claim was over.
        self._owing: set[Execution] = set()
        self._changed = asyncio.Event()

    # Room.

    def resize(self, limit: int) -> None:
        self.limit = limit

    @property
    def batch(self) -> int:
        """How many tasks to claim at a time."""
        return min(self.limit if self.limit < _MANY_SLOTS else self.limit // 3, _MOST_AT_ONCE)

    @property
    def free(self) -> int:
        return self.limit - len(self._executions)

    def limited_with_room(self) -> list[Handler]:
        return [handler for handler in self.limited if self.room_of(handler) > 0]

    def room_of(self, handler: Handler) -> int:
        """How many more tasks a handler with a limit may take."""
        unused = (handler.concurrency or 0) - self._running_of[handler.type]
        return min(unused, self.free, self.batch)

    def room(self) -> tuple[list[str], int]:
        """The types to claim, and how many tasks, so that no handler exceeds its limit."""
        limited = self.limited_with_room()
        types = [*self.unlimited_types, *(handler.type for handler in limited)]
        return types, max(min([self.free, self.batch, *map(self.room_of, limited)]), 1)

    # Executions. The thread of heartbeats reads them too.

    def add(self, execution: Execution) -> None:
        self._executions[execution.task.id] = execution
        if execution.handler.concurrency is not None:
            self._running_of[execution.task.type] += 1

    def remove(self, execution: Execution) -> None:
        if self._executions.get(execution.task.id) is execution:
            del self._executions[execution.task.id]
        if execution.handler.concurrency is not None:
            self._running_of[execution.task.type] -= 1
        if execution.has_unreported_spending:
            self._owing.add(execution)
        self.announce()

    def get(self, task_id: str) -> Execution | None:
        return self._executions.get(task_id)

    def all(self) -> list[Execution]:
        return list(self._executions.copy().values())

    @property
    def are_empty(self) -> bool:
        return not self._executions

    def held(self) -> list[Execution]:
        """Executions whose outcome isn't written: their leases are kept."""
        return [execution for execution in self.all() if not execution.written]

    def to_report(self) -> Collection[Execution]:
        """What is held, after ended claims that have spent more than the server knows."""
        # Held claims last: a server answers by task, and a task whose claim was lost may be held again.
        abandoned = (execution for execution in self.all() if execution.written)
        ended = [one for one in (*self._owing.copy(), *abandoned) if one.has_unreported_spending]
        return [*ended, *self.held()]

    def forget_reported(self) -> None:
        """Forget ended executions whose spending the server knows."""
        self._owing = {execution for execution in self._owing if execution.has_unreported_spending}
        self.announce()

    # Waiting for changes.

    def announce(self) -> None:
        """Something has changed: those that wait look again."""
        self._changed.set()

    async def change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
