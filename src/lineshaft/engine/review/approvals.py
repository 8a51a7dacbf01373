"""Approvals: outputs and tasks that wait for a person.

An output at a gate `human` is approved or rejected. A task that needs the capability `human` is answered: the
answer is its output, and a form can be made from its JSON Schema. Neither holds a slot, a lease, a lock or
money while it waits. An agent with that capability may claim such a task like any other.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from lineshaft.checks import decision_report
from lineshaft.checks.registry import HUMAN
from lineshaft.checks.verdict import Verdict
from lineshaft.engine.feed.actor import with_actor
from lineshaft.engine.live.task_locks import LockedTask
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.literals import raw_json
from lineshaft.engine.postgres.rows import fetch_column, fetch_row, fetch_rows, fetch_value
from lineshaft.engine.read.pages import decode_cursor, encode_cursor
from lineshaft.engine.read.queries import Queries
from lineshaft.engine.review.gated_output import GatedOutput
from lineshaft.engine.review.gates import GateProgress, Gates, GateVerdict
from lineshaft.engine.transition.effects import Effects
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import InvalidInputError, InvalidTransitionError, NotFoundError
from lineshaft.model.field_order import restored
from lineshaft.model.retry import FailureCategory
from lineshaft.model.states import Status
from lineshaft.model.storable import is_storable
from lineshaft.types import Approval, ApprovalDecision, Page
from lineshaft.types.json import raw
from lineshaft.types.page import DEFAULT_LIMIT, check_limit
from lineshaft.types.work import Moved

#: Counting the tasks that wait for one stops here.
MAX_BLOCKED = 1_000

_SQL = catalog.load(__name__)


class _ApprovalKey(msgspec.Struct, frozen=True, array_like=True, tag="approval"):
    since: datetime
    id: str


class LastDecision(Struct, frozen=True):
    reviewer: str
    at: datetime
    approved: bool
    note: str


class Approvals:
    def __init__(self, transitions: Transitions, gates: Gates, queries: Queries) -> None:
        self._database = transitions.database
        self._locks = transitions.locks
        self._gates = gates
        self._queries = queries

    async def waiting(self, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> Page[Approval]:
        """Oldest first."""
        check_limit(limit)
        after = decode_cursor(cursor, _ApprovalKey)
        parameters = {
            "since": None if after is None else after.since,
            "after": None if after is None else after.id,
            "limit": limit + 1,
        }
        async with self._database.connection() as connection:
            found = [
                row
                for statement in ("waiting_gates", "waiting_tasks")
                for row in await fetch_rows(connection, _Waiting, _SQL[statement], parameters)
            ]
        found.sort(key=lambda row: (row.since, row.id))
        page, more = found[:limit], len(found) > limit
        tasks = {task.id: task for task in await self._queries.tasks_by_id([row.id for row in page])}
        return Page(
            # Without those that were just decided.
            [
                Approval(tasks[row.id], row.kind, raw(restored(row.schema)), row.since)
                for row in page
                if row.id in tasks
            ],
            encode_cursor(_ApprovalKey(page[-1].since, page[-1].id)) if more else None,
        )

    async def find(self, task_id: str) -> Approval | None:
        """What a person is asked about this task; None: nothing, now."""
        if not is_storable(task_id):
            return None
        async with self._database.connection() as connection:
            found = await fetch_row(connection, _Waiting, _SQL["waiting_one"], {"id": task_id})
        tasks = [] if found is None else await self._queries.tasks_by_id([task_id])
        if found is None or not tasks:
            return None
        return Approval(tasks[0], found.kind, raw(restored(found.schema)), found.since)

    async def blocked_by(self, ids: Sequence[str]) -> dict[str, int]:
        """How many tasks wait directly for each of these; `MAX_BLOCKED` means that many or more."""
        parameters = {"ids": list(ids), "limit": MAX_BLOCKED}
        async with self._database.connection() as connection:
            found = await fetch_rows(connection, _Blocked, _SQL["count_blocked"], parameters)
        return {row.id: row.count for row in found}

    async def last_decision(self, task_id: str) -> LastDecision | None:
        """The last decision of a person about this task's output, or a person's answer."""
        if not is_storable(task_id):
            return None
        async with self._database.connection() as connection:
            return await fetch_row(connection, LastDecision, _SQL["last_decision"], {"id": task_id})

    async def decide(self, task_id: str, decision: ApprovalDecision) -> Status:
        """Approve or reject an output, or answer a task; returns the new status of the task."""
        if not is_storable(task_id):
            raise NotFoundError(f"There is no task {task_id!r}.")
        output = next((found for found in await self._gates.read([task_id]) if found.gate == HUMAN), None)
        if output is not None:
            return (await self._decide_gate(output, decision)).unwrap()
        answered = await self._answered_task(task_id, decision)
        if answered is not None:
            return (await self._answer(answered, decision)).unwrap()
        raise await self._nothing_to_decide(task_id)

    async def _decide_gate(self, output: GatedOutput, decision: ApprovalDecision) -> Moved:
        if decision.data is not None or decision.report is not None:
            fault = "must be omitted: the output is the agent's, to be approved or rejected as it is"
            raise InvalidInputError(errors=[("data", fault)])
        verdict = GateVerdict(output.gate_no, HUMAN, _verdict(decision), decision.reviewer)
        step = await asyncio.to_thread(self._gates.proceed, output, verdict)

        async def work(connection: Connection) -> Moved:
            locked = await self._locks.lock_with_dependents(connection, [output.id])
            if task := locked.get(output.id):
                effects = Effects(self._database.now)
                effects.event(task, ["approval.decided"], _decided(decision))
                await effects.write(connection)
            (moved,) = await self._gates.advance_in(connection, [step], strict=True)
            # Nothing is recorded about an output that has changed in the meantime.
            moved.unwrap()
            return moved

        return await self._database.run(work)

    async def _answered_task(self, task_id: str, decision: ApprovalDecision) -> GatedOutput | None:
        """The task with the answer as its output, if it waits for a person."""
        output = {
            "data": raw_json(decision.data),
            "artifacts": None,
            "decision_report": raw_json(decision.report),
        }
        values = {"id": task_id, "output": msgspec.json.encode(output).decode()}
        async with self._database.connection() as connection:
            return await fetch_row(connection, GatedOutput, _SQL["read_task_for_person"], values)

    async def _answer(self, answered: GatedOutput, decision: ApprovalDecision) -> Moved:
        if decision.approve:
            step = await asyncio.to_thread(self._gates.proceed, answered)
            if (rejection := step.rejection) is not None:
                # An invalid answer is an error of the caller, not a failed attempt.
                place = "decision_report" if rejection.method == decision_report.METHOD else "data"
                raise InvalidInputError(errors=[(place, reason) for reason in rejection.verdict.reasons])
        else:
            verdict = GateVerdict(0, HUMAN, _verdict(decision), decision.reviewer)
            step = GateProgress(answered.claim, 0, (verdict,), 0, None, category=FailureCategory.CANCELLED)

        async def work(connection: Connection) -> Moved:
            task = (await self._locks.lock_with_dependents(connection, [answered.id])).get(answered.id)
            if task is None or task.status != Status.READY or task.epoch + 1 != answered.epoch:
                raise await self._nothing_to_decide(answered.id)
            await self._take(connection, task, answered, decision)
            (moved,) = await self._gates.advance_in(connection, [step], strict=True)
            return moved

        return await self._database.run(work)

    async def _take(
        self, connection: Connection, task: LockedTask, answered: GatedOutput, decision: ApprovalDecision
    ) -> None:
        await connection.execute(
            _SQL["answer_task"],
            {
                **self._database.now,
                "id": task.id,
                "epoch": task.epoch,
                "by": f"human:{decision.reviewer}",
                "output": answered.output.decode(),
            },
        )
        effects = Effects(self._database.now)
        locked = await self._locks.lock(connection, [task.id])
        kinds = ["approval.decided", "task.claimed", "task.started", "task.validating"]
        effects.event(locked[task.id], kinds, _decided(decision))
        await effects.write(connection)
        if task.dag_id is not None:
            await connection.execute(_SQL["start_dag"], {**self._database.now, "id": task.dag_id})

    async def _nothing_to_decide(self, task_id: str) -> Exception:
        (found,) = await self._queries.tasks_by_id([task_id]) or (None,)
        if found is None:
            return NotFoundError(f"There is no task {task_id}.")
        if found.status is Status.VALIDATING:
            return InvalidTransitionError(
                f"Task {task_id} doesn't wait for a person: its output is at another gate."
            )
        return InvalidTransitionError(
            f"Task {task_id} doesn't wait for a person: it is {found.status}, and only an output at a gate "
            "'human', or a READY task that needs the capability 'human', does."
        )

    async def announce(self, limit: int) -> int:
        """Log an event, once, for each task that waits for a person; returns their number."""

        async def work(connection: Connection) -> int:
            if not await fetch_value(connection, _SQL["try_announce"], {}):
                return 0
            parameters = {**self._database.now, "limit": limit}
            return len(await fetch_column(connection, _SQL["announce_waiting"], parameters))

        return await self._database.run(work)


class _Waiting(Struct, frozen=True):
    id: str
    kind: str
    since: datetime
    schema: bytes | None


class _Blocked(Struct, frozen=True):
    id: str
    count: int


def _verdict(decision: ApprovalDecision) -> Verdict:
    return Verdict(passed=decision.approve, reasons=decision.reasons)


def _decided(decision: ApprovalDecision) -> dict[str, Any]:
    data: dict[str, Any] = {"approve": decision.approve, "reviewer": decision.reviewer}
    if decision.note:
        data["note"] = decision.note
    return with_actor(data)
