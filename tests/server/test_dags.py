"""DAGs over HTTP."""

from typing import Any

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
