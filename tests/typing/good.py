"""Programs that type checkers accept, with the types that they infer. Checked, never run."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

from lineshaft import (
    Agent,
    Child,
    Dag,
    DagHandle,
    Lineshaft,
    NewTask,
    Page,
    Resolution,
    Result,
    RetrySpec,
    Snooze,
    Status,
    SyncLineshaft,
    SyncTaskContext,
    SyncTaskHandle,
    Task,
    TaskContext,
    TaskFailed,
    TaskHandle,
    TaskType,
    TypedTask,
    Why,
)

agent = Agent("coder-1", capabilities=["python"], budget_usd=45, grace_sec=timedelta(seconds=10))


@dataclass
class Notes:
    text: str


@agent.task("research", max_cost_usd=0.50, retry=RetrySpec(jitter=False), max_duration_sec=timedelta(hours=1))
async def research(ctx: TaskContext, prompt: str, depth: int = 1) -> Notes:
    assert_type(await ctx.step("search", search, prompt, depth=depth), list[str])
    assert_type(await ctx.step("length", len, prompt), int)
    assert_type(await ctx.step("again", search, prompt, depth=depth, on_change="rerun"), list[str])
    assert_type(await ctx.step("keyed", len, prompt, key=["v1", depth]), int)
    assert_type(await ctx.spawn("more", [count.new(numbers=[1])], wait=True), list[Child])
    return Notes(prompt)


async def search(prompt: str, *, depth: int) -> list[str]:
    return [prompt] * depth


@agent.task("count", concurrency=2, time_limit_sec=timedelta(minutes=1))
def count(ctx: SyncTaskContext, numbers: list[int]) -> int:
    assert_type(ctx.step("sum", sum, numbers), int)
    assert_type(ctx.step("sum again", sum, numbers, key=1, on_change="reuse"), int)
    return len(numbers)


@agent.task("implement")
async def implement(ctx: TaskContext, notes: Notes, more: list[Notes] | None = None) -> str:
    assert_type(ctx.inputs, dict[str, Any])
    return notes.text


@agent.task("bare")
async def bare(name: str) -> None: ...


@agent.task("plain")
def plain() -> dict[str, int]:
    return {}


@agent.task("whole")
def whole(ctx: SyncTaskContext) -> Result:
    return Result(ctx.spec, artifacts=["a"])


def needs(kind: TaskType[[str, int], Notes]) -> TypedTask[Notes]:
    return kind.new("x", 1)


async def called(ctx: TaskContext, sync: SyncTaskContext) -> None:
    assert_type(await research(ctx, "x"), Notes)
    assert_type(count(sync, [1]), int)
    assert_type(plain(), dict[str, int])


async def submitted(shaft: Lineshaft) -> None:
    handle = await shaft.submit(research.new(prompt="competitors"), priority=10)
    assert_type(handle, TaskHandle[Notes])
    assert_type(await handle.result(timeout=60), Notes)
    assert_type(await handle.result(timedelta(minutes=1)), Notes)
    assert_type(await handle.task(), Task)
    assert_type(await handle.status(), Status)
    assert_type(await handle.cancel(), Task)
    assert_type(await handle.why(), Why)
    assert_type((handle.id, handle.duplicate), tuple[str, bool])
    options = research.new("x", depth=2).with_options(key="r", depends_on=["a"], max_duration_sec=5)
    assert_type(options, TypedTask[Notes])
    assert_type(await (await shaft.submit(count.new(numbers=[1]), delay=60)).result(), int)
    assert_type(await (await shaft.submit(bare.new(name="x"))).result(), None)
    assert_type(await (await shaft.submit(plain.new())).result(), dict[str, int])
    assert_type(await (await shaft.submit(NewTask("elsewhere"))).result(), Any)
    assert_type(await shaft.submit_many([count.new(numbers=[n]) for n in range(3)]), list[TaskHandle[int]])
    assert_type(await shaft.submit_many([NewTask("a"), NewTask("b")]), list[TaskHandle[Any]])


async def dags(shaft: Lineshaft) -> None:
    dag = await shaft.submit_dag(
        "Landing page",
        [
            research.new(prompt="competitors").with_options(key="research"),
            NewTask("implement", key="implement", depends_on=["research"]),
        ],
        budget_ceiling_usd=2,
    )
    assert_type(dag, DagHandle)
    assert_type(dag["research"], TaskHandle[Any])
    assert_type(await dag.wait(60), Dag)
    assert_type(await shaft.wait(dag), Dag)
    assert_type(await shaft.wait(dag["research"], timedelta(seconds=1)), Task)
    assert_type(await shaft.get(dag["research"]), Task)


async def inputs(shaft: Lineshaft, sync: SyncLineshaft) -> None:
    notes = research.new(prompt="competitors").with_options(key="research")
    handle = await shaft.submit(research.new("x"))
    assert_type(notes.as_input(), Notes)
    assert_type(implement.new(notes=notes.as_input(), more=[handle.as_input()]), TypedTask[str])
    implement.new(sync.submit(research.new("x")).as_input())
    NewTask("elsewhere", inputs={"notes": "research", "more": ["a", "b"]})
    notes.with_options(inputs={"a": "b"})


async def failures(handle: TaskHandle[Notes], dag: DagHandle) -> None:
    try:
        assert_type(await dag.result(timeout=60), dict[str, Any])
        await handle.result()
    except TaskFailed as failed:
        assert_type((failed.task_id, failed.attempts), tuple[str, int])
        assert_type((failed.error, failed.traceback), tuple[str | None, str | None])


async def read(shaft: Lineshaft) -> None:
    assert_type(await shaft.list(status="READY", type=["a", "b"]), Page[Task])
    assert_type(await shaft.resolve("task_1", Resolution.RETRY, reviewer="ann"), Task)


def blocking(shaft: SyncLineshaft) -> None:
    handle = shaft.submit(research.new(prompt="x"), tags=["t"])
    assert_type(handle, SyncTaskHandle[Notes])
    assert_type(handle.result(60), Notes)
    assert_type(shaft.submit(NewTask("x")).result(), Any)
    assert_type(shaft.submit_many([count.new(numbers=[])])[0].result(), int)
    assert_type(shaft.submit_dag("x", [])["a"].status(), Status)
    assert_type(shaft.get(handle), Task)


async def running(shaft: Lineshaft) -> None:
    await agent.run(shaft, until_idle=True, retries_within_sec=timedelta(seconds=1), optimize=True)
    raise Snooze(timedelta(hours=1))
