"""Commands that call a server: what can be wrong with it, with the way there, and with the token."""

import json
import os
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from lineshaft.cli import events
from lineshaft.cli.api import connect
from tests.cli.conftest import Cli

NOBODY = "http://127.0.0.1:1"
HTML = b"<html><h1>502 Bad Gateway</h1></html>"


class Script(HTTPServer):
    """Answers with what it was given, one after another; after None, and after every answer, it hangs up."""

    def __init__(self, answers: Sequence[tuple[int, bytes] | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        #: How many connections were closed.
        self.hung_up = threading.Semaphore(0)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.hung_up.release()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, Script)
        # Without a word of it to the client, as a server that was idle for long enough.
        self.close_connection = True
        answer = self.server.answers.pop(0)
        if answer is not None:
            status, body = answer
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@contextmanager
def answering(*answers: tuple[int, bytes] | None) -> Iterator[Script]:
    with Script(answers) as server:
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
        "id": str(number),
        "data": {"text": "…"},
    }
    event |= dict.fromkeys(("task_id", "dag_id", "agent_id"))
    return 200, json.dumps({"items": [event], "next_cursor": str(number), "caught_up": True}).encode()


@pytest.mark.parametrize("flaw", ["\n", "…", " x"])
def test_a_token_that_can_not_be_one_is_refused_unseen(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, flaw: str
) -> None:
    monkeypatch.setenv("LINESHAFT_TOKEN", f"lsh_secret{flaw}")

    said = cli("stats", "--url", NOBODY)

    assert said.code == 1
    assert "LINESHAFT_TOKEN must be letters" in said.err
    assert "secret" not in said.out + said.err


def test_an_answer_of_a_proxy_is_a_message(cli: Cli) -> None:
    with answering((502, HTML), (200, HTML)) as proxy:
        for status in (502, 200):
            said = cli("stats", "--url", proxy.url)
            assert said.code == 1
            assert f"with status {status}, is no JSON" in said.err


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://[::1", "ftp://127.0.0.1"])
def test_an_address_that_can_not_be_one_is_refused(cli: Cli, url: str) -> None:
    said = cli("stats", "--url", url)

    assert said.code == 1
    assert "--url must be http://HOST:PORT" in said.err


def test_a_connection_that_was_closed_while_it_was_idle_is_opened_again() -> None:
    with (
        answering((200, b"{}"), (200, b"[1]")) as server,
        connect(Namespace(url=server.url)) as api,
    ):
        assert api.get("/v1/dead-letters") == {}
        assert server.hung_up.acquire(timeout=60)
        assert api.get("/v1/dead-letters") == [1]


def test_one_who_follows_events_waits_for_a_server_that_restarts(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_PAUSE_SEC", 0.01)
    away = (503, b'{"code": "unavailable", "detail": "The database is away."}')
    follow = ("events", "--follow", "--json", "--limit", "2", "--url")

    with answering(page(1), None, (502, HTML), away, page(2)) as server:
        said = cli(*follow, server.url)
        assert said.code == 0, said.err
        assert [json.loads(line)["id"] for line in said.out.splitlines()] == ["1", "2"]
    with answering(page(1), (403, b'{"code": "forbidden", "detail": "No."}')) as server:
        assert "No." in cli(*follow, server.url).err
    assert "doesn't answer" in cli(*follow, NOBODY).err, "one that never answered is not waited for"


def show_event(
    url: str, *flags: str, redirection: str = "", **variables: str
) -> "subprocess.CompletedProcess[bytes]":
    """`lineshaft events` as a process, because it is about what it inherits."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
    command = [sys.executable, "-m", "lineshaft.cli.main", "events", "--limit", "1", *flags]
    return subprocess.run(
        ["/bin/sh", "-c", f'"$@" {redirection}', "sh", *command, "--url", url],
        env=environment | variables,
        capture_output=True,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_can_not_be_written_is_a_message() -> None:
    with answering(page(1), page(1)) as server:
        full = show_event(server.url, redirection=">/dev/full")
        closed = show_event(server.url, redirection=">&-")

    assert full.returncode == 1
    assert full.stderr.startswith(b"lineshaft: The operating system refused something: [Errno 28]")
    assert full.stderr.count(b"\n") == 1
    assert (closed.returncode, closed.stderr) == (0, b"")


def test_characters_that_the_output_does_not_have_are_spelt() -> None:
    with answering(page(1), page(1)) as server:
        shown = show_event(server.url, PYTHONIOENCODING="latin-1")
        told = show_event(server.url, "--json", PYTHONIOENCODING="latin-1")

    assert b"\\u2026" in shown.stdout, shown.stderr
    assert json.loads(told.stdout)["data"] == {"text": "…"}
