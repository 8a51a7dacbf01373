"""Where tasks stand: locked for a change, or told to whoever changes nothing with an old claim."""

from collections.abc import Mapping, Sequence
from typing import Any

from psycopg.rows import class_row

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.literals import json_text
from lineshaft.engine.transition.changes import LockedTask
from lineshaft.engine.transition.outcomes import refusal
from lineshaft.errors import StaleClaimError
from lineshaft.model.states import Status
from lineshaft.types.work import ClaimRef, Moved

_SQL = catalog.load("transition/task_locks")
_INSERT_EVENTS = catalog.load("transition/changes")["insert_events"]


class TaskLocks:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def lock(self, connection: Connection, ids: Sequence[str]) -> dict[str, LockedTask]:
        if not ids:
            return {}
        async with connection.cursor(row_factory=class_row(LockedTask)) as cursor:
            await cursor.execute(_SQL["lock_tasks"], {"ids": list(ids)})
            return {task.id: task for task in await cursor.fetchall()}

    async def lock_with_dependents(self, connection: Connection, ids: Sequence[str]) -> dict[str, LockedTask]:
        await connection.execute(_SQL["lock_dependents"], {"ids": list(ids)})
        return await self.lock(connection, ids)

    async def hold(self, connection: Connection, claim: ClaimRef, verb: str) -> LockedTask:
        """Lock the RUNNING task of a claim that is still held, or refuse."""
        task = (await self.lock(connection, [claim.id])).get(claim.id)
        if task is None or task.epoch != claim.epoch or task.status != Status.RUNNING:
            (refused,) = await self._answer(connection, [claim], set(), None, verb)
            raise refused.error or StaleClaimError(
                f"Can't {verb} task {claim.id} with the claim of epoch {claim.epoch}: it is {refused.status} "
                "now. The claim ended; stop working on this task."
            )
        return task

    async def log(self, connection: Connection, kind: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """`rows` are (task, dag, agent, epoch)."""
        if rows:
            ids, dags, agents, epochs = map(list, zip(*rows, strict=True))
            await connection.execute(
                _INSERT_EVENTS,
                {
                    **self._database.now,
                    "kinds": ["{" + kind + "}"] * len(ids),
                    "task_ids": ids,
                    "dag_ids": dags,
                    "agent_ids": agents,
                    "epochs": epochs,
                    "data": [None] * len(ids),
                },
            )

    async def _answer(
        self,
        connection: Connection,
        claims: Sequence[ClaimRef],
        moved: set[str],
        target: Status | None,
        verb: str,
        *,
        late: Mapping[str, bytes | None] | None = None,
    ) -> list[Moved]:
        """One answer a claim; for those that didn't move, why."""
        unmoved = [claim.id for claim in claims if claim.id not in moved]
        live: dict[str, tuple[int, str]] = {}
        ends: dict[str, tuple[int, str]] = {}
        if unmoved:
            cursor = await connection.execute(_SQL["read_live"], {"ids": unmoved})
            live = {row[0]: (row[1], row[2]) for row in await cursor.fetchall()}
            cursor = await connection.execute(_SQL["read_ends"], {"ids": unmoved})
            ends = {row[0]: (row[1], row[2]) for row in await cursor.fetchall()}
        answers = []
        stale = []
        for claim in claims:
            if claim.id in moved:
                answers.append(Moved(claim.id, target))
                continue
            answer = refusal(claim, live.get(claim.id), ends.get(claim.id), target, verb)
            if isinstance(answer.error, StaleClaimError) and late is not None:
                stale.append((claim, late.get(claim.id)))
            answers.append(answer)
        for claim, output in stale:
            await connection.execute(
                _SQL["log_late_result"],
                {**self._database.now, "id": claim.id, "epoch": claim.epoch, "output": json_text(output)},
            )
        return answers
