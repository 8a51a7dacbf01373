"""Versions of agents: recorded with each attempt, however it ends."""

import asyncio

import pytest

from lineshaft import Agent, Lineshaft, NewTask, Snooze, TaskContext
from lineshaft.errors import InvalidInputError
from tests.agent.helpers import AT_ONCE, at_work, drain, one, soon


async def test_each_attempt_has_the_version_of_its_agent(shaft: Lineshaft) -> None:
    """Failed, postponed and completed ones."""
    agents = {version: Agent("a", version=version) for version in ("1", "2", None)}
    for agent in agents.values():

        @agent.task("t")
        async def handler(ctx: TaskContext) -> str:
            if len(ctx.previous_attempts) == 0:
                raise RuntimeError("no")
            if len(ctx.previous_attempts) == 1:
                raise Snooze(0)
            return "done"

    task = await one(shaft, agents["1"], "t", max_attempts=1)
    await shaft.retry(task.id)
    await drain(shaft, agents["2"])
    other = await one(shaft, agents[None], "t", retry=AT_ONCE)

    found = [(attempt.outcome, attempt.version) for attempt in await shaft.attempts(task.id)]
    assert found == [("failed", "1"), ("released", "2"), ("completed", "2")]
    assert [failure.version for failure in (await shaft.get(task.id)).failure_history] == ["1"]
    assert [attempt.version for attempt in await shaft.attempts(other.id)] == [None] * 3
    assert (await shaft.get_agent("a")).version is None


async def test_a_running_attempt_has_a_version(shaft: Lineshaft) -> None:
    agent = Agent("a", version="2")
    running, over = asyncio.Event(), asyncio.Event()

    @agent.task("t")
    async def handler() -> None:
        running.set()
        await over.wait()

    task = await shaft.submit(NewTask("t"))
    async with at_work(agent, shaft=shaft):
        await soon(running)
        (attempt,) = await shaft.attempts(task)
        assert (attempt.outcome, attempt.version) == ("running", "2")
        assert (await shaft.get_agent("a")).version == "2"
        over.set()


async def test_an_output_that_is_checked_keeps_the_version(shaft: Lineshaft) -> None:
    agent = Agent("a", version="2")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> int:
        return ctx.attempt

    output = {"type": "json", "validation": "json-schema", "validation_schema": {"const": 2}}
    task = await one(shaft, agent, "t", output=output, retry=AT_ONCE)

    found = [(attempt.outcome, attempt.version) for attempt in await shaft.attempts(task.id)]
    assert found == [("failed", "2"), ("completed", "2")]


@pytest.mark.parametrize("version", ["", "x" * 201, "nul \0"])
async def test_a_version_is_a_short_text(shaft: Lineshaft, version: str) -> None:
    agent = Agent("a", version=version)

    @agent.task("t")
    async def handler() -> None: ...

    with pytest.raises(InvalidInputError, match="version"):
        await drain(shaft, agent)
