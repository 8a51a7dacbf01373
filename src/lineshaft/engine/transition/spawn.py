"""Spawning children: they are created in the parent's DAG, and the parent may wait for them.

A parent that waits uses no attempt, and gives back its slot, its money and its document lock. Children are
created once, however often the call is repeated: a step of the parent records their ids, under the key of the
call or, without one, a digest of the children that holds for one claim.
"""

import hashlib
from collections.abc import Awaitable, Sequence
from functools import partial

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lineshaft.engine.live import spending
from lineshaft.engine.live.task_locks import LockedTask
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_rows, fetch_value
from lineshaft.engine.submit.dags import give_dag_a_row
from lineshaft.engine.submit.drafts import Draft, draft_by_key, off_the_loop, refuse_place
from lineshaft.engine.submit.lanes import Lanes
from lineshaft.engine.submit.submission import Submission
from lineshaft.engine.transition.dependencies import TaskDependencies
from lineshaft.engine.transition.effects import Effects
from lineshaft.engine.transition.steps import Steps
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import (
    BudgetExceededError,
    InvalidInputError,
    LineshaftError,
    StaleClaimError,
    UnavailableError,
)
from lineshaft.model import budget
from lineshaft.model.states import Status
from lineshaft.model.tasks import KnownTypes, NewTask
from lineshaft.types import Submitted
from lineshaft.types.work import SPAWN_STEP, Child, NewCheckpoint, NewSpawn, Spawned, SpawnResult, Spent

_SQL = catalog.load(__name__)


class _ChildRow(Struct, frozen=True):
    id: str
    status: str
    output: bytes | None


class Spawn:
    def __init__(
        self,
        transitions: Transitions,
        lanes: Lanes,
        steps: Steps,
        dependencies: TaskDependencies,
        submission: Submission,
    ) -> None:
        self._transitions = transitions
        self._database = transitions.database
        self._locks = transitions.locks
        self._lanes = lanes
        self._steps = steps
        self._dependencies = dependencies
        self._submission = submission

    async def spawn(self, items: Sequence[NewSpawn]) -> list[SpawnResult]:
        """Each item is a transaction of its own."""
        return [await self._result(item) for item in items]

    async def _result(self, item: NewSpawn) -> SpawnResult:
        def spawn(types: KnownTypes) -> Awaitable[Spawned]:
            return self._database.run(lambda own: self._spawn(own, item, types), pipeline=False)

        try:
            spawned = await self._submission.types.submit(spawn)
        except UnavailableError:
            raise
        except LineshaftError as error:
            report = [(item.claim, item.spent)]
            if isinstance(error, StaleClaimError):
                await self._database.run(lambda own: spending.book_late(own, report, self._database.now))
            elif isinstance(error, BudgetExceededError):
                await self._database.run(lambda own: spending.book(own, report, self._database.now))
            return SpawnResult(item.claim.id, error=error)
        return SpawnResult(item.claim.id, spawned)

    async def _spawn(self, connection: Connection, item: NewSpawn, types: KnownTypes) -> Spawned:
        step = SPAWN_STEP + (_digest(item) if item.key is None else item.key)
        try:
            parent = await self._locks.hold(connection, item.claim, "spawn from")
        except StaleClaimError:
            known = await self._steps.read(connection, item.claim.id, step)
            if known is None or known.epoch != item.claim.epoch or not item.wait:
                raise
            # A repeated call: the parent is waiting already.
            again = _submitted(known.data)
            return Spawned(await self._children(connection, again), paused=True, submitted=again)
        if item.checkpoint is not None:
            await self._steps.save_checkpoints_in(connection, [NewCheckpoint(item.claim, item.checkpoint)])
        effects = self._transitions.effects()
        # While the parent is locked: of two concurrent calls the second finds the children of the first.
        known = await self._steps.read(connection, item.claim.id, step)
        if known is not None:
            submitted = _submitted(known.data)
        else:
            parent, submitted = await self._create(connection, effects, parent, item.tasks, types)
            await self._steps.insert(connection, item.claim, step, _record(item, submitted))
        children = await self._children(connection, submitted)
        # Without a key the caller doesn't learn about ends: it gets them with its next claim.
        paused = item.wait and (item.key is None or not all(child.ended for child in children))
        if paused:
            _check_total(parent, item.spent)
            await self._pause(connection, effects, parent, submitted, item.spent)
        else:
            # With children that won't be created again.
            await spending.book(connection, [(item.claim, item.spent)], self._database.now)
            await effects.write(connection)
        return Spawned(children, paused, submitted)

    async def _create(
        self,
        connection: Connection,
        effects: Effects,
        parent: LockedTask,
        tasks: Sequence[NewTask],
        types: KnownTypes,
    ) -> tuple[LockedTask, list[Submitted]]:
        """In the parent's DAG, which may get its row now; also returns the parent as it is then."""
        dag_id = parent.task_dag_id
        drafts: list[Draft] = []
        for number, task in enumerate(tasks):
            refuse_place(
                task, f"tasks[{number}]", "the task that spawns it", dag_id=dag_id, parent_id=parent.id
            )
        creator = f"agent:{parent.agent_id}"
        own = [
            msgspec.structs.replace(task, parent_id=parent.id, created_by=task.created_by or creator)
            for task in tasks
        ]
        draft = partial(draft_by_key, own, dag_id, drafts, self._submission.rules._replace(types=types))
        heads = (await off_the_loop(own, draft)).values()
        if parent.dag_id is None:
            await give_dag_a_row(connection, self._database.now, parent)
            parent = replace(parent, dag_id=dag_id)
        await self._check_depth(connection, parent)
        results = await self._submission.write_in(connection, drafts, [], types)
        added = sum(draft.id not in results or not results[draft.id].duplicate for draft in drafts)
        await self._check_number(connection, dag_id, added)
        effects.touch_dag(dag_id, added=added)
        return parent, [results[head.id] for head in heads]

    async def _check_depth(self, connection: Connection, parent: LockedTask) -> None:
        """Tasks that spawn tasks that spawn tasks must come to an end."""
        most = self._submission.rules.max_spawn_depth
        depth = await fetch_value(connection, _SQL["spawn_depth"], {"id": parent.id})
        if depth > most:
            raise InvalidInputError(
                f"Asked to spawn tasks below task {parent.id}, which is {depth - 1} levels deep; at most "
                f"{most} levels are allowed. Let a task above spawn them, or raise "
                "LINESHAFT_MAX_SPAWN_DEPTH."
            )

    async def _check_number(self, connection: Connection, dag_id: str, added: int) -> None:
        most = self._submission.rules.max_spawned_tasks
        spawned = await fetch_value(connection, _SQL["count_spawned"], {"dag_id": dag_id, "n": added})
        if spawned > most:
            raise InvalidInputError(
                f"Asked to spawn {added} tasks, but DAG {dag_id} would then have {spawned} spawned tasks; at "
                f"most {most} are allowed. Does a task spawn without end? If not, raise "
                "LINESHAFT_MAX_SPAWNED_TASKS."
            )

    async def _pause(
        self,
        connection: Connection,
        effects: Effects,
        parent: LockedTask,
        children: Sequence[Submitted],
        spent: Spent,
    ) -> None:
        """End the claim until all children have ended; writes the effects."""
        waits_for = await self._dependencies.wait_for_children(connection, parent.id, children)
        status = Status.PENDING if waits_for else Status.READY
        lane_id = await self._lanes.next(connection, parent, spent)
        effects.requeue(parent, status, spent=spent, blocked=waits_for, lane_id=lane_id)
        if waits_for:
            effects.release_batch_lock(parent)
        effects.attempt(parent, "waiting", spent=spent)
        effects.event(parent, ["task.waiting"] if waits_for else ["task.waiting", "task.ready"])
        await effects.write(connection)
        await self._dependencies.rekey_paths(connection, [child.id for child in children])

    async def _children(self, connection: Connection, submitted: Sequence[Submitted]) -> list[Child]:
        ids = [child.id for child in submitted]
        rows = await fetch_rows(connection, _ChildRow, _SQL["children"], {"ids": ids})
        found = {
            row.id: Child(row.id, row.status, None if row.output is None else msgspec.json.decode(row.output))
            for row in rows
        }
        # One that retention has deleted had ended.
        return [found.get(name) or Child(name, Status.COMPLETED) for name in ids]


def _check_total(parent: LockedTask, spent: Spent) -> None:
    """Waiting uses no attempt, but money: the limit over all claims applies here too.

    Nothing has moved: the holder fails the attempt, as when a heartbeat reports that it is over this limit.
    """
    total = parent.cost_usd + spent.cost(parent)
    if budget.total_limit_reached(total, parent.max_total_cost_usd):
        raise BudgetExceededError(
            f"Task {parent.id} can't wait for its children: it has cost {total.normalize():f} USD in all, of "
            f"max_total_cost_usd {parent.max_total_cost_usd}, so it couldn't go on afterwards. Nothing was "
            "spawned. Raise max_total_cost_usd."
        )


def _digest(item: NewSpawn) -> str:
    """The key of a call without one: the same tasks under the same claim."""
    return f"{item.claim.epoch}.{hashlib.sha256(msgspec.json.encode(item.tasks)).hexdigest()[:16]}"


def _record(item: NewSpawn, submitted: Sequence[Submitted]) -> bytes:
    """The step's data. Agents read it by its key as a list of ids; without a key it is the whole result."""
    return msgspec.json.encode(submitted if item.key is None else [child.id for child in submitted])


def _submitted(data: bytes) -> list[Submitted]:
    found = msgspec.json.decode(data, type=list[str | Submitted])
    return [Submitted(child, duplicate=True) if isinstance(child, str) else child for child in found]
