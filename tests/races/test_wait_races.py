"""A task that begins to wait for a signal, and what happens to it at the same moment."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import psycopg
import pytest

from lineshaft.engine.engine import Engine
from lineshaft.errors import InvalidTransitionError, StaleClaimError
from lineshaft.model.tasks import NewTask
from lineshaft.types.waits import NewSignal, NewSuspension, SentSignal, Suspended
from lineshaft.types.work import ClaimedTask
from tests.races.helpers import LIVE_ROW, held, race, running, status, waiting
from tests.world import ref


async def held_task(engine: Engine) -> ClaimedTask:
    await engine.submission.submit([NewTask("code")])
    (task,) = await running(engine)
    return task


async def suspend(engine: Engine, task: ClaimedTask, name: str = "go") -> Suspended:
    (result,) = await engine.work.suspend([NewSuspension(ref(task), name, "go")])
    return result


async def send(engine: Engine, task: ClaimedTask, key: str | None = None) -> SentSignal:
    return await engine.waits.signal(task.id, NewSignal("go", b"1", key))


@pytest.mark.parametrize("first", ["signal", "suspend"])
async def test_a_signal_meets_its_wait(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection, first: str
) -> None:
    """Both wait for the row of the task, in either order: the signal is received, and the task goes on."""
    one, two = engines
    task = await held_task(one)
    calls: list[Awaitable[Any]] = [send(one, task), suspend(two, task)]
    if first == "suspend":
        calls.reverse()

    with held(dsn, LIVE_ROW, task.id) as holder:
        # The row is given to them in the order in which they asked for it.
        sides = []
        for number, call in enumerate(calls, 1):
            sides.append(asyncio.ensure_future(call))
            await waiting(connection, number)
        holder.rollback()
        results = await asyncio.gather(*sides)

    (suspended,) = [result for result in results if isinstance(result, Suspended)]
    if first == "suspend":
        assert suspended.unwrap() is None
        assert status(connection, task.id) == "READY"
        (task,) = await running(one)
        suspended = await suspend(one, task)
    end = suspended.unwrap()
    assert end is not None
    assert end.signal is not None
    assert status(connection, task.id) == "RUNNING"


async def test_a_signal_that_is_sent_twice_at_once_is_sent_once(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    one, two = engines
    task = await held_task(one)

    with held(dsn, LIVE_ROW, task.id) as holder:
        results = await race(connection, holder, send(one, task, "k"), send(two, task, "k"))

    assert sorted(result.duplicate for result in results) == [False, True]
    assert len({result.id for result in results}) == 1


async def test_a_suspension_and_a_cancellation(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    one, two = engines
    task = await held_task(one)

    with held(dsn, LIVE_ROW, task.id) as holder:
        results = await race(connection, holder, one.cancel.cancel(task.id, "no"), suspend(two, task))

    (suspended,) = [result for result in results if isinstance(result, Suspended)]
    assert suspended.error is None or isinstance(suspended.error, StaleClaimError)
    assert status(connection, task.id) == "CANCELLED"


async def test_a_signal_and_a_cancellation(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """A task that has ended meanwhile takes none."""
    one, two = engines
    task = await held_task(one)
    await suspend(one, task)

    with held(dsn, LIVE_ROW, task.id) as holder:
        results = await race(connection, holder, one.cancel.cancel(task.id, "no"), send(two, task))

    assert isinstance(results[1], InvalidTransitionError | SentSignal)
    assert status(connection, task.id) == "CANCELLED"


async def test_two_calls_of_one_suspension(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """A client that repeats a call whose answer is late: both have the same answer."""
    one, two = engines
    task = await held_task(one)
    await send(one, task)

    with held(dsn, LIVE_ROW, task.id) as holder:
        results = await race(connection, holder, suspend(one, task), suspend(two, task))

    ends = [result.unwrap() for result in results]
    assert [end.signal.id for end in ends if end is not None and end.signal is not None] == [
        ends[0].signal.id
    ] * 2
