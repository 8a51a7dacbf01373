"""Commands that call a server: what can be wrong with it, with the way there, and with the token."""

import pytest

from tests.interfaces.cli.conftest import Cli

NOBODY = "http://127.0.0.1:1"


@pytest.mark.parametrize("flaw", ["\n", "…", " x"])
def test_a_token_that_can_not_be_one_is_refused_unseen(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, flaw: str
) -> None:
    monkeypatch.setenv("LINESHAFT_TOKEN", f"lsh_secret{flaw}")

    said = cli("stats", "--url", NOBODY)

    assert said.code == 1
    assert "LINESHAFT_TOKEN must be letters" in said.err
    assert "secret" not in said.out + said.err
