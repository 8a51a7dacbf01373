"""Commands on a database that refuses: a role without rights, a schema that was changed by hand."""

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.cli.conftest import Cli
from tests.conftest import superuser


@pytest.mark.parametrize(
    "command",
    [
        ("doctor",),
        ("migrate", "status"),
        ("migrate", "up"),
        ("migrate", "verify"),
        ("stats", "--json"),
        ("costs", "--json"),
        ("submit", "research"),
        ("token", "list"),
    ],
)
def test_a_role_without_rights_learns_what_it_needs(
    cli: Cli, dsn: str, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    # A role that every server has, set when the session starts.
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", make_conninfo(superuser(dsn), options="-c role=pg_monitor"))

    said = cli(*command)

    text = said.out if command == ("doctor",) else said.err
    assert said.code == 1
    assert "permission denied for" in text
    assert "Connect as the role that owns the schema lineshaft" in text
    assert command == ("doctor",) or said.out == ""


def test_an_unexpected_error_is_one_line_without_values(cli: Cli, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("ALTER TABLE lineshaft.task RENAME TO elsewhere")

    said = cli("submit", "research", "--prompt", "hunter2")

    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert "Unexpected error UndefinedTable" in said.err
    assert 'relation "lineshaft.task" does not exist' in said.err
    assert "hunter2" not in said.err
