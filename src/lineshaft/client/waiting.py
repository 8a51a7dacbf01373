"""Waiting for tasks and DAGs to end: one look for all that this process waits for, not one each.

The end of a task is not notified: that would make every completion of the whole fleet take its turn at one
lock. So it is looked for, by primary key, and the less often the longer it takes: a wait is over at most a
tenth later than it could have been, and at most half a second.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

from lineshaft.client.backend import Backend
from lineshaft.errors import LineshaftError, NotFoundError, UnavailableError

_SHORTEST_SEC, _LONGEST_SEC = 0.01, 0.5
_SHARE = 0.1


@dataclass(slots=True)
class _Wait:
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
        """Returns when it has; whether it is a DAG."""
        wait = self._waiting.get(name)
        if wait is None:
            wait = self._waiting[name] = _Wait(asyncio.get_running_loop().create_future())
            self._new.set()
        wait.users += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), name="lineshaft waits")
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
                f"This Lineshaft was closed while {name} was waited for. It goes on; open one and wait again."
            )
            self._tell(name, closed)

    async def _look(self) -> None:
        # One of this event loop's own: the last one may have been of another.
        self._new = asyncio.Event()
        while self._waiting:
            self._new.clear()
            try:
                states = await self._backend.finished(list(self._waiting))
            except UnavailableError:
                # It comes back, or the time that the caller gave is over.
                states = {}
            except Exception as error:  # noqa: BLE001 - it belongs to those who wait
                for name in list(self._waiting):
                    self._tell(name, error)
                return
            for name, state in states.items():
                if state == "unknown":
                    self._tell(name, NotFoundError(f"There is no task and no DAG {name}."))
                elif state != "open":
                    self._tell(name, state == "dag")
            if self._waiting:
                youngest = time.monotonic() - max(wait.since for wait in self._waiting.values())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(max(_SHARE * youngest, _SHORTEST_SEC), _LONGEST_SEC)):
                        await self._new.wait()

    def _tell(self, name: str, answer: bool | Exception) -> None:  # noqa: FBT001 - the answer itself
        wait = self._waiting.pop(name, None)
        if wait is None or wait.future.done():
            return
        if isinstance(answer, Exception):
            wait.future.set_exception(answer)
        else:
            wait.future.set_result(answer)
