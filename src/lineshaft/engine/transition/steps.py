"""Steps and checkpoints: durable progress of a running task, fenced by its claim."""

from collections.abc import Sequence
from decimal import Decimal

from msgspec import Struct

from lineshaft.engine.live import spending
from lineshaft.engine.live.task_locks import claim_columns, has_duplicate_tasks
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.literals import json_text
from lineshaft.engine.postgres.rows import fetch_column, fetch_row, fetch_rows
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.types.work import (
    SPAWN_STEP,
    ClaimRef,
    Moved,
    NewCheckpoint,
    NewStep,
    RecordedStep,
    RemainingBudgets,
)

_SQL = catalog.load(__name__)


class KnownStep(Struct, frozen=True):
    #: As JSON.
    data: bytes
    #: The claim that recorded it.
    epoch: int


class _Recorded(Struct, frozen=True):
    task_id: str
    name: str
    data: bytes | None
    task_left: Decimal | None
    agent_left: Decimal | None
    dag_left: Decimal | None


class Steps:
    def __init__(self, transitions: Transitions) -> None:
        self._database = transitions.database
        self._locks = transitions.locks

    async def record(self, steps: Sequence[NewStep]) -> list[RecordedStep]:
        """Record results and their cost; of two results for one step the first one counts.

        A result under a later claim and with another digest replaces the recorded one: the step ran again.
        """
        if not steps:
            return []
        if len({(step.claim.id, step.name) for step in steps}) < len(steps):
            return [result for step in steps for result in await self.record([step])]

        spent = spending.reported([(step.claim, step.spent) for step in steps])

        async def work(connection: Connection) -> dict[NewStep, RecordedStep]:
            # Before the results, which then say what is left.
            await spending.book(connection, spent, self._database.now)
            recorded = await self._record(connection, steps)
            for step in recorded:
                if step.received:
                    received = {"id": step.claim.id, "received": list(step.received)}
                    await connection.execute(_SQL["receive_signals"], {**self._database.now, **received})
            return recorded

        is_single = not spent and not any(step.received for step in steps)
        found = await (self._database.run_alone(work) if is_single else self._database.run(work))
        rest = list(dict.fromkeys(step.claim for step in steps if step not in found))
        if not rest:
            return [found[step] for step in steps]
        refused = await self._database.run(
            lambda own: self._locks.refuse(own, rest, "record a step of", spent=dict(spent))
        )
        errors = {claim: result.error for claim, result in zip(rest, refused, strict=True)}
        return [found.get(step) or RecordedStep(step.claim.id, error=errors[step.claim]) for step in steps]

    async def _record(self, connection: Connection, steps: Sequence[NewStep]) -> dict[NewStep, RecordedStep]:
        rows = await fetch_rows(
            connection,
            _Recorded,
            _SQL["record_steps"],
            {
                **self._database.now,
                **claim_columns([step.claim for step in steps]),
                "names": [step.name for step in steps],
                "data": [json_text(step.data) for step in steps],
                "digests": [step.digest for step in steps],
                "costs": [step.cost_usd for step in steps],
            },
        )
        by_step = {(step.claim.id, step.name): step for step in steps}
        recorded = {}
        for row in rows:
            budgets = RemainingBudgets(row.task_left, row.agent_left, row.dag_left)
            recorded[by_step[row.task_id, row.name]] = RecordedStep(row.task_id, row.data or b"null", budgets)
        return recorded

    async def save_checkpoints(self, items: Sequence[NewCheckpoint]) -> list[Moved]:
        """Replace the checkpoints of tasks; the status of a result is None."""
        if has_duplicate_tasks([item.claim for item in items]):
            return [result for item in items for result in await self.save_checkpoints([item])]
        return await self._database.run(lambda own: self.save_checkpoints_in(own, items))

    async def save_checkpoints_in(
        self, connection: Connection, items: Sequence[NewCheckpoint]
    ) -> list[Moved]:
        """As part of a transaction, at most one per task."""
        claims = [item.claim for item in items]
        spent = spending.reported([(item.claim, item.spent) for item in items])
        await spending.book(connection, spent, self._database.now)
        data = [json_text(item.data) for item in items]
        parameters = {**self._database.now, **claim_columns(claims), "data": data}
        saved = await fetch_column(connection, _SQL["save_checkpoints"], parameters)
        results = {task_id: Moved(task_id, None) for task_id in saved}
        rest = [claim for claim in claims if claim.id not in results]
        refused = await self._locks.refuse(connection, rest, "save a checkpoint of", spent=dict(spent))
        results |= {result.id: result for result in refused}
        return [results[claim.id] for claim in claims]

    async def read(self, connection: Connection, task_id: str, name: str) -> KnownStep | None:
        return await fetch_row(connection, KnownStep, _SQL["read_step"], {"id": task_id, "name": name})

    async def insert(self, connection: Connection, claim: ClaimRef, name: str, data: bytes) -> None:
        """A new step of a task that is locked."""
        values = {"id": claim.id, "epoch": claim.epoch, "name": name, "data": data.decode()}
        await connection.execute(_SQL["insert_step"], {**self._database.now, **values})


class _Forgotten(Struct, frozen=True):
    task_id: str
    name: str


async def forget_steps(
    connection: Connection, ids: Sequence[str], names: Sequence[str] | None, *, spawned: bool = False
) -> set[tuple[str, str]]:
    """Delete recorded steps of tasks, which are locked; returns their tasks and names.

    None: all steps, with the signals that they have received or would receive, but records of spawned tasks
    only with `spawned`.
    """
    if names is None:
        await connection.execute(_SQL["forget_signals"], {"ids": list(ids)})
    parameters = {
        "ids": list(ids),
        "names": None if names is None else list(names),
        "spawn": f"{SPAWN_STEP}%",
        "spawned": spawned,
    }
    rows = await fetch_rows(connection, _Forgotten, _SQL["forget_steps"], parameters)
    return {(row.task_id, row.name) for row in rows}
