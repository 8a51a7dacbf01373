"""The backend for whoever reaches the database itself."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec

from lineshaft.checks.registry import Checks
from lineshaft.client.backend import NO_HISTORY, Assignment, EventPage, History, Idler, Pulse
from lineshaft.client.views import (
    Approval,
    Dag,
    Report,
    Task,
    approval_of,
    dag_of,
    event_of,
    report_of,
    task_of,
)
from lineshaft.clock import Clock
from lineshaft.duties.loop import Counts
from lineshaft.duties.promoter import Promoter
from lineshaft.duties.reaper import Reaper
from lineshaft.duties.validator import Validator
from lineshaft.errors import DatabaseError
from lineshaft.model.tasks import NewTask
from lineshaft.settings import Settings
from lineshaft.sql import migrate
from lineshaft.store import guests
from lineshaft.store.approvals import Decision
from lineshaft.store.changes import Spent
from lineshaft.store.claims import Claim, ClaimedTask, Resumed
from lineshaft.store.engine import Engine
from lineshaft.store.events import Events
from lineshaft.store.fleet import AgentView, NewAgent
from lineshaft.store.heartbeats import Heartbeats
from lineshaft.store.lane_directory import Interest, LaneDirectory
from lineshaft.store.listing import TaskFilter
from lineshaft.store.location import database
from lineshaft.store.outcomes import ClaimRef, Completion, Failure, Moved
from lineshaft.store.parting import Child, HandBack, Spawned
from lineshaft.store.reading import Page
from lineshaft.store.rules import Rules
from lineshaft.store.submission import Submitted, SubmittedDag
from lineshaft.store.wakeups import Wakeups
from lineshaft.store.why import Why
from lineshaft.store.working import PastAttempt, Purses

_log = logging.getLogger("lineshaft.client")

#: So soon again, at the most, does upkeep come: a retry may be due in no time.
_SHORTEST_PAUSE_SEC = 0.05


class DatabaseBackend:
    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock | None = None,
        max_connections: int = 10,
        checks: Checks | None = None,
    ) -> None:
        self._settings = settings
        self._checks = checks
        #: Gates that take their time, run beside the rest of the upkeep.
        self._validating: asyncio.Task[Counts] | None = None
        self._clock = clock
        self._max_connections = max_connections
        self._resources = AsyncExitStack()
        self._engine: Engine | None = None
        self._wakeups: Wakeups | None = None
        self._directory: LaneDirectory | None = None
        self._subscribing = asyncio.Lock()
        #: When it was last looked whether a slow-down is over, or a breaker may be probed.
        self._looked_at: datetime | None = None

    async def open(self) -> None:
        async with AsyncExitStack() as opening:
            location = database(self._settings)
            # Starting a server takes a moment, in which the event loop has better things to do.
            dsn = await asyncio.to_thread(location.__enter__)
            opening.callback(location.__exit__, None, None, None)
            await asyncio.to_thread(_prepare, dsn, embedded=self._settings.database_url is None)
            self._engine = await opening.enter_async_context(
                Engine(
                    dsn,
                    clock=self._clock,
                    max_connections=self._max_connections,
                    rules=Rules.of(self._settings),
                    checks=self._checks or Checks.from_settings(self._settings),
                )
            )
            self._resources = opening.pop_all()

    async def close(self) -> None:
        if self._validating is not None:
            self._validating.cancel()
            await asyncio.wait({self._validating})
            self._validating = None
        await self._resources.aclose()
        self._engine = self._wakeups = self._directory = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise DatabaseError("This Lineshaft is not open. Use 'async with Lineshaft() as shaft'.")
        return self._engine

    # Submitting.

    async def submit(self, tasks: Sequence[NewTask], *, connection: Any) -> list[Submitted]:
        async with guests.adapted(connection) as adapted:
            return await self.engine.submission.submit(tasks, connection=adapted)

    async def submit_dag(
        self,
        title: str,
        tasks: Sequence[NewTask],
        *,
        budget_ceiling_usd: Decimal | float | None,
        created_by: str | None,
        connection: Any,
    ) -> SubmittedDag:
        async with guests.adapted(connection) as adapted:
            return await self.engine.submission.submit_dag(
                title,
                tasks,
                budget_ceiling_usd=budget_ceiling_usd,
                created_by=created_by,
                connection=adapted,
            )

    # Reading and operating.

    async def task(self, task_id: str) -> Task:
        return task_of(await self.engine.insights.task(task_id))

    async def tasks(self, filters: TaskFilter, *, order: str, limit: int, cursor: str | None) -> Page[Task]:
        page = await self.engine.insights.tasks(filters, order=order, limit=limit, cursor=cursor)
        return Page([task_of(view) for view in page.items], page.next_cursor)

    async def dag(self, dag_id: str) -> Dag:
        return dag_of(await self.engine.insights.dag(dag_id))

    async def why(self, task_id: str) -> Why:
        return await self.engine.insights.why(task_id)

    async def events(
        self,
        after: str | None,
        *,
        limit: int,
        task_id: str | None,
        dag_id: str | None,
        kinds: Collection[str] | None,
    ) -> EventPage:
        feed = Events(self.engine.database)
        page = await feed.read(after, limit=limit, task_id=task_id, dag_id=dag_id, kinds=kinds)
        return EventPage([event_of(event) for event in page.items], page.next_cursor, page.caught_up)

    async def finished(self, ids: Sequence[str]) -> dict[str, str]:
        return await self.engine.working.finished(ids)

    async def cancel(self, task_id: str, reason: str, *, cascade: bool) -> None:
        await self.engine.operations.cancel(task_id, reason, cascade=cascade)

    async def retry(self, task_id: str, *, delay_sec: float) -> None:
        await self.engine.operations.retry(task_id, delay_sec=delay_sec)

    async def approvals(self, *, limit: int, cursor: str | None) -> Page[Approval]:
        page = await self.engine.approvals.waiting(limit=limit, cursor=cursor)
        return Page([approval_of(found) for found in page.items], page.next_cursor)

    async def decide(self, task_id: str, decision: Decision) -> None:
        await self.engine.approvals.decide(task_id, decision)

    async def reports(
        self, query: str, *, type_: str | None, dag_id: str | None, limit: int, cursor: str | None
    ) -> Page[Report]:
        page = await self.engine.reports.search(query, type_=type_, dag_id=dag_id, limit=limit, cursor=cursor)
        return Page([report_of(found) for found in page.items], page.next_cursor)

    # Working.

    async def register(self, agent: NewAgent) -> AgentView:
        return await self.engine.fleet.register(agent)

    async def drain(self, agent_id: str, incarnation: int) -> None:
        await self.engine.working.drain(agent_id, incarnation)

    async def leave(self, agent_id: str, incarnation: int) -> None:
        await self.engine.working.leave(agent_id, incarnation)

    async def claim(
        self, agent_id: str, incarnation: int, *, limit: int, types: Sequence[str]
    ) -> list[Assignment]:
        claim = await self.engine.claims.claim(
            agent_id, incarnation, limit=limit, types=list(types), start=True
        )
        if not claim.resumed and not claim.inputs:
            return [Assignment(task, NO_HISTORY, {}) for task in claim.tasks]
        past = await self.engine.working.past_attempts(list(claim.resumed)) if claim.resumed else {}
        return [_assignment(task, claim, past) for task in claim.tasks]

    async def complete(self, completions: Sequence[Completion]) -> list[Moved]:
        return await self.engine.lifecycle.complete(completions)

    async def fail(self, failures: Sequence[Failure]) -> list[Moved]:
        return await self.engine.lifecycle.fail(failures)

    async def hand_back(self, items: Sequence[HandBack]) -> list[Moved]:
        return await self.engine.parting.hand_back(items)

    async def cancel_claimed(self, claim: ClaimRef, reason: str, *, spent: Spent) -> None:
        await self.engine.parting.cancel_claimed(claim, reason, spent=spent)

    async def record_step(
        self, claim: ClaimRef, name: str, data: bytes, *, cost_usd: Decimal, cost_so_far_usd: Decimal
    ) -> tuple[bytes, Purses]:
        return await self.engine.working.record_step(
            claim, name, data, cost_usd=cost_usd, cost_so_far_usd=cost_so_far_usd
        )

    async def save_checkpoint(self, claim: ClaimRef, data: bytes) -> None:
        await self.engine.lifecycle.save_checkpoint(claim, data)

    async def spawn(
        self, claim: ClaimRef, key: str, tasks: Sequence[NewTask], *, wait: bool, spent: Spent
    ) -> Spawned:
        return await self.engine.parting.spawn(claim, key, tasks, wait=wait, spent=spent)

    # What keeps a process of agents going.

    def pulse(self) -> Pulse:
        return Heartbeats(self.engine.database.dsn, clock=self._clock)

    async def idler(self, agent: AgentView) -> AbstractContextManager[Idler]:
        async with self._subscribing:
            if self._directory is None:
                wakeups = await self._resources.enter_async_context(Wakeups(self.engine.database.dsn))
                self._wakeups = wakeups
                self._directory = LaneDirectory(self.engine.working, wakeups)
                self._resources.push_async_callback(self._directory.close)
        interest = Interest(agent.types or (), agent.capabilities, agent.models_available)
        await self._directory.enter(interest)
        return self._directory.waiter(interest)

    @property
    def poll_interval_sec(self) -> float | None:
        return None if self._wakeups is None else self._wakeups.poll_interval

    def expect_answers_within(self, seconds: float) -> None:
        known = self.engine.database.answer_within_sec
        self.engine.database.answer_within_sec = seconds if known is None else min(known, seconds)

    @property
    def upkeep_interval_sec(self) -> float:
        return min(self._settings.promoter_interval_sec, self._settings.reaper_interval_sec)

    async def upkeep(self) -> float | None:
        """Retries become due and agents die also where no server runs its duties."""
        await Reaper(self.engine.upkeep).run_once()
        await Promoter(self.engine.upkeep).run_once()
        self._validate()
        openings = await self.engine.working.openings(self._looked_at)
        self._looked_at = openings.now
        if openings.opened and self._wakeups is not None:
            # Nobody is told when a slow-down is over, or a breaker may be probed.
            self._wakeups.wake_all()
        coming = (openings.due_sec, openings.lease_sec, openings.guard_sec)
        return min((max(s, _SHORTEST_PAUSE_SEC) for s in coming if s is not None), default=None)

    def _validate(self) -> None:
        if self._validating is not None:
            if not self._validating.done():
                return
            if not self._validating.cancelled() and (error := self._validating.exception()) is not None:
                _log.warning("Gates could not be run: %s", error)
        validator = Validator(self.engine.gates, self.engine.approvals)
        self._validating = asyncio.create_task(validator.run_once(), name="lineshaft validator")

    async def retry_within(self, types: Sequence[str], within_sec: float) -> float | None:
        return await self.engine.working.retry_within(types, within_sec)


def _prepare(dsn: str, *, embedded: bool) -> None:
    """The embedded database is ours to migrate; any other one is its operator's."""
    if embedded:
        migrate.up(dsn)
        return
    migrate.check_server(dsn)
    unsettled = [status for status in migrate.status(dsn) if status.state is not migrate.State.APPLIED]
    if not unsettled:
        return
    first = unsettled[0]
    if first.state is migrate.State.UNKNOWN:
        raise DatabaseError(
            f"The database has migration {first.version:04d}, which this version of Lineshaft doesn't know: "
            "a newer one was here. Upgrade Lineshaft."
        )
    raise DatabaseError(
        f"The database is not ready: migration {first.version:04d} {first.name} is {first.state}. "
        "Run 'lineshaft migrate up' (and 'lineshaft migrate verify' if that doesn't help)."
    )


def _assignment(task: ClaimedTask, claim: Claim, past: dict[str, list[PastAttempt]]) -> Assignment:
    resumed = claim.resumed.get(task.id)
    history = NO_HISTORY if resumed is None else _history(resumed, past.get(task.id, []))
    return Assignment(task, history, _inputs(task.spec, claim.inputs) if claim.inputs else {})


_STEPS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _history(resumed: Resumed, past: list[PastAttempt]) -> History:
    children = msgspec.json.decode(resumed.children) if resumed.children else {}
    return History(
        checkpoint=resumed.checkpoint,
        steps={name: bytes(data) for name, data in _STEPS.decode(resumed.steps).items()}
        if resumed.steps
        else {},
        children={name: Child(name, child["status"], child["output"]) for name, child in children.items()},
        attempts=past,
    )


def _inputs(spec: bytes, outputs: dict[str, bytes | None]) -> dict[str, Any]:
    """What `context_refs` refer to: outputs of tasks, by value; artifacts, by their name."""
    inputs: dict[str, Any] = {}
    for ref in msgspec.json.decode(spec).get("context_refs", ()):
        kind, _, rest = ref.partition(":")
        if kind == "artifact":
            inputs[ref] = rest
        else:
            output = outputs.get(rest.removesuffix(":output"))
            inputs[ref] = None if output is None else msgspec.json.decode(output)
    return inputs
