"""Gates: an output passes all gates of its task before the task completes.

An output is stored first, with its attempt, and then checked. Instant checks run in the process that
completes the task, while its agent still holds it. At the first gate that runs elsewhere the agent is
released: its slot, money, lock and lease are returned, and the output waits for a validator
(duties/validator.py) or for a person (approvals.py). After the last gate the task completes like any other; a
rejected output is a failed attempt, with the gate's reasons as its error.

A verdict names its gate, and counts only while the output is at that gate: of concurrent verdicts,
cancellations and expired leases, the first one wins.
"""

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lineshaft.checks import decision_report
from lineshaft.checks.registry import HUMAN, Checks
from lineshaft.checks.verdict import NoVerdict, Verdict, rejected
from lineshaft.engine.artifacts.artifacts import ArtifactRegistry
from lineshaft.engine.live.task_locks import LockedTask
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows
from lineshaft.engine.review.gate_runs import EndedRun, GateRuns
from lineshaft.engine.review.gated_output import GATES, PARTS, GatedOutput, RunKey
from lineshaft.engine.transition.complete import Acceptance
from lineshaft.engine.transition.effects import Effects
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import InvalidTransitionError, LineshaftError, UnavailableError
from lineshaft.model.budget import money
from lineshaft.model.retry import FailureCategory
from lineshaft.model.states import Status
from lineshaft.model.storable import replace_unstorable
from lineshaft.types.data_refs import data_ref_in
from lineshaft.types.work import NOTHING, ClaimRef, Completion, Failure, Moved

_ENCODER = msgspec.json.Encoder(decimal_format="number")
MAX_GATE_ERROR = 2_000

_SQL = catalog.load(__name__)
_log = logging.getLogger("lineshaft.engine")


class GateVerdict(Struct, frozen=True):
    """The verdict of one gate of a task."""

    gate_no: int
    method: str
    verdict: Verdict
    #: The reviewer, if it was a person.
    by: str | None = None


class GateProgress(Struct, frozen=True):
    """The way of an output from one gate to another, with the verdicts on the way."""

    claim: ClaimRef
    origin: int
    verdicts: tuple[GateVerdict, ...]
    gate_no: int
    #: The method of the gate that it waits for now; None: it passed the last gate, or was rejected.
    waits_for: str | None
    #: The category of the failure, if it was rejected.
    category: str = FailureCategory.INVALID_OUTPUT
    #: The output, for the answer to a verdict that comes too late.
    data: bytes | None = None
    #: The run of the first verdict, if money is reserved for it.
    run: RunKey | None = None

    @property
    def rejection(self) -> GateVerdict | None:
        return self.verdicts[-1] if self.verdicts and not self.verdicts[-1].verdict.passed else None

    @property
    def cost_usd(self) -> Decimal | None:
        """What its checks have cost; None: an unknown amount."""
        costs = [one.verdict.cost_usd for one in self.verdicts]
        return None if None in costs else sum((money(cost or 0) for cost in costs), NOTHING)

    @property
    def error(self) -> str:
        rejection = self.rejection
        assert rejection is not None  # noqa: S101 - only rejected outputs have an error
        reasons = "; ".join(rejection.verdict.reasons) or "rejected without a reason"
        return reasons if rejection.method == decision_report.METHOD else f"{rejection.method}: {reasons}"


class Gates:
    def __init__(
        self, transitions: Transitions, acceptance: Acceptance, checks: Checks, artifacts: ArtifactRegistry
    ) -> None:
        self._artifacts = artifacts
        self._database = transitions.database
        self._locks = transitions.locks
        self._acceptance = acceptance
        self._runs = GateRuns(transitions)
        # In turn, so that neither kind keeps the other from running.
        free, paid = self._take_free, self._take_paid
        self._turns = itertools.cycle(((free, paid), (paid, free)))
        self.checks = checks

    # A new output.

    async def begin(self, connection: Connection, ids: Sequence[str]) -> None:
        """Release the agents of new outputs whose first gate runs elsewhere."""
        locked = await self._locks.lock(connection, ids)
        waiting = []
        for task in locked.values():
            gates = GATES.decode(task.gates) if task.gates else ()
            if gates and not task.require_decision_report and not self.checks.is_instant(gates[0].method):
                waiting.append((task, GateProgress(ClaimRef(task.id, task.epoch), 0, (), 0, gates[0].method)))
        await self._record(connection, waiting, [])

    async def check(self, claims: Sequence[ClaimRef]) -> dict[str, Moved]:
        """Run instant checks on the outputs of these claims, and move the outputs to their next gate."""
        epochs = {claim.id: claim.epoch for claim in claims}
        outputs = [
            output
            for output in await self.read(list(epochs))
            if output.gate is None and output.epoch == epochs[output.id]
        ]
        if not outputs:
            return {}
        # In a thread: checks of large outputs would block the event loop.
        steps = await asyncio.to_thread(lambda: [self.proceed(output) for output in outputs])
        return {moved.id: moved for moved in await self.advance(steps)}

    async def read(self, ids: Sequence[str]) -> list[GatedOutput]:
        async with self._database.connection() as connection:
            outputs = await fetch_rows(
                connection, GatedOutput, _SQL["read_in_validation"], {"ids": list(ids)}
            )
        return [await self._whole(output) for output in outputs]

    async def _whole(self, output: GatedOutput) -> GatedOutput:
        """With the data, if that is stored as an artifact."""
        large = data_ref_in(output.data)
        if large is None:
            return output
        try:
            data = await self._artifacts.data(large.data_ref)
        except UnavailableError:
            raise
        except LineshaftError as error:
            return replace(output, fault=f"The output can't be checked: {error}")
        parts = PARTS.decode(output.output) | {"data": msgspec.Raw(data)}
        return replace(output, whole=msgspec.json.encode(parts))

    def proceed(self, output: GatedOutput, verdict: GateVerdict | None = None) -> GateProgress:
        """From its gate, or with the verdict of that gate, through all instant checks that follow."""
        gates, candidate = output.all_gates, output.candidate
        verdicts = [] if verdict is None else [verdict]
        if verdict is None and output.gate is None and output.gate_no == 0 and output.require_decision_report:
            report = decision_report.check(None, candidate)
            verdicts.append(GateVerdict(0, decision_report.METHOD, report))
        number = output.gate_no if verdict is None else verdict.gate_no + 1
        waits_for = None
        while number < len(gates) and all(one.verdict.passed for one in verdicts):
            gate = gates[number]
            if output.fault is not None and gate.method != HUMAN:
                verdicts.append(GateVerdict(number, gate.method, rejected(output.fault)))
                break
            if not self.checks.is_instant(gate.method):
                waits_for = gate.method
                break
            try:
                result = self.checks.check_now(gate.method, gate.schema, candidate)
            except NoVerdict:
                # A custom check raised an error: a validator tries again, and records why.
                waits_for = gate.method
                break
            verdicts.append(GateVerdict(number, gate.method, result))
            number += result.passed
        claim, origin = output.claim, output.gate_no
        run = output.run if verdict is not None else None
        return GateProgress(claim, origin, tuple(verdicts), number, waits_for, data=output.data, run=run)

    # Validators.

    async def take(self, *, limit: int, lease_sec: float) -> list[GatedOutput]:
        """Outputs that wait for a gate which this process can run, under a lease.

        A gate that costs money is taken only once what it may cost is reserved.
        """
        taken: list[GatedOutput] = []
        for take in next(self._turns):
            taken += await take(limit=limit - len(taken), lease_sec=lease_sec)
        outputs = []
        for output in taken:
            try:
                outputs.append(await self._whole(output))
            except UnavailableError as error:
                _log.warning("Can't check the output of %s now: %s", output.id, error)
                # Nothing was spent. Otherwise its lease expires, and it is taken again.
                if output.is_paid:
                    await self.postpone(output, str(error), delay_sec=lease_sec)
        return outputs

    async def _take_free(self, *, limit: int, lease_sec: float) -> list[GatedOutput]:
        paid = self.checks.paid
        methods = [method for method in self.checks.runnable if method not in paid]
        parameters = {**self._database.now, "methods": methods, "limit": limit, "lease": lease_sec}
        async with self._database.connection() as connection:
            return await fetch_rows(connection, GatedOutput, _SQL["take_gates"], parameters)

    async def _take_paid(self, *, limit: int, lease_sec: float) -> list[GatedOutput]:
        return await self._runs.take(self.checks.paid, limit=limit, lease_sec=lease_sec)

    async def renew(self, outputs: Sequence[GatedOutput], *, lease_sec: float) -> set[str]:
        """Renew the leases; returns the tasks that this validator still has."""
        async with self._database.connection() as connection:
            renewed = await fetch_column(
                connection,
                _SQL["renew_gates"],
                {
                    **self._database.now,
                    "lease": lease_sec,
                    "ids": [output.id for output in outputs],
                    "epochs": [output.epoch for output in outputs],
                    "gate_nos": [output.gate_no for output in outputs],
                    "runs": [output.gate_runs for output in outputs],
                },
            )
            # Also of tasks that have ended: what their judges cost is still to be booked.
            if runs := [output.run for output in outputs if output.run is not None]:
                await self._runs.renew(connection, runs, lease_sec=lease_sec)
        return set(renewed)

    async def settle(self, output: GatedOutput, verdict: Verdict) -> Moved:
        """Record the verdict of the gate that an output was taken for."""
        gate_verdict = GateVerdict(output.gate_no, output.gate or "", verdict)
        step = await asyncio.to_thread(self.proceed, output, gate_verdict)
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
        """The gate reached no verdict and runs again later. False: this validator's lease had expired.

        `cost_usd`: what the run has cost; None: an unknown amount.
        """

        async def work(connection: Connection) -> bool:
            locked = await self._locks.lock(connection, [output.id])
            attempts = await self._lock_attempts(connection, [output.id])
            runs = await self._ended_runs(connection, {output.claim: output.run}, locked, attempts)
            cursor = await connection.execute(
                _SQL["postpone_gate"],
                {
                    **self._database.now,
                    "id": output.id,
                    "epoch": output.epoch,
                    "gate_no": output.gate_no,
                    "runs": output.gate_runs,
                    "error": replace_unstorable(error[:MAX_GATE_ERROR]),
                    "delay": delay_sec,
                },
            )
            postponed = await cursor.fetchone() is not None
            effects = Effects(self._database.now)
            if postponed or output.is_paid:
                reported = [(run, run.cost(cost_usd)) for run in runs.values()]
                charges = await self._runs.within_ceilings(connection, reported)
                await self._runs.charge(connection, effects, charges)
            if alert and postponed and (task := locked.get(output.id)) is not None:
                data = {
                    "about": "a gate reaches no verdict",
                    "gate": output.gate,
                    "runs": output.gate_runs,
                    "error": replace_unstorable(error[:MAX_GATE_ERROR]),
                }
                effects.event(task, ["alert"], data)
            await effects.write(connection)
            return postponed

        return await self._database.run(work)

    # Results of verdicts.

    async def advance(self, steps: Sequence[GateProgress]) -> list[Moved]:
        """Move outputs to their next gate; an output that is no longer at its origin is only reported."""
        return await self._database.run(lambda connection: self.advance_in(connection, steps))

    async def advance_in(
        self, connection: Connection, steps: Sequence[GateProgress], *, strict: bool = False
    ) -> list[Moved]:
        """In a transaction; with `strict`, an output that is no longer at its origin is an error."""
        ids = [step.claim.id for step in steps]
        locked = await self._locks.lock_with_dependents(connection, ids)
        attempts = await self._lock_attempts(connection, ids)
        going: list[tuple[LockedTask, GateProgress]] = []
        stale: list[GateProgress] = []
        for step in steps:
            task, attempt = locked.get(step.claim.id), attempts.get(step.claim.id)
            if task is not None and attempt is not None and attempt.is_at(step):
                going.append((task, step))
            else:
                stale.append(step)
        runs = await self._ended_runs(connection, {step.claim: step.run for step in steps}, locked, attempts)
        # A verdict that comes too late was paid for, too.
        counted = [step for step in steps if step.run is not None or step not in stale]
        reported = [(run, run.cost(step.cost_usd)) for step in counted if (run := runs.get(step.claim.id))]
        charges = await self._runs.within_ceilings(connection, reported)
        costs = {run.task_id: cost for run, cost in charges}
        await self._record(connection, going, charges)
        accepted = [step for _, step in going if step.waits_for is None and step.rejection is None]
        rejected = [(task, step) for task, step in going if step.rejection is not None]
        moved = {
            step.claim.id: Moved(step.claim.id, Status.VALIDATING)
            for _, step in going
            if step.waits_for is not None
        }
        moved |= await self._accept(connection, accepted, attempts)
        moved |= await self._reject(connection, rejected, costs)
        for step in stale if strict else ():
            message = f"Task {step.claim.id} has changed in the meantime: look at it again before you decide."
            moved[step.claim.id] = Moved(step.claim.id, None, InvalidTransitionError(message))
        if stale and not strict:
            late = [Completion(step.claim, step.data) for step in stale]
            answers = await self._acceptance.refuse(connection, late)
            moved |= {answer.id: answer for answer in answers}
        return [moved[step.claim.id] for step in steps]

    async def _lock_attempts(self, connection: Connection, ids: Sequence[str]) -> "dict[str, _LockedAttempt]":
        parameters = {"ids": list(ids)}
        attempts = await fetch_rows(connection, _LockedAttempt, _SQL["lock_attempts"], parameters)
        return {attempt.task_id: attempt for attempt in attempts}

    async def _ended_runs(
        self,
        connection: Connection,
        runs: Mapping[ClaimRef, RunKey | None],
        locked: Mapping[str, LockedTask],
        attempts: "Mapping[str, _LockedAttempt]",
    ) -> dict[str, EndedRun]:
        """The runs that are to be charged, by task: those with a reservation, and others of open attempts."""
        unreserved = {
            claim.id: EndedRun(claim.id, claim.epoch, attempts[claim.id].agent_id, locked[claim.id].dag_id)
            for claim, run in runs.items()
            if run is None and claim.id in locked and claim.id in attempts
        }
        reserved = [run for run in runs.values() if run is not None]
        return unreserved | await self._runs.end(connection, reserved)

    async def _record(
        self,
        connection: Connection,
        going: Sequence[tuple[LockedTask, GateProgress]],
        charges: Sequence[tuple[EndedRun, Decimal]],
    ) -> None:
        """Record verdicts and costs, and release the agents of outputs that wait now."""
        effects = Effects(self._database.now)
        if going:
            await self._record_verdicts(connection, effects, going)
        await self._runs.charge(connection, effects, charges)
        await effects.write(connection)

    async def _record_verdicts(
        self, connection: Connection, effects: Effects, going: Sequence[tuple[LockedTask, GateProgress]]
    ) -> None:
        await connection.execute(
            _SQL["record_verdicts"],
            {
                **self._database.now,
                "ids": [step.claim.id for _, step in going],
                "epochs": [step.claim.epoch for _, step in going],
                "gate_nos": [step.gate_no for _, step in going],
                "gates": [step.waits_for for _, step in going],
                "verdicts": [_ENCODER.encode(self._recorded(step)).decode() for _, step in going],
            },
        )
        held = [task for task, step in going if step.waits_for is not None and task.agent_id is not None]
        if held:
            await connection.execute(_SQL["release_agents"], {"ids": [task.id for task in held]})
        for task in held:
            effects.release_resources(task)
        for task, step in going:
            if step.waits_for == HUMAN:
                effects.event(task, ["approval.waiting"], {"kind": "gate", "gate": step.gate_no})

    async def _accept(
        self, connection: Connection, steps: Sequence[GateProgress], attempts: "Mapping[str, _LockedAttempt]"
    ) -> dict[str, Moved]:
        if not steps:
            return {}
        ids = [step.claim.id for step in steps]
        await self._acceptance.accept(
            connection, [_completion(step.claim, attempts[step.claim.id].output) for step in steps]
        )
        epochs = [step.claim.epoch for step in steps]
        closed = await fetch_column(
            connection, _SQL["close_accepted"], {**self._database.now, "ids": ids, "epochs": epochs}
        )
        if unfinished := sorted({*ids}.difference(closed)):
            # Never report it as completed: its output would be lost with the attempt.
            name = unfinished[0]
            raise LineshaftError(
                f"Task {name} passed its gates but didn't complete; nothing was changed. It is tried again "
                f"when its lease expires; see `lineshaft why {name}`."
            )
        return {name: Moved(name, Status.COMPLETED) for name in ids}

    async def _reject(
        self,
        connection: Connection,
        steps: Sequence[tuple[LockedTask, GateProgress]],
        costs: Mapping[str, Decimal],
    ) -> dict[str, Moved]:
        return await self._acceptance.reject(
            connection,
            [
                (
                    replace(task, cost_usd=task.cost_usd + costs.get(task.id, NOTHING)),
                    Failure(step.claim, step.error, step.category),
                )
                for task, step in steps
            ],
        )

    def _recorded(self, step: GateProgress) -> list[dict[str, Any]]:
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
            for one in step.verdicts
        ]


class _LockedAttempt(Struct, frozen=True):
    task_id: str
    epoch: int
    gate_no: int
    agent_id: str | None
    output: bytes

    def is_at(self, step: GateProgress) -> bool:
        return self.epoch == step.claim.epoch and self.gate_no == step.origin


def _completion(claim: ClaimRef, output: bytes) -> Completion:
    parts = PARTS.decode(output)
    named = _part(parts, "type")
    return Completion(
        claim,
        _part(parts, "data"),
        _part(parts, "artifacts"),
        _part(parts, "decision_report"),
        output_type=None if named is None else msgspec.json.decode(named, type=str),
    )


def _part(parts: dict[str, msgspec.Raw], name: str) -> bytes | None:
    part = bytes(parts.get(name, b"null"))
    return None if part == b"null" else part
