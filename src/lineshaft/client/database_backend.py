"""The backend over a database."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from msgspec.structs import replace

from lineshaft.artifacts import open_store
from lineshaft.checks.registry import Checks
from lineshaft.client.backend import Claimed, HeartbeatTransport, Req, Res, Waited
from lineshaft.clock import Clock
from lineshaft.duties.on_demand import OnDemand
from lineshaft.engine.caller import caller
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.actor import acting_as
from lineshaft.engine.feed.lane_directory import Interest, LaneDirectory
from lineshaft.engine.feed.waiter import Waiter
from lineshaft.engine.feed.wakeups import Wakeups
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.heartbeats import Heartbeats
from lineshaft.engine.postgres import caller_transaction, migrate
from lineshaft.engine.postgres.location import database, place_of
from lineshaft.errors import DatabaseError, UnavailableError
from lineshaft.integrations.officeplane_redis import locks as document_locks
from lineshaft.integrations.redis.connection import dispatch_server
from lineshaft.model.tasks import NewTask
from lineshaft.operations import health
from lineshaft.operations.operation import Operation
from lineshaft.settings import Settings
from lineshaft.types import Artifact, InstanceInfo, NewDag, Readiness, Submitted, SubmittedDag
from lineshaft.types import work as w
from lineshaft.types.assignments import assignments
from lineshaft.types.request import Nothing
from lineshaft.types.reservations import NewReservation, Settlement
from lineshaft.types.waits import NewSuspension, WaitEnd

_NOT_OPEN = "This Lineshaft is not open. Use 'async with Lineshaft() as shaft'."


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
            await asyncio.to_thread(prepare, dsn, sessions=self._settings.sessions)
            self._engine = await opening.enter_async_context(
                Engine(
                    dsn,
                    clock=self._clock,
                    max_connections=self._max_connections,
                    keep_connections=self._keep_connections,
                    prepare=self._settings.sessions,
                    source_folders=self._settings.source_folders or None,
                    rules=Rules.of(self._settings),
                    checks=self._checks or Checks.from_settings(self._settings),
                    store=open_store(self._settings),
                    max_artifact_bytes=self._settings.max_artifact_bytes,
                    outside_locks=document_locks.of(self._settings),
                    redis=dispatch_server(self._settings),
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

    async def call(self, operation: Operation[Req, Res], request: Req) -> Res:
        if not operation.by_hand:
            return await operation.run(self.engine, request)
        with acting_as(self.actor or caller().actor):
            return await operation.run(self.engine, request)

    async def health(self) -> Readiness:
        ready = await self.call(health.ready, Nothing())
        wakeups = self._wakeups
        if wakeups is None:
            return ready
        return replace(
            ready,
            wakeups=wakeups.wakes_at_once,
            wakeup_mode=wakeups.mode,
            wakeup_mode_since=wakeups.mode_since,
        )

    # Submitting.

    async def submit(self, tasks: Sequence[NewTask], *, connection: Any) -> list[Submitted]:
        async with caller_transaction.adapted(connection) as adapted:
            # It may replace or cancel a task.
            with acting_as(self.actor or caller().actor):
                return await self.engine.submission.submit(tasks, connection=adapted)

    async def submit_dag(self, dag: NewDag, *, connection: Any) -> SubmittedDag:
        async with caller_transaction.adapted(connection) as adapted:
            submitted = await self.engine.submission.submit_dag(
                dag.title,
                dag.tasks,
                budget_ceiling_usd=dag.budget_ceiling_usd,
                created_by=dag.created_by,
                idempotency_key=dag.idempotency_key,
                connection=adapted,
            )
        tasks = list(submitted.tasks.values())
        if submitted.duplicate or connection is not None or not all(task.duplicate for task in tasks):
            return submitted
        # All tasks existed already, so no DAG was created: return the DAG of the first task.
        first = await self.engine.read.task(tasks[0].id)
        return SubmittedDag(first.dag_id, submitted.tasks)

    # The bytes of artifacts.

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

    def read_artifact(self, artifact: Artifact, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        return self.engine.artifacts.read(artifact, start, stop)

    # Working.

    async def claim(self, agent_id: str, incarnation: int, *, limit: int, types: Sequence[str]) -> Claimed:
        claim = await self.engine.claims.claim(
            agent_id, incarnation, limit=limit, types=list(types), start=True
        )
        if len(claim.tasks) < limit and claim.leaves_some and (agent_id, incarnation) in self._waiters:
            # Another agent may be able to take the task that woke this one.
            self._waiters[agent_id, incarnation].decline()
        with self.engine.undelivered.release_if_undelivered(claim.tasks):
            return assignments(claim)

    async def complete(self, items: Sequence[w.Completion]) -> list[w.Moved]:
        return await self.engine.work.complete(items)

    async def complete_and_claim(
        self, item: w.Completion, *, types: Sequence[str]
    ) -> tuple[w.Moved, Claimed]:
        moved, claim = await self.engine.work.complete_and_claim(item, types=list(types))
        with self.engine.undelivered.release_if_undelivered(claim.tasks):
            return moved, assignments(claim)

    async def fail(self, items: Sequence[w.Failure]) -> list[w.Moved]:
        return await self.engine.work.fail(items)

    async def release(self, items: Sequence[w.Release]) -> list[w.Moved]:
        return await self.engine.work.release(items)

    async def cancel_held(self, items: Sequence[w.Cancellation]) -> list[w.Moved]:
        return await self.engine.work.cancel(items)

    async def record_step(self, step: w.NewStep) -> tuple[bytes, w.RemainingBudgets]:
        (recorded,) = await self.engine.work.record_steps([step])
        return recorded.unwrap(), recorded.budgets

    async def save_checkpoint(self, claim: w.ClaimRef, data: bytes) -> None:
        (saved,) = await self.engine.work.save_checkpoints([w.NewCheckpoint(claim, data)])
        if saved.error is not None:
            raise saved.error

    async def spawn(
        self, claim: w.ClaimRef, key: str, tasks: Sequence[NewTask], *, wait: bool, spent: w.Spent
    ) -> w.Spawned:
        (result,) = await self.engine.work.spawn([w.NewSpawn(claim, tasks, key, wait, spent)])
        return result.unwrap()

    async def suspend(self, new: NewSuspension) -> WaitEnd | None:
        (result,) = await self.engine.work.suspend([new])
        return result.unwrap()

    async def acquire(self, new: NewReservation, *, wait_sec: float) -> str | None:
        return await self.engine.reservations.acquire(new, wait_sec=wait_sec)

    async def settle(self, settlement: Settlement) -> None:
        await self.engine.reservations.settle(settlement)

    # Running agents.

    def heartbeats(self) -> HeartbeatTransport:
        return DatabaseHeartbeats(
            self.engine.database.dsn, clock=self._clock, prepare=self._settings.sessions
        )

    @asynccontextmanager
    async def waiter(self, agent_id: str, own: InstanceInfo) -> AsyncIterator["DatabaseWaiter"]:
        async with self._subscribing:
            if self._directory is None:
                directory = LaneDirectory(
                    self.engine.database,
                    listen=self._settings.sessions,
                    redis=self.engine.dispatch,
                )
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
        limit = self.engine.database.answer_within_sec
        self.engine.database.answer_within_sec = seconds if limit is None else min(limit, seconds)

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


class DatabaseHeartbeats(Heartbeats):
    """Heartbeats, and the release of tasks whose event loop is blocked."""

    async def release(
        self, agent: w.Presence, items: Sequence[tuple[w.Release, bytes | None]], *, answer_within_sec: float
    ) -> list[w.Moved]:
        # Rare, so it opens connections of its own; the pool belongs to the blocked event loop.
        states = [w.NewCheckpoint(release.claim, state) for release, state in items if state is not None]
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
    ) -> Waited | None:
        return Waited() if await self._waiter.wait(timeout) else None

    def interrupt(self) -> None:
        self._waiter.close()

    def pass_on(self) -> None:
        self._waiter.pass_on()

    def decline(self) -> None:
        self._waiter.decline()
