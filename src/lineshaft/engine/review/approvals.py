"""What waits for a person, and what a person decided.

An output at a gate `human` waits to be approved or refused. A task that needs the capability `human` waits to
be done: its answer is the output, which a form made of its JSON Schema can ask for. Neither holds a slot, a
lease, a lock or money while it waits. An agent with that capability may claim such a task like any other; who
answers here needs not to be one.
"""

import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from psycopg.rows import class_row

from lineshaft.checks import decision_report
from lineshaft.checks.registry import HUMAN
from lineshaft.checks.verdict import Verdict
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.literals import raw_json
from lineshaft.engine.read.pages import decode_cursor, encode_cursor
from lineshaft.engine.read.queries import Queries
from lineshaft.engine.review.gates import GatedOutput, Gates, Said, Step
from lineshaft.engine.transition.changes import Changes, LockedTask
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import InvalidInputError, InvalidTransitionError, NotFoundError
from lineshaft.model.retry import FailureCategory
from lineshaft.model.states import Status
from lineshaft.model.storable import is_storable
from lineshaft.types import Approval, ApprovalDecision, Page
from lineshaft.types.json import raw
from lineshaft.types.page import DEFAULT_LIMIT, check_limit
from lineshaft.types.work import Moved


class _Key(msgspec.Struct, frozen=True, array_like=True, tag="approval"):
    since: datetime
    id: str


class Approvals:
    def __init__(self, transitions: Transitions, gates: Gates, queries: Queries) -> None:
        self._database = transitions.database
        self._locks = transitions.locks
        self._gates = gates
        self._queries = queries
        self._sql = catalog.load(__name__)

    async def waiting(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Approval]:
        """What waits for a person, the longest first."""
        check_limit(limit)
        after = decode_cursor(cursor, _Key)
        parameters = {
            "since": None if after is None else after.since,
            "after": None if after is None else after.id,
            "limit": limit + 1,
        }
        async with (
            self._database.connection() as connection,
            connection.cursor(row_factory=class_row(_Waiting)) as rows,
        ):
            found: list[_Waiting] = []
            for statement in ("waiting_gates", "waiting_tasks"):
                await rows.execute(self._sql[statement], parameters)
                found += await rows.fetchall()
        found.sort(key=lambda row: (row.since, row.id))
        page, more = found[:limit], len(found) > limit
        tasks = {task.id: task for task in await self._queries.tasks_by_id([row.id for row in page])}
        return Page(
            # One that was decided in this moment is gone, or will be on the next look.
            [
                Approval(tasks[row.id], row.kind, raw(row.schema), row.since)
                for row in page
                if row.id in tasks
            ],
            encode_cursor(_Key(page[-1].since, page[-1].id)) if more else None,
        )

    async def decide(self, task_id: str, decision: ApprovalDecision) -> Status:
        """Approve or refuse what waits; gives the task's status then."""
        if not is_storable(task_id):
            raise NotFoundError(f"There is no task {task_id!r}.")
        output = next((found for found in await self._gates.read([task_id]) if found.gate == HUMAN), None)
        if output is not None:
            return (await self._decide_gate(output, decision)).unwrap()
        asked = await self._asked(task_id, decision)
        if asked is not None:
            return (await self._answer(asked, decision)).unwrap()
        raise await self._refusal(task_id)

    async def _decide_gate(self, output: GatedOutput, decision: ApprovalDecision) -> Moved:
        if decision.data is not None or decision.report is not None:
            fault = "is the output of an agent here: approve or refuse it as it is"
            raise InvalidInputError(errors=[("data", fault)])
        said = Said(output.gate_no, HUMAN, _verdict(decision), decision.reviewer)
        step = await asyncio.to_thread(self._gates.go_on, output, said)

        async def work(connection: Connection) -> Moved:
            (moved,) = await self._gates.advance_in(connection, [step], strict=True)
            return moved

        return await self._database.run(work)

    async def _asked(self, task_id: str, decision: ApprovalDecision) -> GatedOutput | None:
        """The task with the answer as its output, if it is one that waits for a person."""
        output = {
            "data": raw_json(decision.data),
            "artifacts": None,
            "decision_report": raw_json(decision.report),
        }
        async with (
            self._database.connection() as connection,
            connection.cursor(row_factory=class_row(GatedOutput)) as cursor,
        ):
            encoded = msgspec.json.encode(output).decode()
            await cursor.execute(self._sql["read_task_for_person"], {"id": task_id, "output": encoded})
            return await cursor.fetchone()

    async def _answer(self, asked: GatedOutput, decision: ApprovalDecision) -> Moved:
        if decision.approve:
            step = await asyncio.to_thread(self._gates.go_on, asked)
            if (refusal := step.refusal) is not None:
                # A form that was filled in wrongly is handed back; nothing has happened.
                place = "decision_report" if refusal.method == decision_report.METHOD else "data"
                raise InvalidInputError(errors=[(place, reason) for reason in refusal.verdict.reasons])
        else:
            said = Said(0, HUMAN, _verdict(decision), decision.reviewer)
            step = Step(asked.claim, 0, (said,), 0, None, category=FailureCategory.CANCELLED)

        async def work(connection: Connection) -> Moved:
            task = (await self._locks.lock_with_dependents(connection, [asked.id])).get(asked.id)
            if task is None or task.status != Status.READY or task.epoch + 1 != asked.epoch:
                raise await self._refusal(asked.id)
            await self._take(connection, task, asked, decision)
            (moved,) = await self._gates.advance_in(connection, [step], strict=True)
            return moved

        return await self._database.run(work)

    async def _take(
        self, connection: Connection, task: LockedTask, asked: GatedOutput, decision: ApprovalDecision
    ) -> None:
        await connection.execute(
            self._sql["answer_task"],
            {
                **self._database.now,
                "id": task.id,
                "epoch": task.epoch,
                "by": f"human:{decision.reviewer}",
                "output": asked.output.decode(),
            },
        )
        if task.dag_id is not None:
            await connection.execute(self._sql["start_dag"], {**self._database.now, "id": task.dag_id})
        changes = Changes(self._database.now)
        locked = await self._locks.lock(connection, [task.id])
        told = {"by": decision.reviewer, "note": decision.note}
        changes.event(locked[task.id], ["task.claimed", "task.started", "task.validating"], told)
        await changes.write(connection)

    async def _refusal(self, task_id: str) -> Exception:
        (found,) = await self._queries.tasks_by_id([task_id]) or (None,)
        if found is None:
            return NotFoundError(f"There is no task {task_id}.")
        if found.status is Status.VALIDATING:
            return InvalidTransitionError(
                f"Nobody has to decide about task {task_id}: its output is with another gate."
            )
        return InvalidTransitionError(
            f"Nobody has to decide about task {task_id}: it is {found.status}, and only an output at a gate "
            "'human', or a READY task that needs the capability 'human', waits for a person."
        )

    async def announce(self, limit: int) -> int:
        """Tell once for each task that it waits for a person; gives how many were told about."""

        async def work(connection: Connection) -> int:
            got = await connection.execute(self._sql["try_announce"], {})
            row: Any = await got.fetchone()
            if not row[0]:
                return 0
            told = await connection.execute(
                self._sql["announce_waiting"], {**self._database.now, "limit": limit}
            )
            return len(await told.fetchall())

        return await self._database.run(work)


@dataclass(frozen=True, slots=True)
class _Waiting:
    id: str
    kind: str
    since: datetime
    schema: bytes | None


def _verdict(decision: ApprovalDecision) -> Verdict:
    return Verdict(passed=decision.approve, reasons=decision.reasons)
