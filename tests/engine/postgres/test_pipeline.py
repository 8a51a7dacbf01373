"""Pipelined statements: one transaction, rows by name, and a connection that stays usable."""

from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.pipeline import Call, Rows, pipelined, read_in_snapshot, transaction
from lineshaft.errors import InvalidInputError

ADD: Call = ("INSERT INTO lineshaft.pause (type, since) VALUES (%(type)s::text, now())", {"type": "a"})
COUNT: Call = (
    "SELECT count(*) AS count_of_pauses FROM lineshaft.pause WHERE type <> %(not)s::text",
    {"not": "%%"},
)
WRONG: Call = ("SELECT 1 / %(n)s::integer", {"n": 0})


@pytest.fixture(params=[True, False], ids=["prepared", "unprepared"])
async def database(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[Database]:
    async with Database(dsn, max_connections=1, prepare=request.param) as opened:
        yield opened


async def count(connection: Connection) -> int:
    assert connection.info.transaction_status == TransactionStatus.IDLE
    ((row,),) = await pipelined(connection, COUNT)
    return int(row.count_of_pauses)


async def test_the_rows_of_each(database: Database) -> None:
    async with database.connection() as connection:
        assert await pipelined(connection, COUNT, ADD, COUNT) == [[(0,)], [], [(1,)]]
        ((row,),) = await pipelined(connection, COUNT)
        assert row.count_of_pauses == 1


async def test_all_or_none(database: Database) -> None:
    async with database.connection() as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            await pipelined(connection, ADD, WRONG)
        assert await count(connection) == 0


async def test_a_transaction_that_succeeds_is_committed(database: Database) -> None:
    async with database.connection() as connection:
        async with transaction(connection, ADD, COUNT) as (_, seen):
            assert seen == [(1,)]
        assert await count(connection) == 1


@pytest.mark.parametrize("calls", [(ADD,), (ADD, WRONG)], ids=["within", "at its beginning"])
async def test_a_transaction_that_fails_leaves_nothing(database: Database, calls: tuple[Call, ...]) -> None:
    async with database.connection() as connection:
        with pytest.raises(ZeroDivisionError if len(calls) == 1 else psycopg.errors.DivisionByZero):
            async with transaction(connection, *calls):
                raise ZeroDivisionError
        assert await count(connection) == 0


async def test_statements_that_the_driver_has_dropped_are_prepared_again(database: Database) -> None:
    """The driver drops all prepared statements of a connection after a rollback; callers don't notice."""
    async with database.connection() as connection:
        assert await count(connection) == 0
        await connection.execute("DEALLOCATE ALL")
        assert await count(connection) == 0
        await connection.execute("DEALLOCATE ALL")
        async with transaction(connection, COUNT, ADD) as (seen, _):
            assert seen == [(0,)]
        await connection.execute("DEALLOCATE ALL")
        assert await read_in_snapshot(connection, COUNT) == [[{"count_of_pauses": 1}]]
        await connection.execute("DEALLOCATE ALL")

    async def count_in_transaction(own: Connection) -> list[Rows]:
        return await pipelined(own, COUNT)

    assert await database.run(count_in_transaction, pipeline=False) == [[(1,)]]


@pytest.mark.parametrize("given", ["a\0b", ["x", "a\0b"], "{a,b\0}"])
async def test_a_text_is_never_truncated(database: Database, given: object) -> None:
    """U+0000 ends a text in libpq: a truncated id must not name another agent."""
    call: Call = ("SELECT %(given)s::text, %(given)s::text[]", {"given": given})
    with pytest.raises(InvalidInputError, match=r"U\+0000"):
        await database.run_alone(lambda own: pipelined(own, call))
    async with database.connection() as connection:
        with pytest.raises(psycopg.DataError):
            await pipelined(connection, ADD, call)
        assert await count(connection) == 0, "the connection is still usable"
