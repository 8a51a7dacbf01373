"""An agent that runs until it is idle: what it waits for, and what it leaves behind."""

import asyncio
import logging
import math
from collections.abc import Iterable

from lineshaft.client.backend import Backend
from lineshaft.errors import UnavailableError
from lineshaft.operations import work
from lineshaft.types.protocol import RetryDue
from lineshaft.types.work import LeftBehind

_log = logging.getLogger("lineshaft.agent")

#: Due times that differ by less are those of the same retry.
_SAME_RETRY_SEC = 0.5


class Draining:
    """Asks for retries that are worth waiting for, and reports them and what is left."""

    def __init__(self, backend: Backend, agent_id: str, types: Iterable[str], within_sec: float) -> None:
        """`within_sec`: it waits for retries that are due within this time."""
        self._backend = backend
        self._agent_id = agent_id
        self._types = tuple(types)
        self._within_sec = within_sec
        self._loop = asyncio.get_running_loop()
        #: When the retry is due that was last reported, by the event loop's clock.
        self._reported_due_at = -math.inf

    async def retry_due_at(self) -> float | None:
        """When the first retry is due, by the event loop's clock; None: there is none to wait for."""
        request = work.NextRetry(type=self._types, within_sec=self._within_sec)
        retries = await self._backend.call(work.next_retry, request)
        if retries.due_sec is None:
            return None
        due_at = self._loop.time() + retries.due_sec
        if abs(due_at - self._reported_due_at) > _SAME_RETRY_SEC:
            self._reported_due_at = due_at
            _log.info("%s: waiting: %s", self._agent_id, waiting_text(retries))
        return due_at

    async def report_left(self) -> None:
        try:
            request = work.OfTypes(type=self._types)
            text = left_text(await self._backend.call(work.left_behind, request))
        except UnavailableError as error:
            _log.debug("What agent %s leaves behind is unknown: %s", self._agent_id, error)
            return
        if text:
            # A caller that waits for no retries expects some to be left.
            level = logging.WARNING if self._within_sec else logging.INFO
            _log.log(level, "%s: nothing to do now. Left behind: %s", self._agent_id, text)


def waiting_text(retries: RetryDue) -> str:
    return _retries(retries.count, retries.due_sec)


def left_text(left: LeftBehind) -> str:
    """Empty: nothing is left."""
    parts: list[str] = []
    if left.retrying:
        parts.append(_retries(left.retrying, left.retry_sec))
    if left.scheduled:
        first = "" if left.scheduled == 1 else ", the first one"
        parts.append(f"{_tasks(left.scheduled, 'is', 'are')} scheduled{first} {_in(left.scheduled_sec)}")
    if left.waiting:
        parts.append(_tasks(left.waiting, "waits for a signal", "wait for signals"))
    if left.held:
        lease = "its lease expires" if left.held == 1 else "the first lease expires"
        parts.append(f"{_tasks(left.held, 'is', 'are')} held by other agents ({lease} {_in(left.lease_sec)})")
    if left.ready:
        which = "it" if left.ready == 1 else "them"
        why = f"'lineshaft why {left.ready_id}' gives the reason"
        parts.append(
            f"{_tasks(left.ready, 'is', 'are')} READY, but this agent can't claim {which} now ({why})"
        )
    return "; ".join(parts)


def _retries(count: int, seconds: float | None) -> str:
    first = "" if count == 1 else ", the first one"
    return f"{_tasks(count, 'retries', 'retry')}{first} {_in(seconds)}"


def _tasks(count: int, one: str, many: str) -> str:
    return f"1 task {one}" if count == 1 else f"{count} tasks {many}"


def _in(seconds: float | None) -> str:
    """Rounded up: a time that is nearly over isn't over."""
    if seconds is None or seconds <= 0:
        return "soon"
    for unit, length in (("days", 86_400), ("hours", 3_600)):
        if seconds >= 2 * length:
            return f"in {-(-seconds // length):.0f} {unit}"
    return f"in {-(-seconds // 1):.0f} s"
