"""`lineshaft artifact`, over the database and over HTTP."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from lineshaft.cli.artifact import _ProgressLine, size
from tests.cli.conftest import Cli
from tests.http_server import ServerThread


@pytest.fixture(params=["database", "http"])
def url(
    request: pytest.FixtureRequest,
    dsn: str,
    server_thread: ServerThread,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[str]]:
    artifacts = str(tmp_path / "store")
    monkeypatch.setenv("LINESHAFT_ARTIFACTS", artifacts)
    monkeypatch.chdir(tmp_path)
    if request.param == "database":
        yield []
        return
    with server_thread.serving(dsn, artifacts=artifacts) as served, structlog.testing.capture_logs():
        yield ["--url", served]


def test_files_go_up_and_down(cli: Cli, url: list[str], tmp_path: Path) -> None:
    data = bytes(range(256)) * 8192
    (tmp_path / "report.pdf").write_bytes(data)

    put = cli("artifact", "put", "report.pdf", "--name", "../a report.pdf", *url, "--json")
    made = put.json
    assert (made["name"], made["size"], made["content_type"]) == (
        *("../a report.pdf", len(data), "application/pdf"),
    )
    shown = cli("artifact", "put", "report.pdf", *url)
    assert "artifact:artifact_" in shown.out
    assert "2.0 MiB" in shown.out

    assert cli("artifact", "get", made["ref"], *url).code == 0
    assert (tmp_path / "a report.pdf").read_bytes() == data
    again = cli("artifact", "get", made["ref"], *url)
    assert again.code == 2
    assert "exists. Choose another name with -o" in again.err
    for place, fault in (
        (".", "is a folder"),
        ("/dev/null", "is not a regular file"),
        ("unknown/x", "unknown is not a folder"),
    ):
        refused = cli("artifact", "get", made["ref"], "-o", place, "--force", *url)
        assert (refused.code, fault in refused.err) == (2, True), refused.err
    other = cli("artifact", "get", made["id"], "-o", "other", "--json", *url).json
    assert (other["path"], other["artifact"]) == ("other", made)

    listed = cli("artifact", "list", "--json", *url).json
    assert [item["name"] for item in listed] == ["report.pdf", "../a report.pdf"]
    assert "2.0 MiB" in cli("artifact", "list", *url).out
    assert cli("artifact", "rm", made["ref"], *url).code == 0
    assert cli("artifact", "rm", listed[0]["id"], "--json", *url).json == {"deleted": [listed[0]["id"]]}
    assert cli("artifact", "list", *url).out.strip() == "No artifacts."
    missing = cli("artifact", "get", made["ref"], *url)
    assert (missing.code, "There is no artifact" in missing.err) == (1, True)
    assert cli("artifact", "put", "missing.txt", *url).code == 2


def test_progress_is_a_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with _ProgressLine("Uploading", 8 << 20) as progress:
        progress.show(8 << 20)
    assert "Uploading 8.0 MiB of 8.0 MiB (100 %)" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert [size(n) for n in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]


@pytest.mark.slow("starts several processes")
def test_a_large_output_is_printed_where_it_is_asked_for(cli: Cli, url: list[str]) -> None:
    text = "x" * (2 << 20)
    task = cli("submit", "make", "--json", *url).json["id"]
    printing = f"{sys.executable} -c 'print(len(str(0)) * 2097152 * chr(120))'"
    agent = cli("agent", "--exec", printing, "--type", "make", "--until-idle")
    assert agent.code == 0, agent.err

    assert cli("task", "result", task, *url).json == text
    waited = cli("wait", task, *url)
    assert text in waited.out
    shown = cli("task", "show", task, *url)
    assert "Output" in shown.out
    assert "(2097154 bytes)" in shown.out
    assert len(shown.out) < 10_000
