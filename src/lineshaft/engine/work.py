"""Work on claimed tasks, in batches: what servers and agents call.

Each method returns one result per item, in order. An item that is stale or invalid doesn't affect the others.
Only an unavailable database fails a whole call; every call can be repeated.
"""

from collections.abc import Sequence
from typing import TypeVar

from msgspec.structs import replace

from lineshaft.engine.artifacts.references import refer_data, with_sizes
from lineshaft.engine.claim.claims import Claims
from lineshaft.engine.heartbeats import send_heartbeat
from lineshaft.engine.live import disputes
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.transfers import Transfers
from lineshaft.engine.transition.cancel import Cancellations
from lineshaft.engine.transition.complete import Completions
from lineshaft.engine.transition.fail import Failures
from lineshaft.engine.transition.release import Releases
from lineshaft.engine.transition.spawn import Spawn
from lineshaft.engine.transition.start import Starts
from lineshaft.engine.transition.steps import Steps
from lineshaft.engine.transition.waits import Waits
from lineshaft.errors import InvalidInputError, LineshaftError
from lineshaft.types import work
from lineshaft.types.waits import NewSuspension, Suspended
from lineshaft.types.work import (
    Cancellation,
    Claim,
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
    SpawnResult,
)

#: Each may report what its attempt has spent.
ItemT = TypeVar(
    "ItemT",
    Completion,
    Failure,
    work.Release,
    Cancellation,
    NewStep,
    NewCheckpoint,
    NewSpawn,
    NewSuspension,
)


class Work:
    def __init__(
        self,
        database: Database,
        *,
        start: Starts,
        steps: Steps,
        waits: Waits,
        spawn: Spawn,
        complete: Completions,
        fail: Failures,
        release: Releases,
        cancel: Cancellations,
        claims: Claims,
        transfers: Transfers,
    ) -> None:
        self.transfers = transfers
        self._database = database
        self._start = start
        self._steps = steps
        self._waits = waits
        self._spawn = spawn
        self._complete = complete
        self._fail = fail
        self._release = release
        self._cancel = cancel
        self._claims = claims

    async def start(self, claims: Sequence[ClaimRef]) -> list[Moved]:
        """CLAIMED to RUNNING: from now on heartbeats keep the lease."""
        return await self._start.start(claims)

    async def heartbeat(self, agents: Sequence[Presence], tasks: Sequence[HeldTask]) -> HeartbeatAnswers:
        """Renew the leases of all tasks of a process, and the presence of its agents.

        Never waits for a locked row. An agent that is missing from the answer was superseded, or is unknown.
        """
        return await self._database.run_alone(
            lambda own: send_heartbeat(own, self._database.now, agents, tasks)
        )

    async def record_steps(self, steps: Sequence[NewStep]) -> list[RecordedStep]:
        """Record results of steps and their cost; the first result of a step is the one that counts."""
        steps = await self.within_ceilings(steps)
        faults = await refer_data(
            self._database, [step.claim.id for step in steps], [step.data for step in steps]
        )
        results = iter(
            await self._steps.record([step for step, fault in zip(steps, faults, strict=True) if not fault])
        )
        return [
            next(results) if fault is None else RecordedStep(step.claim.id, error=_invalid(fault))
            for step, fault in zip(steps, faults, strict=True)
        ]

    async def save_checkpoints(self, items: Sequence[NewCheckpoint]) -> list[Moved]:
        """Save durable progress for the next claim of each task. The status of a result is None."""
        items = await self.within_ceilings(items)
        faults = await refer_data(
            self._database, [item.claim.id for item in items], [item.data for item in items]
        )
        results = iter(
            await self._steps.save_checkpoints(
                [item for item, fault in zip(items, faults, strict=True) if not fault]
            )
        )
        return [
            next(results) if fault is None else Moved(item.claim.id, None, _invalid(fault))
            for item, fault in zip(items, faults, strict=True)
        ]

    async def spawn(self, items: Sequence[NewSpawn]) -> list[SpawnResult]:
        """Create children; each item is a transaction of its own."""
        return await self._spawn.spawn(await self.within_ceilings(items))

    async def suspend(self, items: Sequence[NewSuspension]) -> list[Suspended]:
        """End claims until a time or a signal, unless their wait is over; each item is a transaction."""
        return await self._waits.suspend(await self.within_ceilings(items))

    async def complete(self, items: Sequence[Completion]) -> list[Moved]:
        """Record outputs. A task with gates is VALIDATING, and then what its gates decide."""
        items = await self.within_ceilings(items)
        return await self._complete.complete(await with_sizes(self._database, items))

    async def complete_and_claim(
        self, item: Completion, *, types: list[str] | None = None
    ) -> tuple[Moved, Claim]:
        """Record an output, and start the next task for the same instance, whatever became of this one.

        Repeated, it returns the same claim while that is held, else none. If the output is refused, nothing
        is claimed: an error has no room for a claim.
        """
        (item,) = await with_sizes(self._database, await self.within_ceilings([item]))
        moved, looked = await self._complete.complete_and_claim(item, types=types)
        if moved.error is not None:
            return moved, Claim()
        if looked is not None and looked.paused:
            # Claimed before it was known: otherwise more could be spent than the cost velocity allows.
            await self._release.release(
                [work.Release(ClaimRef(task.id, task.epoch)) for task in looked.tasks]
            )
            return moved, Claim()
        try:
            return moved, await self._claims.claim_next(item.claim, types=types, looked=looked)
        except LineshaftError:
            # The output is recorded. The instance's next claim has the same error.
            return moved, Claim()

    async def fail(self, items: Sequence[Failure]) -> list[Moved]:
        """End failed attempts: the task is retried, waits for a rate limit, or is dead-lettered."""
        return await self._fail.fail(await self.within_ceilings(items))

    async def release(self, items: Sequence[work.Release]) -> list[Moved]:
        """Give claims up without using an attempt; with a delay the task comes back later."""
        return await self._release.release(await self.within_ceilings(items))

    async def cancel(self, items: Sequence[Cancellation]) -> list[Moved]:
        """Cancel held tasks; each item is a transaction of its own."""
        return await self._cancel.cancel_claims(await self.within_ceilings(items))

    async def within_ceilings(self, items: Sequence[ItemT]) -> Sequence[ItemT]:
        """The same items, with what counts of their reports; the rest is recorded as disputed."""
        reports = [(item.claim, item.spent) for item in items]
        if not disputes.may_be_disputed(reports):
            return items
        counted = await self._database.run_alone(
            lambda own: disputes.within_ceilings(own, reports, self._database.now)
        )
        return [replace(item, spent=spent) for item, (_, spent) in zip(items, counted, strict=True)]


def _invalid(fault: str) -> InvalidInputError:
    return InvalidInputError(errors=[("data_ref", fault)])
