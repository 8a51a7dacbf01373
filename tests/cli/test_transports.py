"""Commands over a database and over HTTP: the same output, and the JSON of the HTTP API."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from lineshaft.model.short_ids import short_id
from tests.cli.conftest import Cli
from tests.cli.test_queue import work
from tests.http_server import ServerThread


@pytest.fixture
def url(dsn: str, server_thread: ServerThread) -> Iterator[str]:
    # The server logs to standard output, which is that of the commands here.
    with server_thread.serving(dsn) as url, structlog.testing.capture_logs():
        yield url


def over_http(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path) as response:  # noqa: S310 - the server of this test
        return json.load(response)


def timeless(value: Any) -> Any:
    """Without fields that depend on the time of the call."""
    if isinstance(value, dict):
        changing = {
            "effective_priority",
            "tier",
            "as_of",
            "oldest_ready_sec",
            "last_minute",
            "since",
            "day",
            "hours",
            "last_heartbeat",
            "utilization",
        }
        return {name: timeless(item) for name, item in value.items() if name not in changing}
    return [timeless(item) for item in value] if isinstance(value, list) else value


@pytest.mark.slow("calls most commands")
def test_json_is_that_of_the_http_api(cli: Cli, dsn: str, url: str) -> None:
    task = cli("submit", "x", "--spec", '{"a": [1.5, "…"]}', "--max-cost", "0.123456", "--json").json["id"]
    work(dsn, error="no access", category="auth_failure")
    cli("submit", "y", "--lock-key", "doc:1")
    cli("breakers", "open", "model:a/b")
    dag = cli("task", "show", task, "--json").json["dag_id"]
    commands = {
        ("task", "show", task): f"/v1/tasks/{task}",
        ("task", "list"): "/v1/tasks",
        ("task", "why", task): f"/v1/tasks/{task}/why",
        ("dag", "list", "--all"): "/v1/dags",
        ("dlq", "list"): "/v1/dead-letters?reviewed=false",
        ("dlq", "show", task): f"/v1/dead-letters/{task}",
        ("agents", "list"): "/v1/agents",
        ("agents", "show", "worker"): "/v1/agents/worker",
        ("breakers", "list"): "/v1/breakers",
        ("locks", "list"): "/v1/locks",
        ("slowdowns", "list"): "/v1/slowdowns",
        ("approvals", "list"): "/v1/approvals",
        ("token", "list"): "/v1/tokens",
        ("stats",): "/v1/stats",
        ("costs", "--days", "30"): "/v1/costs?days=30",
    }

    for command, path in commands.items():
        answer = over_http(url, path)
        wanted = timeless(answer.get("items", answer))
        assert timeless(cli(*command, "--json").json) == wanted, command
        assert timeless(cli(*command, "--json", "--url", url).json) == wanted, command
    assert cli("dag", "show", dag, "--json").json["dag"] == over_http(url, f"/v1/dags/{dag}")


def test_a_task_is_submitted_and_operated_over_http(cli: Cli, dsn: str, url: str) -> None:
    flag = ("--url", url)
    task = cli("submit", "x", "--idempotency-key", "k", "--json", *flag).json["id"]
    assert cli("submit", "x", "--idempotency-key", "k", "--json", *flag).json["duplicate"] is True
    assert cli("task", "change", task, "--priority", "3", "--json", *flag).json["priority"] == 3
    assert cli("pause", "x", "--json", *flag).json == {"type": "x", "paused": True}
    assert cli("resume", *flag, "x").out == "Resumed x.\n"
    work(dsn)
    assert "COMPLETED" in cli("submit", "x", "--idempotency-key", "k", "--wait", "30", *flag).out
    refused = cli("task", "cancel", task, *flag)
    assert (refused.code, refused.err) == (1, cli("task", "cancel", task).err)


@pytest.mark.parametrize("preset", ["factory", "loki", "officeplane"])
def test_presets_are_known_over_both_transports(cli: Cli, url: str, preset: str) -> None:
    for flags in ((), ("--url", url)):
        task = cli("submit", "x", "--preset", preset, "--json", *flags).json
        assert task["preset"] == preset


def test_an_unknown_preset_is_refused_with_those_that_exist(cli: Cli, url: str) -> None:
    refused = [cli("submit", "x", "--preset", "mine", *flags) for flags in ((), ("--url", url))]

    assert [one.code for one in refused] == [2, 2]
    for one in refused:
        assert "preset: must be one of factory, loki, officeplane, got 'mine'" in one.err


def test_a_short_id_is_found_over_http(cli: Cli, url: str) -> None:
    task = cli("submit", "x", "--url", url, "--json").json["id"]

    assert cli("task", "show", short_id(task), "--url", url, "--json").json["id"] == task
    unknown = cli("why", "J8K2M3N4-W1X2", "--url", url)
    assert (unknown.code, unknown.err) == (
        1,
        f"lineshaft: There is no task J8K2M3N4-W1X2. (Looked in the server {url}.)\n",
    )
