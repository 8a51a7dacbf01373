"""A short run of the real thing; `make chaos` makes longer ones, with more faults."""

import pytest

from tests.chaos.faults import QUICK
from tests.chaos.plan import Plan
from tests.chaos.report import table
from tests.chaos.run import Run


@pytest.mark.slow("half a minute of faults")
@pytest.mark.timeout(1_200)
async def test_nothing_is_lost_while_everything_breaks() -> None:
    """F-45: kill -9 of anything, restarts and crashes of the database, a cut network, pauses."""
    plan = Plan(seed=7, seconds=16, agents=3, faults_every_sec=1.4)

    report = await Run(plan).run()

    assert report.held, table(report)
    # One that hits a process which is just being started again is left out.
    kinds = {kind.value for kind in QUICK}
    assert {*report.faults, *report.skipped} <= kinds, table(report)
    assert len({*report.faults, *report.skipped}) >= len(kinds) - 1, table(report)
    assert sum(report.faults.values()) >= len(QUICK) - 2, table(report)
    assert report.tasks["COMPLETED"] > 20, table(report)
