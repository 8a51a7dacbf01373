"""Whatever a handler does: its attempt comes to an end that somebody can read, and its slot is free again."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import psycopg
import pytest
from psycopg import sql

from lineshaft import Agent, AttemptCancelled, Cancel, Fail, Lineshaft, NewTask, Result, Snooze, TaskContext
from lineshaft.model.states import Status
from tests.agent.helpers import at_work, drain, ended, one, soon


class Unwilling:
    """Of a library that raises odd exceptions."""

    id: int

    def model_dump(self, mode: str) -> None:
        raise KeyError(mode)

    @classmethod
    def model_validate(cls, value: dict[str, int]) -> Self:
        found = cls()
        found.id = value["id"]
        return found


class Secretive(Exception):  # noqa: N818 - named as a library might
    @property
    def response(self) -> None:
        raise RuntimeError("ask somebody else")


def raising(error: BaseException) -> Callable[[TaskContext], Any]:
    def raise_it(_: TaskContext) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("act", "status", "words"),
    [
        (lambda _: Unwilling(), Status.DEAD_LETTERED, "KeyError"),
        (lambda _: Result(1, artifacts=5), Status.DEAD_LETTERED, "must be a list, got a int"),
        (lambda _: Result(1, artifacts="a.txt"), Status.DEAD_LETTERED, "must be a list, got a str"),
        (lambda _: Fail(ValueError("why")), Status.DEAD_LETTERED, "ValueError: why"),  # type: ignore[arg-type]
        (lambda _: Cancel(ValueError("why")), Status.CANCELLED, "ValueError: why"),  # type: ignore[arg-type]
        (lambda _: Snooze(float("inf")), Status.DEAD_LETTERED, "from 0 to 31536000 seconds"),
        (lambda _: Snooze(1e12), Status.DEAD_LETTERED, "from 0 to 31536000 seconds"),
        (lambda ctx: ctx.spend(1, tokens_input=1.5), Status.DEAD_LETTERED, "tokens"),
        (lambda ctx: ctx.spend(1, tokens_input=-5), Status.DEAD_LETTERED, "tokens"),
        (lambda ctx: ctx.spend(1, tokens_output=10**19), Status.DEAD_LETTERED, "tokens"),
        (lambda ctx: [ctx.spend(99_999_999) for _ in range(200)], Status.DEAD_LETTERED, "cost_usd"),
        (lambda ctx: ctx.progress("x" * (65 << 10)), Status.DEAD_LETTERED, "progress: must be at most 65536"),
        (raising(AttemptCancelled("no")), Status.DEAD_LETTERED, "AttemptCancelled: no"),
        (raising(GeneratorExit("no")), Status.DEAD_LETTERED, "GeneratorExit: no"),
        (raising(Secretive("no")), Status.DEAD_LETTERED, "Secretive: no"),
        (raising(ValueError("x" * (9 << 20))), Status.DEAD_LETTERED, "ValueError: xxx"),
    ],
)
async def test_the_outcome_is_reported(
    shaft: Lineshaft, act: Callable[[TaskContext], Any], status: Status, words: str
) -> None:
    agent = Agent("a", max_concurrent_tasks=1)

    @agent.task("t")
    async def handler(ctx: TaskContext) -> Any:
        return act(ctx)

    task = await one(shaft, agent, "t", max_attempts=1)

    assert task.status is status
    assert words in str(task.cancel_reason) + str(task.failure_history)


async def test_a_spec_that_makes_a_type_raise_fails_only_its_task(shaft: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler(order: Unwilling) -> int:
        return order.id

    bad, good = await shaft.submit_many(
        [NewTask("t", spec={"order": order}, max_attempts=1) for order in ({}, {"id": 1})]
    )
    await drain(shaft, agent)

    assert (await shaft.get(good)).result == 1
    failed = await shaft.get(bad)
    assert (failed.status, failed.failure_history[-1].category) == (Status.DEAD_LETTERED, "invalid_input")


async def test_a_state_that_is_larger_than_a_request_is_kept(shaft: Lineshaft) -> None:
    """A server accepts 8 MiB in one request: a larger state is stored as an artifact."""
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> Snooze:
        ctx.state["all"] = "x" * (9 << 20)
        return Snooze(3600)

    task = await one(shaft, agent, "t", max_attempts=1)

    assert task.status is Status.PENDING


@contextmanager
def heard(words: str) -> Iterator[asyncio.Event]:
    """Set when an agent has logged this."""
    found, loop = asyncio.Event(), asyncio.get_running_loop()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if words in record.getMessage():
                loop.call_soon_threadsafe(found.set)

    listener = Listener()
    logging.getLogger("lineshaft.agent").addHandler(listener)
    try:
        yield found
    finally:
        logging.getLogger("lineshaft.agent").removeHandler(listener)


async def test_a_result_outlives_a_database_that_can_only_be_read(shaft: Lineshaft, dsn: str) -> None:
    """As servers are for a moment during a failover."""
    agent = Agent("a")
    inside, go = asyncio.Event(), asyncio.Event()
    runs = 0

    @agent.task("t")
    async def handler() -> str:
        nonlocal runs
        runs += 1
        inside.set()
        await go.wait()
        return "result"

    task = await shaft.submit(NewTask("t"))
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as operator,
        at_work(agent, shaft=shaft),
    ):
        database = sql.Identifier(operator.info.dbname)
        everybody_else = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND backend_type = 'client backend'"
        )
        await soon(inside)
        with heard("failed, retrying: The database is unavailable: cannot execute") as refused:
            await operator.execute(
                sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(database)
            )
            await operator.execute(everybody_else)
            go.set()
            await soon(refused)
        await operator.execute(
            sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(database)
        )

        assert (await ended(shaft, task.id)).result == "result"
    assert runs == 1
