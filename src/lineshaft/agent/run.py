"""One call of `Agent.run`: register, work, stop, leave."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence

from lineshaft.agent import siblings
from lineshaft.agent.answers import Answers
from lineshaft.agent.claim_calls import ClaimCalls
from lineshaft.agent.claiming import Claimer
from lineshaft.agent.execution import Host
from lineshaft.agent.executor import Executor
from lineshaft.agent.handlers import Handler
from lineshaft.agent.idle import Draining
from lineshaft.agent.process_group import AgentProcess, agent_process
from lineshaft.agent.slots import Slots
from lineshaft.agent.stopping import Stopper, StopRequest
from lineshaft.agent.task_log import count
from lineshaft.agent.threads import Threads
from lineshaft.client.backend import Backend
from lineshaft.client.sources import Sources
from lineshaft.errors import UnavailableError
from lineshaft.operations import agents
from lineshaft.types import NewAgent, NewSource, RegisteredAgent
from lineshaft.types.work import Presence

_log = logging.getLogger("lineshaft.agent")

#: A connection may be silent for this long, however short heartbeats are: the server may be busy.
_LEAST_PATIENCE_SEC = 10.0
#: Time for the last outcomes when the agent stops, and then to report that it left.
_LAST_WRITES_SEC = 10.0
_LAST_WORD_SEC = 1.0
_LISTED_TYPES = 8


async def work(
    backend: Backend,
    registration: NewAgent,
    handlers: Mapping[str, Handler],
    schedules: Sequence[NewSource],
    stop: StopRequest,
    *,
    drain_retries_within_sec: float | None,
) -> None:
    """Register an agent and its schedules, and let it work until it stops or, when draining, is idle."""
    backend.expect_answers_within(max(registration.heartbeat_interval_sec, _LEAST_PATIENCE_SEC))
    process = agent_process(backend)
    async with process.membership():
        view = await backend.call(agents.register_agent, agents.RegisterAgent(agent=registration))
        for warning in view.warnings:
            _log.warning("%s", warning, extra={"agent_id": view.id})
        if view.status != "active":
            _log.warning(
                "%s: was set %s by hand and claims nothing; "
                "'lineshaft agents change %s --status active' lets it work",
                *(view.id, view.status, view.id),
            )
        for schedule in schedules:
            await Sources(backend).put(schedule)
        run = Run(backend, view, handlers, process, stop, drain_retries_within_sec=drain_retries_within_sec)
        await run.work()


class Run:
    """One registered incarnation at work, in one event loop."""

    def __init__(
        self,
        backend: Backend,
        view: RegisteredAgent,
        handlers: Mapping[str, Handler],
        process: AgentProcess,
        stop: StopRequest,
        *,
        drain_retries_within_sec: float | None,
    ) -> None:
        self._backend = backend
        self._process = process
        self._stop = stop
        self._instance = view.own
        self._types = list(handlers)
        self._presence = presence = Presence(view.id, view.incarnation)
        self._patience_sec = _LAST_WRITES_SEC + max(handler.patience_sec for handler in handlers.values())
        keeper = process.lease_keeper
        draining = (
            None
            if drain_retries_within_sec is None
            else Draining(backend, view.id, handlers, drain_retries_within_sec)
        )
        slots = Slots(view.own.max_concurrent_tasks, handlers.values())
        claims = ClaimCalls(backend, presence, slots, process)
        host = Host(
            backend,
            view.id,
            Threads(f"lineshaft {view.id}"),
            on_news=lambda _: keeper.hurry(presence),
            instance=view.own.instance,
        )
        executor = Executor(view, handlers, host, claims, process, until_idle=draining is not None)
        stopper = Stopper(presence, claims, executor, keeper)
        self._answers = Answers(view, host, claims, executor, stopper)
        self._claimer = Claimer(backend, view, claims, executor, process, draining=draining)
        self._claims = claims
        self._executor = executor
        self._stopper = stopper
        if draining is not None:
            process.enter_drain(claims)

    async def work(self) -> None:
        agent_id = self._presence.agent_id
        about = {"agent_id": agent_id}
        place = self._backend.place
        _log.info("%s: waiting for %s on %s", agent_id, _listed(self._types), place, extra=about)
        self._stop.attach(self._stopper)
        looked = asyncio.Event()
        claiming = asyncio.create_task(self._claim_after(looked), name=f"lineshaft claims {agent_id}")
        stopping = asyncio.create_task(self._stop.requested.wait())
        try:
            async with siblings.watching(self._backend, self._presence, looked):
                await asyncio.wait({claiming, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.requested.is_set():
                await self._finish()
        except asyncio.CancelledError:
            self._stopper.hand_back()
            raise
        finally:
            stopping.cancel()
            self._claims.close()
            await asyncio.wait({claiming})
            self._stopper.hand_back()
            until = asyncio.get_running_loop().time() + self._patience_sec
            await self._stopper.close(self._patience_sec)
            self._process.leave_drain(self._claims)
            _log.info("%s: ended: %s", agent_id, self._executor.task_log.summary(), extra=about)
            if self._stopper.error is None and claiming.exception() is None:
                await self._leave(until + _LAST_WORD_SEC)
        claiming.result()
        if self._stopper.error is not None:
            raise self._stopper.error

    async def _claim_after(self, looked: asyncio.Event) -> None:
        """Claim, once the tasks of dead predecessors on this machine are ready or wait for their retries.

        Otherwise an agent that runs until it is idle would not see them.
        """
        await looked.wait()
        self._process.lease_keeper.enter(self._answers)
        async with self._backend.waiter(self._presence.agent_id, self._instance) as waiter:
            error = await self._claimer.run(waiter)
            if error is not None:
                self._stopper.end_with(error)
            self._claims.close()

    async def _finish(self) -> None:
        """Let running tasks end within the grace, or until a second signal."""
        self._claims.close()
        instance = agents.InstanceOfAgent(id=self._presence.agent_id, incarnation=self._presence.incarnation)
        # At the same time: an unavailable database must not extend the grace.
        reporting = asyncio.create_task(self._backend.call(agents.drain_agent, instance))
        finishing = asyncio.create_task(self._stopper.finish(self._stop.grace_sec))
        at_once = asyncio.create_task(self._stop.without_grace.wait())
        try:
            await asyncio.wait({finishing, at_once}, return_when=asyncio.FIRST_COMPLETED)
            if not at_once.done():
                await asyncio.wait({reporting}, timeout=_LAST_WORD_SEC)
        finally:
            for task in (reporting, finishing, at_once):
                task.cancel()
            # An agent that couldn't report that it is draining claims nothing anyway.
            await asyncio.gather(reporting, finishing, at_once, return_exceptions=True)

    async def _leave(self, until: float) -> None:
        instance = agents.InstanceOfAgent(id=self._presence.agent_id, incarnation=self._presence.incarnation)
        # Otherwise the offline detector notices.
        with contextlib.suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout_at(until):
                await self._backend.call(agents.leave_agent, instance)


def _listed(types: Iterable[str]) -> str:
    """Some of the types, in words."""
    first, rest = list(types)[:_LISTED_TYPES], list(types)[_LISTED_TYPES:]
    return ", ".join(first) + (f" and {count(len(rest), 'other type')}" if rest else "")
