"""Submissions with `on_conflict`, and what else happens to the task of that key at the same moment."""

import asyncio
from collections.abc import Awaitable
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.postgres.database import Connection
from lineshaft.errors import ForbiddenError, StaleClaimError
from lineshaft.model.tasks import NewTask
from lineshaft.types import Submitted
from lineshaft.types.work import ClaimedTask, Completion, Moved
from tests.races.helpers import DONE, INSTANCE_ROW, LIVE_ROW, held, race, running, status, waiting
from tests.races.test_key_races import KEY_ROW
from tests.world import ref

Engines = tuple[Engine, Engine]


async def send(engine: Engine, n: int = 1, how: str = "replace_waiting", **fields: Any) -> Submitted:
    task = NewTask("x", idempotency_key="k", on_conflict=how, spec={"n": n}, **fields)
    (found,) = await engine.submission.submit([task])
    return found


def spec(connection: psycopg.Connection, task_id: str) -> Any:
    row = connection.execute("SELECT spec FROM lineshaft.task WHERE id = %s", [task_id]).fetchone()
    return None if row is None else row[0]


async def one_after_the_other(
    connection: psycopg.Connection, holder: psycopg.Connection, *sides: Awaitable[Any]
) -> list[Any]:
    """Sides that wait for a held row, which is given to them in this order."""
    started = []
    for number, side in enumerate(sides, 1):
        started.append(asyncio.ensure_future(side))
        await waiting(connection, number)
    holder.rollback()
    return await asyncio.gather(*started, return_exceptions=True)


@pytest.mark.parametrize("how", ["replace_waiting", "cancel_running"])
async def test_two_first_submissions_of_a_key(
    engines: Engines, dsn: str, connection: psycopg.Connection, how: str
) -> None:
    """One creates the task, the other replaces it: no submission is lost, and there is one task."""
    taken = "INSERT INTO lineshaft.task_key (key, task_id, content_hash) VALUES ('k', 'nobody', '')"
    with held(dsn, taken) as holder:
        one, two = await race(connection, holder, *(send(e, n, how) for n, e in enumerate(engines, 1)))

    assert one.id == two.id
    assert sorted([one.replaced, two.replaced]) == [False, True]
    assert spec(connection, one.id) == {"n": 1 if one.replaced else 2}


async def test_two_that_meet_at_a_key_that_was_freed(
    engines: Engines, dsn: str, connection: psycopg.Connection
) -> None:
    """Neither finds a task to lock before it asks for the key."""
    first = await send(engines[0])
    await engines[0].cancel.cancel(first.id, "no")

    with held(dsn, KEY_ROW, "k") as holder:
        one, two = await race(connection, holder, *(send(e, n) for n, e in enumerate(engines, 1)))

    assert one.id == two.id != first.id
    assert sorted([one.replaced, two.replaced]) == [False, True]
    assert spec(connection, one.id) == {"n": 1 if one.replaced else 2}


async def test_many_at_once(engines: Engines, connection: psycopg.Connection) -> None:
    found = await asyncio.gather(*(send(engines[n % 2], n, debounce_sec=5) for n in range(20)))

    assert len({one.id for one in found}) == 1
    assert [one.replaced for one in found].count(False) == 1
    # The key knows the content that the task has.
    task = NewTask("x", idempotency_key="k", spec=spec(connection, found[0].id))
    (again,) = await engines[0].submission.submit([task])
    assert (again.duplicate, again.mismatch) == (True, False)


async def test_the_last_of_two_replacements_stays(
    engines: Engines, dsn: str, connection: psycopg.Connection
) -> None:
    first = await send(engines[0])

    with held(dsn, LIVE_ROW, first.id) as holder:
        sides = [send(engine, n, debounce_sec=5) for n, engine in enumerate(engines, 2)]
        found = await one_after_the_other(connection, holder, *sides)

    assert found == [Submitted(first.id, replaced=True)] * 2
    assert spec(connection, first.id) == {"n": 3}
    assert status(connection, first.id) == "PENDING"


@pytest.mark.parametrize("how", ["replace_waiting", "cancel_running"])
async def test_a_claim_that_is_first(engines: Engines, connection: psycopg.Connection, how: str) -> None:
    """The submission waits for its commit, finds the task running, and changes nothing of it."""
    one, two = engines
    first = await send(one)
    sides: list[asyncio.Future[Submitted]] = []

    async def claim(own: Connection) -> ClaimedTask | None:
        task = await one.claims.claim_in(own, "a1", 1, first.id, start=True)
        sides.append(asyncio.ensure_future(send(two, 2, how)))
        await waiting(connection, 1)
        return task

    task = await one.database.run(claim, pipeline=False)
    found = await sides[0]

    assert task is not None
    assert spec(connection, first.id) == {"n": 1}
    if how == "replace_waiting":
        assert found == Submitted(first.id, duplicate=True, mismatch=True)
        assert status(connection, first.id) == "RUNNING"
    else:
        assert (found.duplicate, found.replaced) == (False, False)
        assert [status(connection, name) for name in (first.id, found.id)] == ["CANCELLED", "READY"]


@pytest.mark.parametrize("limit", [1, 5], ids=["fast path", "claim_tasks"])
async def test_a_replacement_that_is_first(engines: Engines, dsn: str, limit: int) -> None:
    """No claim gets the task until the replacement is committed, and then the new one."""
    one, two = engines
    first = await send(one)
    task = NewTask("x", idempotency_key="k", on_conflict="replace_waiting", spec={"n": 2})
    async with await psycopg.AsyncConnection.connect(dsn) as theirs:
        (found,) = await one.submission.submit([task], connection=theirs)
        assert await running(two, limit) == []

    (claimed,) = await running(two, limit)

    assert found == Submitted(first.id, replaced=True)
    assert (claimed.id, bytes(claimed.spec)) == (first.id, b'{"n": 2}')


@pytest.mark.parametrize("way", ["one", "several", "by id", "weighed"])
async def test_a_claim_that_began_before_the_replacement(
    engines: Engines, dsn: str, connection: psycopg.Connection, way: str
) -> None:
    """While it waits for its instance, its snapshot has the old task; it hands out the new one."""
    one, two = engines
    if way == "weighed":
        await two.limits.patch({"daily_budget_usd": Decimal(1000)})
    first = await send(one, debounce_sec=0)

    async def claim() -> list[ClaimedTask]:
        if way == "by id":
            return (await two.claims.claim_task("a1", 1, first.id, start=True)).tasks
        return await running(two, 1 if way == "one" else 5)

    with held(dsn, INSTANCE_ROW) as holder:
        claiming = asyncio.ensure_future(claim())
        await waiting(connection, 1)
        found = await send(one, 2)
        holder.rollback()
    tasks = await claiming or await running(two, 5)

    assert found == Submitted(first.id, replaced=True)
    assert [(task.id, bytes(task.spec)) for task in tasks] == [(first.id, b'{"n": 2}')]
    assert spec(connection, first.id) == {"n": 2}
    assert status(connection, first.id) == "RUNNING"


@pytest.mark.parametrize("first", ["complete", "submit"])
async def test_cancel_running_meets_a_completion(
    engines: Engines, dsn: str, connection: psycopg.Connection, first: str
) -> None:
    """The output counts, and the task is returned; or it comes too late, and there is a new task."""
    one, two = engines
    old = await send(one)
    (task,) = await running(one)

    async def complete() -> Moved:
        (moved,) = await one.work.complete([Completion(ref(task), DONE)])
        return moved

    with held(dsn, LIVE_ROW, old.id) as holder:
        calls: list[Awaitable[Any]] = [complete(), send(two, 2, "cancel_running")]
        ordered = calls if first == "complete" else calls[::-1]
        results = await one_after_the_other(connection, holder, *ordered)

    (moved,) = [result for result in results if isinstance(result, Moved)]
    (found,) = [result for result in results if isinstance(result, Submitted)]
    if first == "complete":
        assert (moved.error, status(connection, old.id)) == (None, "COMPLETED")
        assert found == Submitted(old.id, duplicate=True, mismatch=True)
    else:
        assert isinstance(moved.error, StaleClaimError)
        assert [status(connection, name) for name in (old.id, found.id)] == ["CANCELLED", "READY"]


async def test_two_that_cancel_what_runs(engines: Engines, dsn: str, connection: psycopg.Connection) -> None:
    """The second one finds the task of the first, which waits, and replaces it."""
    old = await send(engines[0])
    await running(engines[0])

    with held(dsn, LIVE_ROW, old.id) as holder:
        sides = [send(engine, n, "cancel_running") for n, engine in enumerate(engines, 2)]
        one, two = await one_after_the_other(connection, holder, *sides)

    assert (one.id, one.replaced, two.replaced) == (two.id, False, True)
    assert one.id != old.id
    assert spec(connection, one.id) == {"n": 3}
    assert [status(connection, name) for name in (old.id, one.id)] == ["CANCELLED", "READY"]


@pytest.mark.parametrize("first", ["cancel", "submit"])
async def test_a_replacement_meets_a_cancellation(
    engines: Engines, dsn: str, connection: psycopg.Connection, first: str
) -> None:
    one, two = engines
    old = await send(one)

    with held(dsn, LIVE_ROW, old.id) as holder:
        calls: list[Awaitable[Any]] = [one.cancel.cancel(old.id, "no"), send(two, 2)]
        ordered = calls if first == "cancel" else calls[::-1]
        results = await one_after_the_other(connection, holder, *ordered)

    (found,) = [result for result in results if isinstance(result, Submitted)]
    assert status(connection, old.id) == "CANCELLED"
    assert found.replaced is (first == "submit")
    if first == "cancel":
        assert (found.id != old.id, status(connection, found.id)) == (True, "READY")


@pytest.mark.parametrize("first", ["depend", "submit"])
async def test_a_replacement_meets_a_new_dependent(
    engines: Engines, dsn: str, connection: psycopg.Connection, first: str
) -> None:
    """One that has a dependent isn't replaced; one that was replaced may get one."""
    one, two = engines
    old = await send(one)

    with held(dsn, LIVE_ROW, old.id) as holder:
        below = one.submission.submit([NewTask("below", depends_on=[old.id])])
        calls: list[Awaitable[Any]] = [below, send(two, 2)]
        ordered = calls if first == "depend" else calls[::-1]
        results = await one_after_the_other(connection, holder, *ordered)

    refused = [result for result in results if isinstance(result, ForbiddenError)]
    assert bool(refused) is (first == "depend")
    assert spec(connection, old.id) == {"n": 1 if refused else 2}


async def test_the_start_moves_while_the_promoter_looks(
    engines: Engines, dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """A task that is due, and is being postponed, isn't made READY."""
    one, two = engines
    first = await send(one, debounce_sec=5)
    clock.advance(6)
    task = NewTask("x", idempotency_key="k", on_conflict="replace_waiting", debounce_sec=5)
    async with await psycopg.AsyncConnection.connect(dsn) as theirs:
        (found,) = await one.submission.submit([task], connection=theirs)
        await two.maintenance.promote_due(10)

    await two.maintenance.promote_due(10)

    assert found.replaced
    assert status(connection, first.id) == "PENDING"
    clock.advance(6)
    await two.maintenance.promote_due(10)
    assert status(connection, first.id) == "READY"


async def test_limits_of_the_type_that_another_process_has_just_set(
    engines: Engines, connection: psycopg.Connection
) -> None:
    """A process whose defaults of types are out of date reads them again, as for a new task."""
    one, two = engines
    first = await send(one, max_cost_usd=9)
    await two.task_types.set("x", {"max_cost_usd": 0.5})

    assert (await send(one, 2)).replaced

    row = connection.execute(
        "SELECT task.max_cost_usd, live.max_cost_usd"
        " FROM lineshaft.task JOIN lineshaft.task_live AS live USING (id)"
    ).fetchone()
    assert row == (Decimal("0.5"), Decimal("0.5"))
    assert status(connection, first.id) == "READY"
