"""Submission inside the caller's own transaction, with the real libraries."""

import threading
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from lineshaft import Lineshaft, NewTask, SyncLineshaft
from lineshaft.errors import InvalidInputError, NotFoundError

pytestmark = pytest.mark.database_only("a transaction of the caller's is one of its database")

#: Below and above where rows are copied in.
SIZES = [1, 120]


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


@pytest.mark.parametrize("size", SIZES)
async def test_sqlalchemy_async(
    shaft: Lineshaft, dsn: str, connection: psycopg.Connection, size: int
) -> None:
    engine = create_async_engine(url(dsn))
    try:
        async with engine.begin() as own:
            await own.run_sync(Base.metadata.create_all)
        async with engine.connect() as own:
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
        thread.join(30)

    assert (found[0].id, found[0].duplicate) == (kept.id, True)


async def test_an_object_that_is_not_a_connection_is_refused(shaft: Lineshaft, dsn: str) -> None:
    with pytest.raises(InvalidInputError, match=r"must be a psycopg connection.*got builtins\.str"):
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
