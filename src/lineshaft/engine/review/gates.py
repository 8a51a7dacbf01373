"""The way of an output through its task's gates, from the moment it is handed in.

It is stored first, with its attempt, and only then looked at. Checks that answer at once run in the process
that completes the task, while its agent still holds it. At the first gate that runs elsewhere the agent is
let go: slot, money, lock and lease are given back, and the output waits for a validator (duties/validator.py)
or for a person (store/approvals.py). Past the last gate the task completes as any other does; an output that
is refused is a failed attempt, with the gate's reasons as its error.

Whoever has a verdict says which gate it is for. It counts only while the output stands at that gate: of two
that come at once, by validators, by people, against a cancellation or the reaper, the first one moves it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
from psycopg.rows import class_row

from lineshaft.checks import decision_report
from lineshaft.checks.registry import HUMAN, Checks
from lineshaft.checks.verdict import CandidateOutput, NoVerdict, Verdict
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.transition.changes import Changes, LockedTask
from lineshaft.engine.transition.complete import Acceptance
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import InvalidTransitionError, LineshaftError
from lineshaft.model.budget import money
from lineshaft.model.retry import FailureCategory
from lineshaft.model.states import Status
from lineshaft.model.storable import replace_unstorable
from lineshaft.model.tasks import Gate
from lineshaft.types.work import NOTHING, ClaimRef, Completion, Failure, Moved

_GATES = msgspec.json.Decoder(tuple[Gate, ...])
_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER = msgspec.json.Encoder(decimal_format="number")
MAX_GATE_ERROR = 2_000


@dataclass(frozen=True, slots=True)
class GatedOutput:
    """An output that stands at one of its gates."""

    id: str
    epoch: int
    gate_no: int
    #: The method that it waits for elsewhere; None: its agent still holds it.
    gate: str | None
    type: str
    title: str
    spec: bytes
    gates: bytes | None
    require_decision_report: bool
    output: bytes
    #: How often validators have begun with this gate.
    gate_runs: int = 0

    @property
    def claim(self) -> ClaimRef:
        return ClaimRef(self.id, self.epoch)

    @property
    def all_gates(self) -> tuple[Gate, ...]:
        return _GATES.decode(self.gates) if self.gates else ()

    @property
    def data(self) -> bytes:
        return bytes(_PARTS.decode(self.output)["data"])

    @property
    def candidate(self) -> CandidateOutput:
        return CandidateOutput(self.id, self.epoch, self.type, self.title, self.spec, self.output)


@dataclass(frozen=True, slots=True)
class Said:
    """What one gate said."""

    gate_no: int
    method: str
    verdict: Verdict
    #: Who, if it was a person.
    by: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """How far an output has come: from which gate, what was said on the way, and where it stands now."""

    claim: ClaimRef
    origin: int
    said: tuple[Said, ...]
    gate_no: int
    #: What it waits for now; None: nothing any more.
    waits_for: str | None
    #: Of the failure, if it was refused.
    category: str = FailureCategory.INVALID_OUTPUT
    #: What was handed in, to be told if the verdict comes too late.
    data: bytes | None = None

    @property
    def refusal(self) -> Said | None:
        return self.said[-1] if self.said and not self.said[-1].verdict.passed else None

    @property
    def cost_usd(self) -> Decimal:
        return sum((money(one.verdict.cost_usd or 0) for one in self.said), NOTHING)

    @property
    def error(self) -> str:
        refusal = self.refusal
        assert refusal is not None  # noqa: S101 - asked only of what was refused
        reasons = "; ".join(refusal.verdict.reasons) or "refused without a reason"
        return reasons if refusal.method == decision_report.METHOD else f"{refusal.method}: {reasons}"


class Gates:
    def __init__(self, transitions: Transitions, acceptance: Acceptance, checks: Checks) -> None:
        self._database = transitions.database
        self._locks = transitions.locks
        self._acceptance = acceptance
        self._sql = catalog.load(__name__)
        self.checks = checks

    # When an output is handed in.

    async def begin(self, connection: Connection, ids: Sequence[str]) -> None:
        """Outputs that were just handed in: let go of those whose first gate runs elsewhere, at once."""
        locked = await self._locks.lock(connection, ids)
        waiting = []
        for task in locked.values():
            gates = _GATES.decode(task.gates) if task.gates else ()
            if gates and not task.require_decision_report and not self.checks.is_instant(gates[0].method):
                waiting.append((task, Step(ClaimRef(task.id, task.epoch), 0, (), 0, gates[0].method)))
        await self._record(connection, waiting)

    async def check(self, claims: Sequence[ClaimRef]) -> dict[str, Moved]:
        """Run the checks that answer at once on what these claims handed in, and move it on."""
        wanted = set(claims)
        outputs = [
            output
            for output in await self.read([claim.id for claim in claims])
            if output.gate is None and output.claim in wanted
        ]
        if not outputs:
            return {}
        # Large outputs take a while, in which the event loop has better things to do.
        steps = await asyncio.to_thread(lambda: [self.go_on(output) for output in outputs])
        return {moved.id: moved for moved in await self.advance(steps)}

    async def read(self, ids: Sequence[str]) -> list[GatedOutput]:
        async with (
            self._database.connection() as connection,
            connection.cursor(row_factory=class_row(GatedOutput)) as cursor,
        ):
            await cursor.execute(self._sql["read_handed_in"], {"ids": list(ids)})
            return await cursor.fetchall()

    def go_on(self, output: GatedOutput, said: Said | None = None) -> Step:
        """From the gate where it stands, or from what that one said, as far as checks answer at once."""
        gates, candidate = output.all_gates, output.candidate
        spoken = [] if said is None else [said]
        if said is None and output.gate is None and output.gate_no == 0 and output.require_decision_report:
            spoken.append(Said(0, decision_report.METHOD, decision_report.check(None, candidate)))
        number = output.gate_no if said is None else said.gate_no + 1
        waits_for = None
        while number < len(gates) and all(one.verdict.passed for one in spoken):
            gate = gates[number]
            if not self.checks.is_instant(gate.method):
                waits_for = gate.method
                break
            try:
                verdict = self.checks.check_now(gate.method, gate.schema, candidate)
            except NoVerdict:
                # A check of the user's own that broke: a validator tries again, and tells why.
                waits_for = gate.method
                break
            spoken.append(Said(number, gate.method, verdict))
            number += verdict.passed
        return Step(output.claim, output.gate_no, tuple(spoken), number, waits_for, data=output.data)

    # In a validator's hands.

    async def take(self, *, limit: int, lease_sec: float) -> list[GatedOutput]:
        """Outputs that wait for a gate which this process can run; nobody else gets them meanwhile."""
        async with (
            self._database.connection() as connection,
            connection.cursor(row_factory=class_row(GatedOutput)) as cursor,
        ):
            await cursor.execute(
                self._sql["take_gates"],
                {
                    **self._database.now,
                    "methods": self.checks.runnable,
                    "limit": limit,
                    "lease": lease_sec,
                },
            )
            return await cursor.fetchall()

    async def renew(self, outputs: Sequence[GatedOutput], *, lease_sec: float) -> set[str]:
        """Keep them a while longer; gives those that are still this validator's."""
        async with self._database.connection() as connection:
            cursor = await connection.execute(
                self._sql["renew_gates"],
                {
                    **self._database.now,
                    "lease": lease_sec,
                    "ids": [output.id for output in outputs],
                    "epochs": [output.epoch for output in outputs],
                    "gate_nos": [output.gate_no for output in outputs],
                    "runs": [output.gate_runs for output in outputs],
                },
            )
            return {row[0] for row in await cursor.fetchall()}

    async def settle(self, output: GatedOutput, verdict: Verdict) -> Moved:
        """What the gate that an output was taken for has said."""
        said = Said(output.gate_no, output.gate or "", verdict)
        step = await asyncio.to_thread(self.go_on, output, said)
        (moved,) = await self.advance([step])
        return moved

    async def postpone(
        self,
        output: GatedOutput,
        error: str,
        *,
        delay_sec: float,
        cost_usd: Decimal | None = NOTHING,
        alert: bool = False,
    ) -> bool:
        """No verdict this time; it is tried again. False: it was no longer this validator's."""

        async def work(connection: Connection) -> bool:
            task = (await self._locks.lock(connection, [output.id])).get(output.id)
            cost = money(cost_usd or 0)
            cursor = await connection.execute(
                self._sql["postpone_gate"],
                {
                    **self._database.now,
                    "id": output.id,
                    "epoch": output.epoch,
                    "gate_no": output.gate_no,
                    "runs": output.gate_runs,
                    "error": replace_unstorable(error[:MAX_GATE_ERROR]),
                    "delay": delay_sec,
                    "cost": cost,
                },
            )
            if await cursor.fetchone() is None or task is None:
                return False
            changes = Changes(self._database.now)
            if alert:
                told = {
                    "gate": output.gate,
                    "runs": output.gate_runs,
                    "error": replace_unstorable(error[:MAX_GATE_ERROR]),
                }
                changes.event(task, ["alert"], {"about": "a gate comes to no verdict", **told})
            if cost:
                agents = await self._agents_of(connection, [output.id])
                await self._charge(connection, changes, [(task, cost, agents.get(output.id))])
            await changes.write(connection)
            return True

        return await self._database.run(work)

    # What verdicts lead to.

    async def advance(self, steps: Sequence[Step]) -> list[Moved]:
        """Move outputs on; what doesn't stand any more where its step began is only told about."""
        return await self._database.run(lambda connection: self.advance_in(connection, steps))

    async def advance_in(
        self, connection: Connection, steps: Sequence[Step], *, strict: bool = False
    ) -> list[Moved]:
        """As part of a transaction; `strict`: what doesn't stand there any more is refused."""
        ids = [step.claim.id for step in steps]
        locked = await self._locks.lock_with_dependents(connection, ids)
        stands = await self._stands(connection, ids)
        going: list[tuple[LockedTask, Step]] = []
        stale: list[Step] = []
        for step in steps:
            task = locked.get(step.claim.id)
            if task is not None and stands.get(step.claim) == step.origin:
                going.append((task, step))
            else:
                stale.append(step)
        await self._record(connection, going)
        accepted = [step for _, step in going if step.waits_for is None and step.refusal is None]
        refused = [(task, step) for task, step in going if step.refusal is not None]
        moved = {
            step.claim.id: Moved(step.claim.id, Status.VALIDATING)
            for _, step in going
            if step.waits_for is not None
        }
        moved |= await self._accept(connection, accepted)
        moved |= await self._refuse(connection, refused)
        for step in stale if strict else ():
            message = f"Task {step.claim.id} has moved on meanwhile: look at it again before you decide."
            moved[step.claim.id] = Moved(step.claim.id, None, InvalidTransitionError(message))
        if stale and not strict:
            late = [Completion(step.claim, step.data) for step in stale]
            answers = await self._acceptance.refuse(connection, late)
            moved |= {answer.id: answer for answer in answers}
        return [moved[step.claim.id] for step in steps]

    async def _stands(self, connection: Connection, ids: Sequence[str]) -> dict[ClaimRef, int]:
        """At which gate each output stands."""
        cursor = await connection.execute(self._sql["lock_attempts"], {"ids": list(ids)})
        return {ClaimRef(row[0], row[1]): row[2] for row in await cursor.fetchall()}

    async def _agents_of(self, connection: Connection, ids: Sequence[str]) -> dict[str, str | None]:
        cursor = await connection.execute(self._sql["lock_attempts"], {"ids": list(ids)})
        return {row[0]: row[4] for row in await cursor.fetchall()}

    async def _record(self, connection: Connection, going: Sequence[tuple[LockedTask, Step]]) -> None:
        """Write down what was said, book what it cost, and let go of what waits now."""
        if not going:
            return
        await connection.execute(
            self._sql["record_verdicts"],
            {
                **self._database.now,
                "ids": [step.claim.id for _, step in going],
                "epochs": [step.claim.epoch for _, step in going],
                "gate_nos": [step.gate_no for _, step in going],
                "gates": [step.waits_for for _, step in going],
                "costs": [step.cost_usd for _, step in going],
                "verdicts": [_ENCODER.encode(self._told(step)).decode() for _, step in going],
            },
        )
        changes = Changes(self._database.now)
        held = [task for task, step in going if step.waits_for is not None and task.agent_id is not None]
        if held:
            await connection.execute(self._sql["hand_over"], {"ids": [task.id for task in held]})
        for task in held:
            changes.release_resources(task)
        for task, step in going:
            if step.waits_for == HUMAN:
                changes.event(task, ["approval.waiting"], {"kind": "gate", "gate": step.gate_no})
        dear = [(task, step.cost_usd) for task, step in going if step.cost_usd]
        if dear:
            agents = await self._agents_of(connection, [task.id for task, _ in dear])
            charges = [(task, cost, agents.get(task.id)) for task, cost in dear]
            await self._charge(connection, changes, charges)
        await changes.write(connection)

    async def _charge(
        self,
        connection: Connection,
        changes: Changes,
        charges: Sequence[tuple[LockedTask, Decimal, str | None]],
    ) -> None:
        """What a gate has cost is the task's, its DAG's, and the agent's whose output it looked at."""
        await connection.execute(
            self._sql["charge_tasks"],
            {"ids": [task.id for task, _, _ in charges], "costs": [cost for _, cost, _ in charges]},
        )
        for task, cost, agent_id in charges:
            changes.charge(task, agent_id, cost)

    async def _accept(self, connection: Connection, steps: Sequence[Step]) -> dict[str, Moved]:
        if not steps:
            return {}
        ids = [step.claim.id for step in steps]
        cursor = await connection.execute(self._sql["lock_attempts"], {"ids": ids})
        outputs = {row[0]: _PARTS.decode(row[5]) for row in await cursor.fetchall()}
        await self._acceptance.accept(
            connection, [_completion(step.claim, outputs[step.claim.id]) for step in steps]
        )
        cursor = await connection.execute(
            self._sql["close_accepted"],
            {**self._database.now, "ids": ids, "epochs": [step.claim.epoch for step in steps]},
        )
        closed = {row[0] for row in await cursor.fetchall()}
        for name in ids:
            if name not in closed:
                # Never told as done: its output would be gone with the attempt.
                raise LineshaftError(
                    f"Task {name} passed its gates but didn't complete; nothing was changed. It is tried "
                    f"again when its lease runs out; `lineshaft why {name}` tells how it stands."
                )
        return {name: Moved(name, Status.COMPLETED) for name in ids}

    async def _refuse(
        self, connection: Connection, steps: Sequence[tuple[LockedTask, Step]]
    ) -> dict[str, Moved]:
        return await self._acceptance.reject(
            connection,
            [
                (
                    replace(task, cost_usd=task.cost_usd + step.cost_usd),
                    Failure(step.claim, step.error, step.category),
                )
                for task, step in steps
            ],
        )

    def _told(self, step: Step) -> list[dict[str, Any]]:
        at = self._database.now["now"] or datetime.now(UTC)
        return [
            {
                "gate": one.gate_no,
                "method": one.method,
                "passed": one.verdict.passed,
                "reasons": one.verdict.reasons,
                "score": one.verdict.score,
                "cost_usd": one.verdict.cost_usd,
                "model": one.verdict.model,
                "by": one.by,
                "at": at,
            }
            for one in step.said
        ]

    # Reading.

    async def verdicts(self, task_id: str) -> "list[AttemptVerdicts]":
        """What the gates said about each attempt, and what the current one waits for."""
        async with (
            self._database.connection() as connection,
            connection.cursor(row_factory=class_row(_VerdictRow)) as cursor,
        ):
            await cursor.execute(self._sql["verdicts"], {"id": task_id})
            return [
                AttemptVerdicts(
                    epoch=row.epoch,
                    outcome=row.outcome,
                    waits_for=row.gate if row.outcome == "validating" else None,
                    waits_since=row.gate_since if row.outcome == "validating" else None,
                    runs=row.gate_runs,
                    last_error=row.gate_error,
                    verdicts=_VERDICTS.decode(row.verdicts) if row.verdicts else [],
                )
                for row in await cursor.fetchall()
            ]


class RecordedVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a gate said, as it was recorded."""

    gate: int
    method: str
    passed: bool
    at: datetime
    reasons: list[str] = []
    score: float | None = None
    cost_usd: float | None = None
    model: str | None = None
    by: str | None = None


_VERDICTS = msgspec.json.Decoder(list[RecordedVerdict])


@dataclass(frozen=True, slots=True)
class AttemptVerdicts:
    epoch: int
    outcome: str
    #: The method of the gate that it waits for now.
    waits_for: str | None
    waits_since: datetime | None
    #: How often that gate was begun without a verdict, and why there was none.
    runs: int
    last_error: str | None
    verdicts: list[RecordedVerdict] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _VerdictRow:
    epoch: int
    outcome: str
    gate: str | None
    gate_since: datetime | None
    gate_runs: int
    gate_error: str | None
    verdicts: bytes | None


def _completion(claim: ClaimRef, parts: dict[str, msgspec.Raw]) -> Completion:
    named = _part(parts, "type")
    return Completion(
        claim,
        _part(parts, "data"),
        _part(parts, "artifacts"),
        _part(parts, "decision_report"),
        output_type=None if named is None else msgspec.json.decode(named, type=str),
    )


def _part(parts: dict[str, msgspec.Raw], name: str) -> bytes | None:
    found = bytes(parts.get(name, b"null"))
    return None if found == b"null" else found
