"""A real PostgreSQL for every test that touches data: a database of its own, cloned from a migrated template.

Where versions may differ (statements, plans, races, the way of a task) a test runs once for every major
version found: the system's, and the one that Lineshaft brings. Elsewhere the newest is enough; `--postgres
all` runs all on all.

A test of a client or an agent that asks for `where` runs over the database and over HTTP. Where nothing of it
depends on that (`alike_over_http`), the database is enough by default; where it is about the database itself
(`database_only`), always. `--transport database`, `http` or `all` chooses.
"""

import fcntl
import os
import re
from collections.abc import AsyncIterator, Iterator
from functools import cache
from itertools import count
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from lineshaft.clock import MovableClock
from lineshaft.embedded import Binaries, EmbeddedServer, databases, find_binaries
from lineshaft.engine.engine import Engine
from lineshaft.engine.postgres import migrate
from tests.factory import Factory
from tests.http_server import ServerThread
from tests.in_memory import clear_away, home_of_servers

TEMPLATE = "lineshaft_template"
#: More constraints than production has.
STRICT = Path(__file__).parent / "strict.sql"
#: Tests need no data after a power cut; everything else is as in production.
FAST = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_connections": "300",
    "max_wal_size": "256MB",
}

#: Modules of tests that run on every version.
ON_EACH_VERSION = re.compile(
    r"tests\.(races|embedded)\.|tests\.engine\.(postgres|claim)\.|tests\.engine\.transition\.test_(matrix|stateful|completion)$"
)

_database_numbers = count(1)


@cache
def one_of_each_major() -> list[Binaries]:
    majors: dict[int, Binaries] = {}
    for binaries in find_binaries():
        majors.setdefault(binaries.major, binaries)
    return [majors[major] for major in sorted(majors)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport",
        choices=["database", "http", "all"],
        help="run tests of clients and agents over this only; 'all': every one over both",
    )
    parser.addoption(
        "--postgres",
        metavar="MAJOR",
        help="run on this version of PostgreSQL only; 'all': every test on each",
    )
    parser.addoption(
        "--histories",
        metavar="N",
        type=int,
        help="so many random histories for each stateful test, instead of a few that are always the same",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "postgres" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("postgres")
        found = one_of_each_major()
        if wanted is None and not ON_EACH_VERSION.match(metafunc.module.__name__):
            found = found[-1:]
        elif wanted not in {None, "all"}:
            found = [binaries for binaries in found if str(binaries.major) == wanted]
        metafunc.parametrize("postgres", found, ids=lambda b: f"pg{b.major}", indirect=True, scope="session")

    if "transport" in metafunc.fixturenames:
        transports = _transports(metafunc.definition, metafunc.config.getoption("transport"))
        metafunc.parametrize("transport", transports)


def _transports(test: pytest.Item, wanted: str | None) -> list[str]:
    if test.get_closest_marker("database_only"):
        return ["database"] if wanted != "http" else []
    if wanted in {"database", "http"}:
        return [wanted]
    alike = test.get_closest_marker("alike_over_http")
    if wanted is None and alike is not None and alike.args != (False,):
        return ["database"]
    return ["database", "http"]


@pytest.fixture(scope="session")
def server_thread() -> Iterator[ServerThread]:
    thread = ServerThread()
    yield thread
    thread.close()


@pytest.fixture
def where(transport: str, dsn: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """What a client of the test's database is given: its DSN, or the URL of a server."""
    if transport == "database":
        yield dsn
        return
    thread: ServerThread = request.getfixturevalue("server_thread")
    with thread.serving(dsn) as url:
        yield url


@pytest.fixture(scope="session")
def postgres(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedServer]:
    """One server for each version; the processes of a parallel run share it."""
    binaries: Binaries = request.param
    shared, run = tmp_path_factory.getbasetemp(), os.getpid()
    if hasattr(request.config, "workerinput"):
        shared, run = shared.parent, os.getppid()
    home = home_of_servers(shared, run) / f"pg{binaries.major}"
    with EmbeddedServer.start(home, binaries=binaries, options=FAST) as server:
        _make_template(server, shared / f"pg{binaries.major}.template.lock")
        yield server


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        clear_away(os.getpid())


def _make_template(server: EmbeddedServer, lock: Path) -> None:
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            if admin.execute("SELECT FROM pg_database WHERE datname = %s", [TEMPLATE]).fetchone() is None:
                admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
                template = make_conninfo(server.dsn, dbname=TEMPLATE)
                migrate.up(template)
                with psycopg.connect(template) as connection:
                    connection.execute(STRICT.read_bytes())


def clone(server: EmbeddedServer, worker: str, template: str) -> Iterator[str]:
    name = f"test_{worker}_{next(_database_numbers)}"
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        databases.clone(admin, name, template)
        yield make_conninfo(server.dsn, dbname=name)
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def dsn(postgres: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """A migrated database of the test's own."""
    yield from clone(postgres, getattr(request.config, "workerinput", {}).get("workerid", "gw"), TEMPLATE)


@pytest.fixture
def empty_dsn(postgres: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty database of the test's own."""
    yield from clone(postgres, getattr(request.config, "workerinput", {}).get("workerid", "gw"), "template0")


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn, autocommit=True) as opened:
        yield opened


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
async def engine(dsn: str, clock: MovableClock) -> AsyncIterator[Engine]:
    """The engine on a database of the test's own, by a clock that the test moves."""
    async with Engine(dsn, clock=clock) as opened:
        yield opened


@pytest.fixture
def factory(connection: psycopg.Connection, clock: MovableClock) -> Factory:
    return Factory(connection, clock)
