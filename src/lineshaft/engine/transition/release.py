"""Releasing claims: no attempt is used, and what the attempt has spent is booked."""

from collections.abc import Sequence
from decimal import Decimal

from lineshaft.engine.live.task_locks import LockedTask, has_duplicate_tasks
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.submit.lanes import Lanes
from lineshaft.engine.transition.effects import Effects
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.model import budget
from lineshaft.model.retry import FailureCategory
from lineshaft.model.states import Status
from lineshaft.types import work
from lineshaft.types.work import Moved, Spent

#: The name of the call, in errors and in the attempts that it ends.
RELEASE = "release"
_RELEASABLE = frozenset({Status.CLAIMED, Status.RUNNING})


class Releases:
    def __init__(self, transitions: Transitions, lanes: Lanes) -> None:
        self._transitions = transitions
        self._locks = transitions.locks
        self._lanes = lanes

    async def release(self, items: Sequence[work.Release]) -> list[Moved]:
        """READY again; with a delay PENDING until it is over."""
        if has_duplicate_tasks([item.claim for item in items]):
            return [result for item in items for result in await self.release([item])]
        return await self._transitions.database.run(lambda own: self.release_in(own, items))

    async def release_in(self, connection: Connection, items: Sequence[work.Release]) -> list[Moved]:
        """As part of another operation's transaction; the tasks are different."""
        locked = await self._locks.lock_with_dependents(connection, [item.claim.id for item in items])
        effects = self._transitions.effects()
        results: dict[str, Moved] = {}
        for item in items:
            task = locked.get(item.claim.id)
            if task is None or task.epoch != item.claim.epoch or task.status not in _RELEASABLE:
                continue
            target, delay = _target(item), item.delay_sec or None
            spent = item.spent
            total = task.cost_usd + spent.cost(task)
            if budget.total_limit_reached(total, task.max_total_cost_usd):
                results[task.id] = _dead_letter(effects, task, spent, total)
                continue
            lane_id = await self._lanes.next(connection, task, spent)
            effects.requeue(task, target, delay_sec=delay, spent=spent, lane_id=lane_id)
            effects.attempt(task, "released", spent=spent, ended_by=RELEASE)
            kinds = ["task.released"] if delay else ["task.released", "task.ready"]
            effects.event(task, kinds, {"delay_sec": delay} if delay else None)
            results[task.id] = Moved(task.id, target)
        await self._transitions.write(connection, effects)
        rest = [item.claim for item in items if item.claim.id not in results]
        # After a delay it is READY.
        refused = await self._locks.refuse(
            connection,
            rest,
            RELEASE,
            repeated=(Status.READY, Status.PENDING, Status.DEAD_LETTERED),
            ended_by=RELEASE,
            spent={item.claim: item.spent for item in items},
        )
        results |= {result.id: result for result in refused}
        return [results[item.claim.id] for item in items]


def _dead_letter(effects: Effects, task: LockedTask, spent: Spent, total: Decimal) -> Moved:
    """Giving a claim up uses no attempt, but money: the limit over all claims applies here too.

    The attempt counts as failed, so that history and metrics give the reason.
    """
    category = FailureCategory.BUDGET_EXCEEDED.value
    error = f"cost {total} USD in all, of max_total_cost_usd {task.max_total_cost_usd}"
    attempts = task.attempts + 1
    effects.attempt(task, "failed", spent=spent, category=category, error=error, ended_by=RELEASE)
    effects.end(task, Status.DEAD_LETTERED, spent=spent, reason=error, category=category, attempts=attempts)
    data = {"category": category, "error": error, "attempt": attempts, "because": "budget_exceeded"}
    effects.event(task, ["task.failed", "task.dead_lettered"], data)
    return Moved(task.id, Status.DEAD_LETTERED)


def _target(item: work.Release) -> Status:
    return Status.PENDING if item.delay_sec else Status.READY
