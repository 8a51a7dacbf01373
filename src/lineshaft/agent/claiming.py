"""Looks for work: when, for how many tasks, and how long to wait in between."""

import asyncio
import logging
import math
import random
from collections.abc import Sequence

from lineshaft.agent.claim_calls import ClaimCalls
from lineshaft.agent.executor import Executor
from lineshaft.agent.idle import Draining
from lineshaft.agent.process_group import AgentProcess
from lineshaft.agent.task_log import duration
from lineshaft.client.backend import Backend, WorkWaiter
from lineshaft.errors import LineshaftError
from lineshaft.types import RegisteredAgent

_log = logging.getLogger("lineshaft.agent")

_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.1, 5.0
#: An agent relies on another's fruitless claim within this share of its poll interval.
_RECENT_SHARE = 0.8


class Claimer:
    def __init__(
        self,
        backend: Backend,
        view: RegisteredAgent,
        claims: ClaimCalls,
        executor: Executor,
        process: AgentProcess,
        *,
        draining: Draining | None,
    ) -> None:
        """`draining`: the agent runs until it is idle."""
        self._backend = backend
        self._agent_id = view.id
        self._instance = view.own
        self._slots = claims.slots
        self._claims = claims
        self._executor = executor
        self._process = process
        self._draining = draining
        self._loop = asyncio.get_running_loop()
        #: Agents with the same interest find the same tasks. One with a budget may be unable to afford them.
        self._interest = (
            None if view.budget_usd is None else view.id,
            claims.slots.types,
            frozenset(view.own.capabilities),
            tuple(view.own.models_available),
        )
        #: Since when claims have failed, by the event loop's clock.
        self._failing_since: float | None = None

    async def run(self, waiter: WorkWaiter) -> LineshaftError | None:
        """Claim until the agent stops or, when draining, is idle; returns why it can't go on."""
        pauses = 0
        # Until then a claim whose response was lost may still be carried out.
        doubts_until: float | None = None
        while not self._claims.closed:
            try:
                # No claim is under way here.
                if doubts_until is not None and await self._claims.release_unknown():
                    doubts_until = doubts_until if self._loop.time() < doubts_until else None
                if await self._claim_and_wait(waiter):
                    return None
                pauses = 0
            except Exception as error:  # noqa: BLE001 - logged, or the end of the agent
                if isinstance(error, LineshaftError) and not (error.retryable or _is_server_fault(error)):
                    return error
                # Once per outage: it is tried again every few seconds.
                level = logging.WARNING if self._failing_since is None else logging.DEBUG
                _log.log(level, "%s: can't claim: %s", self._agent_id, error)
                self._failing_since = self._failing_since or self._loop.time()
                doubts_until = self._loop.time() + self._instance.heartbeat_interval_sec
                pause = min(_FIRST_PAUSE_SEC * 2**pauses, _LONGEST_PAUSE_SEC)
                pauses = min(pauses + 1, 10)
                await self._claims.pause(pause * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            self._claims.nudged.clear()
        # The task that woke it is for another agent.
        waiter.pass_on()
        return None

    async def _claim_and_wait(self, waiter: WorkWaiter) -> bool:
        """One round; True: everything is drained."""
        while self._slots.free < self._worth_claiming():
            await self._slots.change()
            if self._claims.closed:
                return False
        before = self._process.activity
        may_be_more = await self._claim(waiter)
        if self._failing_since is not None:
            outage = duration(self._loop.time() - self._failing_since)
            self._failing_since = None
            _log.info("%s: can claim again, after %s", self._agent_id, outage)
        if may_be_more or self._claims.closed:
            return False
        if self._draining is not None and self._slots.are_empty and not self._executor.writer.busy:
            due_at = await self._draining.retry_due_at()
            if due_at is not None:
                await self._wait_for_retry(waiter, due_at)
                return False
            # Once more: a task that was postponed at the first look may have become READY before the second.
            await self._claim(waiter)
            if self._process.all_idle(self._claims, before):
                await self._draining.report_left()
                return True
        self._process.found_nothing(self._interest)
        await self._wait(waiter)
        return False

    def _worth_claiming(self) -> int:
        """How many slots must be free: one, unless more will be soon, as a call for one costs as much."""
        batch = self._slots.batch
        return batch if self._executor.writer.writing >= batch else 1

    async def _wait_for_retry(self, waiter: WorkWaiter, due_at: float) -> None:
        """Wait until a retry is due, or for other work."""
        await self._wait(waiter, until=due_at)
        if self._loop.time() >= due_at:
            await self._backend.maintain()

    async def _wait(self, waiter: WorkWaiter, *, until: float = math.inf) -> None:
        """Wait until there is a reason to look for work, and start the tasks that the wait has claimed."""
        while not self._claims.nudged.is_set() and (left := until - self._loop.time()) > 0:
            pause = min(self._poll_pause(), left)
            claimed = await self._claims.wait(waiter, pause)
            if claimed is not None:
                self._executor.start(claimed)
                return
            # One agent looks for all that have the same interest.
            if not self._process.looked_since(self._interest, _RECENT_SHARE * pause):
                return

    def _poll_pause(self) -> float:
        interval = self._backend.poll_interval_sec
        # Spread, so that agents that were started together don't ask together.
        return (self._instance.poll_interval_sec if interval is None else interval) * random.uniform(0.8, 1.0)  # noqa: S311

    async def _claim(self, waiter: WorkWaiter) -> bool:
        """Claim and start; whether there may be more."""
        limited = self._slots.limited_with_room()
        may_be_more = True
        if limited:
            # The best of all types first: unlimited types alone could fill all slots.
            may_be_more = await self._claim_types(*self._slots.room(), waiter)
        if may_be_more:
            unlimited = self._slots.unlimited_types
            room = min(self._slots.free, self._slots.batch)
            may_be_more = bool(unlimited) and await self._claim_types(unlimited, room, waiter)
            for handler in limited:
                room = self._slots.room_of(handler)
                may_be_more = await self._claim_types([handler.type], room, waiter) or may_be_more
        if not may_be_more and len(limited) < len(self._slots.limited):
            # The task that woke it may be for a handler at its limit: another agent may take it.
            waiter.decline()
        return may_be_more

    async def _claim_types(self, types: Sequence[str], room: int, waiter: WorkWaiter) -> bool:
        """Claim and start; whether all of the room was needed."""
        if room <= 0:
            return False
        slots = self._slots
        claimed = await self._claims.claim(types, room)
        while len(claimed.assignments) == room:
            waiter.pass_on()
            # Handlers with a limit have their turn first.
            if (
                slots.limited
                or self._claims.closed
                or slots.free - room < slots.batch
                or slots.batch >= slots.limit
            ):
                self._executor.start(claimed)
                return True
            # The database finds the next ones while these are started.
            room = slots.batch
            asking = self._loop.create_task(self._claims.claim(types, room))
            await asyncio.sleep(0)
            self._executor.start(claimed)
            claimed = await asking
        self._executor.start(claimed)
        return False


def _is_server_fault(error: LineshaftError) -> bool:
    """Whether it is a defect of the server or a proxy, which may be fixed soon."""
    return error.code == LineshaftError.code
