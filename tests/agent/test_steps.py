"""Durable steps: once, remembered, the same on every replay."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from lineshaft import Agent, Lineshaft, NewTask, SyncTaskContext, TaskContext
from lineshaft.model.states import Status
from tests.agent.helpers import AT_ONCE, attempts, drain, engine_of, one, result, soon, until


class Once:
    """Counts what ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __call__(self, name: str) -> str:
        self.ran.append(name)
        return name.upper()

    async def slowly(self, name: str) -> str:
        await asyncio.sleep(0)
        return self(name)


@pytest.mark.parametrize("style", ["async", "sync"])
async def test_a_recorded_step_does_not_run_again(shaft: Lineshaft, style: str) -> None:
    once = Once()
    agent = Agent("a")

    @agent.task("async")
    async def asynchronous(ctx: TaskContext) -> list[str]:
        first = await ctx.step("first", once.slowly, "a")
        second = await ctx.step("second", once, "b")
        if ctx.attempt == 1:
            raise RuntimeError("half way")
        return [first, second, await ctx.step("third", once.slowly, name="c")]

    @agent.task("sync")
    def synchronous(ctx: SyncTaskContext) -> list[str]:
        first = ctx.step("first", once, "a")
        second: Any = ctx.step("second", once.slowly, "b")
        if ctx.attempt == 1:
            raise RuntimeError("half way")
        return [first, second, ctx.step("third", once, name="c")]

    assert await result(shaft, agent, style, retry=AT_ONCE) == ["A", "B", "C"]
    assert once.ran == ["a", "b", "c"]


async def test_the_same_step_twice_in_one_run_is_one_step(shaft: Lineshaft) -> None:
    once = Once()
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> list[str]:
        together = await asyncio.gather(*(ctx.step("s", once.slowly, "a") for _ in range(3)))
        return [*together, await ctx.step("s", once.slowly, "a")]

    assert await result(shaft, agent, "t") == ["A"] * 4
    assert once.ran == ["a"]


@pytest.mark.database_only
async def test_a_step_whose_result_is_being_written_does_not_run_again(
    shaft: Lineshaft, dsn: str, connection: psycopg.Connection
) -> None:
    """The handler stops waiting and tries again: it gets the first result."""
    once = Once()
    agent = Agent("a")
    over = asyncio.Event()
    locked = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"

    async def is_being_written() -> bool:
        return connection.execute(locked).rowcount > 0

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str:
        first = asyncio.create_task(ctx.step("pay", once.slowly, "a"))
        await until(is_being_written)
        first.cancel()
        await asyncio.wait({first})
        again = asyncio.create_task(ctx.step("pay", once.slowly, "a"))
        await asyncio.sleep(0)
        over.set()
        return await again

    async with await psycopg.AsyncConnection.connect(dsn) as other:
        await other.execute("LOCK TABLE lineshaft.step IN EXCLUSIVE MODE")
        working = asyncio.create_task(result(shaft, agent, "t"))
        await soon(over)
        await other.rollback()
        assert await working == "A"
    assert once.ran == ["a"]


async def test_a_name_used_twice_is_refused(shaft: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> list[str]:
        return [await ctx.step("search", str.upper, query) for query in ("a", "b")]

    task = await one(shaft, agent, "t", max_attempts=1)

    assert "Step 'search' was called with other arguments before" in (task.failure_reason or "")


@pytest.mark.parametrize("style", ["async", "sync"])
async def test_a_step_inside_of_itself_is_refused(shaft: Lineshaft, style: str) -> None:
    """Also with a step in between. It would wait for itself."""
    agent = Agent("a")

    @agent.task("async")
    async def asynchronous(ctx: TaskContext) -> Any:
        async def research() -> Any:
            return await ctx.step("deeper", deeper)

        async def deeper() -> Any:
            return await ctx.step("research", research)

        async with asyncio.timeout(60):
            return await ctx.step("research", research)

    @agent.task("sync")
    def synchronous(ctx: SyncTaskContext) -> Any:
        def research() -> Any:
            return ctx.step("deeper", deeper)

        def deeper() -> Any:
            return ctx.step("research", research)

        return ctx.step("research", research)

    task = await one(shaft, agent, style, max_attempts=1)

    assert "Step 'research' was called inside of step 'research'" in (task.failure_reason or "")


async def test_a_failed_step_runs_again(shaft: Lineshaft) -> None:
    agent = Agent("a")
    calls: list[int] = []

    @agent.task("t")
    async def handler(ctx: TaskContext) -> int:
        async def flaky() -> int:
            calls.append(ctx.attempt)
            if ctx.attempt == 1:
                raise ConnectionError
            return ctx.attempt

        return await ctx.step("flaky", flaky)

    assert await result(shaft, agent, "t", retry=AT_ONCE) == 2
    assert calls == [1, 2]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", ["step", "checkpoint", "spawn"])
async def test_an_asynchronous_step_of_a_plain_handler_may_not_use_the_context(
    shaft: Lineshaft, method: str
) -> None:
    """It runs in the agent's event loop, which would hang."""
    once = Once()
    agent = Agent("a")

    @agent.task("t")
    def handler(ctx: SyncTaskContext) -> Any:
        calls: dict[str, Callable[[], object]] = {
            "step": lambda: ctx.step("inner", once, "a"),
            "checkpoint": lambda: ctx.checkpoint(1),
            "spawn": lambda: ctx.spawn("children", [NewTask("child")]),
        }

        async def fetch() -> None:
            calls[method]()

        return ctx.step("outer", fetch)

    task = await one(shaft, agent, "t", max_attempts=1)

    assert f"ctx.{method} was called in the agent's event loop" in (task.failure_reason or "")
    assert once.ran == []


@dataclass
class Draft:
    title: str
    words: list[str]


async def test_the_first_run_sees_what_a_replay_will_see(shaft: Lineshaft) -> None:
    """The result has passed through JSON, and has the annotated type."""
    agent = Agent("a")
    seen: list[Any] = []

    def draft() -> Draft:
        return Draft("t", ["a"])

    def pair() -> Any:
        return (1, {"x": None})

    def anything() -> object:
        return {"x": 1}

    def later() -> Awaitable[Draft]:
        return asyncio.sleep(0, draft())

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        seen.append([await ctx.step(step.__name__, step) for step in (draft, pair, anything, later)])
        if ctx.attempt == 1:
            raise RuntimeError

    await result(shaft, agent, "t", retry=AT_ONCE)

    assert seen[0] == seen[1] == [Draft("t", ["a"]), [1, {"x": None}], {"x": 1}, Draft("t", ["a"])]


@pytest.mark.parametrize("name", ["", "spawn:x", "x" * 501])
async def test_invalid_names_are_refused(shaft: Lineshaft, name: str) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        await ctx.step(name, str)

    assert (await one(shaft, agent, "t", max_attempts=1)).failure_category == "error"


async def test_a_result_that_cannot_be_stored(shaft: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        await ctx.step("s", object)

    task = await one(shaft, agent, "t", max_attempts=1)

    assert task.failure_category == "invalid_output"
    assert "step 's': its result can't be stored as JSON" in (task.failure_reason or "")


@pytest.mark.parametrize("style", ["async", "sync"])
async def test_checkpoints(shaft: Lineshaft, style: str) -> None:
    agent = Agent("a")
    seen: list[Any] = []

    @agent.task("async")
    async def asynchronous(ctx: TaskContext) -> None:
        seen.append(ctx.last_checkpoint)
        await ctx.checkpoint({"page": ctx.attempt})
        if ctx.attempt < 3:
            raise RuntimeError

    @agent.task("sync")
    def synchronous(ctx: SyncTaskContext) -> None:
        seen.append(ctx.last_checkpoint)
        ctx.checkpoint({"page": ctx.attempt})
        if ctx.attempt < 3:
            raise RuntimeError

    await result(shaft, agent, style, retry=AT_ONCE)

    assert seen == [None, {"page": 1}, {"page": 2}]


async def test_every_attempt_gets_the_earlier_errors(shaft: Lineshaft) -> None:
    agent = Agent("a")
    seen: list[Any] = []

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        earlier = [(past.number, past.outcome, past.category, past.error) for past in ctx.previous_attempts]
        seen.append((ctx.attempt, earlier, ctx.last_error and ctx.last_error.error))
        if ctx.attempt == 1:
            raise ValueError("not a number")
        if ctx.attempt == 2:
            raise TimeoutError("too slow")

    await result(shaft, agent, "t", retry=AT_ONCE)

    first = (1, "failed", "error", "ValueError: not a number")
    second = (2, "failed", "timeout", "TimeoutError: too slow")
    assert seen == [
        (1, [], None),
        (2, [first], "ValueError: not a number"),
        (3, [first, second], "TimeoutError: too slow"),
    ]


async def test_fallback_models_from_the_second_failure_on(shaft: Lineshaft) -> None:
    """R-117."""
    agent = Agent("a", models=["cheap", "good"])
    models: list[str | None] = []

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        models.append(ctx.model)
        if ctx.attempt < 3:
            raise RuntimeError

    await result(shaft, agent, "t", retry=AT_ONCE, model_preferences=["cheap"], fallback_models=["good"])

    assert models == ["cheap", "cheap", "good"]


async def test_a_lost_claim_records_nothing(shaft: Lineshaft, connection: psycopg.Connection) -> None:
    """Fencing: a step of a superseded claim is refused, and the handler doesn't go on."""
    agent = Agent("a")
    went_on = False

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        nonlocal went_on
        if ctx.epoch == 1:

            async def stolen() -> str:
                # Somebody takes the task away while the step runs.
                connection.execute(
                    "UPDATE lineshaft.task_live SET lease_until = now() - interval '1 s' WHERE id = %s",
                    [ctx.id],
                )
                await engine_of(shaft).maintenance.reap(10)
                return "zombie"

            await ctx.step("s", stolen)
            went_on = True
        assert await ctx.step("s", lambda: "second") == "second"

    task = await one(shaft, agent, "t", retry=AT_ONCE)

    assert (task.status, went_on) == (Status.COMPLETED, False)
    assert [past.outcome for past in await attempts(shaft, task.id)] == ["failed", "completed"]


async def test_the_cost_of_a_step_is_stored_with_it(shaft: Lineshaft, connection: psycopg.Connection) -> None:
    agent = Agent("a")

    def threaded(ctx: TaskContext) -> None:
        ctx.spend(0.25)

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        async def paid() -> None:
            ctx.spend(Decimal("1.10"))
            await ctx.step("inner", lambda: ctx.spend(0.05))

        await ctx.step("outer", paid)
        await ctx.step("thread", threaded, ctx)
        ctx.spend(0.01)
        if ctx.attempt == 1:
            raise RuntimeError

    task = await one(shaft, agent, "t", retry=AT_ONCE)

    costs: dict[str, Decimal] = dict(
        connection.execute("SELECT name, cost_usd FROM lineshaft.step").fetchall()
    )
    assert costs == {"inner": Decimal("0.05"), "outer": Decimal("1.10"), "thread": Decimal("0.25")}
    # Steps are charged once, what is outside of them each time.
    assert task.cost_usd == Decimal("1.42")
    assert [past.cost_usd for past in await attempts(shaft, task.id)] == [Decimal("1.41"), Decimal("0.01")]


async def test_a_drain_leaves_nothing_behind(shaft: Lineshaft) -> None:
    agent = Agent("a")
    agent.task("t")(lambda: None)
    await shaft.submit_many([NewTask("t") for _ in range(50)])

    await drain(shaft, agent)

    assert (await shaft.list(status="READY")).items == []
    assert (await engine_of(shaft).fleet.read("a")).status == "offline"
