"""Migrations: in order, once, all or nothing, with concurrent processes and after interruptions."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from lineshaft.engine.postgres import describe, migrate
from lineshaft.engine.postgres.migrate import Migration, State
from lineshaft.errors import MigrationError, UnavailableError
from tests.conftest import superuser

FIRST = Migration(1, "first", "CREATE TABLE lineshaft.a (n integer);")
SECOND = Migration(
    2, "second", "ALTER TABLE lineshaft.a ADD COLUMN m integer;\nINSERT INTO lineshaft.a VALUES (1, 2);"
)
INDEX = Migration(
    3,
    "index",
    "-- lineshaft: no transaction\n"
    "DROP INDEX CONCURRENTLY IF EXISTS lineshaft.a_n;\n"
    "-- step\n"
    "CREATE UNIQUE INDEX CONCURRENTLY a_n ON lineshaft.a (n);\n",
)


def states(dsn: str, migrations: list[Migration]) -> list[str]:
    return [status.state for status in migrate.status(dsn, migrations)]


def test_the_bundled_migrations_are_applied_once_and_in_order(empty_dsn: str) -> None:
    started: list[Migration] = []

    applied = migrate.up(empty_dsn, on_start=started.append)

    assert applied == started == migrate.bundled()
    assert migrate.up(empty_dsn) == []
    assert {status.state for status in migrate.status(empty_dsn)} == {State.APPLIED}


def test_status_of_an_empty_database_changes_nothing(empty_dsn: str) -> None:
    assert {status.state for status in migrate.status(empty_dsn)} == {State.PENDING}
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT to_regnamespace('lineshaft')").fetchone() == (None,)


def test_ten_processes_at_once_apply_each_migration_once(empty_dsn: str) -> None:
    """The INSERT of the second would be seen twice if it ran twice."""
    with ThreadPoolExecutor(10) as pool:
        results = list(pool.map(lambda _: migrate.up(empty_dsn, [FIRST, SECOND, INDEX]), range(10)))

    assert sorted(m.version for applied in results for m in applied) == [1, 2, 3]
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT n, m FROM lineshaft.a").fetchall() == [(1, 2)]


def test_a_failing_migration_leaves_nothing_and_says_where_it_failed(empty_dsn: str) -> None:
    broken = Migration(2, "broken", "ALTER TABLE lineshaft.a ADD COLUMN b integer;\nSELECT nonsense;\n")

    with pytest.raises(
        MigrationError, match=r'0002 broken failed \(line 2\): column "nonsense" does not exist.*Nothing'
    ):
        migrate.up(empty_dsn, [FIRST, broken])

    assert states(empty_dsn, [FIRST, broken]) == [State.APPLIED, State.PENDING]
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT * FROM lineshaft.a").description is not None
        assert [c.name for c in connection.execute("SELECT * FROM lineshaft.a").description or ()] == ["n"]


def test_a_process_killed_inside_a_migration_leaves_nothing(empty_dsn: str) -> None:
    """SIGKILL while the transaction is open; the next one starts from scratch."""
    slow = Migration(2, "slow", "CREATE TABLE lineshaft.b (n integer); SELECT pg_sleep(60);")
    process = multiprocessing.get_context("spawn").Process(target=migrate.up, args=(empty_dsn, [FIRST, slow]))
    process.start()
    # Only here: other tests sleep on the same server.
    sleeping = "FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
    with psycopg.connect(empty_dsn, autocommit=True) as watcher:
        wait_until(
            watcher,
            f"SELECT count(*) = 1 {sleeping} AND application_name = 'lineshaft migrate'",
        )
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        # The server notices a dead client when it next writes to it: end the orphaned backend at once.
        watcher.execute(f"SELECT pg_terminate_backend(pid, 60000) {sleeping}".encode())

    assert states(empty_dsn, [FIRST, SECOND]) == [State.APPLIED, State.PENDING]
    assert migrate.up(empty_dsn, [FIRST, SECOND]) == [SECOND]


def test_an_interrupted_concurrent_index_is_built_again(empty_dsn: str) -> None:
    """Duplicates make the first try fail, which leaves an invalid index behind, as an interruption would."""
    migrate.up(empty_dsn, [FIRST])
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO lineshaft.a VALUES (1), (1)")
        later = [FIRST, Migration(2, INDEX.name, INDEX.text)]

        with pytest.raises(MigrationError, match=r"0002 index failed.*The next 'migrate up' runs it again"):
            migrate.up(empty_dsn, later)
        assert states(empty_dsn, later) == [State.APPLIED, State.INTERRUPTED]
        connection.execute("TRUNCATE lineshaft.a")

        assert [m.version for m in migrate.up(empty_dsn, later)] == [2]
        assert connection.execute(
            "SELECT indisvalid FROM pg_index WHERE indexrelid = 'lineshaft.a_n'::regclass"
        ).fetchall() == [(True,)]


def test_a_migration_that_was_changed_after_it_was_applied_is_refused(empty_dsn: str) -> None:
    migrate.up(empty_dsn, [FIRST])
    changed = Migration(1, "first", FIRST.text + " -- changed")

    with pytest.raises(
        MigrationError, match="0001 first was applied to this database with different content"
    ):
        migrate.up(empty_dsn, [changed, SECOND])
    assert states(empty_dsn, [changed]) == [State.CHANGED]


def test_an_older_version_goes_on_with_a_newer_schema(empty_dsn: str) -> None:
    """Additive migrations are the rule: processes of both versions use the database during an upgrade."""
    migrate.up(empty_dsn, [FIRST, SECOND])

    assert migrate.up(empty_dsn, [FIRST]) == []
    assert states(empty_dsn, [FIRST]) == [State.APPLIED, State.UNKNOWN]
    assert all(status.is_usable for status in migrate.status(empty_dsn, [FIRST]))


@pytest.mark.parametrize("first_line", ["", "-- lineshaft: no transaction\n"])
def test_a_migration_that_breaks_older_versions_makes_them_refuse_the_database(
    empty_dsn: str, first_line: str
) -> None:
    breaking = Migration(
        2, "breaking", f"{first_line}-- lineshaft: breaks older versions\nDROP TABLE lineshaft.a;"
    )
    migrate.up(empty_dsn, [FIRST, breaking])

    with pytest.raises(MigrationError, match=r"newer than this Lineshaft.*0002 breaking.*Upgrade Lineshaft"):
        migrate.up(empty_dsn, [FIRST])
    assert [status.is_usable for status in migrate.status(empty_dsn, [FIRST])] == [True, False]
    assert migrate.up(empty_dsn, [FIRST, breaking]) == []


def test_waiting_too_long_for_another_process_is_an_error(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as holder:
        holder.execute("SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.migration', 0))")

        with pytest.raises(MigrationError, match="Another process has been migrating this database for 0 s"):
            migrate.up(empty_dsn, [FIRST], wait_sec=0)


def test_an_unreachable_database_is_named_without_its_password() -> None:
    with pytest.raises(UnavailableError) as caught:
        migrate.up("postgresql://me:hunter2@127.0.0.1:1/x")

    assert "Can't reach the database" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_the_error_names_missing_privileges(empty_dsn: str) -> None:
    with psycopg.connect(superuser(empty_dsn), autocommit=True) as admin:
        admin.execute("DROP ROLE IF EXISTS weak")
        admin.execute("CREATE ROLE weak LOGIN PASSWORD 'weak'")
    # Instead of opening another way in, become the role as soon as the session starts.
    weak = psycopg.conninfo.make_conninfo(superuser(empty_dsn), options="-c role=weak")

    with pytest.raises(MigrationError, match=r"permission denied.*needs CREATE on the database"):
        migrate.up(weak)


def test_a_missing_number_is_a_fault_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "migrations"
    folder.mkdir()
    (folder / "0001_a.sql").write_text("SELECT 1")
    (folder / "0003_c.sql").write_text("SELECT 1")
    packaged: Callable[[str], Path] = lambda _: tmp_path  # noqa: E731
    monkeypatch.setattr(migrate, "files", packaged)

    with pytest.raises(MigrationError, match="0002 is missing: the next file is 0003 c"):
        migrate.bundled()


def test_schema_sql_is_what_the_migrations_make(empty_dsn: str) -> None:
    """If this fails after a new migration: run `make schema` and commit the result."""
    migrate.up(empty_dsn)

    with psycopg.connect(empty_dsn) as connection:
        assert describe.describe(connection) == describe.expected()


def test_verify_shows_manual_changes(empty_dsn: str) -> None:
    migrate.up(empty_dsn)
    assert describe.drift(empty_dsn) == ""
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("DROP INDEX lineshaft.task_live_leased")
        connection.execute("ALTER TABLE lineshaft.task ADD COLUMN mine text")

    drift = describe.drift(empty_dsn)

    assert "-CREATE INDEX task_live_leased" in drift
    assert "+    mine text" in drift
    assert len([line for line in drift.splitlines() if line[0] in "+-"]) == 4  # with the two header lines


def wait_until(connection: psycopg.Connection, condition: str) -> None:
    """Ask the server until it says yes; the test's own time limit is the deadline."""
    while True:
        row = connection.execute(condition.encode()).fetchone()
        if row and row[0]:
            return


def test_a_database_must_have_the_schema_of_this_version(empty_dsn: str) -> None:
    with pytest.raises(MigrationError, match=r"0001 schema is not applied\. Run 'lineshaft migrate up'"):
        migrate.check_ready(empty_dsn)
    migrate.up(empty_dsn)
    migrate.check_ready(empty_dsn)
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO lineshaft.migration (version, name, checksum, applied_at) "
            "VALUES (99, 'x', '', now())"
        )
        migrate.check_ready(empty_dsn)
        connection.execute("UPDATE lineshaft.migration SET breaks_older = true WHERE version = 99")
    with pytest.raises(MigrationError, match="newer than this Lineshaft"):
        migrate.check_ready(empty_dsn)
