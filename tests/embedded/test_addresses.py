"""The socket's path must be short, the home's path need not be."""

import tempfile
from pathlib import Path

import psycopg
import pytest

from lineshaft.embedded import EmbeddedServer, address
from lineshaft.embedded.layout import Layout
from lineshaft.errors import EmbeddedServerError
from tests.embedded.helpers import FAST, postmaster_pid, query, stop_server, wait_until_idle


@pytest.mark.slow("starts a server for each")
@pytest.mark.parametrize(
    "name",
    ["with space and 'quote' and back\\slash", "with,comma", "ünïcode", "x" * 120],
    ids=lambda name: name[:10],
)
def test_any_home_can_be_used(home: Path, name: str) -> None:
    moved = home.with_name(name)
    home.rename(moved)
    try:
        with EmbeddedServer.start(moved, options=FAST) as server, EmbeddedServer.start(moved) as joined:
            assert joined.dsn == server.dsn
            assert query(server.dsn, "SELECT 1") == 1
        wait_until_idle(moved)
    finally:
        stop_server(moved)


@pytest.mark.slow("starts a server")
def test_the_link_to_a_long_home_is_private_and_removed_with_the_server(
    home: Path, short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = short_directory / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    moved = home.with_name("long" * 30)
    home.rename(moved)
    with EmbeddedServer.start(moved, options=FAST) as server:
        (private,) = runtime.iterdir()
        assert private.stat().st_mode & 0o777 == 0o700
        assert f"host={private}/socket " in server.dsn
        # After a cleanup of the temporary directory the next user creates the link again.
        (private / "socket").unlink()
        private.rmdir()
        with EmbeddedServer.start(moved) as joined:
            assert query(joined.dsn, "SELECT 1") == 1
            assert query(server.dsn, "SELECT 1") == 1
        pid = postmaster_pid(moved)
        assert pid > 0
    wait_until_idle(moved)
    assert list(runtime.iterdir()) == []


def test_a_squatted_directory_is_not_used(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of another account could contain another server."""
    runtime, temporary = short_directory / "run", short_directory / "tmp"
    runtime.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    layout = Layout(short_directory / ("long" * 30))
    first, second, last = address._link_places(layout)
    assert first.parent == runtime
    first.mkdir()
    first.chmod(0o755)
    second.symlink_to(runtime)
    found = address.client_directory(layout)
    try:
        assert found.parent == last
        assert found.readlink() == layout.socket_directory
        last.chmod(0o777)
        with pytest.raises(EmbeddedServerError, match="isn't a private directory of this account"):
            address.client_directory(layout)
    finally:
        found.unlink()
        last.rmdir()


def test_words_of_a_dsn_are_quoted() -> None:
    layout = Layout(Path("/it's a \\ home"))
    text = address.dsn(layout, layout.socket_directory, 5432)
    assert psycopg.conninfo.conninfo_to_dict(text)["passfile"] == str(layout.passfile)
    assert psycopg.conninfo.conninfo_to_dict(text)["host"] == str(layout.socket_directory)
