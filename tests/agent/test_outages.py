"""The database, or the server, is away or silent: agents go on when it is back, or stop correctly."""

import asyncio
import logging
from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lineshaft import Agent, Lineshaft, NewTask, TaskContext
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.wakeups import POLL_SUBSCRIBED
from lineshaft.engine.heartbeats import Heartbeats
from lineshaft.errors import UnavailableError
from lineshaft.model.states import Status
from lineshaft.types.work import ClaimRef, Presence
from tests.agent.helpers import (
    AT_ONCE,
    PATIENCE,
    at_work,
    attempts,
    engine_of,
    kinds,
    lose_claim,
    reaper,
    soon,
    until,
    with_heartbeats,
)
from tests.proxy import Proxy, proxied, proxied_url
from tests.races.helpers import held, waiting
from tests.world import release_claims


@pytest.fixture
async def line(transport: str, where: str) -> AsyncIterator[tuple[Lineshaft, Proxy]]:
    """A Lineshaft whose connections can be cut."""
    leading = proxied(where) if transport == "database" else proxied_url(where)
    async with leading as (through, proxy), Lineshaft(through, max_connections=4) as shaft:
        yield shaft, proxy
        proxy.restore()


async def test_a_short_outage_of_the_database(
    shaft: Lineshaft, line: tuple[Lineshaft, Proxy], dsn: str
) -> None:
    """Shorter than the lease: steps, outcomes and claims wait, and nothing is lost or done twice."""
    through, proxy = line
    agent = Agent("a", heartbeat_interval_sec=20)
    ran: list[str] = []
    between = asyncio.Event()

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str:
        await ctx.step("first", lambda: ran.append("first"))
        if not between.is_set():
            proxy.cut()
            between.set()
        await ctx.step("second", lambda: ran.append("second"))
        return "done"

    submitted = await shaft.submit(NewTask("t"))
    async with reaper(dsn), at_work(agent, shaft=through):
        await soon(between)
        await asyncio.wait_for(proxy.refuses(5), PATIENCE)
        after = await shaft.submit(NewTask("t"))
        proxy.restore()
        task = await shaft.wait(submitted, PATIENCE)
        later = await shaft.wait(after, PATIENCE)

    assert (task.result, task.attempts, later.result) == ("done", 0, "done")
    assert ran == ["first", "second"] * 2


async def test_an_outage_is_logged_once_with_its_end(
    line: tuple[Lineshaft, Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    through, proxy = line
    agent = Agent("a", heartbeat_interval_sec=20)
    agent.task("t")(lambda: "done")

    def levels(text: str) -> list[int]:
        return [record.levelno for record in caplog.records if text in record.getMessage()]

    async def was_repeated() -> bool:
        return len(levels("a: can't claim: ")) > 1

    async def is_over() -> bool:
        return bool(levels("a: can claim again, after "))

    warm_up = await through.submit(NewTask("t"))
    with caplog.at_level(logging.DEBUG, "lineshaft.agent"):
        async with at_work(agent, shaft=through):
            await through.wait(warm_up, PATIENCE)
            proxy.cut()
            await until(was_repeated)
            assert not await is_over()
            proxy.restore()
            await until(is_over)

    assert levels("can't claim").count(logging.WARNING) == 1
    assert levels("can claim again") == [logging.INFO]


async def test_an_outage_longer_than_the_lease_loses_the_claim(
    shaft: Lineshaft, line: tuple[Lineshaft, Proxy], connection: psycopg.Connection
) -> None:
    through, proxy = line
    cut_off, other = Agent("cut off"), Agent("other")
    away = asyncio.Event()

    @cut_off.task("t")
    async def handler(ctx: TaskContext) -> str:
        if not away.is_set():
            proxy.cut()
            away.set()
        return await ctx.step("work", lambda: "mine")

    @other.task("t")
    async def replacement(ctx: TaskContext) -> str:
        return await ctx.step("work", lambda: "theirs")

    submitted = await shaft.submit(NewTask("t", retry=AT_ONCE))
    async with at_work(cut_off, shaft=through):
        await soon(away)
        await lose_claim(shaft, connection, submitted.id)
        async with at_work(other, shaft=shaft):
            task = await shaft.wait(submitted, PATIENCE)
        proxy.restore()
        # The one that was cut off works on, on other things.
        again = await shaft.submit(NewTask("t", retry=AT_ONCE))
        assert (await shaft.wait(again, PATIENCE)).result == "mine"

    assert task.result == "theirs"
    assert [past.error for past in await attempts(shaft, task.id)] == ["heartbeat_timeout", None]
    assert (await shaft.get(submitted)).result == "theirs"


@pytest.mark.slow("waits until a heartbeat has no answer")
async def test_a_silent_connection_is_noticed_within_a_heartbeat(
    shaft: Lineshaft, line: tuple[Lineshaft, Proxy], dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Black-holed: no error ever comes. The lease is kept on a new connection, and the outcome is written."""
    through, proxy = line
    # What was asked on a silent line is waited for, but not as long as in production.
    monkeypatch.setattr("lineshaft.agent.run._LEAST_PATIENCE_SEC", 2.0)
    agent = Agent("a", heartbeat_interval_sec=6)
    running, go = asyncio.Event(), asyncio.Event()

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str:
        running.set()
        async with with_heartbeats(ctx):
            await go.wait()
        return "done"

    submitted = await shaft.submit(NewTask("t"))
    async with reaper(dsn), at_work(agent, shaft=through):
        await soon(running)

        async def lease() -> object:
            task = await engine_of(shaft).read.task(submitted.id)
            assert task.status is Status.RUNNING
            return task.lease_until

        async def lease_since(known: object) -> bool:
            return await lease() != known

        # The line of the heartbeats is among those that go silent.
        first = await lease()
        await until(lambda: lease_since(first))
        proxy.swallow()
        known = await lease()
        await until(lambda: lease_since(known))
        go.set()
        ended = await shaft.wait(submitted, PATIENCE)

    assert (ended.result, ended.attempts) == ("done", 0)
    assert "task.failed" not in await kinds(shaft, ended.id)


async def test_a_heartbeat_without_an_answer_ends_in_time(dsn: str) -> None:
    async with proxied(dsn) as (through, proxy):
        heartbeats = Heartbeats(through)
        answers = await heartbeats.beat([Presence("a", 1)], [], answer_within_sec=PATIENCE)
        assert answers.agents == {}
        proxy.swallow()

        with pytest.raises(UnavailableError, match=r"within 0\.3 s"):
            await asyncio.wait_for(heartbeats.beat([], [], answer_within_sec=0.3), PATIENCE)

        # A new connection is made for the next one.
        await heartbeats.beat([], [], answer_within_sec=PATIENCE)
        proxy.cut()
        with pytest.raises(UnavailableError, match="unavailable"):
            await heartbeats.beat([], [], answer_within_sec=PATIENCE)
        proxy.restore()
        await heartbeats.beat([], [], answer_within_sec=PATIENCE)
        await heartbeats.close()


async def test_a_pooled_connection_that_goes_silent_is_cut(dsn: str) -> None:
    async with proxied(dsn) as (through, proxy), Engine(through, max_connections=1) as engine:
        await engine.upcoming.openings()
        proxy.swallow()

        engine.database.answer_within_sec = 0.3
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(engine.upcoming.openings(), PATIENCE)

        engine.database.answer_within_sec = PATIENCE
        await engine.upcoming.openings()


@pytest.mark.database_only("what wakes an agent of this process")
async def test_an_agent_that_was_marked_offline_claims_again(
    shaft: Lineshaft, connection: psycopg.Connection
) -> None:
    """R-080: the report of its silence keeps it from nothing, and its next sign of life makes it active."""
    agent = Agent("a")

    @agent.task("x")
    async def x() -> None:
        await asyncio.sleep(0)

    warm_up = await shaft.submit(NewTask("x"))
    async with at_work(agent, shaft=shaft):
        await shaft.wait(warm_up, PATIENCE)
        connection.execute(
            "UPDATE lineshaft.instance"
            " SET silence_reported = true, last_heartbeat = now() - interval '1 hour'"
        )
        task = await shaft.submit(NewTask("x"))
        await shaft.wait(task, POLL_SUBSCRIBED / 2)


@pytest.mark.database_only("the claim is taken back behind the agent's back")
async def test_an_agent_that_gets_its_own_task_again_stops_working_on_the_lost_claim(
    shaft: Lineshaft,
) -> None:
    agent = Agent("a", max_concurrent_tasks=2)
    begun, ended = asyncio.Event(), asyncio.Event()

    @agent.task("x")
    async def x(ctx: TaskContext) -> int:
        if ctx.epoch == 1:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
        return ctx.epoch

    task = await shaft.submit(NewTask("x"))
    async with at_work(agent, shaft=shaft):
        await soon(begun)
        # As the reaper does after a silence.
        await release_claims(engine_of(shaft), [ClaimRef(task.id, 1)])
        done = await shaft.wait(task, PATIENCE)
        await soon(ended)
    assert done.result == 2


@pytest.mark.database_only("a server releases what it couldn't deliver")
async def test_a_claim_whose_response_was_lost_is_released_and_uses_no_attempt(
    shaft: Lineshaft, dsn: str
) -> None:
    """The database carries the claim out after the connection broke: no agent knows that the task runs."""
    agent = Agent("a", heartbeat_interval_sec=60)

    @agent.task("x")
    async def x(ctx: TaskContext) -> int:
        return ctx.epoch

    # However long the agent takes to come back: the claim would not wait for it any longer.
    endless = "-c lock_timeout=0 -c client_connection_check_interval=0"
    warm_up = await shaft.submit(NewTask("x"))
    async with (
        proxied(dsn) as (address, proxy),
        Lineshaft(make_conninfo(address, options=endless), max_connections=4) as through,
        at_work(agent, shaft=through),
    ):
        await shaft.wait(warm_up, PATIENCE)
        with (
            held(dsn, "SELECT FROM lineshaft.instance FOR UPDATE") as holder,
            psycopg.connect(dsn, autocommit=True) as look,
        ):
            task = await shaft.submit(NewTask("x"))
            await waiting(look, 1)
            proxy.reset()
            # The claim goes on without a listener, and the agent looks behind it.
            await waiting(look, 2)
            holder.rollback()
        done = await shaft.wait(task, PATIENCE)

    assert (done.result, done.attempts) == (2, 0)
    assert [attempt.outcome for attempt in await attempts(shaft, task.id)] == ["released", "completed"]
    assert "task.failed" not in await kinds(shaft, task.id)
