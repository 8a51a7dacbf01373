"""Runs slow gates: commands, judges, and the user's own asynchronous checks.

Each output is taken under a lease that is renewed while its check runs. If a validator dies, the lease
expires and another one repeats the check; the attempt doesn't fail. A check without a verdict (the judge is
unreachable) is repeated with growing pauses; the fifth time raises an alert.

It also announces each task that waits for a person, once.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal

from msgspec import Struct

from lineshaft import background
from lineshaft.checks.verdict import NoVerdict, rejected
from lineshaft.duties.loop import Counts, Trouble
from lineshaft.engine.review.approvals import Approvals
from lineshaft.engine.review.gated_output import GatedOutput
from lineshaft.engine.review.gates import Gates
from lineshaft.errors import UnavailableError

_log = logging.getLogger("lineshaft.duties")

_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 5.0, 600.0
_ALERT_AT_RUN = 5
#: A check that takes longer is cancelled and repeated. Commands have their own limits.
_LONGEST_RUN_SEC = 100_000.0

_Runs = dict[asyncio.Task[str], GatedOutput]


class Validator(Struct, frozen=True):
    gates: Gates
    approvals: Approvals
    interval_sec: float = 2.0
    #: Checks that run at the same time.
    concurrency: int = 4
    lease_sec: float = 60.0
    batch: int = 1_000
    #: Stopping doesn't wait for a check, which may take an hour: it is repeated elsewhere.
    interruptible: bool = True
    name: str = "validator"

    async def run_once(self) -> Counts:
        counts: Counter[str] = Counter()
        trouble = Trouble(self.name)
        runs: _Runs = {}
        async with self._renewing(runs):
            while True:
                try:
                    counts["approvals announced"] += await self.approvals.announce(self.batch)
                    await self._take(runs)
                except UnavailableError as error:
                    if not runs:
                        raise
                    # Running checks may have cost money: they continue, and the database may return in time.
                    trouble.failed(error)
                else:
                    trouble.over()
                if not runs:
                    return counts
                # At most one interval: a check may take hours, and new outputs arrive in the meantime.
                done, _ = await asyncio.wait(
                    runs, timeout=self.interval_sec, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    counts[_outcome(task, runs.pop(task))] += 1

    async def _take(self, runs: _Runs) -> None:
        room = self.concurrency - len(runs)
        for output in await self.gates.take(limit=room, lease_sec=self.lease_sec) if room else ():
            runs[asyncio.create_task(self._run(output), name=f"lineshaft gate {output.id}")] = output

    async def _run(self, output: GatedOutput) -> str:
        """Run one gate and record its verdict; returns the outcome for the counts."""
        gate = output.all_gates[output.gate_no]
        try:
            async with asyncio.timeout(_LONGEST_RUN_SEC):
                if output.fault is None:
                    verdict = await self.gates.checks.check(gate.method, gate.schema, output.candidate)
                else:
                    verdict = rejected(output.fault)
        except (NoVerdict, TimeoutError) as error:
            cost = error.cost_usd if isinstance(error, NoVerdict) else None
            await self._postpone(output, str(error) or "timed out", cost_usd=cost)
            return "without a verdict"
        try:
            moved = await self.gates.settle(output, verdict)
        except UnavailableError as error:
            # The lease expires, and the check is repeated.
            _log.warning("Can't record the verdict on %s: %s", output.id, error)
            return "without a verdict"
        if moved.error is not None:
            return "too late"
        return "passed" if verdict.passed else "rejected"

    async def _postpone(self, output: GatedOutput, error: str, *, cost_usd: Decimal | None) -> None:
        _log.warning("Gate %s of %s reached no verdict: %s", output.gate, output.id, error)
        pause = min(_FIRST_PAUSE_SEC * 2 ** (min(output.gate_runs, 20) - 1), _LONGEST_PAUSE_SEC)
        with contextlib.suppress(UnavailableError):
            await self.gates.postpone(
                output, error, delay_sec=pause, cost_usd=cost_usd, alert=output.gate_runs == _ALERT_AT_RUN
            )

    @asynccontextmanager
    async def _renewing(self, runs: _Runs) -> AsyncIterator[None]:
        renewal = asyncio.create_task(self._renew(runs), name="lineshaft gate leases")
        try:
            yield
        finally:
            cancelled = list(runs.values())
            await background.stop(renewal, *runs)
            if cancelled:
                # End the leases, so that another validator needn't wait for them to expire.
                with contextlib.suppress(UnavailableError):
                    await self.gates.renew(cancelled, lease_sec=0)

    async def _renew(self, runs: _Runs) -> None:
        trouble = Trouble(f"{self.name}, which renews the leases of gates,")
        while True:
            await asyncio.sleep(self.lease_sec / 3)
            if not runs:
                continue
            try:
                ours = await self.gates.renew(list(runs.values()), lease_sec=self.lease_sec)
            except UnavailableError as error:
                trouble.failed(error)
                continue
            trouble.over()
            for task, output in runs.items():
                if output.id not in ours:
                    # The task was cancelled, or another validator has it: the verdict would not count.
                    task.cancel()


def _outcome(run: asyncio.Task[str], output: GatedOutput) -> str:
    if run.cancelled():
        return "cancelled"
    if (error := run.exception()) is not None:
        # The other checks continue. The lease expires, and this check is repeated.
        _log.error("Gate %s of %s failed", output.gate, output.id, exc_info=error)
        return "failed"
    return run.result()
