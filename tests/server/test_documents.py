"""Tasks, agents and DAGs as the source documents write them are valid requests."""

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.server.client import Client

DOCUMENTS = Path(__file__).parents[1] / "documents"


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCUMENTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


async def make_what_it_refers_to(client: Client, connection: psycopg.Connection) -> None:
    """Two upstream tasks, one whose output is an input, a DAG to join, and an artifact."""
    connection.execute(
        "INSERT INTO lineshaft.content (sha256, size, used_at, stored) VALUES ('00', 0, now(), true)"
    )
    connection.execute(
        "INSERT INTO lineshaft.artifact (id, name, sha256, size, content_type, created_at, used_at)"
        " VALUES ('abc', 'abc', '00', 0, 'text/plain', now(), now())"
    )
    for name in ("task_01J8K1...", "task_01J8K0...", "xyz", "01J8K..."):
        await client.submit("code", id=name)
    assert (await client.task("01J8K..."))["dag_id"] == "dag_01J8K..."


async def test_the_task_of_004_is_accepted_as_it_is_written(
    client: Client, connection: psycopg.Connection
) -> None:
    """R-011, R-012: system-managed fields that say nothing new are ignored; the task joins its DAG."""
    await make_what_it_refers_to(client, connection)
    asked = document("004-task")

    task = await client.submit(**{"type_": asked.pop("type"), **asked})

    settable = (
        "id",
        "idempotency_key",
        "parent_id",
        "dag_id",
        "title",
        "spec",
        "priority",
        "created_by",
        "tags",
    )
    assert {name: task[name] for name in settable} == {name: asked[name] for name in settable}
    assert (task["status"], task["attempts"], task["cost_usd"]) == ("PENDING", 0, 0)
    assert set(task["blocked_by"]) == {"task_01J8K1...", "task_01J8K0...", "xyz"}
    assert task["heartbeat_interval_sec"] == 30
    assert task["created_at"] != asked["created_at"]
    assert task["retry"] == asked["retry"]
    dag = (await client.get("/v1/dags/dag_01J8K...")).json
    assert set(dag["tasks"]) == {"01J8K...", "task_01J8K2M..."}


async def test_the_agent_of_004_is_accepted_as_it_is_written(client: Client) -> None:
    """R-079: what is left of its budget is its budget; its tasks are counted, not believed."""
    asked = document("004-agent")

    reply = await client.post("/v1/agents", asked)

    assert reply.status == 201, reply
    agent = reply.json
    for name in ("id", "type", "capabilities", "models_available", "max_concurrent_tasks", "status"):
        assert agent[name] == asked[name], name
    assert (agent["budget_remaining_usd"], agent["current_tasks"]) == (45, 0)


async def test_a_dag_with_ids_for_tasks_is_refused_with_the_form_to_send(client: Client) -> None:
    reply = await client.post("/v1/dags", document("004-dag"))

    assert (reply.status, reply.code) == (422, "invalid_input")
    (fault,) = reply.json["errors"]
    assert fault["loc"] == "tasks"
    form = fault["msg"][fault["msg"].index("{") : fault["msg"].rindex("}") + 1].replace("…", "x")
    assert (await client.post("/v1/dags", json.loads(form))).status == 201


async def test_tasks_of_a_dag_and_of_a_batch_may_be_documents(
    client: Client, connection: psycopg.Connection
) -> None:
    await make_what_it_refers_to(client, connection)
    task = {name: value for name, value in document("004-task").items() if name not in {"id", "dag_id"}}
    one, two = (
        task | {"idempotency_key": "1"},
        task | {"idempotency_key": "2", "children": [{"type": "x", "attempts": 0}]},
    )

    dag = await client.post("/v1/dags", {"title": "t", "tasks": [one]})
    batch = await client.post("/v1/tasks/batch", {"tasks": [two]})

    assert (dag.status, batch.status) == (201, 201), (dag, batch)


async def test_the_batch_of_003_is_accepted_as_it_is_written(client: Client) -> None:
    """R-190."""
    reply = await client.post("/api/tasks", document("003-batch"))

    assert reply.status in {200, 201}, reply
    assert (reply.json["taskType"], reply.json["documentId"]) == ("batch_edit", "abc")


async def test_the_payload_of_000_is_a_spec(client: Client) -> None:
    """Its constraints are sentences, not limits."""
    task = await client.submit("eng-backend", preset="loki", spec=document("000-payload"))

    assert task["spec"] == document("000-payload")


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("status", "running", "status"),
        ("attempts", 1, "attempts"),
        ("attempts", False, "attempts"),
        ("blocked_by", ["task_1"], "blocked_by"),
        ("cost_usd", 0.5, "cost_usd"),
        ("tokens_used", {"input": 1, "output": 0}, "tokens_used"),
        ("tokens_used", {"cached": 0}, "tokens_used"),
        ("started_at", "2026-02-08T09:00:00Z", "started_at"),
        ("completed_at", "2026-02-08T09:00:00Z", "completed_at"),
        ("created_at", "yesterday", "created_at"),
        ("output", {"data": {"a": 1}}, "output.data"),
        ("output", {"artifacts": ["artifact:1"]}, "output.artifacts"),
        ("claim", {"agent_id": "a1"}, "claim.agent_id"),
        ("claim", {"since": None}, "claim.since"),
        ("claim", "a1", "claim"),
        ("children", [{"type": "x", "attempts": 2}], "children[0].attempts"),
        ("dag_id", "dag_unknown", "dag_id"),
    ],
)
async def test_a_system_managed_field_with_news_is_refused(
    client: Client, field: str, value: Any, place: str
) -> None:
    """R-011."""
    reply = await client.post("/v1/tasks", {"type": "code", field: value})

    assert (reply.status, reply.code) == (422, "invalid_input")
    assert [error["loc"] for error in reply.json["errors"]] == [place]


async def test_two_different_heartbeat_intervals_are_refused(client: Client) -> None:
    body = {"type": "code", "heartbeat_interval_sec": 5, "claim": {"heartbeat_interval_sec": 30}}

    reply = await client.post("/v1/tasks", body)

    assert [error["loc"] for error in reply.json["errors"]] == ["heartbeat_interval_sec"]


@pytest.mark.parametrize("status", ["draining", "offline", "ACTIVE"])
async def test_an_agent_registers_as_active_only(client: Client, status: str) -> None:
    """R-079."""
    reply = await client.post("/v1/agents", document("004-agent") | {"status": status})

    assert [error["loc"] for error in reply.json["errors"]] == ["status"]
