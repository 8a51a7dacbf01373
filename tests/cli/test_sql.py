"""`lineshaft sql`, with psql and without."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lineshaft.embedded import EmbeddedServer
from lineshaft.engine.postgres import inspection
from tests.cli.conftest import Cli
from tests.conftest import superuser

OPERATIONS_PAGE = Path(__file__).parents[2] / "docs/operations.md"
RUNNING = "SELECT status, count(*) FROM tasks GROUP BY status"


@contextmanager
def own_role(dsn: str, role: str) -> Iterator[psycopg.Connection]:
    """A role for the duration of the block; only a superuser can create one."""
    with psycopg.connect(superuser(dsn), autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN SUPERUSER PASSWORD 'secret'".encode())
        try:
            yield admin
        finally:
            admin.execute(f"DROP ROLE {role}".encode())


def submit(cli: Cli) -> None:
    assert cli("submit", "code").code == 0


def test_a_statement_finds_the_views_without_their_schema(
    cli: Cli, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-240: also for a role that isn't called like the schema, whose own search path doesn't have it."""
    submit(cli)
    role = f"someone_{conninfo_to_dict(dsn)['dbname']}"
    with own_role(dsn, role):
        monkeypatch.setenv("LINESHAFT_DATABASE_URL", make_conninfo(dsn, user=role, password="secret"))
        assert cli("sql", "--no-psql", RUNNING).out.splitlines()[1].split() == ["READY", "1"]
        assert cli("sql", "--json", RUNNING).json == [{"status": "READY", "count": 1}]


def test_psql_gets_the_statement_and_not_the_password(dsn: str, postgres: EmbeddedServer) -> None:
    invocation = inspection.psql_invocation(
        postgres.binaries.program("psql"), make_conninfo(dsn, password="secret"), "SELECT count(*) FROM tasks"
    )

    assert "secret" not in " ".join(invocation.arguments)
    assert invocation.environment == {"PGPASSWORD": "secret"}
    without = inspection.psql_invocation(
        postgres.binaries.program("psql"), dsn, "SELECT count(*) FROM tasks"
    ).arguments
    result = subprocess.run(without, capture_output=True, text=True, check=True)
    assert "(1 row)" in result.stdout


def test_the_reader_takes_statements_from_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(cli)
    monkeypatch.setattr(sys, "stdin", io.StringIO("SELECT 1 AS one,\n  2 AS two;\nSELECT type FROM tasks"))

    said = cli("sql", "--no-psql")

    assert [line.split() for line in said.out.splitlines()] == [
        ["one", "two"],
        ["1", "2"],
        ["type"],
        ["code"],
    ]


def test_it_reads_and_doesnt_write(cli: Cli) -> None:
    submit(cli)

    said = cli("sql", "--no-psql", "DELETE FROM task_live")

    assert said.code == 1
    assert "cannot execute DELETE in a read-only transaction" in said.err
    assert cli("sql", "--no-psql", "SELECT nonsense").code == 1


def test_the_documented_alter_role_is_enough(dsn: str) -> None:
    """R-240."""
    (statement,) = re.findall(r"ALTER ROLE analyst .*?;", OPERATIONS_PAGE.read_text(encoding="utf-8"))
    role = f"analyst_{conninfo_to_dict(dsn)['dbname']}"
    with own_role(dsn, role) as admin:
        admin.execute(statement.replace("analyst", role).encode())
        with psycopg.connect(dsn, user=role, password="secret") as own:
            own.execute("SELECT * FROM tasks WHERE status = 'RUNNING'")
