"""Submission inside the caller's own transaction, with the real libraries."""

import re
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from lineshaft import Lineshaft, NewTask, RetrySpec, SyncLineshaft
from lineshaft.errors import AlreadyExistsError, InvalidInputError, NotFoundError
from tests.conftest import superuser

pytestmark = pytest.mark.database_only("a transaction of the caller's is one of its database")

#: Below and above where rows are copied in.
SIZES = [1, 120]

PAGE = Path(__file__).parents[2] / "docs/transactional-submit.md"


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)


def tasks(size: int) -> list[NewTask]:
    return [NewTask("mail", spec={"n": n}, idempotency_key=f"mail {n}") for n in range(size)]


def url(dsn: str, driver: str = "postgresql+psycopg") -> URL:
    parts = conninfo_to_dict(dsn)
    return URL.create(
        driver,
        username=str(parts["user"]),
        database=str(parts["dbname"]),
        query={"host": str(parts["host"]), "passfile": str(parts["passfile"])},
    )


@pytest.fixture
def alchemy(dsn: str) -> Iterator[Engine]:
    engine = create_engine(url(dsn))
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def count(connection: psycopg.Connection, table: str = "lineshaft.task_live") -> int:
    row = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("size", SIZES)
async def test_psycopg_async(shaft: Lineshaft, dsn: str, connection: psycopg.Connection, size: int) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as own:
        await shaft.submit_many(tasks(size), connection=own)
        assert count(connection) == 0
        await own.rollback()
        assert count(connection) == 0

        submitted = await shaft.submit_many(tasks(size), connection=own)
        await own.commit()

    assert count(connection) == size
    assert (await shaft.get(submitted[0])).spec == {"n": 0}


@pytest.mark.parametrize("size", SIZES)
def test_psycopg_sync(blocking: SyncLineshaft, dsn: str, connection: psycopg.Connection, size: int) -> None:
    with psycopg.connect(dsn, row_factory=dict_row) as own:
        blocking.submit_many(tasks(size), connection=own)
        own.rollback()
        assert count(connection) == 0

        submitted = blocking.submit_many(tasks(size), connection=own)
        assert own.row_factory is dict_row  # as it was
        own.commit()

    assert count(connection) == size
    assert blocking.get(submitted[0]).spec == {"n": 0}


async def test_a_sync_connection_in_async_code(shaft: Lineshaft, connection: psycopg.Connection) -> None:
    with connection.transaction():
        submitted = await shaft.submit(NewTask("mail"), connection=connection)

    assert (await shaft.get(submitted)).type == "mail"


@pytest.mark.parametrize("size", SIZES)
def test_sqlalchemy_core(
    blocking: SyncLineshaft, alchemy: Engine, connection: psycopg.Connection, size: int
) -> None:
    with alchemy.connect() as own:
        # Nothing has begun yet: it must become SQLAlchemy's transaction all the same.
        blocking.submit_many(tasks(size), connection=own)
        assert count(connection) == 0
        own.commit()
    assert count(connection) == size

    with alchemy.connect() as own, own.begin() as transaction:
        blocking.submit(NewTask("other"), connection=own)
        own.execute(text("INSERT INTO orders VALUES (1)"))
        transaction.rollback()
    assert (count(connection), count(connection, "orders")) == (size, 0)


@pytest.mark.parametrize("size", SIZES)
def test_sqlalchemy_orm_session(
    blocking: SyncLineshaft, alchemy: Engine, connection: psycopg.Connection, size: int
) -> None:
    with Session(alchemy) as session:
        session.add(Order(id=1))
        blocking.submit_many(tasks(size), connection=session)
        session.rollback()
    assert (count(connection), count(connection, "orders")) == (0, 0)

    with Session(alchemy) as session, session.begin():
        session.add(Order(id=1))
        blocking.submit_many(tasks(size), connection=session)
        assert count(connection) == 0
    assert (count(connection), count(connection, "orders")) == (size, 1)


def test_sqlalchemy_scoped_session_and_savepoints(
    blocking: SyncLineshaft, alchemy: Engine, connection: psycopg.Connection
) -> None:
    sessions = scoped_session(sessionmaker(alchemy))
    blocking.submit(NewTask("kept"), connection=sessions)
    nested = sessions.begin_nested()
    blocking.submit(NewTask("dropped"), connection=sessions)
    nested.rollback()
    sessions.commit()
    sessions.remove()

    assert [row[0] for row in connection.execute("SELECT type FROM lineshaft.task")] == ["kept"]


async def commits_and_rolls_back(
    engine: AsyncEngine, shaft: Lineshaft, connection: psycopg.Connection, size: int
) -> None:
    """Connections and sessions of SQLAlchemy: the tasks are there after its commit, and only then."""
    try:
        async with engine.begin() as own:
            await own.run_sync(Base.metadata.create_all)
        async with engine.connect() as own:
            # Nothing has begun yet: it must become SQLAlchemy's transaction all the same.
            await shaft.submit_many(tasks(size), connection=own)
            assert count(connection) == 0
            await own.commit()
        assert count(connection) == size

        async with AsyncSession(engine) as session:
            session.add(Order(id=1))
            await shaft.submit(NewTask("other"), connection=session)
            await session.rollback()
        assert (count(connection), count(connection, "orders")) == (size, 0)

        async with AsyncSession(engine) as session, session.begin():
            session.add(Order(id=1))
            await shaft.submit_dag("a DAG", [NewTask("x", key="x")], connection=session)
        assert (count(connection), count(connection, "orders")) == (size + 1, 1)
    finally:
        await engine.dispose()


@pytest.mark.parametrize("size", SIZES)
async def test_sqlalchemy_async(
    shaft: Lineshaft, dsn: str, connection: psycopg.Connection, size: int
) -> None:
    engine = create_async_engine(url(dsn))
    await commits_and_rolls_back(engine, shaft, connection, size)


def test_a_dag_in_a_transaction(blocking: SyncLineshaft, alchemy: Engine) -> None:
    with alchemy.begin() as own:
        dag = blocking.submit_dag(
            "a DAG", [NewTask("x", key="x"), NewTask("y", key="y", depends_on=["x"])], connection=own
        )

    assert blocking.get_dag(dag).counts == {"PENDING": 1, "READY": 1}


def test_what_is_refused_leaves_the_transaction_usable(
    blocking: SyncLineshaft, alchemy: Engine, connection: psycopg.Connection
) -> None:
    with alchemy.begin() as own:
        own.execute(text("INSERT INTO orders VALUES (1)"))
        with pytest.raises(NotFoundError):
            blocking.submit(NewTask("x", parent_id="task_nope"), connection=own)
        own.execute(text("INSERT INTO orders VALUES (2)"))

    assert (count(connection), count(connection, "orders")) == (0, 2)


def test_waiting_for_a_key_blocks_only_its_own_thread(
    blocking: SyncLineshaft, dsn: str, connection: psycopg.Connection
) -> None:
    """Two transactions with one key: the second waits for the first, in its own thread and nowhere else."""
    task = NewTask("mail", idempotency_key="k")
    found = []

    def second() -> None:
        with psycopg.connect(dsn, application_name="second") as own:
            found.append(blocking.submit(task, connection=own))

    with psycopg.connect(dsn) as first:
        kept = blocking.submit(task, connection=first)
        thread = threading.Thread(target=second)
        thread.start()
        waiting = (
            "SELECT FROM pg_stat_activity WHERE application_name = 'second' AND wait_event_type = 'Lock'"
        )
        while connection.execute(waiting.encode()).fetchone() is None:
            assert thread.is_alive()
        # The event loop behind it is free.
        assert blocking.list().items == []
        first.commit()
        thread.join(60)

    assert (found[0].id, found[0].duplicate) == (kept.id, True)


async def test_an_object_that_is_not_a_connection_is_refused(shaft: Lineshaft, dsn: str) -> None:
    with pytest.raises(InvalidInputError, match=r"must be a connection of psycopg.*got builtins\.str"):
        await shaft.submit(NewTask("x"), connection=dsn)
    sqlite = create_engine("sqlite://")
    with (
        sqlite.connect() as own,
        pytest.raises(InvalidInputError, match=r"sqlite3 here.*postgresql\+psycopg"),
    ):
        await shaft.submit(NewTask("x"), connection=own)
    sqlite.dispose()


async def test_an_async_connection_is_refused_by_the_sync_client(blocking: SyncLineshaft, dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as own:
        with pytest.raises(InvalidInputError, match="is asynchronous"):
            blocking.submit(NewTask("x"), connection=own)


def test_a_blocking_call_in_an_open_transaction_holds_up_no_other_submission(
    blocking: SyncLineshaft, dsn: str, connection: psycopg.Connection
) -> None:
    with SyncLineshaft(dsn) as other, psycopg.connect(dsn) as own:
        blocking.submit(NewTask("new lane"), connection=own)
        other.submit(NewTask("new lane"))  # ends while the transaction is open
        assert count(connection) == 1

    assert count(connection) == 2


def own_parameters(dsn: str) -> dict[str, Any]:
    parts = conninfo_to_dict(dsn)
    return {
        "host": parts["host"],
        "user": parts["user"],
        "database": parts["dbname"],
        "passfile": parts["passfile"],
    }


@pytest.fixture
async def asyncpg_connection(dsn: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(**own_parameters(dsn))
    yield connection
    await connection.close()


@pytest.mark.parametrize("size", SIZES)
async def test_asyncpg(
    shaft: Lineshaft, asyncpg_connection: Any, connection: psycopg.Connection, size: int
) -> None:
    own = asyncpg_connection
    transaction = own.transaction()
    await transaction.start()
    await shaft.submit_many(tasks(size), connection=own)
    assert count(connection) == 0
    await transaction.rollback()
    assert count(connection) == 0

    # Begun by a statement, which asyncpg doesn't know about.
    await own.execute("BEGIN")
    submitted = await shaft.submit_many(tasks(size), connection=own)
    again = await shaft.submit_many(tasks(size), connection=own)
    await own.execute("COMMIT")

    assert count(connection) == size
    assert [one.id for one in again] == [one.id for one in submitted]
    assert again[0].duplicate
    assert (await shaft.get(submitted[0])).spec == {"n": 0}


async def test_asyncpg_outside_a_transaction(
    shaft: Lineshaft, asyncpg_connection: Any, connection: psycopg.Connection
) -> None:
    """As with any statement on such a connection: it is committed at once."""
    await shaft.submit(NewTask("x"), connection=asyncpg_connection)

    assert count(connection) == 1


async def test_all_fields_with_asyncpg(shaft: Lineshaft, asyncpg_connection: Any) -> None:
    first = await shaft.submit(NewTask("x"))
    task = NewTask(
        "y",
        title='a "quoted" \\ title, 100 %',
        spec={"text": "it's {\n}", "n": [1, None]},
        required_capabilities=["a b", 'c"d'],
        model_preferences=["m"],
        max_cost_usd=0.25,
        deadline=datetime(2030, 1, 1, tzinfo=UTC),
        run_at=datetime(2029, 1, 1, tzinfo=UTC),
        tags=["t,1"],
        depends_on=[first.id],
        retry=RetrySpec(strategy="fixed", initial_delay_sec=3),
    )
    async with asyncpg_connection.transaction():
        by_asyncpg = await shaft.submit(task, connection=asyncpg_connection)
    by_us = await shaft.submit(task)

    mine, ours = await shaft.get(by_asyncpg), await shaft.get(by_us)
    for name in ("title", "spec", "required_capabilities", "model_preferences", "max_cost_usd", "deadline"):
        assert getattr(mine, name) == getattr(ours, name)
    for name in ("run_at", "tags", "depends_on", "blocked_by", "retry", "status", "priority", "max_attempts"):
        assert getattr(mine, name) == getattr(ours, name)


async def test_a_replacement_on_asyncpg(shaft: Lineshaft, asyncpg_connection: Any) -> None:
    newest: dict[str, Any] = {"idempotency_key": "k", "on_conflict": "replace_waiting", "debounce_sec": 60}
    first = await shaft.submit(NewTask("x", lock_key="a"), idempotency_key="k")
    for n in range(2):
        async with asyncpg_connection.transaction():
            again = await shaft.submit(NewTask("x", spec={"n": n}), connection=asyncpg_connection, **newest)
        assert (again.id, again.replaced) == (first.id, True)

    task = await shaft.get(first)
    assert (task.spec, task.status) == ({"n": 1}, "PENDING")
    del newest["debounce_sec"]
    with pytest.raises(InvalidInputError, match="your own transaction"):
        await shaft.submit(
            NewTask("x"), connection=asyncpg_connection, **(newest | {"on_conflict": "cancel_running"})
        )


async def test_what_is_refused_leaves_an_asyncpg_transaction_usable(
    shaft: Lineshaft, asyncpg_connection: Any, connection: psycopg.Connection
) -> None:
    own = asyncpg_connection
    await own.execute("CREATE TABLE orders (id int)")
    await shaft.submit(NewTask("x", id="taken"))
    async with own.transaction():
        await own.execute("INSERT INTO orders VALUES (1)")
        for size in SIZES:
            with pytest.raises(AlreadyExistsError, match="taken"):
                await shaft.submit_many([NewTask("x", id="taken"), *tasks(size)], connection=own)
        await own.execute("INSERT INTO orders VALUES (2)")

    assert (count(connection), count(connection, "orders")) == (1, 2)


async def test_asyncpg_from_a_pool_and_a_dag_with_a_key(shaft: Lineshaft, dsn: str) -> None:
    new = [NewTask("x", key="x"), NewTask("y", key="y", depends_on=["x"])]
    async with asyncpg.create_pool(**own_parameters(dsn), min_size=1) as pool:
        async with pool.acquire() as own, own.transaction():
            first = await shaft.submit_dag("a DAG", new, idempotency_key="k", connection=own)
        async with pool.acquire() as own, own.transaction():
            second = await shaft.submit_dag("a DAG", new, idempotency_key="k", connection=own)

    assert (first.duplicate, second.duplicate) == (False, True)
    assert second["y"].id == first["y"].id
    assert (await shaft.get_dag(first)).counts == {"PENDING": 1, "READY": 1}


@pytest.mark.parametrize("size", SIZES)
async def test_sqlalchemy_on_asyncpg(
    shaft: Lineshaft, dsn: str, connection: psycopg.Connection, size: int
) -> None:
    parts = own_parameters(dsn)
    engine = create_async_engine(
        URL.create("postgresql+asyncpg", username=parts["user"], database=parts["database"]),
        connect_args={"host": parts["host"], "passfile": parts["passfile"]},
    )
    await commits_and_rolls_back(engine, shaft, connection, size)


async def test_asyncpg_is_refused_by_the_sync_client(
    blocking: SyncLineshaft, asyncpg_connection: Any
) -> None:
    with pytest.raises(InvalidInputError, match="is asynchronous"):
        blocking.submit(NewTask("x"), connection=asyncpg_connection)


async def test_a_dag_with_a_known_key_in_a_transaction(shaft: Lineshaft, dsn: str) -> None:
    new = [NewTask("x", key="x")]
    first = await shaft.submit_dag("a DAG", new, idempotency_key="k")
    async with await psycopg.AsyncConnection.connect(dsn) as own:
        second = await shaft.submit_dag("a DAG", new, idempotency_key="k", connection=own)

    assert (second.id, second.duplicate) == (first.id, True)


@pytest.fixture
def submitter(dsn: str) -> Iterator[str]:
    """The DSN of a role with exactly the grants of docs/client.md."""
    (grants,) = re.findall(r"```sql\n(GRANT USAGE.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    role = f"app_{conninfo_to_dict(dsn)['dbname']}"
    with psycopg.connect(superuser(dsn), autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'".encode())
        admin.execute(grants.replace("app;", f"{role};").encode())
        yield make_conninfo(dsn, user=role, password="secret")
        admin.execute(f"DROP OWNED BY {role}".encode())
        admin.execute(f"DROP ROLE {role}".encode())


@pytest.mark.parametrize("size", SIZES)
async def test_a_role_that_may_only_submit(
    submitter: str, shaft: Lineshaft, connection: psycopg.Connection, size: int
) -> None:
    """For its own transactions and for its Lineshaft; it can't read specs or outputs, or change a task."""
    done = await shaft.submit(NewTask("existing"))
    cancelled = await shaft.submit(NewTask("existing"))
    await shaft.cancel(cancelled)
    async with Lineshaft(submitter) as limited, await psycopg.AsyncConnection.connect(submitter) as own:
        await limited.submit_many(tasks(size), connection=own)
        await limited.submit_many([NewTask("x") for _ in range(size)], connection=own)
        await limited.submit(NewTask("y", depends_on=[done.id]), connection=own)
        with pytest.raises(InvalidInputError, match="was cancelled"):
            await limited.submit(NewTask("y", depends_on=[cancelled.id]), connection=own)
        await limited.submit(NewTask("batch", children=[NewTask("child")]), connection=own)
        for _ in range(2):
            await limited.submit_dag("d", [NewTask("x", key="x")], idempotency_key="k", connection=own)
        await own.commit()
        assert (await limited.submit_many(tasks(size)))[0].duplicate
        await limited.submit_many([NewTask("x") for _ in range(size)])

        for statement in (
            "SELECT spec FROM lineshaft.task",
            "SELECT output FROM lineshaft.task_end",
            "SELECT * FROM lineshaft.tasks",
            "UPDATE lineshaft.task_live SET status = 'READY'",
            "DELETE FROM lineshaft.task_live",
            "SELECT * FROM lineshaft.claim_key",
            "SELECT * FROM lineshaft.token",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await own.execute(statement.encode())
            await own.rollback()
    assert count(connection) == 3 * size + 5
