"""Waiting for tasks and DAGs to end: one query for everything that this process waits for.

PostgreSQL doesn't notify the end of a task: notifications would serialize the commits of the whole fleet. The
watch polls by primary key, less often the longer it takes. A wait ends at most 10 % late, and at most half a
second.
"""

import asyncio
import contextlib
import time

from msgspec import Struct, field

from lineshaft.client.backend import Backend
from lineshaft.errors import LineshaftError, NotFoundError, UnavailableError
from lineshaft.operations import tasks

_SHORTEST_SEC, _LONGEST_SEC = 0.01, 0.5
_SHARE = 0.1


class _Wait(Struct):
    future: "asyncio.Future[bool]"
    since: float = field(default_factory=time.monotonic)
    users: int = 0


class EndWatch:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._waiting: dict[str, _Wait] = {}
        self._new = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def ended(self, name: str) -> bool:
        """Return when the task or DAG has ended; True if it is a DAG."""
        wait = self._waiting.get(name)
        if wait is None:
            wait = self._waiting[name] = _Wait(asyncio.get_running_loop().create_future())
            self._new.set()
        wait.users += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll(), name="lineshaft waits")
        try:
            return await asyncio.shield(wait.future)
        finally:
            wait.users -= 1
            if not wait.users and self._waiting.get(name) is wait:
                del self._waiting[name]
                wait.future.cancel()

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        for name in list(self._waiting):
            closed = LineshaftError(
                f"This Lineshaft was closed while waiting for {name}, which continues. Wait for it again."
            )
            self._settle(name, closed)

    async def _poll(self) -> None:
        # The client may have been open in another event loop before.
        self._new = asyncio.Event()
        while self._waiting:
            self._new.clear()
            try:
                states = await self._states(list(self._waiting))
            except UnavailableError:
                # It comes back, or the timeout of the caller ends the wait.
                states = {}
            except Exception as error:  # noqa: BLE001 - the waiters raise it
                for name in list(self._waiting):
                    self._settle(name, error)
                return
            for name, state in states.items():
                if state == "unknown":
                    self._settle(name, NotFoundError(f"There is no task or DAG {name}."))
                elif state in {"task", "dag"}:
                    self._settle(name, state == "dag")
            if self._waiting:
                youngest = time.monotonic() - max(wait.since for wait in self._waiting.values())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(max(_SHARE * youngest, _SHORTEST_SEC), _LONGEST_SEC)):
                        await self._new.wait()

    async def _states(self, names: list[str]) -> dict[str, str]:
        """By id: `open`, `unknown`, or ended as a `task` or as a `dag`."""
        states: dict[str, str] = {}
        for start in range(0, len(names), tasks.MAX_IDS):
            part = tasks.AskEnded(ids=names[start : start + tasks.MAX_IDS])
            states |= (await self._backend.call(tasks.which_ended, part)).ids
        return states

    def _settle(self, name: str, outcome: bool | Exception) -> None:  # noqa: FBT001 - a result
        wait = self._waiting.pop(name, None)
        if wait is None or wait.future.done():
            return
        if isinstance(outcome, Exception):
            wait.future.set_exception(outcome)
        else:
            wait.future.set_result(outcome)
