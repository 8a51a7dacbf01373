"""Tracebacks of failed attempts, from the handler to people."""

import asyncio

import pytest

from lineshaft import Agent, Lineshaft, NewTask
from lineshaft.cli.main import main
from tests.agent.helpers import drain


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
