"""Statements that go to the server together and are answered together: one round trip for all of them.

For what runs thousands of times a second. psycopg's own pipeline asks the event loop some twenty times for
three statements, which costs the client more than the statements cost the server. Here libpq gets them all at
once, and the loop is asked when there is something to read.
"""

import itertools
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any, LiteralString
from weakref import WeakKeyDictionary

from psycopg import abc, adapt, errors
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait

from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.literals import array_literal

Call = tuple[LiteralString, Mapping[str, Any]]
Rows = list[tuple[Any, ...]]


async def pipelined(connection: Connection, *calls: Call) -> list[Rows]:
    """The rows of each statement. Outside a transaction all are done, or none.

    Parameters go as text, so statements must cast them all, as ours do; an array may be text already.
    """
    transformer = adapt.Transformer(connection)
    return [_rows(transformer, result) for result in await _results(connection, calls)]


async def read_in_snapshot(connection: Connection, *calls: Call) -> list[list[dict[str, Any]]]:
    """The rows of each statement, by column, all from one snapshot of the database."""
    try:
        _, *results, _ = await _results(connection, (_BEGIN_READING, *calls, _COMMIT))
    except BaseException:
        if not connection.closed:
            await pipelined(connection, _ROLLBACK)
        raise
    transformer = adapt.Transformer(connection)
    found = []
    for result in results:
        names = [(result.fname(n) or b"").decode() for n in range(result.nfields)]
        found.append([dict(zip(names, row, strict=True)) for row in _rows(transformer, result)])
    return found


async def _results(connection: Connection, calls: Sequence[Call]) -> list[PGresult]:
    statements = [_positional(sql) for sql, _ in calls]
    prepared = await _prepare(connection, statements)
    pgconn = connection.pgconn
    # First: what can't be sent must not leave a connection behind that waits for the rest.
    all_values = [
        [_text(parameters[name]) for name in statement.parameters]
        for statement, (_, parameters) in zip(statements, calls, strict=True)
    ]
    pgconn.enter_pipeline_mode()
    for statement, values in zip(statements, all_values, strict=True):
        if statement in prepared:
            pgconn.send_query_prepared(prepared[statement], values)
        else:
            pgconn.send_query_params(statement.text, values)
    return await _answers(connection)


@asynccontextmanager
async def transaction(connection: Connection, *calls: Call) -> AsyncIterator[list[Rows]]:
    """A transaction that begins with these statements, and gives their rows."""
    try:
        yield (await pipelined(connection, _BEGIN, *calls))[1:]
    except BaseException:
        if not connection.closed:
            await pipelined(connection, _ROLLBACK)
        raise
    await pipelined(connection, _COMMIT)


_BEGIN: Call = ("BEGIN", {})
_BEGIN_READING: Call = ("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY", {})
_COMMIT: Call = ("COMMIT", {})
_ROLLBACK: Call = ("ROLLBACK", {})


class _Statement:
    """A statement of the catalog as libpq wants it: parameters by number."""

    def __init__(self, sql: LiteralString) -> None:
        self.parameters: list[str] = []
        self.text = _PLACEHOLDER.sub(self._number, sql).encode()

    def _number(self, placeholder: re.Match[str]) -> str:
        name = placeholder[1]
        if name is None:
            return "%"
        if name not in self.parameters:
            self.parameters.append(name)
        return f"${self.parameters.index(name) + 1}"


_PLACEHOLDER = re.compile(r"%(?:\((\w+)\)s|%)")
_positional = lru_cache(maxsize=None)(_Statement)
#: What each connection has prepared, and under which name.
_prepared: WeakKeyDictionary[Connection, dict[_Statement, bytes]] = WeakKeyDictionary()
#: A name is never used twice: one that psycopg has dropped can't be told from one that it hasn't.
_numbers = itertools.count()


async def _prepare(connection: Connection, statements: Sequence[_Statement]) -> dict[_Statement, bytes]:
    """The names of what is prepared: all statements with parameters, unless a pooler can't have that."""
    if connection.prepare_threshold is None:
        return {}
    known = _prepared.setdefault(connection, {})
    new = [each for each in dict.fromkeys(statements) if each.parameters and each not in known]
    if new:
        names = {each: b"lineshaft_%d" % next(_numbers) for each in new}
        connection.pgconn.enter_pipeline_mode()
        for statement, name in names.items():
            connection.pgconn.send_prepare(name, statement.text)
        await _answers(connection)
        known.update(names)
    return known


async def _answers(connection: Connection) -> list[PGresult]:
    """Wait until everything that was sent is answered."""
    pgconn = connection.pgconn
    pgconn.pipeline_sync()
    results = await connection.wait(_read(pgconn))
    pgconn.exit_pipeline_mode()
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            error = errors.error_from_result(result)
            if isinstance(error, errors.InvalidSqlStatementName):
                # psycopg drops all prepared statements of a connection after a rollback, ours too.
                del _prepared[connection]
            raise error
    return results


def _read(pgconn: PGconn) -> abc.PQGen[list[PGresult]]:
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            # The server may be unable to take more before it has got rid of an answer.
            pgconn.consume_input()
    results: list[PGresult] = []
    while True:
        while pgconn.is_busy():
            if (yield Wait.R):
                pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:
            continue
        if result.status == ExecStatus.PIPELINE_SYNC:
            return results
        results.append(result)


def _rows(transformer: abc.Transformer, result: PGresult) -> Rows:
    if not result.ntuples:
        return []
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, tuple)


def _text(value: object) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, datetime):
        return value.isoformat().encode()
    text = (array_literal(value) if isinstance(value, list) else str(value)).encode()
    if b"\0" in text:
        # libpq takes it for the end: the rest would be lost without a word.
        raise errors.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
    return text
