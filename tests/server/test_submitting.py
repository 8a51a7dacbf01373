"""Submitting over HTTP."""

import time
from typing import Any

import pytest

from lineshaft import Lineshaft, NewTask
from lineshaft.errors import InvalidInputError
from lineshaft.operations.agents import ListAgents
from lineshaft.server.framework.routing import read_query
from tests.server.client import Client
from tests.server.conftest import Serve

#: As the contract has them.
FIELDS = {
    *("id", "dag_id", "parent_id", "idempotency_key", "type"),
    *("title", "spec", "required_capabilities", "model_preferences", "fallback_models"),
    *("max_cost_usd", "max_total_cost_usd", "max_duration_sec", "status", "priority"),
    *("effective_priority", "tier", "priority_boost_per_minute", "deadline", "run_at"),
    *("depends_on", "blocked_by", "lock_key", "max_attempts", "attempts"),
    *("retry", "retry_at", "claim", "model", "progress"),
    *("output", "failure_reason", "failure_category", "failure_history", "cost_usd"),
    *("tokens_used", "tags", "created_by", "created_at", "ready_at"),
    *("first_started_at", "started_at", "completed_at", "cancelled_at", "cancel_reason"),
}


async def test_a_task_has_all_fields_of_the_contract(client: Client) -> None:
    reply = await client.post("/v1/tasks", {"type": "code"})

    assert reply.status == 201
    task = reply.json
    assert task.keys() >= FIELDS
    assert task["status"] == "READY"
    assert set(task["output"]) >= {
        "type",
        "validation",
        "validation_schema",
        "data",
        "artifacts",
        "decision_report",
    }
    assert set(task["tokens_used"]) == {"input", "output"}
    assert set(task["retry"]) >= {
        *("strategy", "initial_delay_sec", "backoff_multiplier", "max_delay_sec"),
        *("jitter", "retry_on", "no_retry_on"),
    }
    assert "duplicate" not in task
    assert (await client.task(task["id"])) | {"effective_priority": 0} == task | {"effective_priority": 0}


async def test_what_was_asked_is_what_is_there(client: Client) -> None:
    """Money is a number with at most six decimals, times end with Z."""
    upstream = await client.submit()
    asked: dict[str, Any] = {
        "id": "my-own.id_1",
        "title": "A title",
        "spec": {"deep": [1, {"a": None}], "text": "ü"},
        "priority": 7,
        "priority_boost_per_minute": 0.25,
        "deadline": "2031-05-06T07:08:09Z",
        "depends_on": [upstream["id"]],
        "lock_key": "doc:1",
        "required_capabilities": ["python"],
        "model_preferences": ["large"],
        "fallback_models": ["small"],
        "max_cost_usd": 0.123456,
        "max_total_cost_usd": 1,
        "max_duration_sec": 12.5,
        "heartbeat_interval_sec": 0.5,
        "max_attempts": 4,
        "tags": ["a", "b"],
        "created_by": "human:me",
        "idempotency_key": "key-1",
    }

    task = await client.submit("code", **asked)

    assert {name: task[name] for name in asked} == asked
    assert task["status"] == "PENDING"
    assert task["blocked_by"] == [upstream["id"]]
    assert task["created_at"].endswith("Z")
    body = (await client.get(f"/v1/tasks/{task['id']}")).body
    assert b'"max_cost_usd":0.123456' in body


async def test_a_known_key_gives_the_existing_task(client: Client) -> None:
    first = await client.submit(idempotency_key="k", spec={"a": 1})

    again = await client.post("/v1/tasks", {"type": "code", "idempotency_key": "k", "spec": {"a": 1}})
    by_header = await client.post(
        "/v1/tasks", {"type": "code", "spec": {"a": 1}}, headers={"Idempotency-Key": "k"}
    )
    other = await client.post("/v1/tasks", {"type": "code", "idempotency_key": "k", "spec": {"a": 2}})

    assert [r.status for r in (again, by_header, other)] == [200, 200, 200]
    assert {r.json["id"] for r in (again, by_header, other)} == {first["id"]}
    assert all(r.json["duplicate"] is True for r in (again, by_header, other))
    assert "mismatch" not in again.json
    assert other.json["mismatch"] is True


async def test_the_header_and_the_body_must_name_the_same_key(client: Client) -> None:
    reply = await client.post(
        "/v1/tasks", {"type": "code", "idempotency_key": "a"}, headers={"Idempotency-Key": "b"}
    )

    assert (reply.status, reply.code) == (422, "invalid_input")
    assert reply.json["errors"][0]["loc"] == "idempotency_key"


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"type": "code", "prioirty": 1}, "prioirty"),
        ({"type": "code", "key": "k"}, "key"),
        ({"type": "code", "surface": {}}, "surface"),
        ({"type": "code", "children": [{"type": "x", "surface": {}}]}, "children[0].surface"),
        ({"type": "code", "retry": {"strategi": "fixed"}}, "retry.strategi"),
        ({"type": "code", "output": {"validation": "json-schema", "schema": {}}}, "output.schema"),
        ({}, "type"),
        ({"type": 3}, "type"),
        ({"type": ""}, "type"),
        ({"type": "code", "priority": 101}, "priority"),
        ({"type": "code", "deadline": "2031-01-01T00:00:00"}, "deadline"),
        ({"type": "code", "id": "../etc"}, "id"),
        ({"type": "code", "max_cost_usd": -1}, "max_cost_usd"),
        ({"type": "code", "spec": {"constraints": {"max_cost_usd": 2}}, "max_cost_usd": 1}, "max_cost_usd"),
        ({"type": "code", "spec": {"nul": "\0"}}, "spec"),
    ],
)
async def test_a_fault_is_refused_with_its_place(client: Client, body: Any, place: str) -> None:
    reply = await client.post("/v1/tasks", body)

    assert (reply.status, reply.code) == (422, "invalid_input")
    assert [error["loc"] for error in reply.json["errors"]] == [place]
    assert reply.json["errors"][0]["msg"]
    assert reply.json["retryable"] is False


async def test_all_faults_of_a_task_are_told_at_once(client: Client) -> None:
    reply = await client.post("/v1/tasks", {"type": "code", "priority": -1, "max_attempts": 0})

    assert {error["loc"] for error in reply.json["errors"]} == {"priority", "max_attempts"}


@pytest.mark.parametrize(
    "raw", [b"{", b"[]", b'"x"', b"\xff{}", b'{"type": "a", "spec": {"x": "\xff"}}', b"nul"]
)
async def test_what_is_no_json_object_is_refused(client: Client, raw: bytes) -> None:
    reply = await client.request("POST", "/v1/tasks", raw=raw)

    assert (reply.status, reply.code) == (422, "invalid_input")


async def test_a_dependency_that_doesnt_exist(client: Client) -> None:
    reply = await client.post("/v1/tasks", {"type": "code", "depends_on": ["task_unknown"]})

    assert (reply.status, reply.code) == (422, "dependency_not_found")
    assert [error["loc"] for error in reply.json["errors"]] == ["depends_on"]


async def test_an_id_that_is_taken(client: Client) -> None:
    await client.submit(id="mine")

    reply = await client.post("/v1/tasks", {"type": "code", "id": "mine"})

    assert (reply.status, reply.code) == (409, "already_exists")


async def test_a_parent_that_doesnt_exist(client: Client) -> None:
    reply = await client.post("/v1/tasks", {"type": "code", "parent_id": "task_unknown"})

    assert (reply.status, reply.code) == (404, "not_found")


async def test_a_batch_is_all_or_nothing(client: Client) -> None:
    tasks = [{"type": "code"}, {"type": "code", "depends_on": ["task_unknown"]}]

    refused = await client.post("/v1/tasks/batch", {"tasks": tasks})
    listed = await client.get("/v1/tasks")
    accepted = await client.post("/v1/tasks/batch", {"tasks": [{"type": "code"}] * 60})

    assert refused.code == "dependency_not_found"
    assert listed.json == {"items": [], "next_cursor": None}
    assert accepted.status == 201
    assert len({item["id"] for item in accepted.json["items"]}) == 60
    assert {item["duplicate"] for item in accepted.json["items"]} == {False}


async def test_a_batch_with_a_key_can_be_sent_again(client: Client) -> None:
    body = {"tasks": [{"type": "code"}, {"type": "code", "idempotency_key": "own"}]}

    first = await client.post("/v1/tasks/batch", body, headers={"Idempotency-Key": "k"})
    again = await client.post("/v1/tasks/batch", body, headers={"Idempotency-Key": "k"})

    assert [item["duplicate"] for item in again.json["items"]] == [True, True]
    assert [i["id"] for i in first.json["items"]] == [i["id"] for i in again.json["items"]]


@pytest.mark.parametrize("number", [0, 10_001])
async def test_a_batch_has_1_to_10000_tasks(client: Client, number: int) -> None:
    reply = await client.post("/v1/tasks/batch", {"tasks": [{"type": "a"}] * number})

    assert (reply.status, reply.code) == (422, "invalid_input")


async def test_children_run_in_order_under_their_task(client: Client) -> None:
    batch = await client.submit("book", children=[{"type": "chapter"}, {"type": "chapter"}])

    children = (await client.get("/v1/tasks", parent_id=batch["id"])).json["items"]

    assert [child["status"] for child in reversed(children)] == ["READY", "PENDING"]
    assert (await client.get(f"/v1/dags/{batch['dag_id']}")).json["counts"] == {"PENDING": 2, "READY": 1}


@pytest.mark.parametrize(
    ("path", "limit"), [("/v1/tasks", 10_000), ("/v1/tasks/batch", 10_000), ("/v1/dags", 100_000)]
)
async def test_tasks_are_counted_before_they_are_made(client: Client, path: str, limit: int) -> None:
    """Making them all, only to refuse them, would hold up everybody else for seconds."""
    many = [{"type": "a"}] * (limit * 6 // 10)
    tasks = [{"type": "a", "children": many}, *many, {"type": 1}]
    body = {"type": "a", "children": tasks} if path == "/v1/tasks" else {"tasks": tasks}

    reply = await client.post(path, body)

    assert (reply.status, reply.code) == (422, "invalid_input")
    assert f"at most {limit} tasks" in reply.json["detail"]


async def test_the_longest_key_serves_for_a_batch_too(client: Client) -> None:
    headers = {"Idempotency-Key": "k" * 1_000}
    body = {"tasks": [{"type": "a"}, {"type": "a"}]}

    replies = [await client.post("/v1/tasks/batch", body, headers=headers) for _ in range(2)]

    first, again = ([item["id"] for item in reply.json["items"]] for reply in replies)
    assert len(set(first)) == 2
    assert first == again


def test_a_query_of_many_names_is_refused_at_once() -> None:
    """In seconds, if each name were looked for among all of them."""
    names = "&".join(f"{number:x}=" for number in range(20_000)).encode()
    began = time.process_time()

    with pytest.raises(InvalidInputError, match="0: unknown field"):
        read_query(names, ListAgents)

    assert time.process_time() - began < 2


async def test_the_policy_that_is_read_can_be_sent(client: Client) -> None:
    """R-019: a default task shows 004's lists."""
    task = await client.submit()

    assert task["retry"] == {
        "strategy": "exponential",
        "initial_delay_sec": 10,
        "backoff_multiplier": 2,
        "max_delay_sec": 300,
        "jitter": True,
        "retry_on": ["timeout", "crash", "rate_limit", "invalid_output"],
        "no_retry_on": ["auth_failure", "budget_exceeded", "cancelled"],
    }
    again = await client.submit(retry=task["retry"])
    assert again["retry"] == task["retry"]


async def test_claim_and_artifacts_are_there_before_anything_happens(client: Client) -> None:
    """R-014, R-020: an object and a list, as in 004; and a task that was read can be sent again."""
    task = await client.submit(heartbeat_interval_sec=7)

    assert task["claim"] == {
        "agent_id": None,
        "instance": None,
        "claimed_at": None,
        "heartbeat_at": None,
        "heartbeat_interval_sec": 7,
        "epoch": 0,
    }
    assert (await client.submit())["claim"]["heartbeat_interval_sec"] == 30
    assert task["output"]["artifacts"] == []


async def test_a_task_shows_the_window_of_its_key_and_what_its_failure_does(client: Client) -> None:
    """U8, U7: and what was read can be sent."""
    parent = await client.submit(idempotency_key="k1", idempotency_ttl_sec=60)
    child = await client.submit(parent_id=parent["id"], on_failure="ignore")
    other = await client.submit(parent_id=parent["id"])

    assert (parent["idempotency_ttl_sec"], parent["on_failure"]) == (60, None)
    assert (child["idempotency_ttl_sec"], child["on_failure"]) == (None, "ignore")
    assert other["on_failure"] == "block"
    names = ("type", "parent_id", "on_failure", "idempotency_key", "idempotency_ttl_sec")
    for number, task in enumerate((parent, child, other)):
        sent = {name: task[name] for name in names} | {"idempotency_key": f"other{number}"}
        again = await client.post("/v1/tasks", sent)
        assert again.status == 201
        assert {name: again.json[name] for name in names} == sent


async def test_a_lane_too_many_is_429(serve: Serve) -> None:
    """R-246: nobody slows all claims down with ever new kinds of tasks; the answer names the setting."""
    async with serve(max_lanes=2) as served:
        for n in range(2):
            await served.client.submit(f"type-{n}")

        for path, body in (
            ("/v1/tasks", {"type": "more"}),
            ("/v1/tasks/batch", {"tasks": [{"type": "more"}, {"type": "type-1"}]}),
            ("/v1/dags", {"title": "a DAG", "tasks": [{"key": "a", "type": "more"}]}),
        ):
            refused = await served.client.post(path, body)
            assert (refused.status, refused.json["code"]) == (429, "rate_limited")
            assert "LINESHAFT_MAX_LANES" in refused.json["detail"]
            assert refused.headers["retry-after"] == "5"
        assert len((await served.client.get("/v1/tasks")).json["items"]) == 2


async def test_the_token_that_created_a_task_is_recorded(serve: Serve, dsn: str) -> None:
    """`created_by` is what the caller says; `created_by_token` is what the server saw."""
    async with serve() as served:
        before = await served.client.submit(created_by="human:eve")
        ci = Client(served.client.port, (await served.service.tokens.create("ci", "submit")).token)
        agent = Client(served.client.port, (await served.service.tokens.create("bot", "agent")).token)
        label = {"created_by": "human:alice"}

        one = await ci.submit(**label)
        many = (await ci.post("/v1/tasks/batch", {"tasks": [{"type": "x"}] * 60})).json["items"]
        few = (await ci.post("/v1/tasks/batch", {"tasks": [{"type": "x"}, {"type": "y"}]})).json["items"]
        dag = (await ci.post("/v1/dags", {"title": "d", "tasks": [{"type": "x", "key": "k"}]})).json
        compatible = (await ci.post("/api/tasks", {"taskType": "x"})).json
        again = await agent.post("/v1/tasks", {"type": "x", "idempotency_key": "k"})
        other = await ci.post("/v1/tasks", {"type": "x", "idempotency_key": "k"})
        held = await agent.register(types=["code"])
        item, *_ = await agent.claim(held, start=True)
        spawned = await agent.post(
            f"/v1/tasks/{item['task']['id']}/subtasks",
            {"claim_token": item["claim_token"], "tasks": [{"type": "z"}]},
        )

        assert before["created_by_token"] is None
        assert (one["created_by"], one["created_by_token"]) == ("human:alice", "ci")
        ids = [many[0]["id"], many[59]["id"], few[1]["id"], dag["tasks"]["k"], compatible["id"]]
        assert [(await ci.task(task_id))["created_by_token"] for task_id in ids] == ["ci"] * 5
        assert dag["dag"]["created_by_token"] == "ci"
        assert (again.status, other.status) == (201, 200)
        assert other.json["created_by_token"] == "bot", "of the first"
        child = await ci.task(spawned.json["items"][0]["id"])
        assert (child["created_by"], child["created_by_token"]) == (f"agent:{held['id']}", "bot")
        parent = (await ci.get(f"/v1/dags/{child['dag_id']}")).json
        assert parent["created_by_token"] == item["task"]["created_by_token"]
        async with Lineshaft(dsn) as shaft:
            direct = await shaft.submit(NewTask("x"))
        assert (await ci.task(direct.id))["created_by_token"] is None


async def test_a_bound_token_submits_only_in_the_name_of_its_agent(serve: Serve) -> None:
    async with serve() as served:
        made = await served.service.tokens.create("w", "agent", agent_id="writer")
        writer = Client(served.client.port, made.token)
        foreign, own = {"type": "x", "created_by": "human:boss"}, {"type": "x", "created_by": "agent:writer"}

        refused = [
            await writer.post("/v1/tasks", foreign),
            await writer.post("/v1/tasks", {"type": "x", "children": [foreign]}),
            await writer.post("/v1/tasks/batch", {"tasks": [own, foreign]}),
            await writer.post("/v1/dags", {"title": "d", "created_by": "agent:other", "tasks": [own]}),
            await writer.post("/v1/dags", {"title": "d", "tasks": [foreign]}),
        ]

        assert {(reply.status, reply.code) for reply in refused} == {(403, "forbidden")}
        assert "agent:writer" in refused[0].json["detail"]
        assert (await writer.get("/v1/tasks")).json["items"] == []
        assert (await writer.post("/v1/tasks", own)).status == 201
        assert (await writer.post("/v1/tasks", {"type": "x"})).json["created_by"] is None


async def test_a_key_that_is_used_for_something_else_is_visible(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys are shared by the whole installation: whoever uses one first owns it."""
    first = await client.submit(idempotency_key="report-1", spec={"n": 1})

    single = await client.post("/v1/tasks", {"type": "code", "idempotency_key": "report-1", "spec": {"n": 2}})
    tasks = [{"type": "code", "idempotency_key": "report-1", "spec": {"n": n}} for n in (1, 2)]
    batch = [(await client.post("/v1/tasks/batch", {"tasks": [task]})).json["items"][0] for task in tasks]

    assert (single.json["id"], single.json["mismatch"]) == (first["id"], True)
    assert [(item["duplicate"], item.get("mismatch", False)) for item in batch] == [
        (True, False),
        (True, True),
    ]
    assert "Idempotency key 'report-1' is in use for a different request" in caplog.text
