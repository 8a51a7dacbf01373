"""`until_idle`: when there is nothing left to do, and not before."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from lineshaft import Agent, Lineshaft, NewTask, RetrySpec, TaskContext
from lineshaft.agent.idle import left_text
from lineshaft.client.backend import Req, Res
from lineshaft.client.database_backend import DatabaseBackend
from lineshaft.model.states import Status
from lineshaft.operations import work
from lineshaft.operations.operation import Operation
from lineshaft.settings import Settings
from lineshaft.types.work import LeftBehind
from tests.agent.agent_process import command_agent
from tests.agent.helpers import AT_ONCE, PATIENCE, drain, ended


class Overtaken(DatabaseBackend):
    """Another process makes due tasks READY, just before an agent asks whether any will be."""

    async def call(self, operation: Operation[Req, Res], request: Req) -> Res:
        if operation.name == work.next_retry.name:
            await self.maintain()
        return await super().call(operation, request)


@pytest.fixture
async def overtaken(dsn: str) -> AsyncIterator[Lineshaft]:
    backend = Overtaken(Settings(database_url=dsn), max_connections=4)
    async with Lineshaft(backend=backend) as opened:
        yield opened


async def test_a_retry_that_becomes_ready_between_two_polls_is_done(overtaken: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str:
        if ctx.attempt == 1:
            raise RuntimeError
        return "done"

    submitted = await overtaken.submit(NewTask("t", retry=AT_ONCE))
    await drain(overtaken, agent)

    assert (await overtaken.get(submitted)).result == "done"


async def test_a_handler_with_a_limit_gets_its_share(shaft: Lineshaft) -> None:
    """One slot and a backlog of other types: the best task still comes first."""
    agent = Agent("a", max_concurrent_tasks=1)
    order: list[str] = []

    @agent.task("common")
    async def common() -> None:
        order.append("common")

    @agent.task("rare", concurrency=1)
    async def rare() -> None:
        order.append("rare")

    await shaft.submit_many([NewTask("common", priority=90) for _ in range(5)])
    await shaft.submit(NewTask("rare", priority=0))
    await drain(shaft, agent)

    assert order == ["rare", *["common"] * 5]


@pytest.mark.slow("waits for a retry")
async def test_it_waits_for_a_retry_within_a_minute_and_for_other_work(
    shaft: Lineshaft, where: str, tmp_path: Path
) -> None:
    handle = await shaft.submit(NewTask("t", retry=in_seconds(50)))
    async with command_agent(where, tmp_path, "test -e fixed", "--until-idle") as agent:
        await agent.logs("a: waiting: 1 task retries in ")
        (tmp_path / "fixed").touch()
        # A wake-up, while it waits.
        other = await shaft.submit(NewTask("t"))
        await ended(shaft, other.id)
        await shaft.retry(handle)
        code, lines = await agent.ends()

    assert (code, [line for line in lines if "Left behind" in line]) == (0, [])
    assert (await shaft.get(handle)).status is Status.COMPLETED


@pytest.mark.slow("processes, and the wait for a retry")
async def test_after_a_kill_another_agent_waits_for_the_retry(
    shaft: Lineshaft, where: str, tmp_path: Path
) -> None:
    """As the quick start shows it."""
    handle = await shaft.submit(NewTask("t", retry=in_seconds(6)))
    async with command_agent(where, tmp_path, "echo started >&2; sleep 1000") as agent:
        await agent.logs("started")
        await agent.kill()
    async with command_agent(where, tmp_path, "echo done", "--until-idle") as agent:
        code, _ = await agent.ends()

    assert code == 0
    assert (await shaft.get(handle)).result == "done"


@pytest.mark.slow("starts an agent")
async def test_it_reports_what_it_leaves_behind(shaft: Lineshaft, where: str, tmp_path: Path) -> None:
    await shaft.submit(NewTask("t", retry=in_seconds(500)))
    await shaft.submit(NewTask("t"), delay=timedelta(hours=1))
    async with command_agent(where, tmp_path, "exit 1", "--until-idle", "--quiet") as agent:
        line = await agent.logs("Left behind")
        code, _ = await agent.ends()

    assert code == 0
    text = json.loads(line)["event"]
    assert re.search(r"Left behind: 1 task retries in \d+ s; 1 task is scheduled in \d+ s$", text), text


async def test_it_reports_tasks_that_it_cant_afford(
    shaft: Lineshaft, caplog: pytest.LogCaptureFixture
) -> None:
    """They are READY, and would look forgotten."""
    agent = Agent("poor", budget_usd=1)
    agent.task("t")(lambda: None)
    handle = await shaft.submit(NewTask("t", max_cost_usd=2))

    await asyncio.wait_for(agent.run(shaft, until_idle=True, handle_signals=False), PATIENCE)

    expected = f"Left behind: 1 task is READY, but this agent can't claim it now ('lineshaft why {handle.id}'"
    assert expected in caplog.text


@pytest.mark.slow("starts an agent")
async def test_without_waiting_for_retries(shaft: Lineshaft, where: str, tmp_path: Path) -> None:
    handle = await shaft.submit(NewTask("t", retry=in_seconds(50)))
    async with command_agent(where, tmp_path, "exit 1", "--until-idle", "--retries-within", "0") as agent:
        await agent.logs("Left behind: 1 task retries in ")
        assert (await agent.ends())[0] == 0

    assert (await shaft.get(handle)).status is Status.RETRYING


@pytest.mark.parametrize(
    ("left", "text"),
    [
        (LeftBehind(0, None, 0, None, 0, None), ""),
        (LeftBehind(1, 7.2, 0, None, 0, None), "1 task retries in 8 s"),
        (LeftBehind(2, -1.0, 0, None, 0, None), "2 tasks retry, the first one soon"),
        (LeftBehind(0, None, 1, 60.0, 0, None), "1 task is scheduled in 60 s"),
        (
            LeftBehind(1, 9.0, 0, None, 1, 80.5),
            "1 task retries in 9 s; 1 task is held by other agents (its lease expires in 81 s)",
        ),
        (
            LeftBehind(0, None, 3, 60.0, 0, None),
            "3 tasks are scheduled, the first one in 60 s",
        ),
        (LeftBehind(0, None, 1, 3 * 3600.0 + 1, 0, None), "1 task is scheduled in 4 hours"),
        (LeftBehind(0, None, 1, 98_525_022.0, 0, None), "1 task is scheduled in 1141 days"),
        (
            LeftBehind(0, None, 0, None, 0, None, 1, "task_1"),
            "1 task is READY, but this agent can't claim it now ('lineshaft why task_1' gives the reason)",
        ),
    ],
)
def test_what_is_left_in_words(left: LeftBehind, text: str) -> None:
    assert left_text(left) == text


def in_seconds(delay: float) -> RetrySpec:
    return RetrySpec(strategy="fixed", initial_delay_sec=delay, jitter=False)
