"""Warns about a handler that blocks its event loop: nothing else in that process goes on meanwhile.

The thread of heartbeats looks, since the blocked event loop can't.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lineshaft.tracebacks import user_frame

if TYPE_CHECKING:
    from lineshaft.agent.answers import Answers
    from lineshaft.agent.execution import Execution

_log = logging.getLogger("lineshaft.agent")

#: Seconds between two looks, and how many of them an event loop may leave unanswered. Looks are counted, not
#: seconds: a process that was frozen has not blocked its event loop.
LOOK_SEC, _UNANSWERED_LOOKS = 1.0, 5


class _Ping:
    """A call that an event loop carries out as soon as it runs."""

    def __init__(self) -> None:
        self.answered = False
        self.looks = 0

    def answer(self) -> None:
        self.answered = True


class BlockedLoops:
    def __init__(self) -> None:
        self._pings: dict[asyncio.AbstractEventLoop, _Ping] = {}

    def look(self, members: Iterable["Answers"]) -> None:
        """Warn once about each event loop with running tasks that is blocked."""
        members = [member for member in members if member.slots.held()]
        pings, self._pings = self._pings, {}
        for loop in {member.loop for member in members}:
            ping = pings.get(loop)
            if ping is None or ping.answered:
                ping = _Ping()
                with contextlib.suppress(RuntimeError):  # it has just been closed
                    loop.call_soon_threadsafe(ping.answer)
            self._pings[loop] = ping
            ping.looks += 1
            if ping.looks == _UNANSWERED_LOOKS + 1:
                _warn(loop, [member for member in members if member.loop is loop])


def _warn(loop: asyncio.AbstractEventLoop, members: list["Answers"]) -> None:
    running = asyncio.current_task(loop)
    executions = [execution for member in members for execution in member.slots.held()]
    # A handler may have started tasks of its own: then each of them may be the one.
    suspects = [one for one in executions if one.is_run_by(running)] or [
        one for one in executions if one.is_working and not one.is_in_thread
    ]
    names = " or ".join(sorted({_name(one) for one in suspects})) or "code outside of handlers"
    place = user_frame(sys._current_frames().get(members[0].thread_id))  # noqa: SLF001 - documented
    _log.warning(
        "The event loop has been blocked for %g s by %s%s: nothing else runs in this process. Make the "
        "handler 'def' instead of 'async def', or call what blocks with asyncio.to_thread",
        *(_UNANSWERED_LOOKS * LOOK_SEC, names, f", at {place}" if place else ""),
        extra={"agent_id": members[0].presence.agent_id, "task_ids": [one.task.id for one in suspects]},
    )


def _name(execution: "Execution") -> str:
    handler = execution.handler
    function = getattr(handler.function, "__qualname__", type(handler.function).__qualname__)
    return f"the handler {function} of {handler.type!r}"
