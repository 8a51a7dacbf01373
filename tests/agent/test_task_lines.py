"""What an agent logs about tasks that it lost, outputs that were rejected, and handlers that block it."""

import asyncio
import logging
import threading

import psycopg
import pytest

from lineshaft import Agent, Lineshaft, NewTask, OutputContract, TaskContext
from tests.agent.helpers import AT_ONCE, PATIENCE, at_work, attempts, drain, ended, lose_claim, soon


def lines_about(caplog: pytest.LogCaptureFixture, task_id: str, level: int) -> list[logging.LogRecord]:
    return [
        record
        for record in caplog.records
        if getattr(record, "task_id", None) == task_id
        and record.name.startswith("lineshaft.agent")
        and record.levelno >= level
    ]


@pytest.mark.parametrize("noticed_by", ["a heartbeat", "its outcome"])
async def test_a_lost_task_is_one_line(
    shaft: Lineshaft, connection: psycopg.Connection, caplog: pytest.LogCaptureFixture, noticed_by: str
) -> None:
    agent = Agent("a", instance="pod-1")
    begun, go = asyncio.Event(), asyncio.Event()

    @agent.task("t")
    async def handler(ctx: TaskContext) -> int:
        if ctx.epoch == 1:
            begun.set()
            await go.wait()
            if noticed_by == "a heartbeat":
                ctx.progress("which sends a heartbeat")
                await asyncio.Event().wait()
        return ctx.epoch

    task = await shaft.submit(NewTask("t", retry=AT_ONCE))
    async with at_work(agent, shaft=shaft):
        await soon(begun)
        await lose_claim(shaft, connection, task.id)
        go.set()
        assert (await ended(shaft, task.id)).result == 2

    (line,) = lines_about(caplog, task.id, logging.WARNING)
    text = line.getMessage()
    assert text.startswith("lost after ")
    assert ", by agent a, instance 'pod-1': " in text
    assert " its lease was last renewed " in text
    assert line.__dict__["instance"] == "pod-1"
    assert line.__dict__["silent_sec"] >= 0


async def test_a_rejected_output_is_logged_with_its_reason(
    shaft: Lineshaft, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> dict[str, int]:
        return {"page" if ctx.attempt == 1 else "title": 1}

    schema = {"type": "object", "required": ["title"]}
    contract = OutputContract(validation="json-schema", validation_schema=schema)
    task = await shaft.submit(NewTask("t", output=contract, retry=AT_ONCE))
    with caplog.at_level(logging.INFO, "lineshaft.agent"):
        await drain(shaft, agent)

    (line,) = lines_about(caplog, task.id, logging.ERROR)
    text = line.getMessage()
    assert ": its output was rejected: json-schema: " in text
    assert "title" in text
    assert text.endswith("; will retry at once")
    assert line.__dict__["category"] == "invalid_output"
    assert [message for message in caplog.messages if "ended: " in message] == [
        "a: ended: 1 task done, 1 attempt failed"
    ]


@pytest.mark.database_only("about the event loop of a process")
async def test_a_handler_that_blocks_its_event_loop_is_named(
    shaft: Lineshaft, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with the place, after five seconds, which are shorter here."""
    monkeypatch.setattr("lineshaft.agent.lease_keeper.LOOK_SEC", 0.01)
    agent = Agent("a", max_concurrent_tasks=2)
    warned = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "blocked" in record.getMessage():
                warned.set()

    @agent.task("waits")
    async def waits() -> None:
        await asyncio.sleep(0)

    @agent.task("blocks")
    async def blocks() -> bool:
        return warned.wait(PATIENCE)

    await shaft.submit(NewTask("waits"))
    task = await shaft.submit(NewTask("blocks"))
    watch = Watch()
    logging.getLogger("lineshaft.agent").addHandler(watch)
    try:
        await drain(shaft, agent)
    finally:
        logging.getLogger("lineshaft.agent").removeHandler(watch)

    assert (await shaft.get(task)).result is True
    (text,) = (message for message in caplog.messages if "blocked" in message)
    assert text.startswith("The event loop has been blocked for 5 s by the handler ")
    assert "test_a_handler_that_blocks_its_event_loop_is_named.<locals>.blocks of 'blocks', at " in text
    assert "test_task_lines.py:" in text
    assert [past.outcome for past in await attempts(shaft, task.id)] == ["completed"]
