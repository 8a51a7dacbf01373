"""`ctx.sleep` and `ctx.wait_for`: durable, without a slot, on any agent, over both transports."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from lineshaft import Agent, Fail, Lineshaft, NewTask, Status, SyncTaskContext, TaskContext
from lineshaft.errors import InvalidTransitionError
from tests.agent.commands import Commands, commands_in
from tests.agent.helpers import AT_ONCE, at_work, attempts, drain, ended, engine_of, one, until

DAYS = timedelta(days=2)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as made:
        yield made


async def let_time_pass(shaft: Lineshaft, dsn: str, task_id: str) -> None:
    """All waits of the task end now."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("UPDATE lineshaft.wait SET until = now() WHERE task_id = %s", [task_id])
        connection.execute("UPDATE lineshaft.task_live SET due_at = now() WHERE id = %s", [task_id])
    await engine_of(shaft).maintenance.promote_due(10)


@pytest.mark.parametrize("style", ["async", "sync"])
async def test_a_handler_sleeps_and_goes_on_elsewhere(shaft: Lineshaft, dsn: str, style: str) -> None:
    """Steps before the sleep don't run again; `ctx.state` is kept; no attempt is used."""
    steps: list[str] = []

    def agent(name: str) -> Agent:
        agent = Agent(name, max_concurrent_tasks=1)

        @agent.task("async")
        async def asynchronous(ctx: TaskContext) -> Any:
            await ctx.step("before", lambda: steps.append(name))
            ctx.state["seen"] = name if ctx.attempt == 1 and not ctx.resume else ctx.state["seen"]
            await ctx.sleep("cool-down", DAYS)
            await ctx.sleep("no time", 0)
            return [name, ctx.state["seen"], ctx.attempt]

        @agent.task("sync")
        def synchronous(ctx: SyncTaskContext) -> Any:
            ctx.step("before", lambda: steps.append(name))
            ctx.state["seen"] = name if ctx.attempt == 1 and not ctx.resume else ctx.state["seen"]
            ctx.sleep("cool-down", DAYS)
            ctx.sleep("no time", 0)
            return [name, ctx.state["seen"], ctx.attempt]

        return agent

    task = await one(shaft, agent("first"), style)
    assert task.status is Status.PENDING
    assert [reason.code for reason in (await shaft.why(task)).reasons] == ["sleeping"]
    await let_time_pass(shaft, dsn, task.id)
    await drain(shaft, agent("second"))

    task = await shaft.get(task)
    assert (task.result, task.attempts, steps) == (["second", "first", 1], 0, ["first"])
    assert [past.outcome for past in await attempts(shaft, task.id)] == ["waiting", "completed"]


@pytest.mark.parametrize("style", ["async", "sync"])
async def test_a_handler_waits_for_a_signal(shaft: Lineshaft, style: str) -> None:
    """One that came before is received at once, a later one wakes the task; each is received once."""
    agent = Agent("a")
    runs: list[int] = []

    @agent.task("async")
    async def asynchronous(ctx: TaskContext) -> Any:
        runs.append(ctx.epoch)
        first = await ctx.wait_for("item 1", signal="item")
        second = await ctx.wait_for("item 2", signal="item", timeout=DAYS)
        return [first, second, await ctx.wait_for("approved")]

    @agent.task("sync")
    def synchronous(ctx: SyncTaskContext) -> Any:
        runs.append(ctx.epoch)
        first = ctx.wait_for("item 1", signal="item")
        second = ctx.wait_for("item 2", signal="item", timeout=DAYS)
        return [first, second, ctx.wait_for("approved")]

    task = await shaft.submit(NewTask(style))
    await shaft.signal(task, "item", 1)
    await shaft.signal(task, "approved", {"by": "ann"}, idempotency_key="k")
    await drain(shaft, agent)
    (reason,) = (await shaft.why(task)).reasons
    assert reason.code == "waiting_signal"
    assert "the signal 'item', in step 'item 2', until" in reason.detail
    async with at_work(agent, shaft=shaft):
        sent = await shaft.signal(task, "item", 2)
        done = await ended(shaft, task.id)

    assert (done.result, runs) == ([1, 2, {"by": "ann"}], [1, 2])
    assert sent.name == "item"
    assert (await shaft.signal(task, "approved", idempotency_key="k")).duplicate
    with pytest.raises(InvalidTransitionError):
        await shaft.signal(task, "approved")


async def test_a_short_sleep_needs_no_server(shaft: Lineshaft) -> None:
    """The agent's own maintenance finds out when it is due."""
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str:
        await ctx.sleep("moment", 0.3)
        return "awake"

    task = await shaft.submit(NewTask("t"))
    async with at_work(agent, shaft=shaft):
        assert (await ended(shaft, task.id)).result == "awake"


async def test_a_timeout_is_an_exception_that_stays(shaft: Lineshaft, dsn: str) -> None:
    agent = Agent("a")
    messages: list[str] = []

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str:
        try:
            await ctx.wait_for("approved", timeout=60)
        except TimeoutError as error:
            messages.append(str(error))
        if ctx.attempt == 1:
            raise RuntimeError("after the timeout")
        return "went on"

    task = await one(shaft, agent, "t", retry=AT_ONCE)
    await let_time_pass(shaft, dsn, task.id)
    await drain(shaft, agent)

    assert (await shaft.get(task)).result == "went on"
    assert messages == [messages[0]] * 2
    assert "No signal came by 20" in messages[0]
    assert f"dlq resolve {task.id} --resolution retry --forget-step approved" in messages[0]


async def test_a_timeout_without_a_handler_is_not_retried(shaft: Lineshaft) -> None:
    """The next attempt would find the same. It counts neither against the type nor as a poison pill."""
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        await ctx.wait_for("approved", timeout=0)

    task = await one(shaft, agent, "t", max_attempts=3)

    assert (task.status, task.failure_category, task.attempts) == (
        Status.DEAD_LETTERED,
        "signal_timeout",
        1,
    )
    assert [breaker.failures for breaker in (await shaft.breakers()).items] in ([], [0])


async def test_a_wait_has_a_name_of_its_own(shaft: Lineshaft) -> None:
    agent = Agent("a")
    errors: list[str] = []

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        await ctx.sleep("one", 0)
        await ctx.step("two", lambda: None)
        for name in ("one", "two"):
            with pytest.raises(ValueError, match="its own") as error:
                await ctx.sleep(name, 0)
            errors.append(str(error.value))
        with pytest.raises(ValueError, match="its own"):
            await ctx.step("one", lambda: None)
        with pytest.raises(ValueError, match="a year"):
            await ctx.sleep("three", timedelta(days=400))

    assert (await one(shaft, agent, "t")).status is Status.COMPLETED
    assert "ctx.sleep('one')" in errors[0]


async def test_a_wait_is_no_part_of_a_step(shaft: Lineshaft) -> None:
    """The step would run again after the wait."""
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str:
        with pytest.raises(RuntimeError, match="while a step runs"):
            await ctx.step("outer", ctx.sleep, "inner", 60)
        began = asyncio.Event()

        async def long() -> str:
            began.set()
            await asyncio.Event().wait()
            return "never"

        beside = asyncio.create_task(ctx.step("long", long))
        await began.wait()
        with pytest.raises(RuntimeError, match="while a step runs"):
            await ctx.wait_for("approved")
        beside.cancel()
        return "done"

    assert (await one(shaft, agent, "t")).result == "done"


async def test_a_step_that_became_a_wait_is_refused(shaft: Lineshaft) -> None:
    """After a deployment that gave another thing the same name."""
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        if ctx.attempt == 1:
            await ctx.step("approved", lambda: "yes")
            raise Fail("again")
        await ctx.wait_for("approved")

    task = await one(shaft, agent, "t", retry=AT_ONCE)
    assert (task.status, task.failure_category) == (Status.DEAD_LETTERED, "step_mismatch")


async def test_a_handler_that_swallows_the_wait_changes_nothing(shaft: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str:
        try:
            await ctx.wait_for("go")
        except BaseException:  # noqa: BLE001 - as a careless handler does
            return "too early"
        return "in time"

    task = await one(shaft, agent, "t")
    assert task.status is Status.PENDING
    await shaft.signal(task, "go")
    await drain(shaft, agent)
    assert (await shaft.get(task)).result == "in time"


async def test_what_it_had_spent_is_booked_when_it_sleeps(shaft: Lineshaft) -> None:
    agent = Agent("a", budget_usd=10)

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        ctx.spend(1)
        await ctx.sleep("nap", DAYS)

    task = await one(shaft, agent, "t")
    assert task.status is Status.PENDING
    assert task.cost_usd == 1

    async def is_settled() -> bool:
        return (await shaft.agents()).items[0].spent_usd == 1

    await until(is_settled)


async def test_a_command_sleeps_and_waits(shaft: Lineshaft, dsn: str, commands: Commands) -> None:
    """It is ended, and started again when the wait is over: it asks again then, and is answered."""
    agent = commands.agent(
        """
ask '{"sleep": "nap", "seconds": 100000}' >&2
ask '{"wait_for": "late", "timeout": 0}' >&2
ask '{"wait_for": "approved", "timeout": 100000}'"""
    )
    task = await one(shaft, agent, "t")
    assert task.status is Status.PENDING
    assert [reason.code for reason in (await shaft.why(task)).reasons] == ["sleeping"]
    await let_time_pass(shaft, dsn, task.id)
    await drain(shaft, agent)
    assert [reason.code for reason in (await shaft.why(task)).reasons] == ["waiting_signal"]
    await shaft.signal(task, "approved", {"by": "ann"})
    await drain(shaft, agent)

    task = await shaft.get(task)
    assert task.result == {"wait_for": "approved", "timed_out": False, "data": {"by": "ann"}}
    assert task.attempts == 0


async def test_a_sleep_of_a_command_has_a_length(shaft: Lineshaft, commands: Commands) -> None:
    task = await one(shaft, commands.agent("""ask '{"sleep": "nap"}'"""), "t", max_attempts=1)
    assert task.failure_category == "invalid_output"
    assert "a sleep needs seconds" in (task.failure_reason or "")
