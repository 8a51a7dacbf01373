"""DAGs over HTTP."""

from typing import Any

import pytest

from tests.server.client import Client

DIAMOND: dict[str, Any] = {
    "title": "Diamond",
    "budget_ceiling_usd": 5,
    "created_by": "human:me",
    "tasks": [
        {"key": "top", "type": "a"},
        {"key": "left", "type": "a", "depends_on": ["top"]},
        {"key": "right", "type": "a", "depends_on": ["top"]},
        {"key": "bottom", "type": "a", "depends_on": ["left", "right"]},
    ],
}


async def test_a_dag_as_a_whole(client: Client) -> None:
    reply = await client.post("/v1/dags", DIAMOND)

    assert reply.status == 201
    dag, tasks = reply.json["dag"], reply.json["tasks"]
    assert set(tasks) == {"top", "left", "right", "bottom"}
    assert "duplicate" not in reply.json
    assert set(dag) >= {
        *("id", "title", "status", "created_by", "tasks", "roots", "leaves", "critical_path", "counts"),
        *("budget_ceiling_usd", "reserved_usd", "spent_usd", "created_at", "completed_at"),
    }
    assert dag["roots"] == [tasks["top"]]
    assert dag["leaves"] == [tasks["bottom"]]
    assert len(dag["critical_path"]) == 3
    assert (dag["status"], dag["counts"]) == ("pending", {"PENDING": 3, "READY": 1})
    assert (dag["budget_ceiling_usd"], dag["spent_usd"]) == (5, 0)
    assert (await client.get(f"/v1/dags/{dag['id']}")).json == dag
    assert (await client.get("/v1/dags")).json["items"] == [dag]

    cancelled = await client.post(f"/v1/dags/{dag['id']}/cancel", {"reason": "enough"})
    assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
    assert (await client.get("/v1/dags", status="running")).json["items"] == []


async def test_a_known_key_gives_the_existing_dag(client: Client) -> None:
    first = await client.post("/v1/dags", DIAMOND | {"idempotency_key": "k"})
    again = await client.post("/v1/dags", DIAMOND, headers={"Idempotency-Key": "k"})

    assert (first.status, again.status) == (201, 200)
    assert again.json["duplicate"] is True
    assert again.json["tasks"] == first.json["tasks"]
    assert again.json["dag"]["id"] == first.json["dag"]["id"]


async def test_a_cycle_creates_nothing_and_is_named_by_keys(client: Client) -> None:
    tasks = [{"key": "a", "type": "x", "depends_on": ["b"]}, {"key": "b", "type": "x", "depends_on": ["a"]}]

    reply = await client.post("/v1/dags", {"title": "Loop", "tasks": tasks})

    assert (reply.status, reply.code) == (422, "cycle_detected")
    assert [error["loc"] for error in reply.json["errors"]] == ["depends_on"]
    assert set(reply.json["cycle"]) == {"a", "b"}
    assert (await client.get("/v1/tasks")).json["items"] == []


async def test_tasks_that_are_known_stand_for_the_existing_ones(client: Client) -> None:
    known = await client.submit(idempotency_key="k")
    tasks = [{"key": "one", "type": "code", "idempotency_key": "k"}]

    alone = await client.post("/v1/dags", {"title": "All known", "tasks": tasks})
    mixed = await client.post(
        "/v1/dags",
        {"title": "Some known", "tasks": [*tasks, {"key": "two", "type": "b", "depends_on": ["one"]}]},
    )

    assert alone.status == 201
    assert alone.json["tasks"] == {"one": known["id"]}
    assert alone.json["dag"]["id"] == known["dag_id"]
    assert mixed.json["tasks"]["one"] == known["id"]
    assert (await client.task(mixed.json["tasks"]["two"]))["depends_on"] == [known["id"]]


async def test_faults_of_a_dag(client: Client) -> None:
    async def refused(**body: Any) -> tuple[str, list[str]]:
        reply = await client.post("/v1/dags", body)
        return reply.code, [error["loc"] for error in reply.json.get("errors", [])]

    assert await refused(title="x", tasks=[]) == ("invalid_input", ["tasks"])
    assert await refused(tasks=[{"type": "a"}]) == ("invalid_input", ["title"])
    assert await refused(title="x", tasks=[{"type": ""}]) == ("invalid_input", ["tasks[0].type"])
    assert await refused(title="x", tasks=[{"type": "a", "kye": "a"}]) == ("invalid_input", ["tasks[0].kye"])
    twice = [{"type": "a", "key": "k"}, {"type": "a", "key": "k"}]
    assert await refused(title="x", tasks=twice) == ("invalid_input", ["tasks[1].key"])
    unknown = [{"type": "a", "depends_on": ["unknown"]}]
    assert await refused(title="x", tasks=unknown) == ("dependency_not_found", ["tasks[0].depends_on"])


async def test_a_standalone_tasks_own_dag(client: Client) -> None:
    task = await client.submit()

    dag = (await client.get(f"/v1/dags/{task['dag_id']}")).json

    assert (dag["tasks"], dag["virtual"]) == ([task["id"]], True)


async def test_a_dag_gets_another_title_with_or_without_a_budget(client: Client) -> None:
    dag = (await client.post("/v1/dags", DIAMOND)).json["dag"]
    path = f"/v1/dags/{dag['id']}"

    renamed = await client.patch(path, {"title": "Rhombus"})
    both = await client.patch(path, {"title": "Square", "add_budget_usd": 1})

    assert (renamed.status, renamed.json["title"], renamed.json["budget_ceiling_usd"]) == (200, "Rhombus", 5)
    assert (both.json["title"], both.json["budget_ceiling_usd"]) == ("Square", 6)
    changes = (await client.get("/v1/events", dag_id=dag["id"], kind="dag.changed")).json["items"]
    assert [event["data"] for event in changes] == [
        {"title": {"from": "Diamond", "to": "Rhombus"}, "actor": "this machine"},
        {
            "title": {"from": "Rhombus", "to": "Square"},
            "budget_ceiling_usd": {"from": 5, "to": 6},
            "actor": "this machine",
        },
    ]
    lone = await client.submit(title="One")
    of_lone = await client.patch(f"/v1/dags/{lone['dag_id']}", {"title": "Two"})
    assert (of_lone.json["title"], of_lone.json["virtual"]) == ("Two", False)


@pytest.mark.parametrize(
    "title", ["", "  ", "a\0b", "x" * 1_001, 7], ids=["empty", "blank", "NUL", "too long", "number"]
)
async def test_a_title_is_checked_as_at_submission(client: Client, title: Any) -> None:
    dag = (await client.post("/v1/dags", DIAMOND)).json["dag"]

    submitted = await client.post("/v1/dags", DIAMOND | {"title": title})
    renamed = await client.patch(f"/v1/dags/{dag['id']}", {"title": title})

    assert (submitted.status, submitted.code) == (renamed.status, renamed.code) == (422, "invalid_input")
    assert renamed.json["errors"] == submitted.json["errors"]
    assert (await client.get(f"/v1/dags/{dag['id']}")).json["title"] == "Diamond"


async def test_a_change_of_nothing_is_refused(client: Client) -> None:
    dag = (await client.post("/v1/dags", DIAMOND)).json["dag"]

    reply = await client.patch(f"/v1/dags/{dag['id']}", {})

    assert (reply.status, reply.code) == (422, "invalid_input")


async def test_a_list_over_http(client: Client) -> None:
    """As the contract writes it; the children's inputs are in the claim, and reads have item and index."""
    tasks = [
        {"key": "scan", "type": "scan"},
        {
            "key": "review",
            "type": "review",
            "spec": {"strict": True},
            "inputs": {"name": "scan.name"},
            "for_each": {"over": "scan.files", "max": 5, "concurrency": 2},
        },
    ]
    made = await client.post("/v1/dags", {"title": "Reviews", "tasks": tasks})
    assert made.status == 201, made
    scan, review = made.json["tasks"]["scan"], made.json["tasks"]["review"]
    task = await client.task(review)
    assert task["for_each"] == {"over": "scan.files", "max": 5, "concurrency": 2}
    assert (task["inputs"], task["index"], task["item"]) == ({"name": f"{scan}.name"}, None, None)
    agent = await client.register()
    task_id, token = await client.hold(agent)
    done = {"claim_token": token, "output": {"data": {"files": [{"path": "a"}, None], "name": "lib"}}}
    assert (await client.post(f"/v1/tasks/{task_id}/complete", done)).status == 200

    items = sorted(await client.claim(agent, limit=5), key=lambda item: item["inputs"]["index"])

    assert [item["inputs"] for item in items] == [
        {"item": {"path": "a"}, "index": 0, "name": "lib"},
        {"item": None, "index": 1, "name": "lib"},
    ]
    assert [(item["task"]["index"], item["task"]["item"]) for item in items] == [
        (0, {"path": "a"}),
        (1, None),
    ]
    assert (await client.get(f"/v1/tasks/{review}/why")).json["reasons"][0]["code"] == "blocked_by_dependency"


@pytest.mark.parametrize(
    ("for_each", "loc"),
    [
        ({"over": "nowhere.files"}, "for_each.over"),
        ({"over": "scan", "max": 20_000}, "for_each.max"),
        ({"over": "scan", "items": 3}, "for_each.items"),
        ({"max": 3}, "for_each.over"),
    ],
)
async def test_a_list_with_a_fault_is_refused(client: Client, for_each: dict[str, object], loc: str) -> None:
    tasks = [{"key": "scan", "type": "scan"}, {"type": "review", "for_each": for_each}]

    reply = await client.post("/v1/dags", {"title": "Reviews", "tasks": tasks})

    assert (reply.status, reply.json["code"]) == (422, "invalid_input")
    assert [fault["loc"] for fault in reply.json["errors"]] == [f"tasks[1].{loc}"]
    assert (await client.get("/v1/dags")).json["items"] == []
