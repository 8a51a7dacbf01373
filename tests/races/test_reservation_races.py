"""Calls that acquire the last units of a quota at the same moment."""

from typing import Any

import psycopg

from lineshaft.engine.engine import Engine
from lineshaft.errors import RateLimitedError
from lineshaft.model.tasks import NewTask
from lineshaft.operations.quotas import NewRate, SetQuota
from lineshaft.types.reservations import NewReservation, Settlement, Units
from lineshaft.types.work import ClaimedTask
from tests.races.helpers import held, race, running
from tests.world import ref

LOCKED = "SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.use calls' || chr(31) || 'model:m', 0))"


async def two_tasks(engine: Engine) -> list[ClaimedTask]:
    await engine.quotas.set(
        SetQuota(name="calls", match="model:m", rate=NewRate(amount=10, unit="tokens", per_sec=60))
    )
    await engine.submission.submit([NewTask("code"), NewTask("code")])
    return await running(engine, 2)


def used(connection: psycopg.Connection) -> Any:
    row = connection.execute("SELECT sum(amount) FROM lineshaft.quota_use").fetchone()
    return row and row[0]


def new(task: ClaimedTask, tokens: int, key: str | None = None) -> NewReservation:
    return NewReservation(ref(task), "model:m", Units(tokens=tokens), key)


async def test_of_two_calls_for_the_last_units_one_gets_them(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    one, two = engines
    first, second = await two_tasks(one)
    await one.reservations.acquire(new(first, 4))

    with held(dsn, LOCKED) as holder:
        results = await race(
            connection,
            holder,
            one.reservations.acquire(new(first, 6)),
            two.reservations.acquire(new(second, 6)),
        )

    assert sorted(type(result).__name__ for result in results) == ["RateLimitedError", "str"]
    assert used(connection) == 10


async def test_a_call_that_is_repeated_at_the_same_moment_books_once(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    one, two = engines
    task, _ = await two_tasks(one)
    with held(dsn, LOCKED) as holder:
        results = await race(
            connection,
            holder,
            one.reservations.acquire(new(task, 3, "same")),
            two.reservations.acquire(new(task, 3, "same")),
        )
    assert len(set(results)) == 1
    assert used(connection) == 3


async def test_a_settlement_makes_room_for_a_call_at_the_same_moment_or_not(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """Whoever is first: what is booked in the end is what was used and acquired."""
    one, two = engines
    first, second = await two_tasks(one)
    reservation = await one.reservations.acquire(new(first, 8))

    with held(dsn, LOCKED) as holder:
        settled, acquired = await race(
            connection,
            holder,
            one.reservations.settle(Settlement(ref(first), reservation, Units(tokens=5))),
            two.reservations.acquire(new(second, 5)),
        )

    assert settled is None
    assert used(connection) == (5 if isinstance(acquired, RateLimitedError) else 10)


async def test_two_settlements_of_one_reservation(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    one, two = engines
    task, _ = await two_tasks(one)
    reservation = await one.reservations.acquire(new(task, 8))
    with held(dsn, "SELECT FROM lineshaft.reservation FOR UPDATE") as holder:
        await race(
            connection,
            holder,
            one.reservations.settle(Settlement(ref(task), reservation, Units(tokens=5))),
            two.reservations.settle(Settlement(ref(task), reservation, Units(tokens=5))),
        )
    assert used(connection) == 5
