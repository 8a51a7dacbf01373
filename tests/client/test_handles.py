"""Handles: what a submission returns, over a database and over HTTP, with and without an event loop."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from traceback import format_exception
from typing import Any

import pytest

from lineshaft import Agent, Fail, Lineshaft, NewTask, Resolution, SyncLineshaft, TaskContext
from lineshaft.client.handles import DagHandle, SyncTaskHandle, TaskHandle
from lineshaft.errors import AlreadyExistsError, InvalidInputError, OutputTypeError, TaskCancelled, TaskFailed
from lineshaft.model.states import Status
from lineshaft.testing import Workbench
from tests.client.helpers import engine_of, finish_all


@dataclass
class Notes:
    about: str
    at: datetime


agent = Agent("a", max_concurrent_tasks=10)
MOMENT = datetime(2026, 1, 2, tzinfo=UTC)


@agent.task("research", priority=40)
async def research(prompt: str) -> Notes:
    if prompt == "fail":
        raise Fail("no such place", "invalid_input")
    if prompt == "crash":
        raise RuntimeError("broken.")
    return Notes(prompt, MOMENT)


@agent.task("liar")
def liar() -> int:
    text: object = "not a number"
    return text  # type: ignore[return-value]  # that is the point


@agent.task("slow")
async def slow(ctx: TaskContext) -> str:
    if not ctx.resume:
        raise RuntimeError("rate limit exceeded, retry-after: 3600")
    return "done"


async def work(shaft: Lineshaft) -> None:
    await asyncio.wait_for(agent.run(shaft, until_idle=True, handle_signals=False), 60)


async def test_a_result_has_the_type_that_the_handler_returns(shaft: Lineshaft) -> None:
    handle = await shaft.submit(research.new(prompt="gears"), priority=10, tags=["x"])
    by_name = await shaft.submit(NewTask("research", spec={"prompt": "belts"}))
    assert await handle.status() is Status.READY
    assert (await handle.why()).status is Status.READY
    await work(shaft)

    assert await handle.result(60) == Notes("gears", MOMENT)
    assert await by_name.result(timedelta(minutes=1)) == {"about": "belts", "at": "2026-01-02T00:00:00Z"}
    task = await handle.task()
    assert (task.id, task.priority, task.tags) == (handle.id, 10, ["x"])
    assert (await shaft.wait(handle)).id == (await shaft.get(task)).id == handle.id


async def test_an_output_of_another_type_raises(shaft: Lineshaft) -> None:
    """Another agent may have handed it in, or another version of the handler."""
    handle = await shaft.submit(liar.new())
    await finish_all(engine_of(shaft))

    with pytest.raises(OutputTypeError, match="Expected `int`"):
        await handle.result(60)


async def test_what_has_no_result_raises(shaft: Lineshaft) -> None:
    failing, lying, crashing = await shaft.submit_many(
        [
            research.new(prompt="fail"),
            *(task.with_options(max_attempts=1) for task in (liar.new(), research.new("crash"))),
        ]
    )
    await work(shaft)
    # After the others, which would not be claimed while its rate limit slows everything down.
    unfinished = await shaft.submit(slow.new())
    await work(shaft)

    with pytest.raises(
        TaskFailed,
        match=f"after 1 attempt with invalid_input: no such place.*'lineshaft task show {failing.id}'",
    ) as failed:
        await failing.result(60)
    assert (failed.value.task_id, failed.value.error, failed.value.category, failed.value.attempts) == (
        failing.id,
        "no such place",
        "invalid_input",
        1,
    )
    assert "raise Fail(" in str(failed.value.traceback)
    with pytest.raises(TaskFailed) as crashed:
        await crashing.result(60)
    assert (crashed.value.category, "broken. See 'lineshaft" in str(crashed.value)) == ("error", True)
    assert 'raise RuntimeError("broken.")' in str(crashed.value.traceback)
    assert 'raise RuntimeError("broken.")' in "".join(format_exception(crashed.value)), "shown at the end"
    with pytest.raises(TaskFailed, match=r"invalid_output: .* return type int: Expected `int`, got `str`"):
        await lying.result(60)
    with pytest.raises(
        TimeoutError,
        match=f"{unfinished.id} has not ended.*It is RETRYING .waiting_retry: Waits until .*used. Retry",
    ):
        await unfinished.result(timeout=timedelta(milliseconds=20))
    assert (await unfinished.cancel("not needed")).status is Status.CANCELLED
    with pytest.raises(TaskCancelled, match="was cancelled: not needed") as cancelled:
        await unfinished.result(60)
    assert (cancelled.value.task_id, cancelled.value.reason) == (unfinished.id, "not needed")


async def test_a_duplicate_is_marked(shaft: Lineshaft) -> None:
    first = await shaft.submit(research.new(prompt="a"), idempotency_key="k")
    second = await shaft.submit(research.new(prompt="a"), idempotency_key="k")
    other = await shaft.submit(research.new(prompt="b"), idempotency_key="k")

    assert (first.duplicate, second.duplicate, other.duplicate) == (False, True, True)
    assert (second.mismatch, other.mismatch) == (False, True)
    assert first == second
    assert len({first, second, other}) == 1
    assert repr(second) == f"<TaskHandle {first.id} duplicate>"
    await work(shaft)
    assert await second.result(60) == Notes("a", MOMENT)


async def test_a_replacement_is_marked(shaft: Lineshaft) -> None:
    """Over a database and over HTTP; durations as everywhere."""
    newest: dict[str, Any] = {"idempotency_key": "k", "on_conflict": "replace_waiting"}
    wait = newest | {"debounce_sec": timedelta(minutes=1), "max_wait_sec": timedelta(minutes=2)}
    first = await shaft.submit(research.new(prompt="a"), **wait)
    second = await shaft.submit(research.new(prompt="b"), **newest)
    (third,) = await shaft.submit_many([research.new(prompt="c").with_options(**newest)])

    assert [one.replaced for one in (first, second, third)] == [False, True, True]
    assert [one.duplicate for one in (first, second, third)] == [False] * 3
    assert first == second == third
    task = await shaft.get(first)
    assert (task.status, task.spec["prompt"]) == (Status.READY, "c")
    with pytest.raises(AlreadyExistsError, match="on_conflict reject"):
        await shaft.submit(research.new(prompt="d"), idempotency_key="k", on_conflict="reject")
    with pytest.raises(InvalidInputError, match="idempotency_key, which is missing"):
        await shaft.submit(research.new(prompt="d"), on_conflict="reject")


async def test_a_dag_has_its_tasks_by_key(shaft: Lineshaft) -> None:
    dag = await shaft.submit_dag(
        "Page",
        [
            research.new(prompt="competitors").with_options(key="research"),
            NewTask("later", key="later", depends_on=["research"]),
        ],
    )
    assert isinstance(dag, DagHandle)
    assert (await dag.status(), set(dag.tasks)) == ("pending", {"research", "later"})
    with pytest.raises(KeyError, match="no task with key 'reserch', only"):
        dag["reserch"]
    await work(shaft)

    assert await dag["research"].result(60) == Notes("competitors", MOMENT)
    assert (await dag["later"].task()).depends_on == [dag["research"].id]
    with pytest.raises(TimeoutError):
        await dag.wait(0.01)
    assert (await dag.cancel()).id == dag.id
    # One of its tasks was completed.
    assert (await dag.wait(60)).status == (await dag.dag()).status == "completed"
    assert repr(dag) == f"<DagHandle {dag.id}>"


async def test_the_result_of_a_dag(shaft: Lineshaft) -> None:
    """Outputs by key, or the reason of the first task without one."""
    known = await shaft.submit(research.new("known"), idempotency_key="k")
    tasks = [
        research.new("known").with_options(key="known", idempotency_key="k"),
        research.new("a").with_options(key="a"),
    ]
    good = await shaft.submit_dag("Good", tasks)
    with pytest.raises(TimeoutError, match=f"{good.id} has not ended.*It is pending, its tasks: 1 READY"):
        await good.result(0.01)
    bad = await shaft.submit_dag(
        "Bad", [NewTask("never", key="x"), research.new("fail").with_options(key="f"), *tasks[1:]]
    )
    await work(shaft)
    await bad["x"].cancel("not needed")

    assert await good.result(60) == {"known": Notes("known", MOMENT), "a": Notes("a", MOMENT)}
    assert good["known"].id == known.id
    with pytest.raises(TaskFailed, match=f"{bad['f'].id}.*no such place"):
        await bad.result(60)
    await shaft.resolve(bad["f"], Resolution.CANCEL, reviewer="human:ann")
    with pytest.raises(TaskCancelled, match=f"{bad['x'].id}.*not needed"):
        await bad.result(60)


async def test_a_delay_counts_from_now(shaft: Lineshaft) -> None:
    before = datetime.now(UTC)
    handle = await shaft.submit(research.new(prompt="x"), delay=timedelta(hours=1))
    run_at = (await handle.task()).run_at
    assert run_at is not None
    assert before + timedelta(hours=1) <= run_at <= datetime.now(UTC) + timedelta(hours=1)
    with pytest.raises(InvalidInputError, match="delay: can't be given together with run_at"):
        await shaft.submit(research.new(prompt="x"), delay=1, run_at=before)


@pytest.mark.database_only("a workbench has its own database")
async def test_a_delay_counts_by_the_clock_of_a_workbench(dsn: str) -> None:
    async with Workbench(dsn) as bench:
        handle = await bench.shaft.submit(research.new(prompt="x"), delay=60)
        await bench.advance(59)
        assert await handle.status() is Status.PENDING
        await bench.advance(1)
        assert await handle.status() is Status.READY


def test_without_an_event_loop(where: str) -> None:
    with SyncLineshaft(where) as shaft:
        handle = shaft.submit(research.new(prompt="gears"), priority=10)
        many = shaft.submit_many([research.new(prompt="a"), research.new(prompt="b")])
        dag = shaft.submit_dag("Two", [research.new(prompt="c").with_options(key="c"), NewTask("x", key="x")])
        assert isinstance(handle, SyncTaskHandle)
        assert handle.why().status is handle.status() is Status.READY
        asyncio.run(_work_at(where))

        assert handle.result(60) == Notes("gears", MOMENT)
        assert [one.result(60).about for one in many] == ["a", "b"]
        assert dag["c"].result(60) == Notes("c", MOMENT)
        with pytest.raises(TimeoutError, match="its tasks: 1 COMPLETED, 1 READY"):
            dag.result(0.01)
        assert dag["x"].cancel().status is Status.CANCELLED
        with pytest.raises(TaskCancelled, match="was cancelled: cancelled"):
            dag.result(60)
        assert shaft.get(handle).id == handle.task().id == handle.id
        assert dag.wait(60).status == dag.status() == dag.dag().status
        assert shaft.wait(dag, 60).id == dag.cancel().id == dag.id


async def _work_at(where: str) -> None:
    async with Lineshaft(where) as shaft:
        await work(shaft)


async def test_a_handle_is_known_by_its_id(shaft: Lineshaft) -> None:
    handle = await shaft.submit(research.new(prompt="a"))
    assert isinstance(handle, TaskHandle)
    assert handle != handle.id
    assert (await shaft.get(handle.id)).id == handle.id


async def test_a_handler_or_a_name_is_not_a_task(shaft: Lineshaft) -> None:
    agent = Agent("adder")

    @agent.task("add")
    async def add(one: int) -> int:
        return one

    for wrong in (add, "add"):
        tasks: Any = [wrong]
        expected = r"Expected a NewTask, got .*add.*(add|HANDLER)\.new\(…\)"
        with pytest.raises(TypeError, match=expected):
            await shaft.submit(tasks[0], priority=1)
        with pytest.raises(TypeError, match=expected):
            await shaft.submit_many(tasks)
        with pytest.raises(TypeError, match=expected):
            await shaft.submit_dag("Sums", tasks)
    assert (await shaft.list()).items == []
