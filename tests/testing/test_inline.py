"""`InlineBench`: handlers without a queue."""

import time
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from lineshaft import Agent, BudgetExceeded, Fail, Result, SignalTimeout, Snooze, SyncTaskContext, TaskContext
from lineshaft.errors import InvalidInputError, LineshaftError
from lineshaft.testing import InlineBench

agent = Agent("a")
searched: list[str] = []


@dataclass
class Notes:
    text: str


def search(prompt: str) -> list[str]:
    searched.append(prompt)
    return [prompt, prompt]


@agent.task("research", max_cost_usd=1)
async def research(ctx: TaskContext, prompt: str, fails: int = 0) -> Notes:
    found = await ctx.step("search", search, prompt)
    ctx.spend(0.25, tokens_input=10)
    ctx.progress({"found": len(found)})
    ctx.state["seen"] = ctx.attempt
    ctx.log.info("searched")
    if ctx.attempt <= fails:
        raise RuntimeError(f"attempt {ctx.attempt} of {ctx.max_attempts}")
    return Notes(" ".join([*found, *map(str, ctx.inputs.values())]))


@agent.task("count")
def count(ctx: SyncTaskContext, notes: Notes) -> Any:
    total = ctx.step("length", len, notes.text)
    ctx.checkpoint({"total": total})
    ctx.artifact("a.txt")
    ctx.check_cancelled()
    return Result(total, artifacts=["b.txt"])


@agent.task("odd")
async def odd(ctx: TaskContext, what: str) -> object:
    match what:
        case "snooze":
            return Snooze(1)
        case "fail":
            raise Fail("no", "auth_failure")
        case "spawn":
            return await ctx.spawn("more", [count.new(Notes("x"))])
        case "expensive":
            ctx.spend(5)
        case _:
            return {1, 2}.__iter__()
    return None


async def test_a_handler_runs_as_an_agent_runs_it(inline_bench: InlineBench) -> None:
    assert await inline_bench.run(research, prompt="gears") == Notes("gears gears")
    assert inline_bench.spent_usd == Decimal("0.25")
    assert inline_bench.steps == {"search": ["gears", "gears"]}
    assert inline_bench.progress == [{"found": 2}]

    with_inputs = InlineBench(inputs={"x": 7}, model="large", max_cost_usd=0.1)
    with pytest.raises(BudgetExceeded, match=r"may cost 0\.1 USD and has cost 0\.25 USD"):
        await with_inputs.run(research, prompt="belts")


def test_without_an_event_loop() -> None:
    bench = InlineBench(inputs={"x": 7})
    assert bench.run_sync(research, "x") == Notes("x x 7")
    other = InlineBench()
    assert other.run_sync(count, Notes("abc")) == 3
    assert (other.checkpoint, other.artifacts, other.steps) == (
        {"total": 3},
        ["a.txt", "b.txt"],
        {"length": 3},
    )


async def test_the_next_run_is_the_next_attempt() -> None:
    """The exception of the handler is raised as it is, and recorded steps don't run again."""
    searched.clear()
    bench = InlineBench()
    for attempt in (1, 2):
        with pytest.raises(RuntimeError, match=f"attempt {attempt} of 3"):
            await bench.run(research, "gears", fails=2)
        assert bench.checkpoint == {"seen": attempt}
    assert await bench.run(research, "gears", fails=2) == Notes("gears gears")
    assert searched == ["gears"]
    assert bench.spent_usd == Decimal("0.75")


async def test_what_has_no_output_raises() -> None:
    with pytest.raises(Snooze):
        await InlineBench().run(odd, "snooze")
    with pytest.raises(Fail) as failed:
        await InlineBench().run(odd, "fail")
    assert failed.value.category == "auth_failure"
    with pytest.raises(Fail, match="output can't be stored as JSON") as unstorable:
        await InlineBench().run(odd, "other")
    assert unstorable.value.category == "invalid_output"
    with pytest.raises(LineshaftError, match="Test this handler with a Workbench"):
        await InlineBench().run(odd, "spawn")
    bench = InlineBench(max_cost_usd=1)
    with pytest.raises(BudgetExceeded):
        await bench.run(odd, "expensive")
    assert bench.spent_usd == 5
    with pytest.raises(InvalidInputError, match="Expected `str`, got `int`"):
        await InlineBench().run(research, prompt=1)  # type: ignore[arg-type]


def test_a_run_takes_far_less_than_50_ms() -> None:
    bench = InlineBench()
    bench.run_sync(research, "x")
    began = time.process_time()
    for _ in range(20):
        InlineBench().run_sync(research, "x")
    assert (time.process_time() - began) / 20 < 0.05


@agent.task("patient")
async def patient(ctx: TaskContext) -> Any:
    await ctx.sleep("cool-down", timedelta(days=2))
    try:
        late = await ctx.wait_for("late", timeout=timedelta(days=1))
    except TimeoutError:
        late = "too late"
    return [late, await ctx.wait_for("approved")]


@agent.task("patient thread")
def patient_thread(ctx: SyncTaskContext) -> Any:
    ctx.sleep("cool-down", 60)
    return ctx.wait_for("approved", timeout=60)


async def test_time_passes_at_once_and_signals_are_sent_before() -> None:
    bench = InlineBench()
    with pytest.raises(LineshaftError, match=r"bench\.signal\('approved', DATA\)"):
        await bench.run(patient)
    bench.signal("approved", {"by": "ann"})
    bench.signal("late", "comes after the timeout was recorded")

    assert await bench.run(patient) == ["too late", {"by": "ann"}]
    assert list(bench.steps) == ["cool-down", "late", "approved"]


def test_a_thread_waits_too() -> None:
    bench = InlineBench()
    bench.signal("approved", 1)
    assert bench.run_sync(patient_thread) == 1
    with pytest.raises(SignalTimeout, match="No signal came"):
        InlineBench().run_sync(patient_thread)
