"""What OfficePlane's overview and history pages read."""

from typing import Any

import pytest

from lineshaft.clock import MovableClock
from tests.integrations.officeplane.calls import complete, create, fail
from tests.server.client import Client
from tests.server.conftest import Serve


async def metrics(client: Client) -> dict[str, Any]:
    reply = await client.get("/api/metrics")
    assert reply.status == 200, reply
    found: dict[str, Any] = reply.json
    return found


async def history(client: Client, **query: Any) -> list[dict[str, Any]]:
    reply = await client.get("/api/history", **query)
    assert reply.status == 200, reply
    found: list[dict[str, Any]] = reply.json
    return found


async def test_metrics_of_an_empty_queue(client: Client) -> None:
    found = await metrics(client)

    states = dict.fromkeys(
        ("QUEUED", "RUNNING", "COMPLETED", "FAILED", "RETRYING", "CANCELLED", "TIMEOUT"), 0
    )
    assert found["tasks"] == {"total": 0, "byState": states, "avgDurationMs": 0, "failureRate": 0}
    assert found["system"].keys() == {"uptime", "memoryUsageMb", "cpuPercent"}
    assert found["system"]["uptime"] > 0
    assert found["system"]["memoryUsageMb"] > 1


async def test_metrics_count_the_states_that_lists_show(serve: Serve, clock: MovableClock) -> None:
    async with serve(clock=clock) as served:
        client = served.client
        agent = await client.register()
        for seconds in (1, 3):
            await create(client)
            task_id, token = await client.hold(agent)
            clock.advance(seconds)
            await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token})
        for category in ("crash", "timeout"):
            await create(client, maxRetries=0)
            await fail(client, agent, category)
        await create(client)
        await fail(client, agent)
        cancelled = await create(client)
        await client.post(f"/api/tasks/{cancelled['id']}/cancel")
        await create(client, children=[{"taskType": "a"}, {"taskType": "b"}])
        await client.hold(agent)
        await create(client)

        tasks = (await metrics(client))["tasks"]
        listed = [task["state"] for task in (await client.get("/api/tasks")).json]
        assert tasks["byState"] == {state: listed.count(state) for state in tasks["byState"]}
        assert (tasks["total"], tasks["byState"]["RUNNING"]) == (len(listed), 2), "a batch and its child"
        assert (tasks["avgDurationMs"], tasks["failureRate"]) == (2000, 0.5)


async def test_history_tells_what_happened_newest_first(serve: Serve, clock: MovableClock) -> None:
    async with serve(clock=clock) as served:
        client = served.client
        agent = await client.register("writer")
        made = await create(client, taskName="Page three", documentId="abc", maxRetries=1)
        task_id, token = await client.hold(agent)
        clock.advance(2)
        failed = {"claim_token": token, "error": "it broke", "category": "timeout"}
        await client.post(f"/v1/tasks/{task_id}/fail", failed)
        clock.advance(5)
        await served.service.engine.maintenance.promote_due(10)
        task_id, token = await client.hold(agent)
        clock.advance(3)
        await client.post(f"/v1/tasks/{task_id}/fail", failed | {"claim_token": token})
        await client.post(f"/api/tasks/{task_id}/retry")
        clock.advance(1)
        await client.post(f"/api/tasks/{task_id}/cancel")
        gone = "/v1/agents/writer/leave"
        await client.post(gone, {"incarnation": agent["incarnation"]})

        found = await history(client)
        assert [entry["eventType"] for entry in found] == [
            "WORKER_STOPPED",
            "TASK_CANCELLED",
            "TASK_QUEUED",
            "TASK_TIMEOUT",
            "TASK_STARTED",
            "TASK_RETRY",
            "TASK_STARTED",
            "TASK_QUEUED",
            "WORKER_STARTED",
        ]
        timed_out = found[3]
        assert timed_out["eventMessage"] == "Task Page three timed out: it broke"
        assert (timed_out["durationMs"], found[5]["durationMs"]) == (3000, 2000)
        assert found[4]["durationMs"] is None, "it only started"
        assert (timed_out["actorType"], timed_out["actorId"]) == ("worker", "writer")
        assert timed_out["document"] == {"id": "abc", "title": "abc"}
        assert timed_out["task"] == {"id": made["id"], "taskType": "edit", "taskName": "Page three"}
        assert timed_out["metadata"]["error"] == "it broke"
        assert (found[0]["task"], found[0]["eventMessage"]) == (None, "Worker writer stopped")
        assert len({entry["id"] for entry in found}) == len(found)
        assert await history(client) == found, "the ids are stable"


async def test_history_by_type_and_page(client: Client) -> None:
    agent = await client.register()
    made = []
    for _ in range(3):
        made.append((await create(client))["id"])
        await complete(client, agent)

    done = await history(client, eventType="TASK_COMPLETED")
    assert [entry["task"]["id"] for entry in done] == made[::-1]
    assert await history(client, eventType="task_completed", limit=1, offset=1) == done[1:2]
    assert await history(client, eventType="TASK_FAILED") == []
    assert [entry["eventType"] for entry in await history(client, limit=2)] == [
        "TASK_COMPLETED",
        "TASK_STARTED",
    ]
    assert await history(client, offset=100) == []


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"eventType": "ODD"}, "TASK_QUEUED"),
        ({"offset": -1}, "offset"),
        ({"offset": 10_000}, "offset"),
        ({"limit": 501}, "limit"),
    ],
)
async def test_a_wrong_query_is_refused(client: Client, query: dict[str, Any], words: str) -> None:
    reply = await client.get("/api/history", **query)

    assert reply.status == 422
    assert words in reply.json["detail"]
