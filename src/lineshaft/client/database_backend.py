"""The backend over a database."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from msgspec import UnsetType

from lineshaft.artifacts import open_store
from lineshaft.checks.registry import Checks
from lineshaft.client.backend import HeartbeatTransport
from lineshaft.clock import Clock
from lineshaft.duties.on_demand import OnDemand
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.actor import acting, acting_as
from lineshaft.engine.feed.event_query import EventQuery
from lineshaft.engine.feed.events import Events
from lineshaft.engine.feed.lane_directory import Interest, LaneDirectory
from lineshaft.engine.feed.wakeups import Waiter, Wakeups
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.heartbeats import Heartbeats
from lineshaft.engine.postgres import caller_transaction, migrate
from lineshaft.engine.postgres.location import database, place_of
from lineshaft.engine.sources.firing import Occasion
from lineshaft.errors import DatabaseError, UnavailableError
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.tasks import NewTask
from lineshaft.settings import Settings
from lineshaft.types import (
    AgentInfo,
    Approval,
    ApprovalDecision,
    Artifact,
    Attempt,
    Attention,
    Breaker,
    BulkResolution,
    Costs,
    Dag,
    DagFilter,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    EventPage,
    InstanceInfo,
    Limits,
    Lock,
    MatchedTasks,
    NewAgent,
    NewToken,
    Page,
    Readiness,
    RegisteredAgent,
    Report,
    Slowdown,
    Stats,
    Submitted,
    SubmittedDag,
    Task,
    TaskChange,
    TaskFilter,
    ThroughputHistory,
    Token,
    Waiting,
    Why,
)
from lineshaft.types.assignments import Assignment, assignments
from lineshaft.types.json import decoded
from lineshaft.types.sources import Fired, Firing, NewSource, Source, SourceChange, SourceFields
from lineshaft.types.work import (
    Cancellation,
    ClaimedTask,
    ClaimRef,
    Completion,
    DueRetries,
    Failure,
    LeftBehind,
    Moved,
    NewCheckpoint,
    NewSpawn,
    NewStep,
    Presence,
    Release,
    RemainingBudgets,
    Spawned,
    Spent,
)

P = ParamSpec("P")
T = TypeVar("T")

_NOT_OPEN = "This Lineshaft is not open. Use 'async with Lineshaft() as shaft'."


def _by_hand(
    method: Callable[Concatenate["DatabaseBackend", P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["DatabaseBackend", P], Coroutine[Any, Any, T]]:
    """What a person does, as the actor of the backend."""

    @wraps(method)
    async def act(self: "DatabaseBackend", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with acting_as(self.actor or acting.get()):
            return await method(self, *args, **kwargs)

    return act


class DatabaseBackend:
    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock | None = None,
        max_connections: int = 10,
        keep_connections: int = 1,
        checks: Checks | None = None,
        actor: str | None = None,
    ) -> None:
        """`keep_connections` are open at all times, up to `max_connections` when they are needed.

        `actor` is recorded with what is done by hand.
        """
        self.actor = actor
        self._settings = settings
        self._keep_connections = keep_connections
        self._checks = checks
        self._clock = clock
        self._max_connections = max_connections
        self._resources = AsyncExitStack()
        self._engine: Engine | None = None
        self._on_demand: OnDemand | None = None
        self._wakeups: Wakeups | None = None
        self._directory: LaneDirectory | None = None
        #: By agent and incarnation.
        self._waiters: dict[tuple[str, int], Waiter] = {}
        self._subscribing = asyncio.Lock()

    @property
    def place(self) -> str:
        return place_of(self._settings)

    async def open(self) -> None:
        async with AsyncExitStack() as opening:
            location = database(self._settings)
            # In a thread: starting an embedded server takes a moment.
            dsn = await asyncio.to_thread(location.__enter__)
            opening.callback(location.__exit__, None, None, None)
            # Only the embedded database is migrated automatically.
            prepare = migrate.up if self._settings.database_url is None else migrate.check_ready
            await asyncio.to_thread(prepare, dsn)
            self._engine = await opening.enter_async_context(
                Engine(
                    dsn,
                    clock=self._clock,
                    max_connections=self._max_connections,
                    keep_connections=self._keep_connections,
                    prepare=self._settings.sessions,
                    rules=Rules.of(self._settings),
                    checks=self._checks or Checks.from_settings(self._settings),
                    store=open_store(self._settings),
                    max_artifact_bytes=self._settings.max_artifact_bytes,
                )
            )
            self._on_demand = OnDemand(self._engine, self._wake_all)
            opening.push_async_callback(self._on_demand.close)
            self._resources = opening.pop_all()
            # The backend may have been open in another event loop before.
            self._subscribing = asyncio.Lock()

    async def close(self) -> None:
        await self._resources.aclose()
        self._engine = self._wakeups = self._directory = self._on_demand = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise DatabaseError(_NOT_OPEN)
        return self._engine

    # Submitting.

    async def submit(self, tasks: Sequence[NewTask], *, connection: Any) -> list[Submitted]:
        async with caller_transaction.adapted(connection) as adapted:
            return await self.engine.submission.submit(tasks, connection=adapted)

    async def submit_dag(
        self,
        title: str,
        tasks: Sequence[NewTask],
        *,
        budget_ceiling_usd: Decimal | float | None,
        created_by: str | None,
        idempotency_key: str | None,
        connection: Any,
    ) -> SubmittedDag:
        async with caller_transaction.adapted(connection) as adapted:
            submitted = await self.engine.submission.submit_dag(
                title,
                tasks,
                budget_ceiling_usd=budget_ceiling_usd,
                created_by=created_by,
                idempotency_key=idempotency_key,
                connection=adapted,
            )
        known = list(submitted.tasks.values())
        if submitted.duplicate or connection is not None or not all(task.duplicate for task in known):
            return submitted
        # All tasks existed already, so no DAG was created: return the DAG of the first task.
        first = await self.engine.read.task(known[0].id)
        return SubmittedDag(first.dag_id, submitted.tasks)

    # Reading and operating.

    async def task(self, task_id: str) -> Task:
        return await self.engine.read.task(task_id)

    async def tasks(self, filters: TaskFilter, *, order: str, limit: int, cursor: str | None) -> Page[Task]:
        return await self.engine.read.tasks(filters, order=order, limit=limit, cursor=cursor)

    async def attempts(self, task_id: str) -> list[Attempt]:
        return await self.engine.read.attempts(task_id)

    async def steps(self, task_id: str) -> dict[str, Any]:
        return {name: decoded(data) for name, data in (await self.engine.read.steps(task_id)).items()}

    async def why(self, task_id: str) -> Why:
        return await self.engine.read.why(task_id)

    @_by_hand
    async def change(self, task_id: str, change: TaskChange) -> Task:
        await self.engine.operations.change(task_id, change)
        return await self.engine.read.task(task_id)

    @_by_hand
    async def add_dependencies(self, task_id: str, depends_on: Sequence[str]) -> Task:
        await self.engine.operations.add_dependencies(task_id, depends_on)
        return await self.engine.read.task(task_id)

    @_by_hand
    async def cancel(self, task_id: str, reason: str, *, cascade: bool) -> Task:
        await self.engine.operations.cancel(task_id, reason, cascade=cascade)
        return await self.engine.read.task(task_id)

    @_by_hand
    async def cancel_matching(self, wanted: TaskFilter, reason: str, *, dry_run: bool) -> MatchedTasks:
        return await self.engine.matching.cancel(wanted, reason, dry_run=dry_run)

    @_by_hand
    async def retry_matching(self, wanted: TaskFilter, *, dry_run: bool) -> MatchedTasks:
        return await self.engine.matching.retry(wanted, dry_run=dry_run)

    @_by_hand
    async def retry(self, task_id: str, *, delay_sec: float) -> Task:
        await self.engine.operations.retry(task_id, delay_sec=delay_sec)
        return await self.engine.read.task(task_id)

    async def finished(self, ids: Sequence[str]) -> dict[str, str]:
        return await self.engine.read.ended(ids)

    async def find_ids(self, text: str, kind: Literal["task", "dag"] | None) -> list[str]:
        return await self.engine.read.find_ids(text, kind)

    async def dag(self, dag_id: str) -> Dag:
        return await self.engine.read.dag(dag_id)

    async def dags(self, filters: DagFilter, *, limit: int, cursor: str | None) -> Page[Dag]:
        return await self.engine.read.dags(filters, limit=limit, cursor=cursor)

    @_by_hand
    async def cancel_dag(self, dag_id: str, reason: str) -> Dag:
        await self.engine.operations.cancel_dag(dag_id, reason)
        return await self.engine.read.dag(dag_id)

    @_by_hand
    async def set_dag_budget(self, dag_id: str, usd: Decimal | float | None) -> Dag:
        await self.engine.budgets.set_dag_budget(dag_id, usd)
        return await self.engine.read.dag(dag_id)

    @_by_hand
    async def add_dag_budget(self, dag_id: str, usd: Decimal | float) -> Dag:
        await self.engine.budgets.add_dag_budget(dag_id, usd)
        return await self.engine.read.dag(dag_id)

    @_by_hand
    async def rename_dag(self, dag_id: str, title: str) -> Dag:
        await self.engine.budgets.change_dag(dag_id, title=title)
        return await self.engine.read.dag(dag_id)

    async def events(
        self,
        after: str | None,
        *,
        limit: int,
        task_id: str | None,
        dag_id: str | None,
        kinds: Collection[str] | None,
    ) -> EventPage:
        query = EventQuery(Events(self.engine.database), limit, task_id, dag_id, tuple(kinds or ()))
        return await query.after(after)

    async def approvals(self, *, limit: int, cursor: str | None) -> Page[Approval]:
        return await self.engine.approvals.waiting(limit=limit, cursor=cursor)

    @_by_hand
    async def decide(self, task_id: str, decision: ApprovalDecision) -> Task:
        await self.engine.approvals.decide(task_id, decision)
        return await self.engine.read.task(task_id)

    async def reports(
        self, query: str, *, type_: str | None, dag_id: str | None, limit: int, cursor: str | None
    ) -> Page[Report]:
        return await self.engine.reports.search(query, type_=type_, dag_id=dag_id, limit=limit, cursor=cursor)

    async def dead_letters(
        self, filters: DeadLetterFilter, *, limit: int, cursor: str | None
    ) -> Page[DeadLetter]:
        return await self.engine.dead_letters.find(filters, limit=limit, cursor=cursor)

    async def dead_letter(self, task_id: str) -> DeadLetter:
        return await self.engine.dead_letters.get(task_id)

    async def dead_letter_groups(
        self, *, types: Sequence[str], categories: Sequence[str], limit: int
    ) -> list[DeadLetterGroup]:
        return await self.engine.dead_letters.groups(types=types, categories=categories, limit=limit)

    @_by_hand
    async def resolve(self, task_id: str, decision: ResolutionRequest) -> Task:
        await self.engine.dead_letters.resolve(task_id, decision)
        return await self.engine.read.task(task_id)

    @_by_hand
    async def resolve_all(self, filters: DeadLetterFilter, decision: ResolutionRequest) -> BulkResolution:
        return await self.engine.dead_letters.resolve_all(filters, decision)

    async def put_artifact(
        self,
        chunks: AsyncIterable[bytes],
        *,
        name: str,
        content_type: str | None,
        task_id: str | None,
        size: int | None,  # noqa: ARG002 - the store needs none
    ) -> Artifact:
        return await self.engine.artifacts.put(chunks, name=name, content_type=content_type, task_id=task_id)

    async def artifact(self, ref: str) -> Artifact:
        return await self.engine.artifacts.get(ref)

    async def artifacts(self, *, task_id: str | None, limit: int, cursor: str | None) -> Page[Artifact]:
        return await self.engine.artifacts.page(task_id=task_id, limit=limit, cursor=cursor)

    def read_artifact(self, artifact: Artifact, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        return self.engine.artifacts.read(artifact, start, stop)

    async def delete_artifact(self, ref: str) -> None:
        await self.engine.artifacts.delete(ref)

    async def agents(self, *, status: Sequence[str], limit: int, cursor: str | None) -> Page[AgentInfo]:
        return await self.engine.fleet.page(status=status, limit=limit, cursor=cursor)

    async def agent(self, agent_id: str) -> AgentInfo:
        return await self.engine.fleet.read(agent_id)

    @_by_hand
    async def change_agent(
        self,
        agent_id: str,
        *,
        status: str | None,
        max_concurrent_tasks: int | UnsetType | None,
        budget_usd: Decimal | float | UnsetType | None,
        add_budget_usd: Decimal | float | None,
        reason: str | None,
    ) -> AgentInfo:
        return await self.engine.fleet.patch(
            agent_id,
            status=status,
            max_concurrent_tasks=max_concurrent_tasks,
            budget_usd=budget_usd,
            add_budget_usd=add_budget_usd,
            reason=reason,
        )

    @_by_hand
    async def delete_agent(self, agent_id: str, *, reason: str | None) -> None:
        await self.engine.fleet.delete(agent_id, reason=reason)

    async def limits(self) -> Limits:
        return await self.engine.limits.read()

    @_by_hand
    async def change_limits(self, changes: Mapping[str, Any], *, reason: str | None) -> Limits:
        return await self.engine.limits.patch(changes, reason=reason)

    async def breakers(self, *, limit: int, cursor: str | None) -> Page[Breaker]:
        return await self.engine.read.breakers(limit=limit, cursor=cursor)

    @_by_hand
    async def open_breaker(self, key: str, *, reason: str | None) -> Breaker:
        await self.engine.breakers.open(key, reason=reason)
        return await self.engine.read.breaker(key)

    @_by_hand
    async def reset_breaker(self, key: str, *, reason: str | None) -> Breaker:
        await self.engine.breakers.reset(key, reason=reason)
        return await self.engine.read.breaker(key)

    async def locks(self, *, limit: int, cursor: str | None) -> Page[Lock]:
        return await self.engine.read.locks(limit=limit, cursor=cursor)

    @_by_hand
    async def release_lock(self, key: str, *, reason: str | None) -> None:
        await self.engine.locks.release(key, reason=reason)

    async def slowdowns(self, *, limit: int, cursor: str | None) -> Page[Slowdown]:
        return await self.engine.read.slowdowns(limit=limit, cursor=cursor)

    @_by_hand
    async def end_slowdown(self, key: str, *, reason: str | None) -> None:
        await self.engine.slowdowns.end(key, reason=reason)

    @_by_hand
    async def pause(self, type_: str | None, *, reason: str | None) -> None:
        await self.engine.operations.pause(type_, reason=reason)

    @_by_hand
    async def resume(self, type_: str | None, *, reason: str | None) -> None:
        await self.engine.operations.resume(type_, reason=reason)

    async def stats(self) -> Stats:
        return await self.engine.read.stats()

    async def waiting(self) -> Waiting:
        return await self.engine.read.waiting()

    async def throughput(self) -> ThroughputHistory:
        return await self.engine.read.throughput()

    async def costs(self, *, days: int, type_: str | None, model: str | None, agent_id: str | None) -> Costs:
        return await self.engine.read.costs(days=days, type=type_, model=model, agent_id=agent_id)

    async def attention(self) -> Attention:
        return await self.engine.read.attention()

    async def health(self) -> Readiness:
        await self.engine.tokens.exist()
        return Readiness("ready", "ok", self._wakeups is None or self._wakeups.healthy)

    async def sources(self, *, kind: str | None, limit: int, cursor: str | None) -> Page[Source]:
        return await self.engine.sources.find(kind=kind, limit=limit, cursor=cursor)

    async def source(self, name: str) -> Source:
        return await self.engine.sources.get(name)

    @_by_hand
    async def create_source(self, source: NewSource) -> Source:
        return await self.engine.sources.create(source)

    @_by_hand
    async def put_source(self, source: NewSource, *, version: int | None = None) -> Source:
        origin = "agent" if source.name.startswith("agent:") else "api"
        return (await self.engine.sources.put(source, version=version, origin=origin))[0]

    @_by_hand
    async def patch_source(self, name: str, changes: SourceFields, *, version: int | None = None) -> Source:
        return await self.engine.sources.patch(name, changes, version=version)

    @_by_hand
    async def delete_source(self, name: str) -> None:
        await self.engine.sources.delete(name)

    @_by_hand
    async def fire_source(self, name: str, event: Mapping[str, Any] | None, *, dry_run: bool) -> Fired:
        if dry_run:
            return await self.engine.firings.preview(name, event)
        return await self.engine.firings.fire(name, None if event is None else Occasion(event), by_hand=True)

    async def source_firings(self, name: str, *, limit: int, cursor: str | None) -> Page[Firing]:
        return await self.engine.sources.firings(name, limit=limit, cursor=cursor)

    @_by_hand
    async def apply_sources(
        self, sources: Sequence[NewSource], *, origin: str, dry_run: bool
    ) -> list[SourceChange]:
        return await self.engine.sources.apply(sources, origin=origin, dry_run=dry_run)

    async def tokens(self) -> list[Token]:
        return await self.engine.tokens.all()

    @_by_hand
    async def create_token(
        self, name: str, scope: str, *, agent_id: str | None, budget_usd: Decimal | float | None
    ) -> NewToken:
        return await self.engine.tokens.create(name, scope, agent_id=agent_id, budget_usd=budget_usd)

    @_by_hand
    async def revoke_token(self, which: str) -> None:
        await self.engine.tokens.revoke(which)

    # Working.

    async def register(self, agent: NewAgent) -> RegisteredAgent:
        return await self.engine.fleet.register(agent)

    async def drain(self, agent_id: str, incarnation: int) -> None:
        await self.engine.fleet.drain(agent_id, incarnation)

    async def leave(self, agent_id: str, incarnation: int) -> None:
        await self.engine.fleet.leave(agent_id, incarnation)

    async def siblings(
        self, agent_id: str, incarnation: int, *, gone: Sequence[str], everyone: bool
    ) -> list[str]:
        return await self.engine.fleet.siblings(agent_id, incarnation, gone=gone, everyone=everyone)

    async def claim(
        self, agent_id: str, incarnation: int, *, limit: int, types: Sequence[str]
    ) -> list[Assignment[ClaimedTask]]:
        claim = await self.engine.claims.claim(
            agent_id, incarnation, limit=limit, types=list(types), start=True
        )
        if len(claim.tasks) < limit and claim.leaves_some and (agent_id, incarnation) in self._waiters:
            # Another agent may be able to take the task that woke this one.
            self._waiters[agent_id, incarnation].decline()
        with self.engine.undelivered.release_if_undelivered(claim.tasks):
            return assignments(claim)

    async def complete(self, items: Sequence[Completion]) -> list[Moved]:
        return await self.engine.work.complete(items)

    async def complete_and_claim(
        self, item: Completion, *, types: Sequence[str]
    ) -> tuple[Moved, list[Assignment[ClaimedTask]]]:
        moved, claim = await self.engine.work.complete_and_claim(item, types=list(types))
        with self.engine.undelivered.release_if_undelivered(claim.tasks):
            return moved, assignments(claim)

    async def fail(self, items: Sequence[Failure]) -> list[Moved]:
        return await self.engine.work.fail(items)

    async def release(self, items: Sequence[Release]) -> list[Moved]:
        return await self.engine.work.release(items)

    async def cancel_held(self, items: Sequence[Cancellation]) -> list[Moved]:
        return await self.engine.work.cancel(items)

    async def record_step(self, step: NewStep) -> tuple[bytes, RemainingBudgets]:
        (recorded,) = await self.engine.work.record_steps([step])
        return recorded.unwrap(), recorded.budgets

    async def save_checkpoint(self, claim: ClaimRef, data: bytes) -> None:
        (saved,) = await self.engine.work.save_checkpoints([NewCheckpoint(claim, data)])
        if saved.error is not None:
            raise saved.error

    async def spawn(
        self, claim: ClaimRef, key: str, tasks: Sequence[NewTask], *, wait: bool, spent: Spent
    ) -> Spawned:
        (result,) = await self.engine.work.spawn([NewSpawn(claim, tasks, key, wait, spent)])
        return result.unwrap()

    # Running agents.

    def heartbeats(self) -> HeartbeatTransport:
        return DatabaseHeartbeats(
            self.engine.database.dsn, clock=self._clock, prepare=self._settings.sessions
        )

    @asynccontextmanager
    async def waiter(self, agent_id: str, own: InstanceInfo) -> AsyncIterator["DatabaseWaiter"]:
        async with self._subscribing:
            if self._directory is None:
                directory = LaneDirectory(self.engine.database, listen=self._settings.sessions)
                self._wakeups = await self._resources.enter_async_context(directory.wakeups)
                self._directory = directory
                self._resources.push_async_callback(directory.close)
        interest = Interest(own.types or (), own.capabilities, own.models_available)
        await self._directory.enter(interest)
        with self._directory.waiter(interest) as waiter:
            self._waiters[agent_id, own.incarnation] = waiter
            try:
                yield DatabaseWaiter(waiter)
            finally:
                self._waiters.pop((agent_id, own.incarnation), None)

    @property
    def poll_interval_sec(self) -> float | None:
        return None if self._wakeups is None else self._wakeups.poll_interval

    async def release_unknown(self, agent_id: str, incarnation: int, known: Collection[str]) -> int:
        return await self.engine.undelivered.release_unknown(agent_id, incarnation, known)

    def expect_answers_within(self, seconds: float) -> None:
        known = self.engine.database.answer_within_sec
        self.engine.database.answer_within_sec = seconds if known is None else min(known, seconds)

    @property
    def maintenance_interval_sec(self) -> float:
        return min(self._settings.promoter_interval_sec, self._settings.reaper_interval_sec)

    async def maintain(self) -> float | None:
        """Make due retries READY and recover the tasks of dead agents, if no server does it."""
        if self._on_demand is None:
            raise DatabaseError(_NOT_OPEN)
        return await self._on_demand.run()

    def _wake_all(self) -> None:
        if self._wakeups is not None:
            self._wakeups.wake_all()

    async def retry_within(self, types: Sequence[str], within_sec: float) -> DueRetries:
        return await self.engine.schedule.retry_within(types, within_sec)

    async def left_behind(self, types: Sequence[str]) -> LeftBehind:
        return await self.engine.schedule.left_behind(types)


class DatabaseHeartbeats(Heartbeats):
    """Heartbeats, and the release of tasks whose event loop is blocked."""

    async def release(
        self, agent: Presence, items: Sequence[tuple[Release, bytes | None]], *, answer_within_sec: float
    ) -> list[Moved]:
        # Rare, so it opens connections of its own; the pool belongs to the blocked event loop.
        states = [NewCheckpoint(release.claim, state) for release, state in items if state is not None]
        try:
            async with (
                asyncio.timeout(answer_within_sec),
                Engine(self.dsn, clock=self.clock, max_connections=2, prepare=self.prepare) as engine,
            ):
                await engine.fleet.drain(agent.agent_id, agent.incarnation)
                if states:
                    await engine.work.save_checkpoints(states)
                return await engine.work.release([release for release, _ in items])
        except TimeoutError:
            raise UnavailableError(
                f"The database didn't answer a release within {answer_within_sec:g} s."
            ) from None


class DatabaseWaiter:
    """Waits for a wake-up; the agent claims afterwards."""

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter

    async def wait(
        self,
        timeout: float,  # noqa: ASYNC109 - the end of the time is a result
        *,
        types: Sequence[str],  # noqa: ARG002 - it waits for all types of its agent
        limit: int,  # noqa: ARG002 - it claims nothing
    ) -> list[Assignment[ClaimedTask]] | None:
        return [] if await self._waiter.wait(timeout) else None

    def interrupt(self) -> None:
        self._waiter.close()

    def pass_on(self) -> None:
        self._waiter.pass_on()

    def decline(self) -> None:
        self._waiter.decline()
