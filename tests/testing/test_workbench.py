"""`lineshaft.testing`, used as people use it."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from lineshaft import Agent, Lineshaft, NewTask, Snooze, TaskContext
from lineshaft.model.states import Status
from lineshaft.testing import SyncWorkbench, Workbench

pytest_plugins = ["pytester"]


@pytest.fixture
async def bench(dsn: str) -> AsyncIterator[Workbench]:
    async with Workbench(dsn) as opened:
        yield opened


async def test_drain_does_everything_retries_included(bench: Workbench) -> None:
    """The clock advances instead of waiting for back-offs."""
    agent = Agent("a")
    seen: list[tuple[str, int]] = []

    @agent.task("flaky")
    async def flaky(ctx: TaskContext, name: str) -> str:
        seen.append((name, ctx.attempt))
        if ctx.attempt < 3:
            raise RuntimeError("not yet")
        return name.upper()

    @agent.task("sync")
    def sync(n: int) -> int:
        return n + 1

    before = bench.clock.now()
    one = await bench.shaft.submit(NewTask("flaky", spec={"name": "x"}))
    two = await bench.shaft.submit(NewTask("sync", spec={"n": 1}))
    await bench.drain(agent)

    assert (await bench.shaft.get(one)).result == "X"
    assert (await bench.shaft.get(two)).result == 2
    assert seen == [("x", 1), ("x", 2), ("x", 3)]
    assert bench.clock.now() - before > timedelta(seconds=10)


async def test_drain_without_retries(bench: Workbench) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler() -> None:
        raise RuntimeError("no")

    submitted = await bench.shaft.submit(NewTask("t"))
    await bench.drain(agent, retry=False)
    assert (await bench.shaft.get(submitted)).status is Status.RETRYING
    await bench.drain(agent)
    assert (await bench.shaft.get(submitted)).status is Status.DEAD_LETTERED


async def test_time_passes_when_the_test_says_so(bench: Workbench) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> Any:
        return "awake" if ctx.resume else Snooze(3600)

    later = await bench.shaft.submit(NewTask("t", run_at=bench.clock.now() + timedelta(days=400)))
    task = await bench.run(agent, NewTask("t"))
    assert task.status is Status.PENDING
    await bench.advance(3599)
    await bench.drain(agent)
    assert (await bench.shaft.get(task.id)).status is Status.PENDING
    await bench.advance(1)
    await bench.drain(agent)
    assert (await bench.shaft.get(task.id)).result == "awake"
    await bench.advance(400 * 86_400)
    await bench.drain(agent)
    assert (await bench.shaft.get(later)).status is Status.PENDING, "it was snoozed, as the first one was"


async def test_several_agents_and_a_dag(bench: Workbench) -> None:
    first, second = Agent("a"), Agent("b")

    @first.task("one")
    async def one() -> int:
        return 1

    @second.task("two")
    async def two(ctx: TaskContext) -> int:
        return int(ctx.inputs[f"task:{ctx.spec['of']}:output"]) + 1

    begin = await bench.shaft.submit(NewTask("one"))
    end = await bench.shaft.submit(
        NewTask("two", spec={"of": begin.id, "context_refs": [f"task:{begin.id}:output"]})
    )
    await bench.drain(first, second)
    assert (await bench.shaft.get(end)).result == 2


async def test_result_of_a_failure_shows_the_reason(bench: Workbench) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler() -> None:
        raise RuntimeError("the reason")

    @agent.task("sync")
    def sync() -> None:
        raise RuntimeError("the reason")

    for name in ("t", "sync"):
        with pytest.raises(
            AssertionError, match=r"(?s) is DEAD_LETTERED, not COMPLETED.*the reason"
        ) as caught:
            await bench.result(agent, NewTask(name))
        assert isinstance(caught.value.__cause__, RuntimeError), "with the traceback of the handler"


async def test_what_was_submitted(bench: Workbench) -> None:
    for n in range(3):
        await bench.shaft.submit(
            NewTask("mail", spec={"to": "ann", "n": n, "list": [n]}, tags=["x"], priority=n)
        )
    await bench.shaft.submit(NewTask("other"))

    tasks = await bench.assert_submitted("mail", spec={"to": "ann"}, tags=["x"])
    assert [task.spec["n"] for task in tasks] == [0, 1, 2]
    assert [task.priority for task in await bench.assert_submitted("mail", spec={"list": [1]}, count=1)] == [
        1
    ]
    await bench.assert_submitted("nothing", count=0)
    with pytest.raises(AssertionError, match=r"(?s)at least one task 'mail' with .*'bob'.*found 0.*'ann'"):
        await bench.assert_submitted("mail", spec={"to": "bob"})
    with pytest.raises(AssertionError, match="Expected 2 tasks 'mail'"):
        await bench.assert_submitted("mail", count=2)
    assert len(await bench.submitted()) == 4


async def test_code_under_test_sees_an_ordinary_queue(bench: Workbench) -> None:
    """The program's own waits and agents work here too."""
    agent = Agent("a")

    @agent.task("t")
    async def handler() -> str:
        return "done"

    async def program(shaft: Lineshaft) -> Any:
        return (await shaft.wait(await shaft.submit(NewTask("t")), 30)).result

    running = asyncio.create_task(agent.run(bench.shaft, handle_signals=False))
    assert await program(bench.shaft) == "done"
    agent.stop()
    await running


def test_without_an_event_loop(dsn: str) -> None:
    agent = Agent("a")

    @agent.task("t")
    def handler(n: int) -> int:
        return 2 * n

    with SyncWorkbench(dsn) as bench:
        bench.shaft.submit(NewTask("t", spec={"n": 1}, run_at=bench.clock.now() + timedelta(hours=1)))
        bench.advance(3600)
        assert bench.result(agent, NewTask("t", spec={"n": 4})) == 8
        assert [task.result for task in bench.assert_submitted("t", count=2)] == [2, 8]
    with pytest.raises(RuntimeError, match="not open"):
        bench.shaft.submit(NewTask("t"))


USERS_TESTS = """
import sys
import pytest
from lineshaft import Agent, NewTask
from lineshaft.testing import Workbench

agent = Agent("a")

@agent.task("t")
def double(n: int) -> int:
    return 2 * n

def test_one(workbench):
    assert workbench.result(agent, NewTask("t", spec={"n": 2})) == 4

def test_two(workbench):
    assert workbench.submitted() == [], "a database for each test"

def test_three():
    import asyncio
    async def work():
        async with Workbench() as bench:
            return await bench.result(agent, NewTask("t", spec={"n": 3}))
    assert asyncio.run(work()) == 6

def test_four(inline_bench):
    assert inline_bench.run_sync(double, n=4) == 8

@pytest.mark.asyncio
async def test_five(async_workbench):
    assert await async_workbench.result(agent, NewTask("t", spec={"n": 5})) == 10
"""
OTHERS = """
import sys

def test_of_a_project_that_uses_no_fixture():
    assert not [name for name in sys.modules if name.startswith(("psycopg", "lineshaft.client", "msgspec"))]
"""
WITHOUT_ASYNCIO = """
import sys
sys.modules["pytest_asyncio"] = None
pytest_plugins = ["lineshaft.testing.fixtures"]
"""


@pytest.mark.slow("initdb, and pytest within pytest")
def test_the_fixtures_in_a_project_of_its_own(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Independent processes start the server and create the template."""
    monkeypatch.setenv("LINESHAFT_HOME", str(pytester.path / "home"))
    monkeypatch.delenv("LINESHAFT_DATABASE_URL", raising=False)
    pytester.makepyfile(USERS_TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "2")
    result.assert_outcomes(passed=5)
    assert (pytester.path / "home" / "testing" / "postgres").is_dir()


@pytest.mark.slow("pytest within pytest")
def test_the_plugin_does_nothing_in_projects_that_do_not_use_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports neither the driver nor the rest; without pytest-asyncio it explains itself."""
    pytester.makepyfile(OTHERS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)

    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(WITHOUT_ASYNCIO)
    pytester.makepyfile("def test_asynchronous(async_workbench): pass")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*async_workbench needs pytest-asyncio, which is not installed.*"])
