"""Spawning: once for each key, however often the handler is replayed; outputs handed back (R-145)."""

from typing import Any

import pytest

from lineshaft import Agent, Lineshaft, NewTask, SyncTaskContext, TaskContext
from lineshaft.model.states import Status
from tests.agent.helpers import AT_ONCE, drain, engine_of, kinds, one, result


def worker(**options: Any) -> Agent:
    agent = Agent("a", **options)

    @agent.task("double")
    async def double(n: int) -> int:
        if n < 0:
            raise ValueError("no negative numbers")
        return 2 * n

    return agent


def children(numbers: list[int], **fields: Any) -> list[NewTask]:
    return [NewTask("double", spec={"n": n}, **fields) for n in numbers]


@pytest.mark.parametrize("style", ["async", "sync"])
async def test_a_parent_waits_and_gets_the_outputs(shaft: Lineshaft, style: str) -> None:
    """With one slot: a waiting parent frees it."""
    agent = worker(max_concurrent_tasks=1)
    runs: list[int] = []

    @agent.task("async")
    async def asynchronous(ctx: TaskContext) -> list[Any]:
        runs.append(ctx.attempt)
        first = await ctx.spawn("first", children([1, 2]), wait=True)
        second = await ctx.spawn("second", children([first[1].output]), wait=True)
        return [child.output for child in [*first, *second]]

    @agent.task("sync")
    def synchronous(ctx: SyncTaskContext) -> list[Any]:
        runs.append(ctx.attempt)
        first = ctx.spawn("first", children([1, 2]), wait=True)
        second = ctx.spawn("second", children([first[1].output]), wait=True)
        return [child.output for child in [*first, *second]]

    task = await one(shaft, agent, style)

    assert task.result == [2, 4, 8]
    # Waiting used no attempt, and the parent ran once for each wait and once more.
    assert (runs, task.attempts) == ([1, 1, 1], 0)
    assert [kind for kind in await kinds(shaft, task.id) if kind == "task.waiting"] == ["task.waiting"] * 2
    spawned = await shaft.list(parent_id=task.id)
    assert len(spawned.items) == 3
    assert {child.dag_id for child in spawned.items} == {task.dag_id}


async def test_the_failure_of_a_child_may_be_ignored(shaft: Lineshaft) -> None:
    """The dead letter stays, and its DAG completes."""
    agent = worker()

    @agent.task("parent")
    async def parent(ctx: TaskContext) -> list[str]:
        options = {"on_failure": "ignore", "max_attempts": 1}
        return [child.status for child in await ctx.spawn("all", children([-1, 1], **options), wait=True)]

    task = await one(shaft, agent, "parent")

    assert task.result == ["DEAD_LETTERED", "COMPLETED"]
    assert (await shaft.get_dag(task.dag_id)).status == "completed"


async def test_fire_and_forget_happens_once(shaft: Lineshaft) -> None:
    agent = worker()
    seen: list[list[str]] = []

    @agent.task("parent")
    async def parent(ctx: TaskContext) -> None:
        seen.append([child.id for child in await ctx.spawn("more", children([1, 2]))])
        seen.append([child.id for child in await ctx.spawn("more", children([1, 2]))])
        if ctx.attempt == 1:
            raise RuntimeError("after the children were made")

    task = await one(shaft, agent, "parent", retry=AT_ONCE)

    assert task.status is Status.COMPLETED
    assert len(seen) == 4
    assert seen == [seen[0]] * 4
    assert {child.id for child in (await shaft.list(parent_id=task.id)).items} == set(seen[0])


async def test_children_that_fail_are_reported(shaft: Lineshaft) -> None:
    agent = worker()

    @agent.task("parent")
    async def parent(ctx: TaskContext) -> Any:
        return await ctx.spawn("kids", children([1, -1], max_attempts=1), wait=True)

    output = await result(shaft, agent, "parent")

    assert [(child["status"], child["output"]) for child in output] == [
        ("COMPLETED", 2),
        ("DEAD_LETTERED", None),
    ]


async def test_children_created_first_and_awaited_later(shaft: Lineshaft) -> None:
    agent = worker()

    @agent.task("parent")
    async def parent(ctx: TaskContext) -> Any:
        await ctx.spawn("kids", children([3]))
        await ctx.step("between", lambda: None)
        return [child.output for child in await ctx.spawn("kids", children([3]), wait=True)]

    assert await result(shaft, agent, "parent") == [6]


async def test_a_parent_that_swallows_the_pause_changes_nothing(shaft: Lineshaft) -> None:
    agent = worker()

    @agent.task("parent")
    async def parent(ctx: TaskContext) -> str:
        try:
            await ctx.spawn("kids", children([3]), wait=True)
        except BaseException:  # noqa: BLE001 - as a careless handler does
            return "too early"
        return "in time"

    assert await result(shaft, agent, "parent") == "in time"


async def test_children_may_depend_on_each_other(shaft: Lineshaft) -> None:
    agent = worker()

    @agent.task("parent")
    async def parent(ctx: TaskContext) -> Any:
        tasks = [
            NewTask("double", key="a", spec={"n": 1}),
            NewTask("double", key="b", spec={"n": 2}, depends_on=["a"]),
        ]
        return [child.output for child in await ctx.spawn("kids", tasks, wait=True)]

    assert await result(shaft, agent, "parent") == [2, 4]


async def test_a_child_that_breaks_a_rule_fails_the_parent(shaft: Lineshaft) -> None:
    agent = worker()

    @agent.task("parent")
    async def parent(ctx: TaskContext) -> None:
        await ctx.spawn("kids", [NewTask("double", priority=1000)])

    task = await one(shaft, agent, "parent", max_attempts=1)

    assert (task.status, task.failure_category) == (Status.DEAD_LETTERED, "error")
    assert "priority" in (task.failure_reason or "")


async def test_what_a_waiting_parent_had_spent_is_kept(shaft: Lineshaft) -> None:
    agent = worker(budget_usd=10)

    @agent.task("parent")
    async def parent(ctx: TaskContext) -> None:
        ctx.spend(0.5)
        await ctx.spawn("kids", children([1]), wait=True)

    task = await one(shaft, agent, "parent", max_cost_usd=1)

    assert float(task.cost_usd) == 1.0
    view = await engine_of(shaft).fleet.read("a")
    assert (float(view.spent_usd), float(view.reserved_usd)) == (1.0, 0.0)


async def test_two_agents_share_parent_and_children(shaft: Lineshaft) -> None:
    """They drain together: the one without work waits for the other's children."""
    parents = Agent("parents")
    kids = worker()

    @parents.task("parent")
    async def parent(ctx: TaskContext) -> Any:
        return [child.output for child in await ctx.spawn("kids", children([1, 2, 3]), wait=True)]

    submitted = await shaft.submit(NewTask("parent"))

    await drain(shaft, parents, kids)

    assert (await shaft.get(submitted)).result == [2, 4, 6]
