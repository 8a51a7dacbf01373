"""OfficePlane's API: its calls as documented there, its names, retries and batches."""

import asyncio
import json
import shlex
import shutil
from datetime import datetime, timedelta
from typing import Any

import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.artifacts import artifacts
from lineshaft.settings import Settings
from tests.integrations.officeplane.calls import complete, create, fail, ids, look
from tests.server.client import Client, Reply
from tests.server.conftest import Serve, Served

FIELDS = {
    *("id", "taskType", "taskName", "documentId", "parentTaskId", "payload", "result", "state", "priority"),
    *("maxRetries", "retryCount", "retries", "createdAt", "scheduledFor", "startedAt", "completedAt"),
    *("cancelledAt", "timeoutSeconds", "errorMessage", "workerId", "tags"),
}


async def curl(command: str, port: int) -> Any:
    process = await asyncio.create_subprocess_exec(
        *("curl", "-s", "-S", "--fail-with-body"),
        *shlex.split(command.replace("localhost:8001", f"localhost:{port}"))[1:],
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said
    return json.loads(said)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the calls are curl's")
async def test_the_five_calls_as_they_are_written(served: Served) -> None:
    """R-248. On the default port, which another server may have: only the number is changed."""
    port = served.client.port
    made = await curl(
        "curl -X POST http://localhost:8001/api/tasks"
        """ -d '{"taskType": "write_page", "documentId": "abc", "payload": {"page": 3}}'""",
        port,
    )
    assert made["state"] == "QUEUED"
    (listed,) = await curl("curl http://localhost:8001/api/tasks", port)
    found = await curl(f"curl http://localhost:8001/api/tasks/{made['id']}", port)
    assert found == listed == made
    assert found.keys() >= FIELDS
    cancelled = await curl(f"curl -X POST http://localhost:8001/api/tasks/{made['id']}/cancel", port)
    assert (cancelled["state"], cancelled["cancelReason"]) == ("CANCELLED", "cancelled by hand")
    assert cancelled["cancelledAt"]
    again = await curl(f"curl -X POST http://localhost:8001/api/tasks/{made['id']}/retry", port)
    assert (again["state"], again["cancelledAt"]) == ("QUEUED", None)


def test_the_default_port_is_that_of_003() -> None:
    """R-248."""
    assert (Settings().host, Settings().port) == ("127.0.0.1", 8001)


async def test_what_was_sent_is_echoed(client: Client) -> None:
    """R-026, U1: also what we have no column for; the priority as one of its words."""
    sent = {
        "taskName": "Page three",
        "documentId": "ordner/ä 7",
        "instanceId": "node-1",
        "priority": 3,
        "maxRetries": 1,
        "timeoutSeconds": 30,
        "tags": ["nightly", "k:v"],
        "payload": {"page": 3, "skip_pretty": True},
        "metadata": {"from": ["a", None]},
    }
    made = await create(client, **sent)

    assert {name: made[name] for name in sent} == sent | {"priority": "HIGH"}
    assert isinstance(made["timeoutSeconds"], int)
    assert await look(client, made["id"]) == made
    native = await client.task(made["id"])
    assert (native["lock_key"], native["priority"], native["title"]) == ("doc:ordner/ä 7", 20, "Page three")
    assert (native["max_attempts"], native["max_duration_sec"]) == (2, 30)
    assert (native["preset"], native["priority_boost_per_minute"]) == ("officeplane", 0)
    await client.patch(f"/v1/tasks/{made['id']}", {"priority": 70})
    assert (await look(client, made["id"]))["priority"] == "LOW"


async def test_defaults(client: Client) -> None:
    """U2, U15."""
    made = await create(client, payload={"action": "tidy up"})

    assert (made["maxRetries"], made["priority"], made["timeoutSeconds"]) == (3, "NORMAL", 300)
    assert (made["taskName"], made["documentId"], made["tags"]) == ("tidy up", None, [])
    assert (await client.task(made["id"]))["max_attempts"] == 4


async def test_the_other_calling_style_has_the_whole_body_as_payload(client: Client) -> None:
    query = {"taskType": "edit", "documentId": "d1", "priority": "high", "maxRetries": 0, "tags": ["a", "b"]}
    made = await client.post("/api/tasks", {"taskType": "is mine", "x": 1}, query=query)
    bare = await client.request("POST", "/api/tasks", query={"taskType": "edit", "priority": "4"})

    assert made.status == bare.status == 201
    assert made.json["payload"] == {"taskType": "is mine", "x": 1}
    assert (made.json["documentId"], made.json["priority"], made.json["tags"]) == ("d1", "HIGH", ["a", "b"])
    assert (await client.task(made.json["id"]))["max_attempts"] == 1
    assert (bare.json["payload"], bare.json["priority"]) == ({}, "CRITICAL")
    for wrong in ({"documentId": "d1"}, {"taskType": "x", "odd": 1}, {"taskType": "x", "priority": "5"}):
        assert (await client.post("/api/tasks", {}, query=wrong)).status == 422


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "taskType"),
        ({"taskType": "x", "documentid": "d"}, "documentid"),
        ({"taskType": "x", "priority": "URGENT"}, "CRITICAL, HIGH, NORMAL or LOW"),
        ({"taskType": "x", "priority": 0}, "priority"),
        ({"taskType": "x", "maxRetries": -1}, "maxRetries"),
        ({"taskType": "x", "payload": [1]}, "payload"),
        ({"taskType": "x", "timeoutSeconds": -1}, "timeoutSeconds"),
        ({"taskType": "x", "documentId": ""}, "documentId"),
        ({"taskType": "x", "payload": {"a": "\0"}}, "payload"),
        ({"taskType": "x", "parentTaskId": "unknown"}, "parentTaskId"),
        ({"taskType": "x", "children": [{"taskType": "y", "timeoutSeconds": -1}]}, "children[0].timeoutSec"),
    ],
)
async def test_errors_have_its_format_and_names(client: Client, body: Any, expected: str) -> None:
    reply = await client.post("/api/tasks", body)

    assert reply.status in {404, 422}
    assert reply.headers["content-type"] == "application/json"
    assert reply.json.keys() == {"detail"}
    assert expected in reply.json["detail"]


async def test_other_refusals_are_as_in_003_too(serve: Serve) -> None:
    async with serve(auth=True, max_body_bytes=2000) as served:
        client = served.client
        replies: list[tuple[int, Reply]] = [
            (401, await client.get("/api/tasks")),
            (403, await client.request("GET", "/api/tasks", headers={"Origin": "http://evil.example"})),
            (404, await client.get("/api/nothing")),
            (405, await client.request("DELETE", "/api/tasks")),
            (413, await client.post("/api/tasks", {"taskType": "x", "payload": {"x": "x" * 3000}})),
        ]
        for status, reply in replies:
            assert reply.status == status
            assert reply.json.keys() == {"detail"}
        assert (await client.get("/health")).json["status"] == "ok"


async def test_a_task_that_is_not_there(client: Client) -> None:
    for method, path in (("GET", ""), ("POST", "/cancel"), ("POST", "/retry")):
        reply = await client.request(method, f"/api/tasks/unknown{path}")
        assert (reply.status, reply.json.keys()) == (404, {"detail"})


async def test_a_key_is_honoured(client: Client) -> None:
    """U8: the header, as everywhere."""
    headers = {"Idempotency-Key": "k1"}
    one = await client.post("/api/tasks", {"taskType": "x"}, headers=headers)
    two = await client.post("/api/tasks", {"taskType": "x"}, headers=headers)

    assert (one.status, two.status) == (201, 200)
    assert two.json == one.json | {"duplicate": True}


async def test_the_states_of_003(served: Served) -> None:
    """U4, R-037, F-46, U5: each state, as it is shown and as it is searched."""
    client = served.client
    agent = await client.register()
    expected: dict[str, str] = {}

    async def end(state: str, category: str | None, **fields: Any) -> None:
        made = await create(client, priority="CRITICAL", **fields)
        if category is None:
            await complete(client, agent, {"ok": True})
        else:
            await fail(client, agent, category)
        expected[made["id"]] = state

    await end("COMPLETED", None)
    await end("RETRYING", "crash")
    await end("FAILED", "crash", maxRetries=0)
    await end("TIMEOUT", "timeout", maxRetries=0)
    await end("RETRYING", "timeout")
    expected[(await create(client))["id"]] = "RUNNING"
    await client.claim(agent)
    gated = await client.submit("edit", output={"validation": "human"})
    await complete(client, agent, 1)
    expected[gated["id"]] = "RUNNING"
    expected[(await create(client, scheduledFor="2199-01-01T00:00:00Z"))["id"]] = "QUEUED"
    cancelled = await create(client)
    await client.post(f"/api/tasks/{cancelled['id']}/cancel", {"reason": "no"})
    expected[cancelled["id"]] = "CANCELLED"
    expected[(await create(client))["id"]] = "QUEUED"

    assert {task["id"]: task["state"] for task in (await client.get("/api/tasks")).json} == expected
    for state in set(expected.values()):
        newest = [name for name in reversed(expected) if expected[name] == state]
        assert await ids(client, state=state.lower()) == newest
        assert await ids(client, state=state, limit=1) == newest[:1]
    both = [name for name in reversed(expected) if expected[name] in {"FAILED", "TIMEOUT"}]
    assert await ids(client, state=["FAILED", "TIMEOUT"]) == both
    assert (await client.get("/api/tasks", state="odd")).status == 422
    done = next(name for name, state in expected.items() if state == "COMPLETED")
    found = await look(client, done)
    assert (found["result"], found["workerId"], found["retryCount"]) == ({"ok": True}, "a1", 0)
    assert found["startedAt"]
    assert found["completedAt"]
    assert (await look(client, gated["id"]))["result"] is None, "not before it counts"


async def test_lists_by_priority_and_document(client: Client) -> None:
    """R-166."""
    high = await create(client, priority="HIGH", documentId="a")
    normal = await create(client, documentId="a")
    low = await create(client, priority="LOW", documentId="b")
    native = await client.submit(priority=15)

    assert await ids(client, priority="high") == [native["id"], high["id"]]
    assert await ids(client, priority="2") == [normal["id"]]
    assert await ids(client, documentId="a") == [normal["id"], high["id"]]
    assert await ids(client, documentId=["a", "b"], priority="LOW") == [low["id"]]
    assert await ids(client, documentId="nothing") == []
    assert await ids(client, limit=1) == [native["id"]]
    for wrong in ({"limit": 0}, {"limit": 501}, {"priority": "odd"}, {"document": "a"}):
        assert (await client.get("/api/tasks", **wrong)).status == 422


async def test_priorities_have_an_effect(client: Client) -> None:
    """F-41, R-166."""
    made = [await create(client, priority=word) for word in ("LOW", "NORMAL", "CRITICAL", "HIGH")]
    agent = await client.register()

    order = [item["task"]["id"] for item in await client.claim(agent, limit=4)]

    assert order == [made[n]["id"] for n in (2, 3, 1, 0)]


async def test_the_delays_of_003(serve: Serve, clock: MovableClock) -> None:
    """R-113, U2, U3, F-50: the first attempt at once, then after 5, 25 and 125 s, and then no more."""
    async with serve(clock=clock) as served:
        client = served.client
        agent = await client.register()
        made = await create(client)
        for retries, delay in ((1, 5), (2, 25), (3, 125)):
            await fail(client, agent)
            found = await look(client, made["id"])
            assert (found["state"], found["retryCount"], found["retries"]) == ("RETRYING", retries, retries)
            due = datetime.fromisoformat(found["scheduledFor"])
            assert (due - clock.now()).total_seconds() == delay
            clock.advance(delay)
            await served.service.engine.maintenance.promote_due(10)
        await fail(client, agent)

        found = await look(client, made["id"])
        assert (found["state"], found["retryCount"], found["maxRetries"]) == ("FAILED", 3, 3)
        assert found["errorMessage"]


async def test_the_program_of_003_counts_the_first_attempt(serve: Serve) -> None:
    """U2: as a setting."""
    async with serve(max_retries_are="all") as served:
        made = await create(served.client)
        batch = await create(served.client, maxRetries=2, children=[{"taskType": "a"}])

        assert (made["maxRetries"], batch["maxRetries"]) == (3, 2)
        assert (await served.client.task(made["id"]))["max_attempts"] == 3
        (child,) = await children(served.client, batch)
        assert (child["maxRetries"], (await served.client.task(child["id"]))["max_attempts"]) == (2, 2)


async def test_cancel_and_retry_only_where_they_make_sense(client: Client) -> None:
    """R-122, R-174, F-49, F-51, F-52."""
    agent = await client.register()

    async def post(task_id: str, what: str) -> Reply:
        return await client.request("POST", f"/api/tasks/{task_id}/{what}")

    waiting = (await create(client, priority="LOW"))["id"]
    assert (await post(waiting, "retry")).status == 409
    retrying = (await create(client))["id"]
    await fail(client, agent)
    reply = await post(retrying, "retry")
    assert (reply.json["state"], reply.json["retryCount"]) == ("QUEUED", 1), "due now, counters kept"
    assert await fail(client, agent) == retrying
    await post(retrying, "cancel")
    running, _ = await client.hold(agent)
    assert running == waiting
    assert (await post(running, "retry")).status == 409
    assert (await post(running, "cancel")).json["state"] == "CANCELLED"
    assert (await post(running, "cancel")).status == 200
    failed = (await create(client, maxRetries=0))["id"]
    await fail(client, agent)
    assert (await post(failed, "cancel")).status == 409
    reply = await post(failed, "retry")
    assert (reply.json["state"], reply.json["retryCount"], reply.json["errorMessage"]) == ("QUEUED", 0, None)
    assert await complete(client, agent) == failed
    assert (await post(failed, "retry")).status == 409
    assert (await post(failed, "cancel")).status == 409


async def test_the_times_and_the_error_of_an_end(serve: Serve, clock: MovableClock) -> None:
    """Every end has `completedAt`; a cancelled task has no error, and a retry starts no earlier."""
    async with serve(clock=clock) as served:
        client = served.client
        agent = await client.register()
        ended = []
        for category in ("crash", "timeout"):
            ended.append((await create(client, maxRetries=0))["id"])
            clock.advance(10)
            await fail(client, agent, category)
        ended.append((await create(client))["id"])
        await client.post(f"/api/tasks/{ended[-1]}/cancel", {"reason": "not needed"})
        times = [(await look(client, task_id))["completedAt"] for task_id in ended]
        assert [datetime.fromisoformat(time) for time in times] == [
            clock.now() - timedelta(seconds=10),
            clock.now(),
            clock.now(),
        ]
        found = await look(client, ended[2])
        assert (found["errorMessage"], found["cancelReason"]) == (None, "not needed")

        retrying = (await create(client))["id"]
        assert (await look(client, retrying))["completedAt"] is None
        started = []
        for _ in range(2):
            clock.advance(60)
            await served.service.engine.maintenance.promote_due(10)
            task_id, token = await client.hold(agent)
            started.append((await look(client, retrying))["startedAt"])
            body = {"claim_token": token, "error": "it broke"}
            await client.post(f"/v1/tasks/{task_id}/fail", body)
            found = await look(client, retrying)
            assert (found["state"], found["startedAt"]) == ("RETRYING", started[-1])
        assert started[0] < started[1]


async def test_a_refusal_names_its_states(client: Client) -> None:
    agent = await client.register()
    failed = (await create(client, maxRetries=0))["id"]
    await fail(client, agent)
    running = (await create(client))["id"]
    await client.hold(agent)

    cancel = await client.post(f"/api/tasks/{failed}/cancel")
    retry = await client.post(f"/api/tasks/{running}/retry")
    assert (cancel.status, retry.status) == (409, 409)
    assert cancel.json["detail"] == (
        f"Task {failed} can't be cancelled: it is FAILED. It must be QUEUED, RUNNING or RETRYING."
    )
    assert "it is RUNNING. It must be FAILED, TIMEOUT, CANCELLED or RETRYING." in retry.json["detail"]


async def test_a_list_has_a_hundred_tasks_by_default(client: Client) -> None:
    body = {"tasks": [{"type": "x"} for _ in range(101)]}
    assert (await client.post("/v1/tasks/batch", body)).status == 201

    assert len(await ids(client)) == 100


# Batches.


async def children(client: Client, parent: dict[str, Any]) -> list[dict[str, Any]]:
    """In the order in which they run."""
    native = (await client.get("/v1/tasks", parent_id=parent["id"])).json["items"]
    found = [await look(client, task["id"]) for task in native]
    return sorted(found, key=lambda task: str(task["id"]))


BATCH = {
    "taskType": "batch_edit",
    "documentId": "abc",
    "priority": "HIGH",
    "maxRetries": 1,
    "children": [
        {"taskType": "add_section", "payload": {"n": 1}},
        {"taskType": "write_page", "payload": {"n": 2}, "priority": "LOW", "maxRetries": 5},
    ],
}


async def test_a_batch_runs_its_children_in_order_and_keeps_the_document(client: Client) -> None:
    """R-190, R-191, R-192, R-196, R-200, R-204, R-205, F-47."""
    parent = await create(client, **BATCH)
    one, two = await children(client, parent)
    assert [child["parentTaskId"] for child in (one, two)] == [parent["id"]] * 2
    assert [child["documentId"] for child in (one, two)] == ["abc", "abc"]
    assert [(child["priority"], child["maxRetries"]) for child in (one, two)] == [("HIGH", 1), ("LOW", 5)]
    intruder = await create(client, documentId="abc", priority="CRITICAL")
    elsewhere = await create(client, documentId="other", priority="LOW")
    agent = await client.register()

    # The more urgent one comes first; then nothing gets between the children.
    assert await complete(client, agent) == intruder["id"]
    late = await create(client, documentId="abc", priority="CRITICAL")
    (first,) = await client.claim(agent, types=["add_section"])
    await client.post(f"/v1/tasks/{one['id']}/start", {"claim_token": first["claim_token"]})
    assert first["task"]["id"] == one["id"]
    found = await look(client, parent["id"])
    assert (found["state"], bool(found["startedAt"])) == ("RUNNING", True)
    assert await ids(client, state="RUNNING") == [one["id"], parent["id"]]
    assert parent["id"] not in await ids(client, state="QUEUED")
    assert [item["task"]["id"] for item in await client.claim(agent, limit=9)] == [elsewhere["id"]]
    (lock,) = (item for item in (await client.get("/v1/locks")).json["items"] if item["key"] == "doc:abc")
    assert lock["holder_task_id"] == parent["id"]
    done = {"claim_token": first["claim_token"], "output": {"data": "section"}}
    await client.post(f"/v1/tasks/{one['id']}/complete", done)
    assert (await look(client, parent["id"]))["state"] == "RUNNING"
    assert await complete(client, agent, "page") == two["id"]

    found = await look(client, parent["id"])
    assert (found["state"], found["result"]) == ("COMPLETED", ["section", "page"])
    assert await complete(client, agent) == late["id"], "the document is free again"


async def test_a_child_that_fails_for_good(client: Client) -> None:
    """R-193, F-48, R-206: the rest is cancelled, the batch FAILED; a retry runs only what is left."""
    agent = await client.register()
    parent = await create(client, documentId="abc", children=[{"taskType": t} for t in "abc"], maxRetries=0)
    one, two, three = await children(client, parent)
    assert await complete(client, agent, 1) == one["id"]
    assert await fail(client, agent) == two["id"]

    found = {child["id"]: child for child in await children(client, parent)}
    assert [found[child["id"]]["state"] for child in (one, two, three)] == [
        "COMPLETED",
        "FAILED",
        "CANCELLED",
    ]
    assert "sibling failed" in found[three["id"]]["cancelReason"]
    assert (await look(client, parent["id"]))["state"] == "FAILED"
    assert (await client.get("/v1/locks")).json["items"] == []

    assert (await client.post(f"/api/tasks/{parent['id']}/retry")).json["state"] in {"QUEUED", "RUNNING"}
    assert await complete(client, agent, 2) == two["id"]
    assert await complete(client, agent, 3) == three["id"]
    found_parent = await look(client, parent["id"])
    assert (found_parent["state"], found_parent["result"]) == ("COMPLETED", [1, 2, 3])


async def test_cancelling_a_batch_cancels_its_children(client: Client) -> None:
    """R-194, R-206."""
    parent = await create(client, **BATCH)
    agent = await client.register()
    await client.hold(agent)

    assert (await client.post(f"/api/tasks/{parent['id']}/cancel")).json["state"] == "CANCELLED"

    assert {child["state"] for child in await children(client, parent)} == {"CANCELLED"}
    assert (await client.get("/v1/locks")).json["items"] == []


async def test_nested_batches(client: Client) -> None:
    """R-195."""
    inner = {"taskType": "inner", "children": [{"taskType": "a"}, {"taskType": "b"}]}
    parent = await create(client, documentId="abc", children=[inner, {"taskType": "c"}])
    agent = await client.register()

    assert (await look(client, parent["id"]))["state"] == "QUEUED"
    await client.hold(agent)
    assert (await look(client, parent["id"]))["state"] == "RUNNING"
    deep: dict[str, Any] = {"taskType": "x"}
    for _ in range(11):
        deep = {"taskType": "x", "children": [deep]}
    assert (await client.post("/api/tasks", deep)).status == 422


async def test_a_large_result_is_in_its_task_and_a_reference_in_lists(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (await client.request("POST", "/v1/artifacts", raw=b'{"text": "long"}')).json
    task = await create(client)
    task_id, token = await client.hold(await client.register())
    body = {"claim_token": token, "output": {"data_ref": made["ref"]}}
    assert (await client.post(f"/v1/tasks/{task_id}/complete", body)).status == 200

    assert (await look(client, task["id"]))["result"] == {"text": "long"}
    reference = {"data": None, "data_ref": made["ref"], "size": 16}
    assert [each["result"] for each in (await client.get("/api/tasks")).json] == [reference]
    with monkeypatch.context() as small:
        small.setattr(artifacts, "MAX_DATA_BYTES", 10)
        assert (await look(client, task["id"]))["result"] == reference
    assert (await client.request("DELETE", f"/v1/artifacts/{made['id']}")).status == 204
    assert (await look(client, task["id"]))["result"] == reference
