"""Import, export, and records on every surface: over the database and over HTTP."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import structlog

from lineshaft.integrations.loki.folder import Folder
from lineshaft.integrations.loki.importing import plan
from tests.cli.conftest import Cli, cli
from tests.http_server import ServerThread
from tests.integrations.loki.readers import by_id, check_as_readers_do, put, queue
from tests.server.client import Client
from tests.server.conftest import client, serve, served
from tests.server.test_documents import DOCUMENTS, document

__all__ = ["cli", "client", "serve", "served"]


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "type": "x", "payload": {"n": name}, "priority": 5} | fields


@pytest.fixture
def root(tmp_path: Path) -> Path:
    Folder(tmp_path / ".loki").create()
    return tmp_path / ".loki"


@pytest.fixture(params=["database", "http"])
def at(request: pytest.FixtureRequest, dsn: str, server_thread: ServerThread) -> Iterator[tuple[str, ...]]:
    """The flags of a command for each transport."""
    if request.param == "database":
        yield ()
        return
    # The server logs to standard output, which is that of the commands here.
    with server_thread.serving(dsn) as url, structlog.testing.capture_logs():
        yield ("--url", url)


def test_import_creates_each_task_once(cli: Cli, at: tuple[str, ...], root: Path) -> None:
    """R-003, R-170, U8: content-derived keys; a second import creates nothing."""
    put(
        root,
        "pending",
        {
            "tasks": [
                record("b", dependencies=["a"], custom={"deep": [1]}),
                record("a", priority="high"),
                record("copy", payload={"n": "a"}),
            ]
        },
    )
    put(root, "in-progress", [record("c", claimedBy="worker-7", dependencies=["done"])])
    put(root, "completed", [record("done")])
    put(root, "dead-letter", [record("dead", lastError="it broke")])

    first = cli("loki", "import", str(root), "--json", *at)
    again = cli("loki", "import", str(root), "--json", *at)

    assert (first.json["created"], first.json["duplicates"], first.json["workers"]) == (3, 1, ["worker-7"])
    assert list(first.json["left_out"]) == ["dead"]
    assert (again.json["created"], again.json["duplicates"]) == (0, 4)
    task = cli("task", "show", "b", "--json", *at).json
    key = task["idempotency_key"]
    assert f"Duplicate task detected: {key}" in again.err
    assert (task["preset"], task["depends_on"], task["spec"], task["priority"]) == (
        "loki",
        ["a"],
        {"n": "b"},
        55,
    )
    assert task["output"]["require_decision_report"] is True
    assert (
        task["retry"]["initial_delay_sec"],
        task["retry"]["backoff_multiplier"],
        task["retry"]["jitter"],
    ) == (60, 2, False)
    assert task["surface"]["loki"]["custom"] == {"deep": [1]}
    assert cli("task", "show", "c", "--json", *at).json["depends_on"] == []


def test_what_can_not_be_imported_is_named(cli: Cli, root: Path) -> None:
    put(
        root,
        "pending",
        [
            record("good"),
            record("bad", priority=99),
            record("x/y"),
            record("late", dependencies=["nowhere"]),
            record("p", dependencies=["q"]),
            record("q", dependencies=["p"]),
            record("five", dependencies=5),
            record("nested", dependencies=[["p"]]),
            "text",
        ],
    )
    (root / "queue/in-progress.json").write_text("[{")

    said = cli("loki", "import", str(root), "--json")

    assert said.json["created"] == 1
    assert set(said.json["left_out"]) == {
        "bad",
        "x/y",
        "late",
        "p",
        "q",
        "five",
        "nested",
        "pending.json[8]",
        "in-progress.json",
    }
    assert "cycle" in said.json["left_out"]["p"]
    assert (root / "queue/in-progress.json").read_text() == "[{"


def test_an_id_in_two_files_counts_once(root: Path) -> None:
    """A terminal one wins over a live one, failed over completed."""
    put(root, "pending", [record("a"), record("b"), record("c")])
    put(root, "in-progress", [record("b", claimedBy="w")])
    put(root, "completed", [record("a"), record("d")])
    put(root, "dead-letter", [record("d")])

    planned = plan(Folder(root))

    assert sorted(found["id"] for found in planned.records) == ["b", "c"]
    assert planned.workers == ["w"]
    assert [name for name, _ in planned.left_out] == ["d"]


def test_export_writes_what_other_programs_read(cli: Cli, at: tuple[str, ...], root: Path) -> None:
    task = cli("submit", "review", "--prompt", "read it", "--priority", "5", "--json").json["id"]
    gone = cli("submit", "review", "--json").json["id"]
    assert cli("task", "cancel", gone, "--json").code == 0
    put(root, "completed", [record("history", extra=1)])

    said = cli("loki", "export", str(root), "--json", *at)

    assert said.json == {"pending": 1, "in-progress": 0, "completed": 1, "dead-letter": 0, "cancelled": 1}
    found = by_id(root, "pending")[task]
    assert (found["priority"], found["payload"], found["claimedBy"]) == (
        10,
        {"prompt": "read it"},
        "lineshaft",
    )
    assert found["requireDecisionReport"] is False
    assert queue(root, "completed") == [record("history", extra=1)]
    check_as_readers_do(root)
    assert cli("loki", "export", str(root), "--claimable", *at).code == 0
    assert by_id(root, "pending")[task]["claimedBy"] is None


def test_a_wrapper_is_written_where_it_is_asked_for(cli: Cli, tmp_path: Path) -> None:
    cli("submit", "x")

    assert cli("loki", "export", str(tmp_path / "new"), "--wrapper").code == 0

    assert [len(json.loads((tmp_path / "new/queue/pending.json").read_text())["tasks"])] == [1]


def test_submit_takes_a_record(cli: Cli, at: tuple[str, ...], tmp_path: Path) -> None:
    path = str(DOCUMENTS / "000-task.json")

    made = cli("submit", "--file", path, "--json", *at).json
    again = cli("submit", "--file", path, "--json", *at).json

    assert (made["id"], made["priority"], made["preset"]) == (document("000-task")["id"], 15, "loki")
    assert made["created_by"].startswith("human:")
    assert (again["id"], again["duplicate"]) == (made["id"], True)
    several = tmp_path / "several.yaml"
    several.write_text("tasks:\n- {type: x, payload: {a: 1}}\n- {type: x, payload: {a: 2}, priority: low}\n")
    assert len(cli("submit", "--file", str(several), "--json", *at).json["items"]) == 2


async def test_http_takes_a_record(client: Client) -> None:
    record = document("000-task")

    made = await client.post("/v1/tasks?format=loki", record)
    again = await client.post("/v1/tasks?format=loki", record)

    assert (made.status, again.status, again.json["duplicate"]) == (201, 200, True)
    assert (made.json["priority"], made.json["idempotency_key"]) == (15, "hash-of-task-content")
    del record["idempotencyKey"], record["id"]
    keyed = await client.post("/v1/tasks?format=loki", record, headers={"Idempotency-Key": "mine"})
    assert (keyed.status, keyed.json["idempotency_key"]) == (201, "mine")


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"type": "x", "payload": {}, "priority": 50}, "priority"),
        ([1], ""),
        ({"type": "x", "payload": []}, "payload"),
    ],
)
async def test_http_refuses_what_is_wrong_in_a_record(client: Client, body: Any, place: str) -> None:
    reply = await client.post("/v1/tasks?format=loki", body)

    assert (reply.status, reply.code, [fault["loc"] for fault in reply.json["errors"]]) == (
        422,
        "invalid_input",
        [place],
    )
    assert (await client.request("POST", "/v1/tasks?format=loki", raw=b'{"type"')).status == 422
    too_large = b'{"type": "x", "payload": {"n": 1e999}}'
    assert (await client.request("POST", "/v1/tasks?format=loki", raw=too_large)).status == 422
    assert (await client.post("/v1/tasks?format=other", {"type": "x"})).status == 422


@pytest.mark.parametrize("wrapped", [True, False])
def test_submit_takes_the_task_of_004(
    cli: Cli, at: tuple[str, ...], tmp_path: Path, connection: psycopg.Connection, wrapped: bool
) -> None:
    connection.execute(
        "INSERT INTO lineshaft.content (sha256, size, used_at, stored) VALUES ('00', 0, now(), true)"
    )
    connection.execute(
        "INSERT INTO lineshaft.artifact (id, name, sha256, size, content_type, created_at, used_at)"
        " VALUES ('abc', 'abc', '00', 0, 'text/plain', now(), now())"
    )
    others = tmp_path / "others.json"
    others.write_text(
        json.dumps(
            [{"type": "code", "id": name} for name in ("task_01J8K1...", "task_01J8K0...", "xyz", "01J8K...")]
        )
    )
    assert cli("submit", "--file", str(others)).code == 0
    path = DOCUMENTS / ("004-task.yaml" if wrapped else "004-task.json")

    made = cli("submit", "--file", str(path), "--json", *at)

    assert made.code == 0, made.err
    assert (made.json["id"], made.json["dag_id"], made.json["created_by"]) == (
        "task_01J8K2M...",
        "dag_01J8K...",
        "agent:orchestrator",
    )
    assert made.json["heartbeat_interval_sec"] == 30


DAG = """
dag:
  id: "dag_01J8K"
  title: "Build landing page for client X"
  created_by: "human:adam"
  status: "pending"               # pending | running | completed | failed | cancelled
  tasks:
    - {key: task_01, type: research, status: pending, dag_id: dag_01J8K, blocked_by: []}
    - {key: task_02, type: code, depends_on: [task_01]}
    - {key: task_05, type: deploy, depends_on: [task_02]}

  # Computed at creation and on mutation
  roots: ["task_01"]           # Tasks with no dependencies (entry points)
  leaves: ["task_05"]          # Tasks with no dependents (exit points)
"""


def test_submit_takes_a_dag_as_004_writes_it(cli: Cli, at: tuple[str, ...], tmp_path: Path) -> None:
    """R-140: what the system computes is ignored where it says nothing new."""
    path = tmp_path / "dag.yaml"
    path.write_text(DAG)

    made = cli("submit", "--file", str(path), "--json", *at)
    again = cli("submit", "--file", str(path), "--json", *at)

    assert made.code == 0, made.err
    dag = made.json["dag"]
    assert (dag["title"], dag["created_by"], len(dag["tasks"])) == (
        "Build landing page for client X",
        "human:adam",
        3,
    )
    assert dag["roots"] == [made.json["tasks"]["task_01"]]
    assert (again.json["dag"]["id"], again.json["duplicate"]) == (dag["id"], True)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('status: "pending" ', 'status: "running" ', "status"),
        ('roots: ["task_01"]', 'roots: ["task_02"]', "roots"),
        ('leaves: ["task_05"]', "leaves: []", "leaves"),
        ("status: pending", "status: completed", "tasks[0].status"),
    ],
)
def test_a_dag_that_says_something_else_is_refused(
    cli: Cli, tmp_path: Path, old: str, new: str, place: str
) -> None:
    path = tmp_path / "dag.yaml"
    path.write_text(DAG.replace(old, new))

    said = cli("submit", "--file", str(path))

    assert said.code == 2
    assert f"{place}: " in said.err
