"""Agents and their instances over HTTP: registration, the agent object, deletion, siblings."""

from typing import Any

from lineshaft.clock import MovableClock
from tests.server.client import Client
from tests.server.conftest import Serve


async def test_a_registration_names_its_process(client: Client) -> None:
    """R-083: 201 for a new agent, 200 for one more instance; `incarnation` is the caller's."""
    given = {"instance": "h1/1", "host": "h1", "version": "7", "max_concurrent_tasks": 2}
    first = await client.post("/v1/agents", {"id": "writer", "capabilities": ["a"], **given})
    second = await client.post("/v1/agents", {"id": "writer", "instance": "h1/2", "capabilities": ["b"]})

    assert (first.status, second.status) == (201, 200)
    assert (first.json["incarnation"], second.json["incarnation"]) == (1, 2)
    assert first.json["warnings"] == second.json["warnings"] == []
    (own,) = first.json["instances"]
    assert own["started_at"].endswith("Z")
    assert own | {"started_at": 0, "last_heartbeat": 0} == {
        "instance": "h1/1",
        "incarnation": 1,
        "host": "h1",
        "version": "7",
        "status": "active",
        "started_at": 0,
        "last_heartbeat": 0,
        "capabilities": ["a"],
        "types": None,
        "models_available": [],
        "max_concurrent_tasks": 2,
        "current_tasks": 0,
        "task_ids": [],
        "poll_interval_sec": 5.0,
        "claim_ttl_sec": 60.0,
        "heartbeat_interval_sec": 30.0,
    }
    assert [each["instance"] for each in second.json["instances"]] == ["h1/2"]


async def test_the_agent_object_has_sums_and_unions(client: Client) -> None:
    """R-083: over live instances; other reads have the newest incarnation and no warnings."""
    first = await client.register("writer", instance="one", capabilities=["a"], max_concurrent_tasks=2)
    await client.register("writer", instance="two", capabilities=["b"], version="2", max_concurrent_tasks=5)
    await client.submit()
    task_id, _ = await client.hold(first)

    agent = (await client.get("/v1/agents/writer")).json

    assert agent["capabilities"] == ["b", "a"]
    assert (agent["max_concurrent_tasks"], agent["current_tasks"]) == (7, 1)
    assert (agent["incarnation"], agent["version"], agent["status"]) == (2, "2", "active")
    assert (agent["budget_usd"], agent["budget_remaining_usd"]) == (None, None)
    assert "warnings" not in agent
    assert [each["task_ids"] for each in agent["instances"]] == [[], [task_id]]
    (listed,) = (await client.get("/v1/agents")).json["items"]
    assert listed == agent
    task = await client.task(task_id)
    assert (task["claim"]["agent_id"], task["claim"]["instance"]) == ("writer", "one")


async def test_a_superseded_process_is_refused_with_409(client: Client) -> None:
    """R-083: claims, heartbeats and reports are `superseded`, its tokens are `stale_claim`."""
    old = await client.register("writer", instance="one")
    await client.submit()
    task_id, token = await client.hold(old)
    await client.register("writer", instance="one")

    for path in ("claim", "heartbeat", "siblings"):
        refused = await client.post(f"/v1/agents/writer/{path}", {"incarnation": 1})
        assert (path, refused.status, refused.code) == (path, 409, "superseded")
    bodies: dict[str, Any] = {
        "complete": {"output": {"data": 1}},
        "fail": {"error": "x"},
        "release": {},
        "cancel": {},
    }
    for path, body in bodies.items():
        refused = await client.post(f"/v1/tasks/{task_id}/{path}", {"claim_token": token, **body})
        assert (path, refused.status, refused.code) == (path, 409, "stale_claim")
    (failed,) = (await client.task(task_id))["failure_history"]
    assert (failed["agent"], failed["instance"]) == ("writer", "one")
    assert (failed["category"], failed["error"]) == ("crash", "agent_restarted")


async def test_a_restarted_process_names_its_dead_predecessor(client: Client) -> None:
    """R-083: in `gone`; only those of the same host are superseded."""
    dead = await client.register("writer", instance="h1/1", host="h1")
    await client.register("writer", instance="h2/1", host="h2")
    await client.submit()
    task_id, _ = await client.hold(dead)

    new = await client.register("writer", instance="h1/2", host="h1", gone=["h1/1", "h2/1"])

    assert [each["instance"] for each in new["instances"]] == ["h1/2"]
    found = (await client.get("/v1/agents/writer")).json
    assert [each["instance"] for each in found["instances"]] == ["h1/2", "h2/1"]
    assert (await client.task(task_id))["status"] == "RETRYING"
    without_host = await client.post("/v1/agents", {"id": "writer", "gone": ["h1/2"]})
    assert (without_host.status, without_host.code) == (422, "invalid_input")
    assert without_host.json["errors"][0]["loc"] == "gone"


async def test_siblings_watch_each_other(client: Client) -> None:
    """R-083: a report ends what a dead process held; the answer names those to watch."""
    own = await client.register("writer", instance="h1/1", host="h1")
    dead = await client.register("writer", instance="h1/2", host="h1")
    await client.register("writer", instance="h1/3", host="h1")
    await client.submit()
    task_id, _ = await client.hold(dead)
    path = "/v1/agents/writer/siblings"

    first = await client.post(path, {"incarnation": own["incarnation"], "everyone": True})
    second = await client.post(path, {"incarnation": own["incarnation"], "gone": ["h1/2"]})

    assert (first.status, first.json) == (200, {"instances": ["h1/2", "h1/3"]})
    assert (second.status, second.json) == (200, {"instances": ["h1/3"]})
    assert (await client.task(task_id))["status"] == "RETRYING"
    unknown = await client.post("/v1/agents/unknown/siblings", {"incarnation": 1})
    assert (unknown.status, unknown.code) == (404, "not_found")


async def test_draining_and_leaving_name_an_instance(client: Client) -> None:
    """R-083: the others go on."""
    one = await client.register("writer", instance="one")
    two = await client.register("writer", instance="two")

    drained = await client.post("/v1/agents/writer/drain", {"incarnation": one["incarnation"]})
    assert drained.json["status"] == "active"
    assert [each["status"] for each in drained.json["instances"]] == ["active", "draining"]
    left = await client.post("/v1/agents/writer/leave", {"incarnation": two["incarnation"]})
    assert left.json["status"] == "draining"
    assert [each["status"] for each in left.json["instances"]] == ["offline", "draining"]


async def test_slots_of_each_instance_are_set_and_unset(client: Client) -> None:
    """R-083: null returns to what each declares."""
    await client.register("writer", instance="one", max_concurrent_tasks=1)
    changed = await client.patch("/v1/agents/writer", {"max_concurrent_tasks": 4})
    assert changed.json["max_concurrent_tasks"] == 4
    assert (await client.register("writer", instance="two"))["max_concurrent_tasks"] == 8

    unset = await client.patch("/v1/agents/writer", {"max_concurrent_tasks": None})

    assert unset.json["max_concurrent_tasks"] == 11


async def test_a_budget_without_an_id_is_refused(client: Client) -> None:
    """R-083: the money would be new with every start."""
    refused = await client.post("/v1/agents", {"budget_usd": 1})
    assert (refused.status, refused.code) == (422, "invalid_input")
    assert refused.json["errors"][0]["loc"] == "budget_usd"


async def test_an_agent_is_deleted_once_its_processes_are_gone(serve: Serve) -> None:
    """R-083: 409 while one lives; budget and spend are kept for when it registers again."""
    clock = MovableClock()
    async with serve(clock=clock) as served:
        client = served.client
        agent = await client.register("writer", instance="one", budget_usd=5)
        await client.submit(max_cost_usd=1)
        task_id, token = await client.hold(agent)
        done = {"claim_token": token, "output": {"data": 1}, "cost_usd": 0.5}
        assert (await client.post(f"/v1/tasks/{task_id}/complete", done)).status == 200

        refused = await client.delete("/v1/agents/writer")
        assert (refused.status, refused.code) == (409, "invalid_transition")
        assert "'one'" in refused.json["detail"]
        clock.advance(91)
        deleted = await client.delete("/v1/agents/writer")
        assert (deleted.status, deleted.body) == (204, b"")

        again = await client.delete("/v1/agents/writer")
        assert (again.status, again.code) == (404, "not_found")
        assert (await client.get("/v1/agents/writer")).status == 404
        assert (await client.get("/v1/agents")).json["items"] == []
        registered = await client.register("writer", instance="one", budget_usd=9)
        assert (registered["budget_usd"], registered["spent_usd"], registered["incarnation"]) == (5, 0.5, 2)
        assert registered["warnings"][0].startswith("budget_usd=9 is ignored")
        kinds = [
            event["kind"] for event in (await client.get("/v1/events", kind="agent.changed")).json["items"]
        ]
        assert kinds == ["agent.changed"]
