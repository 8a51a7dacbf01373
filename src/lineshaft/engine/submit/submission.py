"""Submission of tasks, batches and DAGs, all or nothing.

First everything is decided in memory: fields are checked, keys resolved, cycles rejected, children linked.
Then one transaction writes it. It locks existing tasks that new ones depend on, so that they can't end in the
meantime. The first transaction that inserts an idempotency key owns it: twenty submitters of one key get one
task (keys.py).
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from lineshaft.engine.artifacts.references import refer, unknown_artifacts
from lineshaft.engine.live.upstream import hold_upstream
from lineshaft.engine.postgres import caller_transaction, catalog
from lineshaft.engine.postgres.copy import Constant, copy_all, copy_of
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.literals import column_literal
from lineshaft.engine.postgres.pipeline import Call, pipelined
from lineshaft.engine.postgres.rows import fetch_row, fetch_rows
from lineshaft.engine.submit.bulk import UniformTasks
from lineshaft.engine.submit.columns import (
    LIVE_DEFAULTS,
    TASK_DEFAULTS,
    event_columns,
    is_standalone,
    live_columns,
    task_columns,
    task_values,
)
from lineshaft.engine.submit.dags import insert_dag, insert_edges, log_dag_created, take_dag_key
from lineshaft.engine.submit.drafts import (
    DagDraft,
    Draft,
    check_number,
    draft_dag,
    draft_each,
    off_the_loop,
    place_in_graph,
    renamed,
    with_id,
)
from lineshaft.engine.submit.joining import Joining
from lineshaft.engine.submit.keys import Cancel, Keys, Replacement, refuse_cancelling
from lineshaft.engine.submit.known_types import TypeCache
from lineshaft.engine.submit.lanes import KnownLane, Lanes, wake_lanes
from lineshaft.errors import (
    AlreadyExistsError,
    DependencyNotFoundError,
    InvalidInputError,
    QuotaFullError,
)
from lineshaft.model.admission import fair_key_of, quota_keys
from lineshaft.model.priority import Lane, lane_boost
from lineshaft.model.resolving import all_alike
from lineshaft.model.states import Status
from lineshaft.model.tasks import DEFAULT_RULES, KnownTypes, NewTask, TaskRules
from lineshaft.types import Submitted, SubmittedDag

T = TypeVar("T")

#: From this many tasks on, three COPYs are faster than one INSERT with arrays.
_COPY_FROM = 50

_SQL = catalog.load(__name__)
_log = logging.getLogger(__name__)


class _Clock(NamedTuple):
    now: datetime
    #: The generation of tasks that become READY now.
    generation: int


class _FullQueue(NamedTuple):
    #: Whether quotas bound waiting tasks at all.
    bounds: bool
    #: None: no bound would be exceeded.
    quota: str | None
    key: str | None
    most: int | None
    waiting: int | None
    added: int | None


class Submission:
    def __init__(
        self, database: Database, lanes: Lanes, cancel: Cancel, *, rules: TaskRules = DEFAULT_RULES
    ) -> None:
        self._database = database
        self._keys = Keys(database, cancel)
        self._lanes = lanes
        self._joining = Joining(database)
        #: Checks and defaults of new tasks, without those of types.
        self.rules = rules
        self.types = TypeCache(database)

    async def submit(
        self,
        tasks: Sequence[NewTask],
        *,
        preset: str | None = None,
        connection: Connection | None = None,
        is_short: bool = False,
    ) -> list[Submitted]:
        """Submit standalone tasks; they may depend on existing tasks, but not on each other.

        Tasks that name no preset get that of the API they come over, `preset`, or else `factory`.

        With a `connection`, the submission is part of that connection's transaction. If that `is_short`, new
        lanes are created in it too.
        """
        rules = self.rules if preset is None else self.rules._replace(preset=preset)

        def submit(types: KnownTypes) -> Awaitable[list[Submitted]]:
            return self._submit(tasks, rules._replace(types=types), connection, is_short=is_short)

        return await self.types.submit(submit, connection)

    async def _submit(
        self, tasks: Sequence[NewTask], rules: TaskRules, connection: Connection | None, *, is_short: bool
    ) -> list[Submitted]:
        if connection is None and len(tasks) >= _COPY_FROM and _is_simple(tasks[0]) and all_alike(tasks):
            return await self._submit_uniform(tasks, rules)
        heads, drafts = await off_the_loop(tasks, partial(draft_each, tasks, rules))
        # A batch has a real DAG; the DAG of any other standalone task is virtual.
        dags = [
            DagDraft(id=head.dag_id, title=head.row.title, created_by=head.row.created_by)
            for head in heads
            if head.live_dag_id is not None and not head.joins
        ]
        results = await self._write(drafts, dags, rules.types, connection, is_short=is_short)
        return [results[head.id] for head in heads]

    async def _submit_uniform(self, tasks: Sequence[NewTask], rules: TaskRules) -> list[Submitted]:
        check_number(len(tasks))
        uniform = UniformTasks(tasks, rules)

        async def write(connection: Connection) -> tuple[list[Submitted], dict[Lane, KnownLane]]:
            if rules.types.checks_waiting:
                await self._check_waiting(
                    connection, Counter(dict.fromkeys(quota_keys(uniform.row), len(tasks)))
                )
            lanes = await self._lanes.find(connection, [uniform.row.lane], for_new_tasks=True)
            clock = await self._read_clock(connection, rules.types)
            ((lane_id, _),) = lanes.values()
            if fair_key_of(uniform.row.admission) is not None:
                await connection.execute(_SQL["fair_tasks_exist"])
            await uniform.write(connection, lane_id, clock.now, clock.generation)
            if uniform.row.run_at is None or uniform.row.run_at <= clock.now:
                await wake_lanes(connection, [lane_id] * len(tasks))
            return [Submitted(task_id) for task_id in uniform.ids], lanes

        return await self._run(write, len(tasks), None)

    async def submit_dag(
        self,
        title: str,
        tasks: Sequence[NewTask],
        *,
        budget_ceiling_usd: Decimal | float | None = None,
        created_by: str | None = None,
        idempotency_key: str | None = None,
        connection: Connection | None = None,
        is_short: bool = False,
    ) -> SubmittedDag:
        """Submit tasks that depend on each other by `key`, or on existing ones by id; see `submit`.

        If a DAG owns the `idempotency_key`, that DAG is returned and nothing is created.
        """
        draft = partial(
            draft_dag,
            title,
            tasks,
            budget_ceiling_usd=budget_ceiling_usd,
            created_by=created_by,
            idempotency_key=idempotency_key,
        )

        async def submit(types: KnownTypes) -> SubmittedDag:
            rules = self.rules._replace(types=types)
            dag, heads, drafts = await off_the_loop(tasks, partial(draft, rules=rules))

            async def write(connection: Connection) -> tuple[SubmittedDag, dict[Lane, KnownLane]]:
                existing = await take_dag_key(connection, dag, {key: head.id for key, head in heads.items()})
                if existing is not None:
                    return existing, {}
                results, lanes = await self._write_in(connection, drafts, [dag], types)
                return SubmittedDag(dag.id, {key: results[head.id] for key, head in heads.items()}), lanes

            if not is_short:
                await self._create_lanes_outside(connection, drafts)
            return await self._run(write, len(drafts), connection)

        return await self.types.submit(submit, connection)

    async def _write(
        self,
        drafts: list[Draft],
        dags: list[DagDraft],
        types: KnownTypes,
        connection: Connection | None,
        *,
        is_short: bool,
    ) -> dict[str, Submitted]:
        may_be_short = connection is None and not dags and not types.checks_waiting
        if may_be_short and await self._insert_in_one_statement(drafts, types):
            return {draft.id: Submitted(draft.id) for draft in drafts}
        if not is_short:
            if connection is not None:
                refuse_cancelling(drafts)
            await self._create_lanes_outside(connection, drafts)
        return await self._run(lambda own: self._write_in(own, drafts, dags, types), len(drafts), connection)

    async def _create_lanes_outside(self, connection: Connection | None, drafts: list[Draft]) -> None:
        if connection is not None:
            if _has_fair(drafts):
                # The caller's transaction must not lock the limits of the installation until it commits.
                async with self._database.connection() as own:
                    await own.execute(_SQL["fair_tasks_exist"])
            lanes = [draft.row.lane for draft in drafts]
            await self._lanes.create_outside(connection, self._database, lanes)

    async def _insert_in_one_statement(self, drafts: list[Draft], types: KnownTypes) -> bool:
        """Possible for a few standalone tasks of cached lanes; returns False if these are not."""
        if not 0 < len(drafts) < _COPY_FROM or not all(map(is_standalone, drafts)):
            return False
        lanes = self._lanes.known([draft.row.lane for draft in drafts])
        if lanes is None:
            return False
        for draft in drafts:
            draft.lane_id = lanes[draft.row.lane]
        common = {**self._database.now, **_known(types)}
        if len(drafts) == 1:
            calls: list[Call] = [(_SQL["insert_task"], common | task_values(drafts[0]))]
        else:
            calls = [(_SQL["insert_tasks"], common | _columns(drafts))]
        if _has_fair(drafts):
            calls.insert(0, (_SQL["fair_tasks_exist"], {}))
        with _reporting_duplicate_ids():
            await self._database.run_alone(lambda own: pipelined(own, *calls))
        return True

    async def _run(
        self,
        write: Callable[[Connection], Awaitable[tuple[T, dict[Lane, KnownLane]]]],
        drafts: int,
        connection: Connection | None,
    ) -> T:
        # In a pipeline an error is raised by a later statement, or at the end of the transaction.
        with _reporting_duplicate_ids():
            if connection is not None:
                async with caller_transaction.nested(connection):
                    results, _ = await write(connection)
                return results
            results, lanes = await self._database.run(write, pipeline=drafts < _COPY_FROM)
        self._lanes.remember(lanes)
        return results

    async def write_in(
        self, connection: Connection, drafts: list[Draft], dags: list[DagDraft], types: KnownTypes
    ) -> dict[str, Submitted]:
        """Write drafts as part of another operation's transaction, outside a pipeline; in any number.

        The drafts have the defaults of these types. If those have changed, the transaction must run again, in
        `types.submit`.
        """
        with _reporting_duplicate_ids():
            results, _ = await self._write_in(connection, drafts, dags, types, is_spawn=True)
        return results

    async def _write_in(
        self,
        connection: Connection,
        drafts: list[Draft],
        dags: list[DagDraft],
        types: KnownTypes,
        *,
        is_spawn: bool = False,
    ) -> tuple[dict[str, Submitted], dict[Lane, KnownLane]]:
        results: dict[str, Submitted] = {}
        replacements: list[Replacement] = []
        new, satisfied = drafts, set[str]()
        if not all(map(is_standalone, drafts)):
            results, replacements = await self._keys.take(connection, drafts)
            existing = {draft_id: found.id for draft_id, found in results.items()}
            # Copies: if this transaction must run again, it may find other tasks.
            new = [
                _with_existing(draft, existing) if existing else draft
                for draft in drafts
                if draft.id not in results
            ]
            new = await self._keys.with_starts(connection, new)
            satisfied = await self._check_upstream(connection, new)
            await self._keys.forget(connection, replacements)
            await self._refer_to_artifacts(connection, [*new, *(each.draft for each in replacements)])
            await self._joining.join(connection, new)
            place_in_graph(new, satisfied)
        if is_spawn:
            types = types._replace(checks_waiting=True)
        elif types.checks_waiting:
            await self._check_waiting(
                connection, Counter(key for draft in new for key in quota_keys(draft.row))
            )
        await self._announce_fair(connection, [*new, *(each.draft for each in replacements)])
        rows = {id(draft.row): draft.row for draft in new}
        wanted = [*(row.lane for row in rows.values()), *(each.lane for each in replacements)]
        lanes = await self._lanes.find(connection, wanted, for_new_tasks=True)
        lane_ids = {name: lanes[row.lane].id for name, row in rows.items()}
        for draft in new:
            draft.lane_id = lane_ids[id(draft.row)]
        for each in replacements:
            each.draft.lane_id = lanes[each.lane].id
        await self._keys.replace(connection, replacements, types)
        if dags:
            totals = Counter(draft.live_dag_id for draft in new)
            dags = [dag for dag in dags if totals[dag.id]]
            for dag in dags:
                await insert_dag(connection, self._database.now, dag, totals[dag.id])
        if len(new) < _COPY_FROM:
            await self._insert(connection, new, types)
        else:
            await self._copy(connection, new, types)
        edges = [(draft.id, name) for draft in new for name in draft.depends_on]
        copy_edges = len(edges) >= _COPY_FROM and len(new) >= _COPY_FROM
        await insert_edges(connection, edges, satisfied, copy=copy_edges)
        await self._raise_paths(connection, new, satisfied)
        for dag in dags:
            await log_dag_created(connection, self._database.now, dag.id)
        return results | {draft.id: Submitted(draft.id) for draft in new}, lanes

    async def _announce_fair(self, connection: Connection, drafts: Sequence[Draft]) -> None:
        """Make claims look at fair shares before there are tasks with a fair_key."""
        if _has_fair(drafts):
            await connection.execute(_SQL["fair_tasks_exist"])

    async def _check_waiting(self, connection: Connection, keys: Counter[str]) -> None:
        """Refuse tasks of a key of which so many wait already that a quota admits no more."""
        columns = {"keys": list(keys), "counts": list(keys.values())}
        (full,) = await fetch_rows(connection, _FullQueue, _SQL["full_queues"], columns)
        if full.quota is not None:
            raise QuotaFullError(
                f"Quota {full.quota!r} lets {full.most} tasks of {full.key!r} wait: {full.waiting} wait, and "
                f"{full.added} would be added. Nothing was changed; try again when fewer wait."
            )
        if not full.bounds:
            self.types.forget_waiting()

    async def _check_upstream(self, connection: Connection, new: list[Draft]) -> set[str]:
        """Existing upstream tasks that are COMPLETED; rejects unknown and cancelled ones."""
        own = {draft.id for draft in new}
        outside = sorted({name for draft in new for name in draft.depends_on if name not in own})
        if not outside:
            return set()
        statuses = await hold_upstream(connection, outside)
        for draft in new:
            for name in draft.depends_on:
                if name in own:
                    continue
                place = f"{draft.place}." if draft.place else ""
                if name not in statuses:
                    fault = f"{name!r} is neither a key of this call nor an existing task"
                    raise DependencyNotFoundError(
                        f"{place}depends_on: {fault}; nothing was changed.",
                        errors=[(f"{place}depends_on", fault)],
                    )
                if statuses[name] is Status.CANCELLED:
                    raise InvalidInputError(
                        errors=[(f"{place}depends_on", f"{name} was cancelled and will never complete")]
                    )
        return {name for name, status in statuses.items() if status is Status.COMPLETED}

    async def _raise_paths(self, connection: Connection, new: list[Draft], satisfied: set[str]) -> None:
        """Existing tasks that new ones wait for have longer critical paths now."""
        own = {draft.id for draft in new}
        lengths: dict[str, int] = {}
        for draft in new:
            for name in draft.depends_on:
                if name not in own and name not in satisfied:
                    lengths[name] = max(lengths.get(name, 0), draft.downstream + 1)
        if lengths:
            parameters = {**self._database.now, "ids": list(lengths), "lengths": list(lengths.values())}
            await connection.execute(_SQL["raise_paths"], parameters)

    async def _refer_to_artifacts(self, connection: Connection, new: list[Draft]) -> None:
        """Keep the artifacts that tasks get as inputs; rejects unknown ones."""
        unknown = await refer(connection, {draft.id: draft.row.context_artifacts for draft in new})
        for draft in new if unknown else ():
            if found := unknown.intersection(draft.row.context_artifacts):
                place = f"{draft.place}." if draft.place else ""
                raise InvalidInputError(
                    errors=[(f"{place}spec.context_refs", unknown_artifacts(sorted(found)))]
                )

    async def _insert(self, connection: Connection, new: list[Draft], types: KnownTypes) -> None:
        if new:
            common = {**self._database.now, **_known(types)}
            await connection.execute(_SQL["insert_tasks"], common | _columns(new))

    async def _read_clock(self, connection: Connection, types: KnownTypes) -> _Clock:
        known = {**self._database.now, **_known(types)}
        clock = await fetch_row(connection, _Clock, _SQL["read_clock"], known)
        if clock is None:
            raise AssertionError("read_clock returns one row")
        return clock

    async def _copy(self, connection: Connection, new: list[Draft], types: KnownTypes) -> None:
        now, generation = await self._read_clock(connection, types)
        live = live_columns(new, now, generation)
        await copy_all(
            connection,
            [
                lambda: copy_of("task", {**task_columns(new), "created_at": Constant(now)}, TASK_DEFAULTS),
                lambda: copy_of("task_live", live, LIVE_DEFAULTS),
                lambda: copy_of("event", event_columns(live, now), {}),
            ],
        )
        status = live["status"]
        if isinstance(status, Constant):
            ready = [new[0].lane_id] if status.value == "READY" else []
        else:
            ready = [draft.lane_id for draft, each in zip(new, status, strict=True) if each == "READY"]
        await wake_lanes(connection, ready)


def _columns(new: list[Draft]) -> dict[str, str | None]:
    """The parameters of insert_tasks."""
    columns = {
        name: [column.value] * len(new) if isinstance(column, Constant) else column
        for name, column in task_columns(new).items()
    } | {
        "live_dag_id": [draft.live_dag_id for draft in new],
        "lock_owner": [draft.lock_owner for draft in new],
        "lane_id": [draft.lane_id for draft in new],
        "boost": [lane_boost(draft.row.priority_boost_per_minute) for draft in new],
        "blocked": [draft.blocked for draft in new],
        "downstream": [draft.downstream for draft in new],
    }
    return {name: column_literal(values) for name, values in columns.items()}


def _has_fair(drafts: Sequence[Draft]) -> bool:
    return any(fair_key_of(draft.row.admission) is not None for draft in drafts)


def _is_simple(task: NewTask) -> bool:
    return task.idempotency_key is None and not task.children and task.for_each is None


def _with_existing(draft: Draft, existing: Mapping[str, str]) -> Draft:
    """A copy that depends on existing tasks in place of upstream drafts that are duplicates."""
    names = dict.fromkeys(existing.get(name, name) for name in draft.depends_on)
    over = draft.over and with_id(draft.over, existing)
    inputs = renamed(draft.inputs, existing)
    return msgspec.structs.replace(draft, depends_on=list(names), inputs=inputs, over=over)


@contextmanager
def _reporting_duplicate_ids() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        violation = caller_transaction.unique_violation(error)
        if violation is None or violation.table not in {"task", "task_live"}:
            raise
        raise AlreadyExistsError(
            f"A task with one of these ids already exists ({violation.detail}). Omit the id to "
            "get a new one, or use an idempotency_key to get the existing task."
        ) from None


def _known(types: KnownTypes) -> dict[str, Any]:
    """What a statement compares with the database; see the fragment knows_types."""
    return {"known_revision": types.revision, "checks_waiting": types.checks_waiting}
