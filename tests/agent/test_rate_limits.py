"""Rate limits: no attempt used, others slowed down, bounded (R-210 to R-218, U13)."""

import asyncio
from typing import Any

import psycopg
import pytest

from lineshaft import Agent, Fail, Lineshaft, NewTask, TaskContext
from lineshaft.model.states import Status
from tests.agent.helpers import PATIENCE, at_work, attempts, drain, engine_of, kinds, one, soon


class RateLimitError(Exception):
    """As client libraries raise it."""

    def __init__(self, seconds: float) -> None:
        self.response = type("Response", (), {"status_code": 429, "headers": {"retry-after": str(seconds)}})
        super().__init__("Rate limit reached")


async def test_it_waits_without_using_an_attempt_and_continues(shaft: Lineshaft) -> None:
    """R-211, R-213, R-215: its state is kept, each wait is in the history, and it continues."""
    agent = Agent("a", models=["m"])
    ran: list[str] = []
    done = asyncio.Event()

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str:
        await ctx.step("first", lambda: ran.append("first"))
        await ctx.checkpoint(len(ran))
        if len(ran) < 3:
            ran.append("limited")
            raise RateLimitError(0.2)
        done.set()
        return f"attempt {ctx.attempt}, checkpoint {ctx.last_checkpoint}"

    submitted = await shaft.submit(NewTask("t"))
    async with at_work(agent, shaft=shaft):
        task = await shaft.wait(submitted, PATIENCE)

    assert ran == ["first", "limited", "limited"]
    assert (task.result, task.attempts) == ("attempt 1, checkpoint 2", 0)
    outcomes = [past.outcome for past in await attempts(shaft, task.id)]
    assert outcomes == ["rate_limited", "rate_limited", "completed"]
    assert (await kinds(shaft, task.id)).count("task.rate_limited") == 2
    signals = [event.data async for event in shaft.events(None, kinds=["signal.slowdown"], follow=False)]
    assert [(signal["key"], signal["wait"]) for signal in signals] == [("model:m", 0.1)] * 2


@pytest.mark.parametrize(
    ("models", "claimed", "key"),
    [((), None, "*"), (("m", "n"), None, "model:m"), (("m", "n"), "n", "model:n")],
)
async def test_which_agents_slow_down(
    shaft: Lineshaft, models: tuple[str, ...], claimed: str | None, key: str
) -> None:
    """R-218: users of the claimed model, else of the agent's first one, else everyone."""
    agent = Agent("a", models=models)

    @agent.task("t")
    async def handler() -> None:
        raise RateLimitError(1000)

    task = await one(shaft, agent, "t", model_preferences=[claimed] if claimed else [])

    assert (task.status, task.attempts) == (Status.RETRYING, 0)
    (slowdown,) = (await engine_of(shaft).read.slowdowns()).items
    assert slowdown.key == key
    waits = (slowdown.until - (await attempts(shaft, task.id))[0].ended_at).total_seconds()  # type: ignore[operator]
    assert waits == pytest.approx(500, abs=1)


async def test_others_on_the_same_model_wait_and_others_go_on(shaft: Lineshaft) -> None:
    limited, same, other = (Agent(name, models=[name[-1]]) for name in ("limited m", "same m", "other n"))
    ran: list[str] = []

    @limited.task("first")
    async def first() -> None:
        raise RateLimitError(1000)

    @same.task("second")
    async def second() -> None:
        ran.append("same")

    @other.task("second")
    async def third() -> None:
        ran.append("other")

    await one(shaft, limited, "first")
    await shaft.submit(NewTask("second"))
    await drain(shaft, same)
    assert ran == []

    await drain(shaft, other)
    assert ran == ["other"]


async def test_idle_agents_poll_when_a_slowdown_is_over(shaft: Lineshaft) -> None:
    """There is no notification then; polls would come after 30 s."""
    agent = Agent("a", models=["m"])
    limited, done = asyncio.Event(), asyncio.Event()

    @agent.task("t")
    async def handler(n: int) -> None:
        if n == 1:
            limited.set()
            raise RateLimitError(1.0)
        done.set()

    async with at_work(agent, shaft=shaft):
        await shaft.submit(NewTask("t", spec={"n": 1}))
        await soon(limited)
        async for _ in shaft.events(None, kinds=["signal.slowdown"]):
            break
        await shaft.submit(NewTask("t", spec={"n": 2}))
        await asyncio.wait_for(done.wait(), PATIENCE)


async def test_after_ten_waits_it_counts(shaft: Lineshaft, connection: psycopg.Connection) -> None:
    agent = Agent("a", models=["m"])

    @agent.task("t")
    async def handler() -> None:
        raise Fail("429", "rate_limit", retry_after_sec=0.0)

    submitted = await shaft.submit(NewTask("t", max_attempts=1))
    async with at_work(agent, shaft=shaft):
        task = await shaft.wait(submitted, PATIENCE)

    assert (task.status, task.attempts) == (Status.DEAD_LETTERED, 1)
    outcomes: list[Any] = [past.outcome for past in await attempts(shaft, task.id)]
    assert outcomes == ["rate_limited"] * 10 + ["failed"]
    assert connection.execute("SELECT count(*) FROM lineshaft.breaker").fetchone() == (0,)
