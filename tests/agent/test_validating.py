"""Processes killed and stopped while their output is being checked (VALIDATING).

A gate that answers at once is run by the agent's own process, which still holds the task.
"""

import signal
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path

import psycopg
import pytest

from lineshaft import Gate, Lineshaft, NewTask, OutputContract
from lineshaft.model.states import Status
from tests.agent.agent_process import agent_process
from tests.agent.agent_program import Points, make_agent, make_checks
from tests.agent.helpers import AT_ONCE, at_work, attempts, ended, kinds, lose_claim
from tests.client.helpers import engine_beside
from tests.invariants import check_invariants

pytestmark = pytest.mark.slow("starts processes")


@pytest.fixture
async def checking(dsn: str, tmp_path: Path) -> AsyncIterator[Lineshaft]:
    """A queue with the program's gate."""
    checks = make_checks(Points(tmp_path / "log"))
    async with Lineshaft(dsn, max_connections=6, checks=checks) as opened, engine_beside(opened, dsn):
        yield opened
    check_invariants(dsn)


async def submit(shaft: Lineshaft) -> str:
    gated = OutputContract(validation=(Gate("look"),))
    return (await shaft.submit(NewTask("work", retry=AT_ONCE, max_attempts=2, output=gated))).id


async def test_killed(checking: Lineshaft, dsn: str, tmp_path: Path, connection: psycopg.Connection) -> None:
    log = tmp_path / "log"
    task_id = await submit(checking)
    async with agent_process(dsn, log, "--wait-at", "validating") as process:
        await process.reaches("validating")
        assert (await checking.get(task_id)).status is Status.VALIDATING
        await process.kill()
    await lose_claim(checking, connection, task_id)

    second = make_agent("second", Points(log), interval=60, grace=5)
    async with at_work(second, shaft=checking):
        task = await ended(checking, task_id)

    assert (task.status, task.result, task.cost_usd) == (
        Status.COMPLETED,
        {"sum": 3, "by": "second"},
        Decimal(3),
    )
    history = [(past.outcome, past.error) for past in await attempts(checking, task_id)]
    assert history == [("failed", "heartbeat_timeout"), ("completed", None)]
    assert (await kinds(checking, task_id)).count("task.completed") == 1
    reached = log.read_text().splitlines()
    assert [reached.count(step) for step in ("in a step", "in another step", "validating")] == [1, 1, 2]


async def test_stopped_past_its_lease(
    checking: Lineshaft, dsn: str, tmp_path: Path, connection: psycopg.Connection
) -> None:
    """The verdict of a zombie on its own output is ignored, but logged."""
    log, go = tmp_path / "log", tmp_path / "go"
    task_id = await submit(checking)
    async with agent_process(dsn, log, "--wait-at", "validating", "--wait-for", str(go)) as process:
        await process.reaches("validating")
        process.send(signal.SIGSTOP)
        await lose_claim(checking, connection, task_id)

        second = make_agent("second", Points(log), interval=60, grace=5)
        async with at_work(second, shaft=checking):
            task = await ended(checking, task_id)
        go.touch()
        process.send(signal.SIGCONT)

        async for event in checking.events(None, task_id=task_id, kinds=["task.late_result"]):
            assert event.data == {"output": {"sum": 3, "by": "first"}}
            break

    assert task.result == {"sum": 3, "by": "second"}
    assert (await checking.get(task_id)).result == {"sum": 3, "by": "second"}
    assert (await kinds(checking, task_id)).count("task.completed") == 1
    history = [(past.outcome, past.error) for past in await attempts(checking, task_id)]
    assert history == [("failed", "heartbeat_timeout"), ("completed", None)]
    assert log.read_text().splitlines().count("in a step") == 1
