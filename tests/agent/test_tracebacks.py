"""Tracebacks of failed attempts, from the handler to people."""

import asyncio
import logging
from pathlib import Path

import pytest

import lineshaft
from lineshaft import Agent, Fail, Lineshaft, NewTask, RetrySpec, SyncTaskContext, TaskContext
from lineshaft.cli.main import main
from lineshaft.logs import TASK_LINES
from lineshaft.testing import Workbench
from tests.agent.helpers import drain, one

OWN = str(Path(lineshaft.__file__).parent)


async def test_the_traceback_of_a_handler_is_stored_and_shown(shaft: Lineshaft) -> None:
    """R-018."""
    agent = Agent("a")

    @agent.task("divide")
    async def divide(by: int) -> float:
        return 1 / by

    task = await shaft.submit(NewTask("divide", spec={"by": 0}, max_attempts=1))
    await drain(shaft, agent)

    (failed,) = (await shaft.get(task)).failure_history
    (attempt,) = await shaft.attempts(task)
    (letter,) = (await shaft.get_dead_letter(task)).failure_history
    for found in (failed.traceback, attempt.traceback, letter.traceback):
        assert found is not None
        assert "return 1 / by" in found
        assert found.rstrip().endswith("ZeroDivisionError: division by zero")
        assert OWN not in found


@pytest.mark.database_only("the command reads the database")
async def test_the_command_line_shows_the_last_traceback(
    shaft: Lineshaft, dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handle() -> None:
        raise KeyError("missing")

    task = await shaft.submit(NewTask("t", max_attempts=1))
    await drain(shaft, agent)
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)

    for command in (("task", "show"), ("dlq", "show")):
        assert await asyncio.to_thread(main, [*command, task.id]) == 0
        shown = capsys.readouterr().out
        assert "Traceback of attempt 1:" in shown
        assert "KeyError: 'missing'" in shown


async def test_the_log_has_the_traceback_with_the_task(
    shaft: Lineshaft, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handle() -> None:
        raise KeyError("missing")

    retry = RetrySpec(strategy="fixed", initial_delay_sec=0.1, jitter=False)
    task = await shaft.submit(NewTask("t", spec={}, max_attempts=2, retry=retry))
    await drain(shaft, agent)

    first, second = (record for record in caplog.records if record.name == TASK_LINES)
    for number, record in enumerate((first, second), 1):
        assert record.levelno == logging.ERROR
        about = {
            "task_id": task.id,
            "task_type": "t",
            "attempt": number,
            "agent_id": "a",
            "category": "error",
        }
        assert record.__dict__.items() >= about.items()
        assert record.exc_info is not None
        assert isinstance(record.exc_info[1], KeyError)
    assert first.getMessage().endswith("KeyError: 'missing'; will retry in 100 ms")
    assert f"won't retry: see 'lineshaft dlq show {task.id}'" in second.getMessage()


async def test_tracebacks_have_only_frames_of_the_handler_and_its_libraries(shaft: Lineshaft) -> None:
    """Steps, threads and causes have frames of Lineshaft between those of the handler."""
    agent = Agent("a")

    def divide(by: int) -> float:
        return 1 / by

    @agent.task("step")
    async def step(ctx: TaskContext) -> None:
        await ctx.step("divide", divide, 0)

    @agent.task("sync")
    def sync(ctx: SyncTaskContext) -> None:
        try:
            ctx.step("divide", divide, 0)
        except ZeroDivisionError as error:
            raise RuntimeError("outer") from error

    @agent.task("fail")
    async def fail() -> None:
        raise Fail("on purpose")

    @agent.task("late", time_limit_sec=0.1)
    async def late() -> None:
        await asyncio.Event().wait()

    found = {}
    for name in agent.task_types:
        (failure,) = (await one(shaft, agent, name, max_attempts=1)).failure_history
        assert failure.traceback is not None, name
        assert OWN not in failure.traceback
        found[name] = failure.traceback
    for name in ("step", "sync"):
        assert "in divide" in found[name]
        assert 'ctx.step("divide", divide, 0)' in found[name]
    assert found["sync"].rstrip().endswith("RuntimeError: outer")
    assert 'raise Fail("on purpose")' in found["fail"]
    assert "await asyncio.Event().wait()" in found["late"]


@pytest.mark.database_only("a workbench has a database")
async def test_a_failed_result_of_a_workbench_has_the_traceback(dsn: str) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handle() -> None:
        raise KeyError("missing")

    async with Workbench(dsn) as bench:
        with pytest.raises(AssertionError, match='raise KeyError\\("missing"\\)'):
            await bench.result(agent, NewTask("t", max_attempts=1))
