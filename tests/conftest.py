"""The test suite: which tests run, and the PostgreSQL that they run on.

Every test that touches data has a real PostgreSQL and its own database, cloned from a migrated template.

By default a run is the inner loop: the newest PostgreSQL, clients and agents on the database, no slow tests.
`--full` is what CI runs: slow tests, every PostgreSQL found for tests of statements, plans, races and
transitions, and clients and agents also over HTTP. `--postgres` and `--transport` choose one explicitly.
"""

import fcntl
import gc
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from itertools import count
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg import sql
from psycopg.conninfo import make_conninfo

from lineshaft.clock import MovableClock
from lineshaft.embedded import Binaries, EmbeddedServer, databases, find_binaries
from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.postgres import migrate
from tests.artifact_stores import s3_place, s3_url
from tests.examples import IN_FULL_RUN, IN_INNER_LOOP
from tests.factory import Factory
from tests.http_server import ServerThread
from tests.in_memory import home_of_servers, remove_folders
from tests.invariants import check_invariants
from tests.order import slow_first
from tests.run_outcome import RunOutcome
from tests.world import World

# Here, so that a process of tests starts one S3 server, whichever modules use it.
__all__ = ["s3_place", "s3_url"]

TEMPLATE = "lineshaft_template"
#: More constraints than production has.
STRICT = Path(__file__).parent / "strict.sql"
#: Tests need no data after a power cut. No database lives long enough to need autovacuum, and dropping one
#: would wait for it. Lineshaft's connections turn compiled queries off; those of tests need none either.
#: Everything else is as in production.
FAST = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "autovacuum": "off",
    "jit": "off",
    "max_connections": "300",
    "max_wal_size": "256MB",
}

MAX_WORKERS = 16

#: Modules that a full run executes on every version of PostgreSQL: the versions may differ there.
ON_EACH_VERSION = re.compile(
    r"tests\.(races|embedded)\.|tests\.engine\.(postgres|claim)\.|tests\.engine\.transition\.test_(matrix|stateful|completion)$"
)

NewDatabase = Callable[[str], AbstractContextManager[str]]

#: A module with this line has slow tests only.
ALL_SLOW = b"\npytestmark = pytest.mark.slow("
#: Tests with these fixtures start a browser, an S3 server, a pooler, or servers and agents as processes.
SLOW_FIXTURES = {"browser", "pooled", "s3_url", "serving", "site"}
#: Few changes touch it: the inner loop leaves out its tests with databases, unless the command line names it.
INTEGRATIONS = Path(__file__).parent / "integrations"

# A process that is paused for a moment is neither a slow test nor a slow strategy.
settings.register_profile(
    "full", max_examples=IN_FULL_RUN, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("inner loop", settings.get_profile("full"), max_examples=IN_INNER_LOOP)


@cache
def one_of_each_major() -> list[Binaries]:
    majors: dict[int, Binaries] = {}
    for binaries in find_binaries():
        majors.setdefault(binaries.major, binaries)
    return [majors[major] for major in sorted(majors)]


# Collecting tests makes most of the objects that a process ever has, and they stay until its end. Garbage
# collections needn't look at them.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run everything: slow tests, every PostgreSQL found, clients and agents also over HTTP",
    )
    parser.addoption(
        "--transport",
        choices=["database", "http", "all"],
        help="run tests of clients and agents over this transport only; 'all': each of them over both",
    )
    parser.addoption(
        "--postgres",
        metavar="MAJOR",
        help="run on this version of PostgreSQL only; 'all': every test on each version",
    )
    parser.addoption(
        "--histories",
        metavar="N",
        type=int,
        help="run N random histories for each stateful test, instead of a few that are always the same",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs like this, and the processes that tests interrupt would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.load_profile("full" if config.getoption("full") else "inner loop")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunOutcome(), RunOutcome.NAME)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`. Tests wait for half of their time or more, those of a full run for three quarters of it.

    The limit is that of the connections that one PostgreSQL accepts.
    """
    busy_share = 0.25 if config.getoption("full") else 0.4
    return min(round((os.cpu_count() or 1) / busy_share), MAX_WORKERS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "postgres" in metafunc.fixturenames:
        versions = _versions(metafunc.module.__name__, metafunc.config)
        metafunc.parametrize(
            "postgres", versions, ids=lambda b: f"pg{b.major}", indirect=True, scope="session"
        )
    if "transport" in metafunc.fixturenames:
        metafunc.parametrize("transport", _transports(metafunc.definition, metafunc.config))


def _versions(module: str, config: pytest.Config) -> list[Binaries]:
    wanted, found = config.getoption("postgres"), one_of_each_major()
    if wanted == "all":
        return found
    if wanted is not None:
        return [binaries for binaries in found if str(binaries.major) == wanted]
    everywhere = config.getoption("full") and ON_EACH_VERSION.match(module)
    return found if everywhere else found[-1:]


def _transports(test: pytest.Item, config: pytest.Config) -> list[str]:
    wanted, full = config.getoption("transport"), config.getoption("full")
    if test.get_closest_marker("database_only"):
        return ["database"] if wanted != "http" else []
    if wanted in {"database", "http"}:
        return [wanted]
    alike = test.get_closest_marker("alike_over_http")
    if wanted is None and (not full or (alike is not None and alike.args != (False,))):
        return ["database"]
    return ["database", "http"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Don't import modules whose tests are all slow: each process of a parallel run would.

    pytest doesn't ask about files that the command line names.
    """
    if config.getoption("full") or collection_path.suffix != ".py":
        return None
    return True if ALL_SLOW in collection_path.read_bytes() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("full"):
        _leave_out(config, items)
    if (worker := getattr(config, "workerinput", None)) is not None:
        items[:] = slow_first(items, worker["workercount"], is_slow=_is_slow, module=lambda item: item.path)


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long, except where the command line names the file."""
    named = [argument.partition("::")[0] for argument in config.args]
    files = {Path(config.invocation_params.dir, name) for name in named if name.endswith(".py")}
    others = [item for item in items if item.path not in files]
    left_out = {item for item in others if _is_slow(item)}
    if not any(INTEGRATIONS.name in argument for argument in config.args):
        left_out.update(item for item in others if INTEGRATIONS in item.path.parents and _has_database(item))
    left_out.update(_after_the_first([item for item in others if item not in left_out]))
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def _after_the_first(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of each test with a database, all parameters but the first: most of their time is that of databases.

    A version of PostgreSQL and a transport are not such parameters: if the command line names them, they run.
    """
    seen: set[tuple[object, ...]] = set()
    for item in items:
        if not _has_database(item):
            continue
        parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        test = (item.nodeid.partition("[")[0], parameters.get("postgres"), parameters.get("transport"))
        if test in seen:
            yield item
        seen.add(test)


def _has_database(item: pytest.Item) -> bool:
    return not {"dsn", "empty_dsn"}.isdisjoint(_fixtures(item))


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None or not SLOW_FIXTURES.isdisjoint(_fixtures(item))


@pytest.fixture(scope="session")
def server_thread() -> Iterator[ServerThread]:
    thread = ServerThread()
    yield thread
    thread.close()


@pytest.fixture
def where(
    transport: str,
    dsn: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """What a client of the test's database is given: its DSN, or the URL of a server."""
    artifacts = str(tmp_path / "artifacts")
    monkeypatch.setenv("LINESHAFT_ARTIFACTS", artifacts)
    if transport == "database":
        yield dsn
        return
    thread: ServerThread = request.getfixturevalue("server_thread")
    # Tests that create tokens go on without one.
    with thread.serving(dsn, auth="off", artifacts=artifacts) as url:
        yield url


@pytest.fixture(scope="session")
def server_of(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Binaries], EmbeddedServer]]:
    """One server for each version; the processes of a parallel run share it."""
    shared, run = tmp_path_factory.getbasetemp(), os.getpid()
    if hasattr(pytestconfig, "workerinput"):
        shared, run = shared.parent, os.getppid()
    with ExitStack() as kept:

        @cache
        def started(binaries: Binaries) -> EmbeddedServer:
            home = home_of_servers(shared, run) / f"pg{binaries.major}"
            with _without_passwords() as options:
                server = EmbeddedServer.start(home, binaries=binaries, options=FAST | options)
            kept.enter_context(server)
            _make_template(server, shared / f"pg{binaries.major}.template.lock")
            return server

        yield started


@pytest.fixture(scope="session")
def postgres(
    request: pytest.FixtureRequest, server_of: Callable[[Binaries], EmbeddedServer]
) -> EmbeddedServer:
    """The server stays when a worker goes on with tests on another version: it may come back."""
    return server_of(request.param)


@contextmanager
def _without_passwords() -> Iterator[dict[str, str]]:
    """The setting that lets tests in, also as the superuser with an unknown password. The socket is private.

    Proving a password takes as long as the rest of connecting. Tests of embedded servers do it.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".hba") as rules:
        rules.write("local all all trust\n")
        rules.flush()
        # The server may run under another account.
        Path(rules.name).chmod(0o644)
        yield {"hba_file": rules.name}


def superuser(dsn: str) -> str:
    """The DSN of the same database for the superuser, who isn't used in production."""
    return make_conninfo(dsn, user="postgres")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        remove_folders(os.getpid())


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
                # A session after the last change writes a cache of the catalogue, which copies have then too.
                # Without it, the first session of each test's database builds it, which takes milliseconds.
                psycopg.connect(template).close()


@pytest.fixture(scope="session")
def new_database(postgres: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[NewDatabase]:
    """Makes databases like a template; each is dropped at the end of its block."""
    worker = getattr(request.config, "workerinput", {}).get("workerid", "gw")
    numbers = count(1)

    @contextmanager
    def new(template: str) -> Iterator[str]:
        name = f"test_{worker}_{next(numbers)}"
        databases.clone(admin, name, template)
        try:
            yield make_conninfo(postgres.dsn, dbname=name)
        finally:
            # Also after a failure: the numbers start again when this worker comes back to this server.
            databases.drop(admin, name)

    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        yield new


@pytest.fixture
def dsn(new_database: NewDatabase) -> Iterator[str]:
    """A migrated database for one test."""
    with new_database(TEMPLATE) as made:
        yield made


@pytest.fixture
def empty_dsn(new_database: NewDatabase) -> Iterator[str]:
    """An empty database for one test."""
    with new_database("template0") as made:
        yield made


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn, autocommit=True) as opened:
        yield opened


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def rules() -> Rules:
    """What the operator decides; a module may have its own.

    This and `engine` are here, because pytest forgets the conftest of a folder that it collects twice, as in
    `pytest tests/engine/claim tests/test_ids.py tests/engine/guards`. Tests would use the fixtures above it.
    """
    return Rules()


@pytest.fixture
async def engine(dsn: str, clock: MovableClock, rules: Rules) -> AsyncIterator[Engine]:
    """The engine on a database of the test's own, by a clock that the test moves."""
    async with Engine(dsn, clock=clock, rules=rules) as opened:
        yield opened


@pytest.fixture
def factory(connection: psycopg.Connection, clock: MovableClock) -> Factory:
    return Factory(connection, clock)


@pytest.fixture
async def world(engine: Engine, connection: psycopg.Connection, clock: MovableClock) -> AsyncIterator[World]:
    """The engine; after the test, a check that everything is consistent."""
    yield World(engine, connection, clock)
    check_invariants(connection)
