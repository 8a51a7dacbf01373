"""Processes of one agent that meet: at its last dollar, at a name, at a dead sibling, at its deletion."""

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.errors import InvalidTransitionError, StaleClaimError, SupersededError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import NewAgent, RegisteredAgent
from lineshaft.types.work import ClaimedTask, Completion
from tests.races.helpers import DONE, INSTANCE_ROW, LIVE_ROW, held, race, running, status, waiting
from tests.world import only, ref

AGENT_ROW = "SELECT FROM lineshaft.agent WHERE id = %s FOR UPDATE"

End = Callable[[Engine], Awaitable[Any]]


async def replica(engine: Engine, name: str, agent_id: str = "a1", **fields: Any) -> RegisteredAgent:
    return await engine.fleet.register(NewAgent(id=agent_id, instance=name, host="h", **fields))


def failures(connection: psycopg.Connection, task_id: str) -> list[tuple[Any, ...]]:
    attempts = "SELECT outcome, error, instance FROM lineshaft.attempt WHERE task_id = %s ORDER BY epoch"
    return connection.execute(attempts, [task_id]).fetchall()


async def in_turn(
    look: psycopg.Connection, holder: psycopg.Connection, first: Awaitable[Any], second: Awaitable[Any]
) -> tuple[Any, Any]:
    """Both wait for the held row, the first one ahead of the second; returns their results or errors."""
    ahead = asyncio.ensure_future(first)
    await waiting(look, 1)
    (behind,) = await race(look, holder, second, already=1)
    await asyncio.wait({ahead})
    return ahead.exception() or ahead.result(), behind


async def test_two_instances_and_one_dollar(
    engines: tuple[Engine, Engine], connection: psycopg.Connection, dsn: str
) -> None:
    """R-057, R-083: replicas on two nodes share the budget; only one of them gets the last dollar."""
    one, two = engines
    second = await replica(two, "second")
    await one.fleet.patch("a1", budget_usd=1)
    await one.submission.submit([NewTask("code", max_cost_usd=1) for _ in range(2)])
    with held(dsn, AGENT_ROW, "a1") as holder:
        claims = await race(
            connection,
            holder,
            one.claims.claim("a1", 1, limit=2, start=True),
            two.claims.claim("a1", second.incarnation, limit=2, start=True),
        )

    assert sorted(len(claim.tasks) for claim in claims) == [0, 1]
    agent = await one.fleet.read("a1")
    assert (agent.reserved_usd, agent.budget_remaining_usd) == (Decimal(1), Decimal(0))


async def test_many_replicas_stay_within_their_budget(engines: tuple[Engine, Engine]) -> None:
    """R-057, R-083: claims and completions of six processes at once; every cent is counted once."""
    replicas = [await replica(engines[n % 2], f"r{n}", "b") for n in range(6)]
    await engines[0].fleet.patch("b", budget_usd=10)
    await engines[0].submission.submit([NewTask("code", max_cost_usd=1) for _ in range(30)])

    async def work(engine: Engine, incarnation: int) -> int:
        done = 0
        while tasks := (await engine.claims.claim("b", incarnation, limit=2, start=True)).tasks:
            agent = await engine.fleet.read("b")
            assert agent.spent_usd + agent.reserved_usd <= 10
            spent = [Completion(ref(task), DONE) for task in tasks]
            assert all(moved.error is None for moved in await engine.work.complete(spent))
            done += len(tasks)
        return done

    done = await asyncio.gather(*(work(engines[n % 2], each.incarnation) for n, each in enumerate(replicas)))

    agent = await engines[0].fleet.read("b")
    assert (sum(done), agent.reserved_usd, agent.current_tasks) == (30, Decimal(0), 0)


async def test_a_process_claims_just_before_it_is_superseded(
    engines: tuple[Engine, Engine], connection: psycopg.Connection, dsn: str
) -> None:
    """R-083: what it got fails with its instance; nothing is held by a process that is gone."""
    one, two = engines
    old = await replica(one, "x")
    ((task,),) = [await one.submission.submit([NewTask("code")])]
    with held(dsn, INSTANCE_ROW) as holder:
        claim, new = await in_turn(
            connection,
            holder,
            one.claims.claim("a1", old.incarnation, start=True),
            replica(two, "x"),
        )

    assert [claimed.id for claimed in claim.tasks] == [task.id]
    assert new.incarnation == old.incarnation + 1
    assert status(connection, task.id) == Status.RETRYING
    assert failures(connection, task.id) == [("failed", "agent_restarted", "x")]
    assert isinstance(
        only(await one.work.complete([Completion(ref(claim.tasks[0]), DONE)])).error, StaleClaimError
    )


async def test_a_process_claims_just_after_it_was_superseded(
    engines: tuple[Engine, Engine], connection: psycopg.Connection, dsn: str
) -> None:
    """R-083: it learns so, and the task stays for others."""
    one, two = engines
    old = await replica(one, "x")
    ((task,),) = [await one.submission.submit([NewTask("code")])]
    with held(dsn, INSTANCE_ROW) as holder:
        new, claim = await in_turn(
            connection,
            holder,
            replica(two, "x"),
            one.claims.claim("a1", old.incarnation, start=True),
        )

    assert isinstance(claim, SupersededError)
    assert status(connection, task.id) == Status.READY
    (found,) = (await two.claims.claim("a1", new.incarnation, start=True)).tasks
    assert found.id == task.id


@pytest.fixture
async def watched(engines: tuple[Engine, Engine]) -> tuple[RegisteredAgent, RegisteredAgent, ClaimedTask]:
    """A process that holds a task, and a sibling that watches it."""
    one, _ = engines
    dead, sibling = await replica(one, "dead", "b"), await replica(one, "sibling", "b")
    await one.submission.submit([NewTask("code")])
    (task,) = (await one.claims.claim("b", dead.incarnation, start=True)).tasks
    return dead, sibling, task


async def supersede(engine: Engine) -> None:
    await replica(engine, "dead", "b")


async def restart(engine: Engine) -> None:
    await replica(engine, "restarted", "b", gone=("dead",))


async def report(engine: Engine) -> None:
    await engine.fleet.siblings("b", 2, gone=["dead"])


ENDS = pytest.mark.parametrize("end", [supersede, restart, report])


@ENDS
async def test_a_process_completes_just_before_it_is_taken_for_dead(
    engines: tuple[Engine, Engine],
    watched: tuple[RegisteredAgent, RegisteredAgent, ClaimedTask],
    connection: psycopg.Connection,
    dsn: str,
    end: End,
) -> None:
    """R-083: the result stands, and no attempt failed."""
    one, two = engines
    _, _, task = watched
    with held(dsn, LIVE_ROW, task.id) as holder:
        moved, ended = await in_turn(
            connection, holder, one.work.complete([Completion(ref(task), DONE)]), end(two)
        )

    assert not isinstance(ended, BaseException)
    assert only(moved).unwrap() is Status.COMPLETED
    assert failures(connection, task.id) == []
    assert (await one.fleet.read("b")).current_tasks == 0


@ENDS
async def test_a_process_completes_just_after_it_was_taken_for_dead(
    engines: tuple[Engine, Engine],
    watched: tuple[RegisteredAgent, RegisteredAgent, ClaimedTask],
    connection: psycopg.Connection,
    dsn: str,
    end: End,
) -> None:
    """R-083: the claim is over, once."""
    one, two = engines
    _, _, task = watched
    with held(dsn, LIVE_ROW, task.id) as holder:
        ended, moved = await in_turn(
            connection, holder, end(two), one.work.complete([Completion(ref(task), DONE)])
        )

    assert not isinstance(ended, BaseException)
    assert isinstance(only(moved).error, StaleClaimError)
    assert status(connection, task.id) == Status.RETRYING
    assert failures(connection, task.id) == [("failed", "agent_restarted", "dead")]


async def test_two_siblings_report_the_same_dead_process(
    engines: tuple[Engine, Engine],
    watched: tuple[RegisteredAgent, RegisteredAgent, ClaimedTask],
    connection: psycopg.Connection,
    dsn: str,
) -> None:
    """R-083: one attempt is used, and both go on."""
    one, two = engines
    _, sibling, task = watched
    third = await replica(two, "third", "b")
    with held(dsn, LIVE_ROW, task.id) as holder:
        names = await race(
            connection,
            holder,
            one.fleet.siblings("b", sibling.incarnation, gone=["dead"]),
            two.fleet.siblings("b", third.incarnation, gone=["dead"]),
        )

    assert names == [["third"], ["sibling"]]
    assert failures(connection, task.id) == [("failed", "agent_restarted", "dead")]
    assert [each.instance for each in (await one.fleet.read("b")).instances] == ["third", "sibling"]


async def test_a_dead_process_is_reported_while_its_successor_registers(
    engines: tuple[Engine, Engine],
    watched: tuple[RegisteredAgent, RegisteredAgent, ClaimedTask],
    connection: psycopg.Connection,
    dsn: str,
) -> None:
    """R-083: the report is about the old process; the new one of the same name isn't removed with it."""
    one, two = engines
    _, _, task = watched
    with held(dsn, LIVE_ROW, task.id) as holder:
        _, new = await race(connection, holder, report(one), replica(two, "dead", "b"))

    assert failures(connection, task.id) == [("failed", "agent_restarted", "dead")]
    agent = await one.fleet.read("b")
    assert [(each.instance, each.incarnation) for each in agent.instances] == [
        ("dead", new.incarnation),
        ("sibling", 2),
    ]


def check_superseded(both: list[Any], earlier: int, later: int) -> list[RegisteredAgent]:
    """Both register one name in turn; the earlier one may learn at once that it has ended.

    Returns the answers of those that were registered.
    """
    answered = [each for each in both if isinstance(each, RegisteredAgent)]
    ended = [each for each in both if not isinstance(each, RegisteredAgent)]
    assert {each.incarnation for each in answered} in ({earlier, later}, {later})
    for error in ended:
        assert isinstance(error, SupersededError)
        assert f"Incarnation {earlier} of agent" in str(error)
    return answered


async def test_two_registrations_of_one_name_leave_one(
    engines: tuple[Engine, Engine], connection: psycopg.Connection, dsn: str
) -> None:
    """R-083: the later one supersedes the earlier one."""
    one, two = engines
    with held(dsn, AGENT_ROW, "a1") as holder:
        both = await race(connection, holder, replica(one, "x"), replica(two, "x"))

    check_superseded(both, 2, 3)
    names = {each.instance: each.incarnation for each in (await one.fleet.read("a1")).instances}
    assert names == {"x": 3, "": 1}


async def test_two_first_registrations_of_an_agent(
    engines: tuple[Engine, Engine], connection: psycopg.Connection, dsn: str
) -> None:
    """R-083: of one name one is left, of two names both; the budget is set once."""
    one, two = engines
    new = "INSERT INTO lineshaft.agent (id, registered_at, incarnation) VALUES (%s, now(), 1)"
    for agent_id, names in (("same", ("x", "x")), ("other", ("x", "y"))):
        with held(dsn, new, agent_id) as holder:
            both = await race(
                connection,
                holder,
                replica(one, names[0], agent_id, budget_usd=1),
                replica(two, names[1], agent_id, budget_usd=2),
            )

        if agent_id == "same":
            registered = check_superseded(both, 1, 2)
        else:
            registered = sorted(both, key=lambda each: each.incarnation)
            assert [each.incarnation for each in registered] == [1, 2]
        agent = await one.fleet.read(agent_id)
        assert sorted(each.instance for each in agent.instances) == sorted(set(names))
        assert {each.budget_usd for each in registered} == {agent.budget_usd}
        assert agent.budget_usd in {Decimal(1), Decimal(2)}


async def test_an_agent_is_deleted_just_before_it_registers(
    engines: tuple[Engine, Engine], connection: psycopg.Connection, dsn: str
) -> None:
    """R-083: the registration counts, with the incarnation after the last one."""
    one, two = engines
    await one.fleet.leave("a1", 1)
    with held(dsn, AGENT_ROW, "a1") as holder:
        deleted, new = await in_turn(connection, holder, one.fleet.delete("a1"), replica(two, "x"))

    assert deleted is None
    assert new.incarnation == 2
    assert [each.instance for each in (await one.fleet.read("a1")).instances] == ["x"]


async def test_an_agent_is_deleted_just_after_it_registered(
    engines: tuple[Engine, Engine], connection: psycopg.Connection, dsn: str
) -> None:
    """R-083: it has a live instance, so it is kept."""
    one, two = engines
    await one.fleet.leave("a1", 1)
    with held(dsn, AGENT_ROW, "a1") as holder:
        new, deleted = await in_turn(connection, holder, replica(two, "x"), one.fleet.delete("a1"))

    assert isinstance(deleted, InvalidTransitionError)
    await two.fleet.present("a1", new.incarnation)


async def test_a_silent_process_claims_while_its_agent_is_deleted(
    engines: tuple[Engine, Engine], clock: MovableClock, connection: psycopg.Connection, dsn: str
) -> None:
    """R-083: either the agent is kept, because the process lives, or the process learns that it is over."""
    one, two = engines
    ((task,),) = [await one.submission.submit([NewTask("code")])]
    clock.advance(91)
    with held(dsn, INSTANCE_ROW) as holder:
        claim, deleted = await in_turn(
            connection, holder, one.claims.claim("a1", 1, start=True), two.fleet.delete("a1")
        )

    assert [found.id for found in claim.tasks] == [task.id]
    assert deleted is None
    assert failures(connection, task.id) == [("failed", "agent_restarted", "")]
    with pytest.raises(SupersededError):
        await running(one)
