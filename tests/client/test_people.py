"""Approvals, reports and custom gates from Python."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from lineshaft import Agent, Lineshaft, NewTask, OutputContract, SyncLineshaft
from lineshaft.checks.registry import Checks
from lineshaft.checks.verdict import CandidateOutput
from lineshaft.errors import InvalidInputError
from tests.agent.helpers import PATIENCE, at_work, drain

REPORT = {"why": "asked for", "what": "a page", "tradeoffs": "none worth naming"}


def writer(*, report: object = None) -> Agent:
    from lineshaft import Result  # noqa: PLC0415

    agent = Agent("writer")

    @agent.task("write")
    async def write() -> Result:
        return Result({"draft": 1}, decision_report=report)

    return agent


async def test_an_output_is_approved(shaft: Lineshaft) -> None:
    task = await shaft.submit(NewTask("write", output=OutputContract(validation="human")))
    await drain(shaft, writer())

    (approval,) = (await shaft.approvals()).items
    assert (approval.kind, approval.task.id, approval.task.output.data) == ("gate", task.id, {"draft": 1})

    done = await shaft.approve(task, reviewer="ann", note="fine")
    assert (done.status, done.result) == ("COMPLETED", {"draft": 1})


async def test_a_person_completes_or_declines_a_task(shaft: Lineshaft) -> None:
    ask = NewTask("ask", required_capabilities=["human"])
    one, two = await shaft.submit_many([ask, ask])

    assert (await shaft.approve(one, reviewer="ann", data={"ok": True})).result == {"ok": True}
    refused = await shaft.reject(two, reviewer="ann", note="not mine")

    assert (refused.status, refused.failure_reason) == ("DEAD_LETTERED", "human: rejected by ann: not mine")


@pytest.mark.parametrize("data", [float("nan"), {"a": "\0"}, {"a": object()}])
async def test_data_that_the_database_cannot_store_is_refused(shaft: Lineshaft, data: object) -> None:
    """Hostile input: refused by name, nothing changed."""
    task = await shaft.submit(NewTask("ask", required_capabilities=["human"]))

    with pytest.raises(InvalidInputError, match="data: "):
        await shaft.approve(task, reviewer="ann", data=data)

    assert (await shaft.get(task)).status == "READY"


async def test_reports_are_found(shaft: Lineshaft) -> None:
    """R-093."""
    task = await shaft.submit(NewTask("write", preset="loki"))
    await drain(shaft, writer(report=REPORT))

    (report,) = (await shaft.reports("worth naming")).items
    assert (report.task_id, report.decision_report) == (task.id, REPORT)
    assert (await shaft.get(task)).output.decision_report == REPORT


def test_without_an_event_loop(blocking: SyncLineshaft) -> None:
    task = blocking.submit(NewTask("ask", required_capabilities=["human"]))

    assert [found.task.id for found in blocking.approvals().items] == [task.id]
    assert blocking.approve(task, reviewer="ann", data=7).result == 7
    assert blocking.reports().items == []


@pytest.fixture
async def own(dsn: str) -> AsyncIterator[Lineshaft]:
    checks = Checks()

    async def four_eyes(schema: object, candidate: CandidateOutput) -> bool:
        return bool(candidate.data == schema)

    checks.register("looks-like", four_eyes)
    async with Lineshaft(dsn, max_connections=4, checks=checks) as opened:
        yield opened


async def test_custom_gates_run_in_the_process_of_the_agents(own: Lineshaft) -> None:
    """Without any server: the process that runs agents runs the gates it knows."""
    contract = OutputContract(validation="looks-like", validation_schema={"draft": 1})
    task = await own.submit(NewTask("write", output=contract))

    async with at_work(writer(), shaft=own):
        done = await asyncio.wait_for(own.wait(task), PATIENCE)

    assert done.status == "COMPLETED"
