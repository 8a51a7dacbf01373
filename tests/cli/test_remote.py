"""Commands that use a server: mistakes in its URL and token, proxies, restarts, and the output."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from lineshaft.cli import events
from tests.cli.conftest import Cli

NO_SERVER = "http://127.0.0.1:1"
HTML = b"<html><h1>502 Bad Gateway</h1></html>"
Answer = tuple[int, bytes] | None


class Script(HTTPServer):
    """Answers GET requests from a list, and closes the connection after each; None closes it unanswered."""

    def __init__(self, answers: Sequence[Answer], opening: Answer = (200, b'{"ids": {}}')) -> None:
        """`opening` answers the request with which a client opens."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.opening = list(answers), opening
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, Script)
        self.answer(self.server.answers.pop(0))

    def do_POST(self) -> None:
        assert isinstance(self.server, Script)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(self.server.opening)

    def answer(self, answer: Answer) -> None:
        # Without announcing it, as a server with an idle timeout does.
        self.close_connection = True
        if answer is not None:
            status, body = answer
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def answering(*answers: Answer, opening: Answer = (200, b'{"ids": {}}')) -> Iterator[Script]:
    with Script(answers, opening) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def page(number: int) -> tuple[int, bytes]:
    event: dict[str, Any] = {
        "at": "2026-01-01T00:00:00Z",
        "kind": "task.created",
        "cursor": str(number),
        "data": {"text": "…"},
    }
    event |= dict.fromkeys(("task_id", "dag_id", "agent_id", "epoch"))
    return 200, json.dumps({"items": [event], "next_cursor": str(number), "caught_up": True}).encode()


@pytest.mark.parametrize("flaw", ["\n", "…", " x"])
def test_an_invalid_token_is_refused_and_not_shown(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, flaw: str
) -> None:
    monkeypatch.setenv("LINESHAFT_TOKEN", f"lsh_secret{flaw}")

    said = cli("stats", "--url", NO_SERVER)

    assert said.code == 1
    assert "LINESHAFT_TOKEN must be letters" in said.err
    assert "secret" not in said.out + said.err


@pytest.mark.parametrize("status", [502, 200])
def test_an_answer_of_a_proxy_is_a_message(cli: Cli, status: int) -> None:
    with answering(opening=(status, HTML)) as proxy:
        said = cli("stats", "--url", proxy.url)

    assert said.code == 1
    assert f"Unexpected response {status}" in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://[::1", "ftp://127.0.0.1", "postgresql:///x"])
def test_an_invalid_url_is_refused(cli: Cli, url: str) -> None:
    said = cli("stats", "--url", url)

    assert said.code in {1, 2}
    assert "url" in said.err
    assert "must be http://HOST:PORT" in said.err


def test_following_events_continues_after_a_restart_of_the_server(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_PAUSE_SEC", 0.01)
    away = (503, b'{"code": "unavailable", "detail": "The database is away."}')
    follow = ("events", "--follow", "--json", "--limit", "2", "--url")

    with answering(page(1), None, (502, HTML), away, page(2)) as server:
        said = cli(*follow, server.url)
        assert said.code == 0, said.err
        assert [json.loads(line)["cursor"] for line in said.out.splitlines()] == ["1", "2"]
    with answering(page(1), (403, b'{"code": "forbidden", "detail": "No."}')) as server:
        assert "No." in cli(*follow, server.url).err
    assert "doesn't answer" in cli(*follow, NO_SERVER).err, "a server that never answered is an error"


def show_event(
    url: str, *flags: str, redirection: str = "", **variables: str
) -> "subprocess.CompletedProcess[bytes]":
    """`lineshaft events` as a process with its own streams."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
    command = [sys.executable, "-m", "lineshaft.cli.main", "events", "--limit", "1", *flags]
    return subprocess.run(
        ["/bin/sh", "-c", f'"$@" {redirection}', "sh", *command, "--url", url],
        env=environment | variables,
        capture_output=True,
        check=False,
    )


@pytest.mark.slow("starts processes")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_unwritable_output_is_a_message() -> None:
    with answering(page(1), page(1)) as server:
        full = show_event(server.url, redirection=">/dev/full")
        closed = show_event(server.url, redirection=">&-")

    assert full.returncode == 1
    assert full.stderr.startswith(b"lineshaft: Operating system error: [Errno 28]")
    assert full.stderr.count(b"\n") == 1
    assert (closed.returncode, closed.stderr) == (0, b"")


@pytest.mark.slow("starts processes")
def test_characters_that_the_output_lacks_are_escaped() -> None:
    with answering(page(1), page(1)) as server:
        shown = show_event(server.url, PYTHONIOENCODING="latin-1")
        escaped = show_event(server.url, "--json", PYTHONIOENCODING="latin-1")

    assert b"\\u2026" in shown.stdout, shown.stderr
    assert json.loads(escaped.stdout)["data"] == {"text": "…"}
