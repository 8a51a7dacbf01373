"""Several statements in one round trip, for calls that run thousands of times a second.

psycopg's own pipeline visits the event loop about twenty times for three statements, which costs the client
more than the statements cost the server. Here libpq gets all statements at once, and the event loop is
visited only when there is something to read.
"""

import itertools
import re
from collections import namedtuple
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any, LiteralString
from weakref import WeakKeyDictionary

from psycopg import abc, adapt, errors
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait

from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.literals import array_literal

Call = tuple[LiteralString, Mapping[str, Any]]
#: Named tuples with the columns of the statement.
Rows = list[Any]


async def pipelined(connection: Connection, *calls: Call, named: bool = True) -> list[Rows]:
    """The rows of each statement. Outside a transaction, either all statements take effect or none.

    Parameters are sent as text, so statements must cast all of them; an array may be an array literal. With
    `named=False` rows are plain tuples, which is faster where there are many; see `row_type`.
    """
    transformer = adapt.Transformer(connection)
    results = await _results(connection, calls)
    found = []
    for (sql, _), result in zip(calls, results, strict=True):
        make_row = _statement(sql).type_of(result)._make
        found.append(_rows(transformer, result, make_row if named else tuple))
    return found


def row_type(sql: LiteralString) -> Any:
    """The named tuple of a statement's rows; known once the statement has been answered."""
    return _statement(sql).row_type


async def read_in_snapshot(connection: Connection, *calls: Call) -> list[list[dict[str, Any]]]:
    """The rows of each statement as dictionaries, all from one snapshot of the database."""
    try:
        _, *results, _ = await _results(connection, (_BEGIN_READ_ONLY, *calls, _COMMIT))
    except BaseException:
        if not connection.closed:
            await pipelined(connection, _ROLLBACK)
        raise
    transformer = adapt.Transformer(connection)
    found = []
    for result in results:
        names = _column_names(result)
        found.append([dict(zip(names, row, strict=True)) for row in _rows(transformer, result, tuple)])
    return found


async def _results(connection: Connection, calls: Sequence[Call]) -> list[PGresult]:
    is_alone = connection.pgconn.transaction_status == TransactionStatus.IDLE
    try:
        return await _sent(connection, calls)
    except errors.InvalidSqlStatementName:
        # psycopg drops all prepared statements of a connection after a rollback, ours too.
        _prepared.pop(connection, None)
        if not is_alone:
            # The transaction is aborted; `Database.run` runs it again.
            raise
    if connection.pgconn.transaction_status != TransactionStatus.IDLE:
        # These statements began a transaction.
        await _sent(connection, [_ROLLBACK])
    return await _sent(connection, calls)


async def _sent(connection: Connection, calls: Sequence[Call]) -> list[PGresult]:
    statements = [_statement(sql) for sql, _ in calls]
    prepared = await _prepare(connection, statements)
    pgconn = connection.pgconn
    # Before anything is sent: an error here must not leave a half-filled pipeline behind.
    all_values = [
        [as_text(parameters[name]) for name in statement.parameters]
        for statement, (_, parameters) in zip(statements, calls, strict=True)
    ]
    pgconn.enter_pipeline_mode()
    for statement, values in zip(statements, all_values, strict=True):
        if statement in prepared:
            pgconn.send_query_prepared(prepared[statement], values)
        else:
            pgconn.send_query_params(statement.text, values)
    return await _wait_for_results(connection)


@asynccontextmanager
async def transaction(connection: Connection, *calls: Call) -> AsyncIterator[list[Rows]]:
    """A transaction that begins with these statements; yields their rows."""
    try:
        yield (await pipelined(connection, _BEGIN, *calls))[1:]
    except BaseException:
        if not connection.closed:
            await pipelined(connection, _ROLLBACK)
        raise
    await pipelined(connection, _COMMIT)


_BEGIN: Call = ("BEGIN", {})
_BEGIN_READ_ONLY: Call = ("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY", {})
_COMMIT: Call = ("COMMIT", {})
_ROLLBACK: Call = ("ROLLBACK", {})


#: Untyped: mypy wants the columns to be literals, but they are known at run time only.
_namedtuple: Any = namedtuple  # noqa: PYI024 - see above


class _Statement:
    """A statement of the catalog in libpq's form: parameters by number."""

    def __init__(self, sql: LiteralString) -> None:
        self.parameters: list[str] = []
        self.text = PLACEHOLDER.sub(self._number, sql).encode()
        self.row_type: Any = None

    def type_of(self, result: PGresult) -> Any:
        if self.row_type is None:
            self.row_type = _namedtuple("Row", _column_names(result), rename=True)
        return self.row_type

    def _number(self, placeholder: re.Match[str]) -> str:
        name = placeholder[1]
        if name is None:
            return "%"
        if name not in self.parameters:
            self.parameters.append(name)
        return f"${self.parameters.index(name) + 1}"


PLACEHOLDER = re.compile(r"%(?:\((\w+)\)s|%)")
_statement = lru_cache(maxsize=None)(_Statement)
#: The prepared statements of each connection, with their names.
_prepared: WeakKeyDictionary[Connection, dict[_Statement, bytes]] = WeakKeyDictionary()
#: A name is never used twice: psycopg doesn't report which names it has dropped.
_numbers = itertools.count()


async def _prepare(connection: Connection, statements: Sequence[_Statement]) -> dict[_Statement, bytes]:
    """The names of prepared statements: all that have parameters, unless a pooler rules out preparing."""
    if connection.prepare_threshold is None:
        return {}
    known = _prepared.setdefault(connection, {})
    new = [each for each in dict.fromkeys(statements) if each.parameters and each not in known]
    if new:
        names = {each: b"lineshaft_%d" % next(_numbers) for each in new}
        connection.pgconn.enter_pipeline_mode()
        for statement, name in names.items():
            connection.pgconn.send_prepare(name, statement.text)
        await _wait_for_results(connection)
        known.update(names)
    return known


async def _wait_for_results(connection: Connection) -> list[PGresult]:
    pgconn = connection.pgconn
    pgconn.pipeline_sync()
    results = await connection.wait(_read(pgconn))
    pgconn.exit_pipeline_mode()
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            raise errors.error_from_result(result)
    return results


def _read(pgconn: PGconn) -> abc.PQGen[list[PGresult]]:
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            # The server may not accept more input before the client has read its output.
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


def _column_names(result: PGresult) -> list[str]:
    return [(result.fname(n) or b"").decode() for n in range(result.nfields)]


def _rows(
    transformer: abc.Transformer, result: PGresult, make_row: Callable[[Sequence[Any]], Any]
) -> list[Any]:
    if not result.ntuples:
        return []
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, make_row)


def as_text(value: object) -> bytes | None:
    """A parameter in PostgreSQL's text format."""
    if value is None:
        return None
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, datetime):
        return value.isoformat().encode()
    text = (array_literal(value) if isinstance(value, list) else str(value)).encode()
    if b"\0" in text:
        # libpq takes NUL for the end of the text: the rest would be lost silently.
        raise errors.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
    return text
