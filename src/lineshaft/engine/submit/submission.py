"""Submitting tasks, batches and DAGs, all or nothing.

First everything is decided in memory: fields checked, local keys resolved, cycles refused, children strung in
order. Then one transaction writes it. Tasks that new ones depend on are locked against ending meanwhile, and
an idempotency key belongs to whoever inserted it first, so that twenty submitters of one key get one task.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from decimal import Decimal
from typing import TypeVar

import msgspec
import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.copy import Column, Constant, copy_all, copy_of
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.literals import column_literal
from lineshaft.engine.postgres.pipeline import pipelined
from lineshaft.engine.submit.bulk import AlikeTasks
from lineshaft.engine.submit.columns import (
    LIVE_DEFAULTS,
    TASK_DEFAULTS,
    event_columns,
    is_plain,
    live_columns,
    task_columns,
    task_values,
)
from lineshaft.engine.submit.drafts import (
    DagDraft,
    Draft,
    check_number,
    draft_dag,
    draft_each,
    place_in_graph,
    with_refs,
)
from lineshaft.engine.submit.lanes import Lanes, named
from lineshaft.engine.transition.upstream import hold_upstream
from lineshaft.errors import (
    AlreadyExistsError,
    DependencyNotFoundError,
    InvalidInputError,
    NotFoundError,
)
from lineshaft.model.priority import Lane
from lineshaft.model.resolving import all_alike
from lineshaft.model.states import Status
from lineshaft.model.tasks import GateFaults, NewTask
from lineshaft.types import Submitted, SubmittedDag

T = TypeVar("T")

#: From here on three COPYs are quicker than one INSERT with arrays.
_COPY_FROM = 50
_EDGE_DEFAULTS = {"satisfied": False}


class Submission:
    def __init__(self, database: Database, lanes: Lanes, *, gate_faults: GateFaults | None = None) -> None:
        self._database = database
        self._lanes = lanes
        #: What is wrong with the gates of a new task.
        self.gate_faults = gate_faults
        self._sql = catalog.load("submit/submission")

    async def submit(
        self, tasks: Sequence[NewTask], *, connection: Connection | None = None
    ) -> list[Submitted]:
        """Submit standalone tasks; they may depend on tasks that exist, not on each other.

        With a `connection` it becomes part of that connection's transaction, and of its commit or rollback.
        """
        if connection is None and len(tasks) >= _COPY_FROM and _by_themselves(tasks[0]) and all_alike(tasks):
            return await self._submit_alike(tasks)
        heads, drafts = draft_each(tasks, self.gate_faults)
        # A standalone task's DAG is virtual, but one with children is a real one.
        dags = [
            DagDraft(id=head.dag_id, title=head.row.title, created_by=head.row.created_by)
            for head in heads
            if head.live_dag_id is not None
        ]
        results = await self._write(drafts, dags, connection)
        return [results[head.id] for head in heads]

    async def _submit_alike(self, tasks: Sequence[NewTask]) -> list[Submitted]:
        check_number(len(tasks))
        alike = AlikeTasks(tasks, self.gate_faults)

        async def write(connection: Connection) -> tuple[list[Submitted], dict[Lane, int]]:
            lanes = await self._lanes.find(connection, [alike.row.lane])
            now, generation = await self._read_clock(connection)
            (lane_id,) = lanes.values()
            await alike.write(connection, lane_id, now, generation)
            if alike.row.run_at is None or alike.row.run_at <= now:
                await connection.execute(self._sql["wake"], {"lanes": str(lane_id)})
            return [Submitted(task_id) for task_id in alike.ids], lanes

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
    ) -> SubmittedDag:
        """Submit tasks that depend on each other by `key`, or on existing ones by id.

        With an `idempotency_key` that is in force the DAG it stands for is given, and nothing is created.
        """
        dag, heads, drafts = draft_dag(
            title,
            tasks,
            budget_ceiling_usd=budget_ceiling_usd,
            created_by=created_by,
            idempotency_key=idempotency_key,
            gate_faults=self.gate_faults,
        )

        async def write(connection: Connection) -> tuple[SubmittedDag, dict[Lane, int]]:
            existing = await self._take_dag_key(connection, dag, heads)
            if existing is not None:
                return existing, {}
            results, lanes = await self._write_in(connection, drafts, [dag])
            return SubmittedDag(dag.id, {key: results[head.id] for key, head in heads.items()}), lanes

        return await self._run(write, len(drafts), connection)

    async def _write(
        self, drafts: list[Draft], dags: list[DagDraft], connection: Connection | None
    ) -> dict[str, Submitted]:
        if connection is None and not dags and await self._insert_at_once(drafts):
            return {draft.id: Submitted(draft.id) for draft in drafts}
        return await self._run(lambda own: self._write_in(own, drafts, dags), len(drafts), connection)

    async def _insert_at_once(self, drafts: list[Draft]) -> bool:
        """A few tasks that depend on nothing, of known lanes, need one statement; gives whether these did."""
        if not 0 < len(drafts) < _COPY_FROM or not all(map(is_plain, drafts)):
            return False
        lanes = self._lanes.known([draft.row.lane for draft in drafts])
        if lanes is None:
            return False
        for draft in drafts:
            draft.lane_id = lanes[draft.row.lane]
        if len(drafts) == 1:
            call = self._sql["insert_task"], {**self._database.now, **task_values(drafts[0])}
        else:
            call = self._sql["insert_tasks"], {**self._database.now, **_columns(drafts)}
        with _naming_taken_ids():
            await self._database.run_alone(lambda own: pipelined(own, call))
        return True

    async def _run(
        self,
        write: Callable[[Connection], Awaitable[tuple[T, dict[Lane, int]]]],
        drafts: int,
        connection: Connection | None,
    ) -> T:
        # In a pipeline an error comes with a later statement, or with the end of the transaction.
        with _naming_taken_ids():
            if connection is not None:
                async with _as_guest(connection):
                    results, _ = await write(connection)
                return results
            results, lanes = await self._database.run(write, pipeline=drafts < _COPY_FROM)
        self._lanes.remember(lanes)
        return results

    async def _take_dag_key(
        self, connection: Connection, dag: DagDraft, heads: Mapping[str, Draft]
    ) -> SubmittedDag | None:
        """The DAG that has the key already; None: there is no key, or this one has it now."""
        if dag.key is None:
            return None
        tasks = {name: head.id for name, head in heads.items()}
        cursor = await connection.execute(
            self._sql["take_dag_key"],
            {"key": dag.key, "dag_id": dag.id, "tasks": msgspec.json.encode(tasks).decode()},
        )
        if await cursor.fetchone() is not None:
            return None
        cursor = await connection.execute(self._sql["read_dag_key"], {"key": dag.key})
        ((existing, known),) = await cursor.fetchall()
        ids: dict[str, str] = msgspec.json.decode(known)
        return SubmittedDag(
            existing,
            {name: Submitted(task_id, duplicate=True) for name, task_id in ids.items()},
            duplicate=True,
        )

    async def write_in(
        self, connection: Connection, drafts: list[Draft], dags: list[DagDraft]
    ) -> dict[str, Submitted]:
        """Write drafts as part of another operation's transaction, outside a pipeline."""
        with _naming_taken_ids():
            results, _ = await self._write_in(connection, drafts, dags)
        return results

    async def _write_in(
        self, connection: Connection, drafts: list[Draft], dags: list[DagDraft]
    ) -> tuple[dict[str, Submitted], dict[Lane, int]]:
        results: dict[str, Submitted] = {}
        new, satisfied = drafts, set[str]()
        if not all(map(is_plain, drafts)):
            results = await self._take_keys(connection, drafts)
            stands_for = {draft_id: found.id for draft_id, found in results.items()}
            # Copies: if this transaction must be run again, the answers may be others.
            new = [
                _stand_in(draft, stands_for) if stands_for or draft.refs else draft
                for draft in drafts
                if draft.id not in results
            ]
            await self._check_parents(connection, new)
            satisfied = await self._check_upstream(connection, new)
            place_in_graph(new, satisfied)
        rows = {id(draft.row): draft.row for draft in new}
        lanes = await self._lanes.find(connection, [row.lane for row in rows.values()])
        lane_ids = {name: lanes[row.lane] for name, row in rows.items()}
        for draft in new:
            draft.lane_id = lane_ids[id(draft.row)]
        if dags:
            totals = Counter(draft.live_dag_id for draft in new)
            dags = [dag for dag in dags if totals[dag.id]]
            for dag in dags:
                about = {**dag.parameters(), "total": totals[dag.id]}
                await connection.execute(self._sql["insert_dag"], {**self._database.now, **about})
        if len(new) < _COPY_FROM:
            await self._insert(connection, new)
        else:
            await self._copy(connection, new)
        await self._insert_edges(connection, new, satisfied)
        for dag in dags:
            await connection.execute(self._sql["log_dag_created"], {**self._database.now, "id": dag.id})
        return results | {draft.id: Submitted(draft.id) for draft in new}, lanes

    async def _take_keys(self, connection: Connection, drafts: list[Draft]) -> dict[str, Submitted]:
        """Duplicates, by the id that the new task would have had; their children go with them."""
        # Of two with the same key in one call, the first has it.
        keyed: dict[str, Draft] = {}
        for draft in drafts:
            if draft.row.idempotency_key is not None:
                keyed.setdefault(draft.row.idempotency_key, draft)
        if not keyed:
            return {}
        keys = sorted(keyed)
        cursor = await connection.execute(
            self._sql["take_keys"],
            {
                **self._database.now,
                "keys": keys,
                "task_ids": [keyed[key].id for key in keys],
                "hashes": [keyed[key].content for key in keys],
            },
        )
        owners = {row[0]: (keyed[row[0]].id, keyed[row[0]].content) for row in await cursor.fetchall()}
        if lost := [key for key in keys if key not in owners]:
            cursor = await connection.execute(self._sql["read_keys"], {"keys": lost})
            owners |= {key: (task_id, bytes(known)) for key, task_id, known in await cursor.fetchall()}
        results: dict[str, Submitted] = {}
        for draft in drafts:
            if draft.row.idempotency_key is not None:
                owner, content = owners[draft.row.idempotency_key]
                if owner != draft.id:
                    results[draft.id] = Submitted(
                        owner, duplicate=True, mismatch=draft.content not in content
                    )
        gone = set(results)
        for draft in drafts:
            if draft.parent_id in gone:
                gone.add(draft.id)
                results.setdefault(draft.id, Submitted(draft.id, duplicate=True))
        return results

    async def _check_parents(self, connection: Connection, new: list[Draft]) -> None:
        own = {draft.id for draft in new}
        outside = {d.parent_id for d in new if d.parent_id is not None and d.parent_id not in own}
        if not outside:
            return
        cursor = await connection.execute(self._sql["read_parents"], {"ids": sorted(outside)})
        found = {row[0] for row in await cursor.fetchall()}
        if missing := sorted(outside - found):
            raise NotFoundError(f"parent_id names {missing[0]}, which doesn't exist; nothing was changed.")

    async def _check_upstream(self, connection: Connection, new: list[Draft]) -> set[str]:
        """Which upstream tasks are COMPLETED already; refuses those that don't exist or were cancelled."""
        own = {draft.id for draft in new}
        outside = sorted({name for draft in new for name in draft.depends_on if name not in own})
        if not outside:
            return set()
        stands = await hold_upstream(connection, outside)
        for draft in new:
            for name in draft.depends_on:
                if name in own:
                    continue
                where = f"{draft.place}." if draft.place else ""
                if name not in stands:
                    raise DependencyNotFoundError(
                        f"{where}depends_on names {name!r}, which is neither a key of this call nor an "
                        "existing task; nothing was changed."
                    )
                if stands[name] is Status.CANCELLED:
                    raise InvalidInputError(
                        errors=[(f"{where}depends_on", f"{name} was cancelled and will never complete")]
                    )
        return {name for name, status in stands.items() if status is Status.COMPLETED}

    async def _insert(self, connection: Connection, new: list[Draft]) -> None:
        if new:
            await connection.execute(self._sql["insert_tasks"], {**self._database.now, **_columns(new)})

    async def _read_clock(self, connection: Connection) -> tuple[datetime, int]:
        """Now, and the generation that tasks get now."""
        cursor = await connection.execute(self._sql["read_clock"], self._database.now)
        ((now, generation),) = await cursor.fetchall()
        return now, generation

    async def _copy(self, connection: Connection, new: list[Draft]) -> None:
        now, generation = await self._read_clock(connection)
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
            awake = [new[0].lane_id] if status.value == "READY" else []
        else:
            awake = [draft.lane_id for draft, each in zip(new, status, strict=True) if each == "READY"]
        if awake:
            await connection.execute(self._sql["wake"], {"lanes": named(awake)})

    async def _insert_edges(self, connection: Connection, new: list[Draft], satisfied: set[str]) -> None:
        edges = [(draft.id, name) for draft in new for name in draft.depends_on]
        if len(edges) >= _COPY_FROM and len(new) >= _COPY_FROM:
            columns: dict[str, Column] = {
                "task_id": [task_id for task_id, _ in edges],
                "depends_on": [name for _, name in edges],
                "satisfied": [name in satisfied for _, name in edges],
            }
            await copy_all(connection, [lambda: copy_of("edge", columns, _EDGE_DEFAULTS)])
        elif edges:
            await connection.execute(
                self._sql["insert_edges"],
                {
                    "task_ids": [task_id for task_id, _ in edges],
                    "depends_on": [name for _, name in edges],
                    "kinds": ["success"] * len(edges),
                    "satisfied": [name in satisfied for _, name in edges],
                },
            )


def _columns(new: list[Draft]) -> dict[str, str | None]:
    """The parameters of insert_tasks."""
    columns = {
        name: [column.value] * len(new) if isinstance(column, Constant) else column
        for name, column in task_columns(new).items()
    } | {
        "live_dag_id": [draft.live_dag_id for draft in new],
        "lock_owner": [draft.lock_owner for draft in new],
        "lane_id": [draft.lane_id for draft in new],
        "blocked": [draft.blocked for draft in new],
        "downstream": [draft.downstream for draft in new],
    }
    return {name: column_literal(values) for name, values in columns.items()}


def _by_themselves(one: NewTask) -> bool:
    """Tasks that are like this one have nothing to do with any other."""
    return one.idempotency_key is None and not one.children


def _stand_in(draft: Draft, stands_for: Mapping[str, str]) -> Draft:
    """A copy that names the tasks which its upstream ones turned out to be."""
    names = dict.fromkeys(stands_for.get(name, name) for name in draft.depends_on)
    refs = {key: stands_for.get(task_id, task_id) for key, task_id in draft.refs.items()}
    return msgspec.structs.replace(
        draft, depends_on=list(names), spec=with_refs(draft.spec, refs) if refs else draft.spec
    )


@contextmanager
def _naming_taken_ids() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.UniqueViolation as error:
        if error.diag.table_name not in {"task", "task_live"}:
            raise
        raise AlreadyExistsError(
            f"A task with one of these ids exists already ({error.diag.message_detail}). Leave the id "
            "out to get a new one, or use an idempotency_key to get the existing task."
        ) from None


@asynccontextmanager
async def _as_guest(connection: Connection) -> AsyncIterator[None]:
    """In the caller's transaction: what is refused leaves nothing behind, and the connection is as before."""
    if connection.info.transaction_status == TransactionStatus.IDLE and not connection.autocommit:
        # Otherwise ours would be the outermost transaction, and be committed here.
        await connection.execute("SELECT")
    theirs, connection.row_factory = connection.row_factory, tuple_row
    try:
        async with connection.transaction():
            yield
    finally:
        connection.row_factory = theirs
