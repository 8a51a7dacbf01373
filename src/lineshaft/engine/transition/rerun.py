"""Running a completed task again, and with `downstream` everything below it.

The completed attempts are kept with their outputs; the tasks become live again as revived ones do
(revive.py). What hasn't begun waits again. What is running began with an output that is about to be replaced:
unless the caller wants it cancelled, nothing is changed.
"""

from collections.abc import Collection, Sequence
from typing import Any

from msgspec import Struct

from lineshaft.engine.feed.actor import with_actor
from lineshaft.engine.live.parking import unpark_budget_waiters, unpark_lock_waiters
from lineshaft.engine.live.task_locks import HELD, LockedTask
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows
from lineshaft.engine.transition.cancel import Cancellations
from lineshaft.engine.transition.dependencies import TaskDependencies
from lineshaft.engine.transition.reviews import NewReview
from lineshaft.engine.transition.revive import Revivable, Revive
from lineshaft.engine.transition.steps import forget_steps
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.engine.transition.waits import forget_waits
from lineshaft.errors import DependentsRunningError, InvalidTransitionError, LineshaftError, NotFoundError
from lineshaft.model.reviews import Resolution
from lineshaft.model.states import Status
from lineshaft.types.work import UNREPORTED

_SQL = catalog.load(__name__)
#: Tasks that an error names.
_NAMED = 5


class _DownstreamTask(Struct, frozen=True):
    id: str
    #: It has children of a list that is replaced.
    has_old_list: bool
    #: It has begun with the outputs of others, and waits for its own children, sleeps, or waits for a signal.
    is_suspended: bool


class _OpenEdges(Struct, frozen=True):
    id: str
    n: int


class _Scope(Struct, frozen=True):
    """What a rerun concerns, locked."""

    #: The task itself first, then what runs again with it.
    again: dict[str, Revivable]
    #: What waits for them and hasn't begun.
    waiting: dict[str, LockedTask]
    #: What has begun with their outputs.
    running: dict[str, LockedTask]
    #: Those of all these whose children are of a list that is replaced.
    with_old_list: list[str]


class Rerun:
    def __init__(
        self, transitions: Transitions, revive: Revive, cancel: Cancellations, dependencies: TaskDependencies
    ) -> None:
        self._transitions = transitions
        self._locks = transitions.locks
        self._revive = revive
        self._cancel = cancel
        self._dependencies = dependencies

    async def rerun(
        self,
        task_id: str,
        *,
        downstream: bool = False,
        cancel_running: bool = False,
        forget_steps: bool = True,
        reason: str | None = None,
    ) -> Status:
        """Run a COMPLETED task again; with `downstream` all ended tasks below it too, after it."""
        review = NewReview(
            resolution=Resolution.RETRY,
            rerun=True,
            reason=reason,
            forgotten="all" if forget_steps else None,
        )

        async def work(connection: Connection) -> Status:
            # Satisfied edges become open ones: meanwhile no other transaction adds edges that close a cycle.
            await self._dependencies.lock_edges(connection)
            scope = await self._lock(connection, task_id, downstream=downstream)
            if scope.running and not cancel_running:
                raise _dependents_running(task_id, list(scope.running))
            deleted = await self._revive.hold_upstream(connection, scope.again)
            if deleted:
                raise _deleted(task_id, deleted)
            await connection.execute(_SQL["keep_attempts"], {"ids": list(scope.again)})
            if forget_steps:
                await _forget(connection, scope, self._transitions.now)
            await self._wait_again(connection, task_id, scope, downstream=downstream)
            statuses = await self._revive.bring_back(
                connection,
                scope.again,
                review,
                roots=dict.fromkeys(scope.again, task_id),
                delays=dict.fromkeys(scope.again, 0.0),
            )
            await connection.execute(_SQL["mark_dags"], {"ids": list(scope.again)})
            return statuses[task_id]

        return await self._transitions.database.run(work)

    async def _lock(self, connection: Connection, task_id: str, *, downstream: bool) -> _Scope:
        parameters = {"id": task_id, "downstream": downstream}
        ended: dict[str, Revivable] = {}
        live: dict[str, LockedTask] = {}
        while True:
            rows = await fetch_rows(connection, _DownstreamTask, _SQL["members"], parameters)
            members = {member.id: member for member in rows}
            if members.keys() <= ended.keys() | live.keys():
                break
            # Those that end, or are revived, before this has locked them are locked in the next round.
            ended = await self._revive.lock_ended(connection, sorted(members))
            live = await self._locks.lock(connection, sorted(members))
            if task_id not in ended or ended[task_id].status != Status.COMPLETED:
                status = live[task_id].status if task_id in live else None
                raise _not_completed(task_id, ended[task_id].status if task_id in ended else status)
        ours = {name: task for name, task in live.items() if name in members}
        running = {
            name: task
            for name, task in ours.items()
            if task.status in HELD or members[name].is_suspended or members[name].has_old_list
        }
        return _Scope(
            {task_id: ended[task_id], **{name: task for name, task in ended.items() if name in members}},
            {name: task for name, task in ours.items() if name not in running},
            running,
            [name for name, member in members.items() if member.has_old_list],
        )

    async def _wait_again(
        self, connection: Connection, task_id: str, scope: _Scope, *, downstream: bool
    ) -> None:
        """Make everything that depends on what runs again wait for it."""
        others = scope.waiting | scope.running
        outdated = await fetch_column(connection, _SQL["forget_lists"], {"ids": scope.with_old_list})
        await connection.execute(_SQL["reopen_edges"], {"ids": list(scope.again), "waiting": list(others)})
        await self._dependencies.refuse_cycle_above(connection, [*scope.again, *others])
        if others:
            await self._hold_back(connection, task_id, scope, downstream=downstream)
        elif not outdated:
            return
        # What they have spawned was for an output that is replaced.
        children = await self._locks.children(connection, list(scope.running))
        await self._cancel.cancel_in(connection, [*children, *outdated], f"Upstream {task_id} is run again")
        # Others may be first now among those that wait for a lock, or for the money of a DAG.
        ready = [task for task in others.values() if task.status == Status.READY]
        await unpark_lock_waiters(connection, sorted({key for task in ready for key in task.locks}))
        await unpark_budget_waiters(connection, sorted({task.dag_id for task in ready if task.dag_id}))

    async def _hold_back(
        self, connection: Connection, task_id: str, scope: _Scope, *, downstream: bool
    ) -> None:
        """End the claims of what has begun, and block it and what hasn't."""
        others = scope.waiting | scope.running
        counted = await fetch_rows(connection, _OpenEdges, _SQL["count_open"], {"ids": list(others)})
        open_edges = {row.id: row.n for row in counted}
        effects = self._transitions.effects()
        why = with_actor({"reason": f"Upstream {task_id} is run again"})
        blocked = []
        for name, task in others.items():
            if task.status in HELD:
                more = open_edges[name] - task.blocked
                effects.requeue(task, Status.PENDING, spent=UNREPORTED, attempts=0, blocked=more)
                effects.attempt(task, "released", spent=UNREPORTED)
                effects.event(task, ["task.released", "task.waiting"], why)
            elif open_edges[name] != task.blocked:
                blocked.append(name)
                if task.status != Status.PENDING:
                    effects.event(task, ["task.waiting"], why)
            if downstream:
                # Nothing of the batch is running now, and the task above may need its lock.
                effects.release_batch_lock(task)
        numbers = [open_edges[name] for name in blocked]
        await connection.execute(
            _SQL["block_waiting"], {**self._transitions.now, "ids": blocked, "open": numbers}
        )
        await self._transitions.write(connection, effects)


async def _forget(connection: Connection, scope: _Scope, now: dict[str, Any]) -> None:
    """Delete steps and checkpoints of everything that has begun, and begins again with other inputs."""
    retried = [name for name, task in scope.waiting.items() if task.status == Status.RETRYING]
    await forget_steps(connection, [*scope.again, *retried], None)
    # Their children are cancelled.
    await forget_steps(connection, list(scope.running), None, spawned=True)
    ids = [*scope.again, *scope.running, *retried]
    await connection.execute(_SQL["forget_checkpoints"], {"ids": ids})
    await forget_waits(connection, ids, now)


def _not_completed(task_id: str, status: str | None) -> LineshaftError:
    if status is None:
        return NotFoundError(f"There is no task {task_id}.")
    instead = f" Use 'lineshaft task retry {task_id}'." if Status(status).ended else ""
    return InvalidTransitionError(
        f"Can't rerun task {task_id}: it is {status}. Only a COMPLETED task can be rerun.{instead}"
    )


def _dependents_running(task_id: str, running: Sequence[str]) -> LineshaftError:
    return DependentsRunningError(
        f"Can't rerun task {task_id}: tasks that depend on it are running: {_listed(running)}. Wait for "
        "them, or set cancel_running (--cancel-running): they stop, and run again after it. Nothing was "
        "changed."
    )


def _deleted(task_id: str, deleted: Sequence[str]) -> LineshaftError:
    return InvalidTransitionError(
        f"Can't rerun task {task_id}: retention has deleted tasks whose outputs are needed again: "
        f"{_listed(deleted)}. Submit the work as a new task. Nothing was changed."
    )


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(sorted(names)[:_NAMED]) + more
