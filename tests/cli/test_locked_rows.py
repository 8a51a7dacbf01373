"""Commands on a row that another transaction holds."""

import pytest
from psycopg.conninfo import make_conninfo

from tests.cli.conftest import Cli
from tests.races.helpers import LIVE_ROW, held


def test_a_cancel_gives_up_with_exit_code_1(dsn: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-064: after 10 s, or what the database URL says."""
    task = cli("submit", "t", "--json").json["id"]
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", make_conninfo(dsn, options="-clock_timeout=200"))
    with held(dsn, LIVE_ROW, task):
        said = cli("task", "cancel", task)

    assert said.code == 1
    assert "Another transaction has locked a row" in said.err
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)
    assert cli("task", "cancel", task).code == 0
