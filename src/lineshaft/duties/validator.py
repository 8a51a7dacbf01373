"""Runs the gates that take their time: commands, judges, and checks of the user's own.

Each output is taken under a lease that is renewed while its check runs. A validator that dies stops renewing,
and another one runs the check again: no attempt of the task fails for it. A check that comes to no verdict
(the judge is away) is tried again, each time after a longer pause; at the fifth time somebody is told.

It also tells, once for each, which tasks wait for a person.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal

from lineshaft.checks.verdict import NOTHING, NoVerdict
from lineshaft.duties.loop import Counts
from lineshaft.engine.review.approvals import Approvals
from lineshaft.engine.review.gates import GatedOutput, Gates
from lineshaft.errors import UnavailableError

_log = logging.getLogger("lineshaft.duties")

_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 5.0, 600.0
_TOLD_AT = 5
#: A check that has not answered by then is given up, and tried again. Commands have limits of their own.
_LONGEST_RUN_SEC = 100_000.0

_Runs = dict[asyncio.Task[str], GatedOutput]


@dataclass(frozen=True, slots=True)
class Validator:
    gates: Gates
    approvals: Approvals
    interval_sec: float = 2.0
    #: Checks that run at the same time.
    concurrency: int = 4
    lease_sec: float = 60.0
    batch: int = 1_000
    #: Whoever stops needn't wait for a check that takes an hour: it is run again elsewhere.
    interruptible: bool = True
    name: str = "validator"

    async def run_once(self) -> Counts:
        counts: Counter[str] = Counter()
        runs: _Runs = {}
        async with self._renewing(runs):
            while True:
                try:
                    counts["people told"] += await self.approvals.announce(self.batch)
                    await self._take(runs)
                except UnavailableError as error:
                    if not runs:
                        raise
                    # What runs may have cost money already: it goes on, and the database may be back by then.
                    _log.warning("%s: %s", self.name, error)
                if not runs:
                    return counts
                # No longer than between two runs: a check may take hours, and others come meanwhile.
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
        """Run one gate and hand its verdict in; gives what came of it."""
        gate = output.all_gates[output.gate_no]
        try:
            async with asyncio.timeout(_LONGEST_RUN_SEC):
                verdict = await self.gates.checks.check(gate.method, gate.schema, output.candidate)
        except (NoVerdict, TimeoutError) as error:
            cost = error.cost_usd if isinstance(error, NoVerdict) else NOTHING
            await self._postpone(output, str(error) or "it took too long", cost_usd=cost)
            return "without a verdict"
        try:
            moved = await self.gates.settle(output, verdict)
        except UnavailableError as error:
            # The lease runs out by itself, and the check is run again.
            _log.warning("The verdict on %s can't be written: %s", output.id, error)
            return "without a verdict"
        if moved.error is not None:
            return "too late"
        return "passed" if verdict.passed else "refused"

    async def _postpone(self, output: GatedOutput, error: str, *, cost_usd: Decimal | None) -> None:
        _log.warning("The gate %s of %s came to no verdict: %s", output.gate, output.id, error)
        pause = min(_FIRST_PAUSE_SEC * 2 ** (min(output.gate_runs, 20) - 1), _LONGEST_PAUSE_SEC)
        with contextlib.suppress(UnavailableError):
            await self.gates.postpone(
                output, error, delay_sec=pause, cost_usd=cost_usd, alert=output.gate_runs == _TOLD_AT
            )

    @asynccontextmanager
    async def _renewing(self, runs: _Runs) -> AsyncIterator[None]:
        renewal = asyncio.create_task(self._renew(runs), name="lineshaft gate leases")
        try:
            yield
        finally:
            cut_off = list(runs.values())
            started = [renewal, *runs]
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)
            if cut_off:
                # Another one needn't wait until this one is given up for dead.
                with contextlib.suppress(UnavailableError):
                    await self.gates.renew(cut_off, lease_sec=0)

    async def _renew(self, runs: _Runs) -> None:
        while True:
            await asyncio.sleep(self.lease_sec / 3)
            if not runs:
                continue
            try:
                ours = await self.gates.renew(list(runs.values()), lease_sec=self.lease_sec)
            except UnavailableError as error:
                _log.warning("Leases on gates can't be renewed: %s", error)
                continue
            for task, output in runs.items():
                if output.id not in ours:
                    # Cancelled meanwhile, or another validator has it: whatever it said would count no more.
                    task.cancel()


def _outcome(run: asyncio.Task[str], output: GatedOutput) -> str:
    if run.cancelled():
        return "given up"
    if (error := run.exception()) is not None:
        # Of this one alone: the checks of others go on. Its lease runs out, and it is tried again.
        _log.error("The gate %s of %s failed", output.gate, output.id, exc_info=error)
        return "failed"
    return run.result()
