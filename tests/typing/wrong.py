"""Mistakes that type checkers must find: each line with `expect-error`, and no other. Checked, never run."""

from datetime import timedelta

from lineshaft import Agent, Lineshaft, NewTask, SyncLineshaft, SyncTaskContext, TaskContext

agent = Agent("coder-1")


@agent.task("research", max_cost_usd=0.50)
async def research(ctx: TaskContext, prompt: str, depth: int = 1) -> dict[str, int]:
    return {prompt: depth}


@agent.task("count")
def count(ctx: SyncTaskContext, numbers: list[int]) -> int:
    return sum(numbers)


def parameters() -> None:
    research.new()  # expect-error
    research.new(promt="x")  # expect-error
    research.new(prompt=1)  # expect-error
    research.new("x", "2")  # expect-error
    research.new(prompt="x", unknown=1)  # expect-error
    count.new(numbers=["a"])  # expect-error
    count.new(1)  # expect-error


@agent.task("implement")
async def implement(ctx: TaskContext, notes: dict[str, int]) -> None: ...


def inputs() -> None:
    implement.new(notes=research.new("x").as_input())
    implement.new(notes=count.new([1]).as_input())  # expect-error
    implement.new(notes=count.new([1]))  # expect-error
    NewTask("x", inputs={"notes": 1})  # expect-error


def options() -> None:
    research.new("x").with_options(priorty=1)  # expect-error
    research.new("x").with_options(priority="high")  # expect-error
    research.new("x").with_options(depends_on=1)  # expect-error
    NewTask("x").with_options(spec={})  # expect-error
    agent.task("a", max_cots_usd=1)  # expect-error
    agent.task("b", idempotency_key="k")  # expect-error
    agent.task("c", time_limit_sec="1 h")  # expect-error
    Agent("d", heartbeat_interval_sec="30")  # expect-error


async def results(shaft: Lineshaft, sync: SyncLineshaft) -> None:
    handle = await shaft.submit(research.new(prompt="x"))
    text: str = await handle.result()  # expect-error
    number: int = await (await shaft.submit(count.new(numbers=[1]))).result()
    wrong: str = await (await shaft.submit(count.new(numbers=[1]))).result()  # expect-error
    await handle.result(timeout="60")  # expect-error
    (one,) = await shaft.submit_many([count.new([1])])
    many: list[str] = [await one.result()]  # expect-error
    name: str = sync.submit(count.new([1])).result(timedelta(seconds=1))  # expect-error
    _ = (text, number, wrong, many, name)


async def calls(shaft: Lineshaft, ctx: TaskContext) -> None:
    await shaft.submit(research.new(prompt="x"), priorty=1)  # expect-error
    await shaft.submit(research.new(prompt="x"), priority="high")  # expect-error
    await shaft.submit(research.new(prompt="x"), delay="1 h")  # expect-error
    await shaft.submit("research")  # expect-error
    await shaft.resolve("task_1", "retry", reviewer="ann")  # expect-error
    await shaft.list(state="READY")  # expect-error
    await research(ctx, 1)  # expect-error
    await ctx.step("length", len, 1)  # expect-error
    await ctx.step("length", len, "", on_change="again")  # expect-error
    ctx.unsaved_state()  # expect-error
