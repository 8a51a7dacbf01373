"""Work on claimed tasks, in batches: what servers and agents call.

Each method returns one result per item, in order. An item that is stale or invalid doesn't affect the others.
Only an unavailable database fails a whole call; every call can be repeated.
"""

from collections.abc import Sequence

from lineshaft.engine.heartbeats import send_heartbeat
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.transition.lifecycle import Lifecycle
from lineshaft.engine.transition.operations import Operations
from lineshaft.engine.transition.spawn import Parting
from lineshaft.engine.transition.working import Working
from lineshaft.errors import LineshaftError, UnavailableError
from lineshaft.model.states import Status
from lineshaft.types.work import (
    NOTHING,
    Cancellation,
    Child,
    ClaimRef,
    Completion,
    Failure,
    HeartbeatAnswers,
    HeldTask,
    Moved,
    NewCheckpoint,
    NewSpawn,
    NewStep,
    Presence,
    RecordedStep,
    Release,
    Spawned,
    SpawnResult,
)


class Work:
    def __init__(
        self,
        database: Database,
        lifecycle: Lifecycle,
        working: Working,
        parting: Parting,
        operations: Operations,
    ) -> None:
        self._database = database
        self._lifecycle = lifecycle
        self._working = working
        self._parting = parting
        self._operations = operations

    async def start(self, claims: Sequence[ClaimRef]) -> list[Moved]:
        """CLAIMED to RUNNING: from now on heartbeats keep the lease."""
        return await self._lifecycle.start(claims)

    async def heartbeat(self, agents: Sequence[Presence], tasks: Sequence[HeldTask]) -> HeartbeatAnswers:
        """Renew the leases of all tasks of a process, and the presence of its agents.

        Never waits for a locked row. An agent that is missing from the answer was superseded, or is unknown.
        """
        async with self._database.connection() as connection:
            return await send_heartbeat(connection, self._database.now, agents, tasks)

    async def record_steps(self, steps: Sequence[NewStep]) -> list[RecordedStep]:
        """Record results of steps and their cost; the first result of a step is the one that counts."""
        return [await self._record_step(step) for step in steps]

    async def _record_step(self, step: NewStep) -> RecordedStep:
        try:
            data, budgets = await self._working.record_step(
                step.claim,
                step.name,
                step.data,
                cost_usd=step.cost_usd,
                cost_so_far_usd=step.cost_so_far_usd or NOTHING,
            )
        except UnavailableError:
            raise
        except LineshaftError as error:
            return RecordedStep(step.claim.id, error=error)
        return RecordedStep(step.claim.id, data, budgets)

    async def save_checkpoints(self, items: Sequence[NewCheckpoint]) -> list[Moved]:
        """Save durable progress for the next claim of each task. The status of a result is None."""
        results = []
        for item in items:
            try:
                await self._lifecycle.save_checkpoint(item.claim, item.data)
            except UnavailableError:
                raise
            except LineshaftError as error:
                results.append(Moved(item.claim.id, None, error))
            else:
                results.append(Moved(item.claim.id, None))
        return results

    async def spawn(self, items: Sequence[NewSpawn]) -> list[SpawnResult]:
        """Create children; each item is a transaction of its own."""
        results = []
        for item in items:
            try:
                results.append(SpawnResult(item.claim.id, await self._spawn(item)))
            except UnavailableError:
                raise
            except LineshaftError as error:
                results.append(SpawnResult(item.claim.id, error=error))
        return results

    async def _spawn(self, item: NewSpawn) -> Spawned:
        if item.key is not None:
            return await self._parting.spawn(
                item.claim, item.key, item.tasks, wait=item.wait, spent=item.spent
            )
        submitted = await self._operations.spawn(
            item.claim, item.tasks, wait=item.wait, checkpoint=item.checkpoint
        )
        return Spawned([Child(each.id) for each in submitted], paused=item.wait, submitted=submitted)

    async def complete(self, items: Sequence[Completion]) -> list[Moved]:
        """Record outputs. A task with gates is VALIDATING, and then what its gates decide."""
        return await self._lifecycle.complete(items)

    async def fail(self, items: Sequence[Failure]) -> list[Moved]:
        """End failed attempts: the task is retried, waits for a rate limit, or is dead-lettered."""
        return await self._lifecycle.fail(items)

    async def release(self, items: Sequence[Release]) -> list[Moved]:
        """Give claims up without using an attempt; with a delay the task comes back later."""
        return await self._parting.hand_back(items)

    async def cancel(self, items: Sequence[Cancellation]) -> list[Moved]:
        """Cancel held tasks; each item is a transaction of its own."""
        results = []
        for item in items:
            try:
                await self._parting.cancel_claimed(
                    item.claim, item.reason, spent=item.spent, cascade=item.cascade
                )
            except UnavailableError:
                raise
            except LineshaftError as error:
                results.append(Moved(item.claim.id, None, error))
            else:
                results.append(Moved(item.claim.id, Status.CANCELLED))
        return results
