"""Commands on a database that refuses: a role without rights, a schema that somebody took apart."""

import logging

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.cli.conftest import Cli


@pytest.mark.parametrize(
    "command",
    [
        ("doctor",),
        ("migrate", "status"),
        ("migrate", "up"),
        ("migrate", "verify"),
        ("stats", "--json"),
        ("submit", "research"),
        ("token", "list"),
    ],
)
def test_a_role_without_rights_is_told_what_it_needs(
    cli: Cli, dsn: str, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    # A role that every server has; taken as soon as the session starts, instead of opening another way in.
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", make_conninfo(dsn, options="-c role=pg_monitor"))

    said = cli(*command)

    told = said.out if command == ("doctor",) else said.err
    assert said.code == 1
    assert "permission denied for" in told
    assert "Connect as the role that owns the schema lineshaft" in told
    assert command == ("doctor",) or said.out == ""


def test_an_error_that_nobody_foresaw_is_logged_without_values_and_not_on_standard_output(
    cli: Cli, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("ALTER TABLE lineshaft.task RENAME TO elsewhere")

    with caplog.at_level(logging.ERROR):
        said = cli("submit", "research", "--prompt", "hunter2")

    assert (said.code, said.out) == (1, "")
    assert "Internal error" in said.err
    assert 'relation "lineshaft.task" does not exist' in caplog.text
    assert "hunter2" not in caplog.text + said.err
