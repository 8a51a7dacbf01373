"""Spending is written through while a handler runs, and stops it at a limit: nothing is paid twice."""

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from statistics import median

import psycopg
import pytest

from lineshaft import Agent, BudgetExceeded, Lineshaft, NewTask, SyncTaskContext, TaskContext
from lineshaft.model.states import Status
from tests.agent.agent_process import command_agent
from tests.agent.commands import ASK, Commands, commands_in
from tests.agent.helpers import AT_ONCE, at_work, engine_of, lose_claim, one, soon, until
from tests.world import decoded


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as made:
        yield made


async def test_spending_outside_a_step_raises_and_the_cost_is_there(shaft: Lineshaft) -> None:
    """R-235."""
    agent = Agent("a")
    raised: list[str] = []

    @agent.task("t")
    async def t(ctx: TaskContext) -> str:
        ctx.spend(0.6)
        with pytest.raises(BudgetExceeded) as error:
            ctx.spend(0.5, tokens_input=7)
        raised.append(str(error.value))
        raise error.value

    task = await one(shaft, agent, "t", max_cost_usd=1)

    assert raised == ["The task may cost 1 USD and has cost 1.1 USD. Raise max_cost_usd."]
    assert (task.status, task.failure_category) == (Status.DEAD_LETTERED, "budget_exceeded")
    assert (task.cost_usd, task.tokens_used.input) == (Decimal("1.1"), 7)


async def test_an_unknown_cost(shaft: Lineshaft) -> None:
    """Tokens count, and what is known beside it."""
    agent, costs = Agent("a"), list[Decimal | None]()

    @agent.task("t")
    async def t(ctx: TaskContext) -> None:
        ctx.spend(None, tokens_input=5, tokens_output=2)
        costs.append(ctx._execution.spent.cost_usd)
        ctx.spend(0.25, tokens_input=1)
        costs.append(ctx._execution.spent.cost_usd)
        ctx.spend(None, tokens_input=1)
        costs.append(ctx._execution.spent.cost_usd)

    task = await one(shaft, agent, "t")

    assert costs == [None, Decimal("0.25"), Decimal("0.25")]
    assert (task.cost_usd, task.tokens_used.input, task.tokens_used.output) == (Decimal("0.25"), 7, 2)


async def test_a_step_is_recorded_before_its_cost_raises(shaft: Lineshaft) -> None:
    """R-235: nothing raises within the step, so its result isn't paid for again."""
    agent = Agent("a")
    reached: list[str] = []

    @agent.task("t")
    async def t(ctx: TaskContext) -> None:
        def expensive() -> str:
            ctx.spend(2)
            reached.append("after spend")
            return "result"

        await ctx.step("expensive", expensive)
        reached.append("after the step")

    task = await one(shaft, agent, "t", max_cost_usd=1)

    assert reached == ["after spend"]
    assert (task.failure_category, task.cost_usd) == ("budget_exceeded", Decimal(2))
    (step,) = (await engine_of(shaft).read.steps(task.id)).values()
    assert decoded(step) == "result"


async def test_a_command_over_its_limit_is_ended(
    shaft: Lineshaft, commands: Commands, tmp_path: Path
) -> None:
    """R-235: row 4; 50 and 50 more, of 1."""
    agent = commands.agent(
        f"tell '{{\"spend\": 50}}'; sleep 1000; tell '{{\"spend\": 50}}'; touch {tmp_path}/late"
    )

    task = await one(shaft, agent, "t", max_cost_usd=1)

    assert (task.status, task.failure_category) == (Status.DEAD_LETTERED, "budget_exceeded")
    assert (task.cost_usd, task.disputed_usd) == (Decimal(10), Decimal(40))
    assert not (tmp_path / "late").exists()


async def test_a_commands_step_is_recorded_before_its_cost_ends_it(
    shaft: Lineshaft, commands: Commands
) -> None:
    agent = commands.agent("""tell '{"step": "expensive", "result": "kept", "spend": 2}'; sleep 1000""")

    task = await one(shaft, agent, "t", max_cost_usd=1)

    assert (task.failure_category, task.cost_usd) == ("budget_exceeded", Decimal(2))
    (step,) = (await engine_of(shaft).read.steps(task.id)).values()
    assert decoded(step) == "kept"


@pytest.mark.parametrize("kind", ["coroutine", "command"])
async def test_an_attempt_over_its_agents_budget_is_released(
    shaft: Lineshaft, commands: Commands, kind: str
) -> None:
    """R-231: the answer to the heartbeat stops it; no attempt is used, and the task waits for money."""
    agent = Agent("a", budget_usd=1)
    if kind == "command":
        agent.task("t")(commands.script("tell '{\"spend\": 5}'; sleep 1000"))
    else:

        @agent.task("t")
        async def t(ctx: TaskContext) -> None:
            ctx.spend(5)
            await asyncio.Event().wait()

    async with at_work(agent, shaft=shaft):
        task_id = (await shaft.submit(NewTask("t"))).id

        async def released() -> bool:
            return [past.outcome for past in await engine_of(shaft).read.attempts(task_id)] == ["released"]

        await until(released)

    task = await shaft.get(task_id)
    assert (task.status, task.attempts, task.cost_usd) == (Status.READY, 0, Decimal(5))


async def test_spending_is_visible_within_a_second(shaft: Lineshaft) -> None:
    """R-230: with heartbeats every 30 seconds; the agent shows it while the task runs."""
    agent = Agent("a", heartbeat_interval_sec=30)
    go, spent = asyncio.Event(), asyncio.Event()

    @agent.task("t")
    async def t(ctx: TaskContext) -> None:
        ctx.spend(0.26, tokens_input=11, tokens_output=3)
        spent.set()
        await soon(go)

    async with at_work(agent, shaft=shaft):
        task_id = (await shaft.submit(NewTask("t"))).id
        await soon(spent)
        since = asyncio.get_running_loop().time()

        async def shown() -> bool:
            return (await engine_of(shaft).fleet.read("a")).spent_usd == Decimal("0.26")

        await until(shown)
        took = asyncio.get_running_loop().time() - since
        task = await shaft.get(task_id)
        go.set()
        await shaft.wait(task_id, 60)

    assert (task.status, task.cost_usd) == (Status.RUNNING, Decimal("0.26"))
    assert (task.tokens_used.input, task.tokens_used.output) == (11, 3)
    assert took < 10, "not with the next heartbeat"


@pytest.mark.slow("starts an agent again and again")
async def test_an_exec_agent_that_is_killed_again_and_again_has_spent_it(
    shaft: Lineshaft, where: str, tmp_path: Path, connection: psycopg.Connection
) -> None:
    """R-024, R-238: row 3; each kill costs 0.90, and 1.50 in all are allowed."""
    engine = engine_of(shaft)
    task_id = (await shaft.submit(NewTask("t", max_total_cost_usd=1.5, max_attempts=9, retry=AT_ONCE))).id
    kills = 0
    while (await shaft.get(task_id)).status is not Status.DEAD_LETTERED:
        assert kills < 3
        script = f"{ASK}\ntell '{{\"spend\": 0.9}}'; exec sleep 1000"
        async with command_agent(where, tmp_path, script, "--budget", "2") as agent:
            before = Decimal("0.9") * kills

            async def written(before: Decimal = before) -> bool:
                return (await shaft.get(task_id)).cost_usd == before + Decimal("0.9")

            await until(written)
            await agent.kill()
        kills += 1
        await lose_claim(shaft, connection, task_id)
        await engine.maintenance.promote_due(10)

    task = await shaft.get(task_id)
    assert (kills, task.cost_usd, task.failure_category) == (2, Decimal("1.8"), "budget_exceeded")
    assert (await engine.fleet.read("a")).spent_usd == Decimal("1.8")


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
@pytest.mark.parametrize("end", ["cancelled", "lost"])
async def test_what_is_spent_after_the_end_of_the_claim_is_booked(
    shaft: Lineshaft, connection: psycopg.Connection, kind: str, end: str
) -> None:
    """R-024: the agent knows that the claim is over and writes no outcome; it stops a moment later."""
    agent = Agent("a")
    here, running, spent = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    if kind == "coroutine":

        @agent.task("t")
        async def in_event_loop(ctx: TaskContext) -> None:
            running.set()
            try:
                while True:
                    ctx.progress("which makes it send a heartbeat")
                    await asyncio.sleep(0.1)
            finally:
                ctx.spend(0.7, tokens_input=3)
                spent.set()

    else:

        @agent.task("t")
        def in_thread(ctx: SyncTaskContext) -> None:
            here.call_soon_threadsafe(running.set)
            while not ctx.cancelled:
                ctx.progress("which makes it send a heartbeat")
                time.sleep(0.1)
            ctx.spend(0.7, tokens_input=3)
            here.call_soon_threadsafe(spent.set)

    async with at_work(agent, shaft=shaft):
        task_id = (await shaft.submit(NewTask("t", max_attempts=1))).id
        await soon(running)
        if end == "cancelled":
            await shaft.cancel(task_id)
        else:
            await lose_claim(shaft, connection, task_id)
        await soon(spent)

    task = await shaft.get(task_id)
    assert task.status is (Status.CANCELLED if end == "cancelled" else Status.DEAD_LETTERED)
    assert (task.cost_usd, task.tokens_used.input) == (Decimal("0.7"), 3)
    assert (await engine_of(shaft).fleet.read("a")).spent_usd == Decimal("0.7")


SPENDER = """
import asyncio, sys, time
from lineshaft import Agent, Lineshaft

agent = Agent("spender", heartbeat_interval_sec=30)

@agent.task(sys.argv[2])
async def t(ctx):
    while True:
        ctx.spend(0.01, tokens_input=1)
        print(time.monotonic(), ctx.spent_usd, flush=True)
        await asyncio.sleep(0.02)

async def main():
    async with Lineshaft(sys.argv[1], max_connections=2) as shaft:
        await agent.run(shaft)

asyncio.run(main())
"""


@pytest.mark.slow("kills fifteen processes")
@pytest.mark.timeout(1200)
async def test_a_killed_agent_has_reported_all_but_the_last_second(
    shaft: Lineshaft, where: str, connection: psycopg.Connection
) -> None:
    """R-024: many times, at different moments."""
    engine = engine_of(shaft)
    lost: list[float] = []
    task_ids: list[str] = []
    for number in range(15):
        # A type of its own: lost processes open the breaker of a type.
        task_id = (await shaft.submit(NewTask(f"t{number}", max_attempts=1))).id
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SPENDER, where, f"t{number}", stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        said: list[tuple[float, Decimal]] = []
        try:
            while not said or said[-1][1] < Decimal("0.5") + Decimal("0.035") * number:
                line = await asyncio.wait_for(process.stdout.readline(), 60)
                when, spent = line.split()
                said.append((float(when), Decimal(spent.decode())))
        finally:
            process.send_signal(signal.SIGKILL)
            rest = await process.stdout.read()
            await process.wait()
        said += [
            (float(line.split()[0]), Decimal(line.split()[1].decode()))
            for line in rest.splitlines(True)
            if line.endswith(b"\n")
        ]
        await lose_claim(shaft, connection, task_id)
        task = await shaft.get(task_id)
        task_ids.append(task_id)
        assert task.status is Status.DEAD_LETTERED
        assert task.tokens_used.input == task.cost_usd * 100, "tokens come with their cost"
        missing = [when for when, spent in said if spent > task.cost_usd]
        lost.append(said[-1][0] - missing[0] if missing else 0.0)

    # The machine may be busy for a moment; that is less than the 30 s between two heartbeats.
    assert median(lost) < 1, sorted(lost)
    assert max(lost) < 20, sorted(lost)

    # A last heartbeat may still be on its way when its sender is dead.
    async def is_booked() -> bool:
        tasks = [await shaft.get(each) for each in task_ids]
        agent = await engine.fleet.read("spender")
        return agent.spent_usd == sum(task.cost_usd for task in tasks)

    await until(is_booked)
