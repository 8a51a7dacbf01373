"""Making ended tasks live again: dead letters and cancelled tasks; for rerun.py also completed ones."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal

import msgspec
from msgspec import Struct

from lineshaft.engine.feed.actor import with_actor
from lineshaft.engine.live.upstream import hold_upstream
from lineshaft.engine.live.waking import wake_ready
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_column, fetch_row, fetch_rows
from lineshaft.engine.submit.lanes import Lanes
from lineshaft.engine.transition.dependencies import TaskDependencies
from lineshaft.engine.transition.effects import log_events
from lineshaft.engine.transition.reviews import MANUAL_RETRY, NewReview, Reviews
from lineshaft.engine.transition.rows import NewEvent
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.engine.transition.waits import forget_waits
from lineshaft.errors import AlreadyExistsError, InvalidTransitionError, LineshaftError, NotFoundError
from lineshaft.model.budget import attempt_limit
from lineshaft.model.idempotency import content_hash
from lineshaft.model.priority import Lane
from lineshaft.model.states import Status

_SQL = catalog.load(__name__)


class Revivable(Struct, frozen=True):
    """An ended task, locked, with what a revival needs."""

    id: str
    status: str
    type: str
    required_capabilities: list[str]
    model_preferences: list[str]
    priority_boost_per_minute: float
    max_cost_usd: Decimal | None
    max_total_cost_usd: Decimal | None
    cost_usd: Decimal
    idempotency_key: str | None
    spec: bytes
    is_batch: bool
    deadline: datetime | None
    #: Its deadline has passed, and it is cancelled then.
    expired: bool
    lock_owners: list[str]

    @property
    def lane(self) -> Lane:
        return Lane.of(
            self.type,
            self.required_capabilities,
            self.model_preferences,
            self.priority_boost_per_minute,
            attempt_limit(self.max_cost_usd, self.max_total_cost_usd, self.cost_usd),
        )


class _Revived(Struct, frozen=True):
    id: str
    dag_id: str | None
    status: str
    epoch: int
    #: It is a batch whose children have all ended.
    batch_done: bool


class _Promoted(Struct, frozen=True):
    id: str
    dag_id: str | None


class Revive:
    def __init__(
        self, transitions: Transitions, lanes: Lanes, dependencies: TaskDependencies, reviews: Reviews
    ) -> None:
        self._transitions = transitions
        self._database = transitions.database
        self._locks = transitions.locks
        self._lanes = lanes
        self._dependencies = dependencies
        self._reviews = reviews

    async def retry(self, task_id: str, *, delay_sec: float = 0.0) -> Status:
        """Revive a DEAD_LETTERED or CANCELLED task with fresh counters, or end the wait of a RETRYING one."""

        async def work(connection: Connection) -> Status:
            promoted = await fetch_row(
                connection, _Promoted, _SQL["promote_retry"], {**self._database.now, "id": task_id}
            )
            if promoted is None:
                return (await self.revive(connection, {task_id: delay_sec}, MANUAL_RETRY))[task_id]
            event = NewEvent.of(["task.ready"], promoted.id, promoted.dag_id, data=with_actor() or None)
            await log_events(connection, self._database.now, [event])
            await wake_ready(connection, [promoted.id])
            return Status.READY

        return await self._database.run(work)

    async def retry_many(self, ids: Sequence[str]) -> list[str]:
        """As `retry`, all of them or none."""

        async def work(connection: Connection) -> list[str]:
            promoted = [
                row
                for name in ids
                if (
                    row := await fetch_row(
                        connection, _Promoted, _SQL["promote_retry"], {**self._database.now, "id": name}
                    )
                )
            ]
            if promoted:
                act = with_actor() or None
                events = [NewEvent.of(["task.ready"], row.id, row.dag_id, data=act) for row in promoted]
                await log_events(connection, self._database.now, events)
                await wake_ready(connection, [row.id for row in promoted])
            due = {row.id for row in promoted}
            if ended := {name: 0.0 for name in ids if name not in due}:
                await self.revive(connection, ended, MANUAL_RETRY)
            return list(ids)

        return await self._database.run(work)

    async def revive(
        self, connection: Connection, delays: Mapping[str, float], review: NewReview
    ) -> dict[str, Status]:
        """Revive DEAD_LETTERED or CANCELLED tasks, each after its delay in seconds.

        A batch is revived with those of its children that failed. Returns the status of all of them.
        """
        tasks, roots = await self._with_children(connection, list(delays))
        await self.hold_upstream(connection, tasks)
        delay_of = {name: delays[root] for name, root in roots.items()}
        return await self.bring_back(connection, tasks, review, roots=roots, delays=delay_of)

    async def bring_back(
        self,
        connection: Connection,
        tasks: Mapping[str, Revivable],
        review: NewReview,
        *,
        roots: Mapping[str, str],
        delays: Mapping[str, float],
    ) -> dict[str, Status]:
        """Make ended tasks live again. They are locked, and so is everything that they depend on.

        `roots`: for each the task of the request; it comes first among the tasks.
        """
        wanted = list(tasks.values())
        for task in wanted:
            if task.expired:
                raise InvalidTransitionError(
                    f"Can't {review.verb} task {task.id}: its deadline {task.deadline:%Y-%m-%dT%H:%M:%SZ} "
                    "has passed, and it has expire_at_deadline. Change its deadline first; nothing was "
                    "changed."
                )
        await self._retake_keys(connection, wanted, review.verb)
        # A wait that it was in begins again.
        await forget_waits(connection, list(tasks), self._database.now)
        lanes = await self._lanes.find(connection, [task.lane for task in wanted])
        owners = await self._lock_owners(connection, tasks)
        await connection.execute(_SQL["fair_tasks_exist"], {"ids": [task.id for task in wanted]})
        revived = await fetch_rows(
            connection,
            _Revived,
            _SQL["revive_tasks"],
            {
                **self._database.now,
                "ids": [task.id for task in wanted],
                "lane_ids": [lanes[task.lane].id for task in wanted],
                # A batch has no work that could wait, but its children have.
                "delays": [0.0 if task.is_batch else float(delays[task.id]) for task in wanted],
                "lock_owners": [owners.get(task.id) for task in wanted],
            },
        )
        causes = await self._reviews.record(connection, list(tasks), review)
        await self._recount_dags(connection, tasks, revived)
        await connection.execute(_SQL["reopen_work"], {"ids": list(tasks)})
        await self._dependencies.rekey_paths(connection, list(tasks))
        events = [
            NewEvent.of(
                ["task.resolved"],
                task.id,
                task.dag_id,
                epoch=task.epoch,
                data=review.event_data(task.id, root=roots[task.id]) | causes.get(task.id, {}),
            )
            for task in revived
        ]
        ready = [task for task in revived if task.status == Status.READY]
        events += [NewEvent.of(["task.ready"], task.id, task.dag_id, epoch=task.epoch) for task in ready]
        await log_events(connection, self._database.now, events)
        if ready:
            await wake_ready(connection, [task.id for task in ready])
        finished = await self._transitions.finish_batches(
            connection, [task.id for task in revived if task.batch_done]
        )
        return {task.id: finished.get(task.id, Status(task.status)) for task in revived}

    async def _with_children(
        self, connection: Connection, ids: Sequence[str]
    ) -> tuple[dict[str, Revivable], dict[str, str]]:
        """These tasks and those that are revived with them, locked; and for each the task of the request."""
        ended = await self.lock_ended(connection, ids)
        for task_id in ids:
            if task_id not in ended:
                live = (await self._locks.live(connection, [task_id])).get(task_id)
                raise _not_revivable(task_id, None if live is None else live.status)
            if ended[task_id].status == Status.COMPLETED:
                raise _not_revivable(task_id, Status.COMPLETED)
        tasks = {task_id: ended[task_id] for task_id in ids}
        roots = {name: name for name in tasks}
        # A batch is retried by retrying those of its children that failed or were cancelled with it.
        frontier = [task for task in tasks.values() if task.is_batch]
        while frontier:
            parents = await self._locks.children(connection, [task.id for task in frontier])
            children = await self.lock_ended(connection, [name for name in parents if name not in tasks])
            below = [task for task in children.values() if task.status != Status.COMPLETED]
            tasks |= {task.id: task for task in below}
            roots |= {task.id: roots[parents[task.id]] for task in below}
            frontier = [task for task in below if task.is_batch]
        return tasks, roots

    async def _lock_owners(
        self, connection: Connection, tasks: Mapping[str, Revivable]
    ) -> dict[str, str | None]:
        """For each task the outermost batch that can hold its lock: live, or revived with it."""
        around = sorted({name for task in tasks.values() for name in task.lock_owners} - tasks.keys())
        able = tasks.keys() | (await self._locks.live(connection, around)).keys()
        return {
            task.id: next((name for name in task.lock_owners if name in able), None)
            for task in tasks.values()
        }

    async def hold_upstream(self, connection: Connection, ids: Iterable[str]) -> list[str]:
        """Lock everything that these tasks depend on: they wait for what hasn't completed.

        Returns what retention has deleted.
        """
        parameters = {"ids": list(ids)}
        names = await fetch_column(connection, _SQL["upstream_of"], parameters)
        if not names:
            return []
        held = await hold_upstream(connection, names)
        await connection.execute(_SQL["reopen_edges"], parameters)
        return [name for name in names if name not in held]

    async def lock_ended(self, connection: Connection, ids: Sequence[str]) -> dict[str, Revivable]:
        """Those of these tasks that have ended."""
        ended = await fetch_rows(
            connection, Revivable, _SQL["read_revivable"], {**self._database.now, "ids": list(ids)}
        )
        return {task.id: task for task in ended}

    async def _retake_keys(self, connection: Connection, tasks: Iterable[Revivable], verb: str) -> None:
        by_key: dict[str, Revivable] = {}
        for task in tasks:
            # If two tasks used it one after the other, only one can use it again.
            if task.idempotency_key is not None and by_key.setdefault(task.idempotency_key, task) is not task:
                raise _key_in_use(task.id, task.idempotency_key, verb)
        if not by_key:
            return
        keyed = sorted(by_key.items(), key=lambda item: item[0])
        taken = await fetch_column(
            connection,
            _SQL["retake_keys"],
            {
                **self._database.now,
                "keys": [key for key, _ in keyed],
                "task_ids": [task.id for _, task in keyed],
                "hashes": [content_hash(task.type, msgspec.json.decode(task.spec)) for _, task in keyed],
            },
        )
        for key, task in keyed:
            if key not in taken:
                raise _key_in_use(task.id, key, verb)

    async def _recount_dags(
        self, connection: Connection, before: Mapping[str, Revivable], revived: Sequence[_Revived]
    ) -> None:
        effects = self._transitions.effects()
        for task in revived:
            effects.revive(task.id, task.dag_id, Status(before[task.id].status))
        await effects.write(connection)


def _key_in_use(task_id: str, key: str, verb: str) -> LineshaftError:
    return AlreadyExistsError(
        f"Can't {verb} task {task_id}: its idempotency key {key!r} is in use by a newer task. Cancel that "
        "one first; nothing was changed."
    )


def _not_revivable(task_id: str, status: str | None) -> LineshaftError:
    if status is None:
        return NotFoundError(f"There is no task {task_id}.")
    instead = (
        f" To run it again, use 'lineshaft task rerun {task_id}' or POST /v1/tasks/{task_id}/rerun."
        if status == Status.COMPLETED
        else ""
    )
    return InvalidTransitionError(
        f"Can't retry task {task_id}: it is {status}. Only DEAD_LETTERED, CANCELLED and RETRYING tasks can "
        f"be retried.{instead}"
    )
