"""What operators do, over HTTP."""

from typing import Any
from urllib.parse import quote

import pytest

from tests.server.client import Client


async def dead_letter(
    client: Client, type_: str = "code", error: str = "no access to the vault", **fields: Any
) -> str:
    """A task that failed for good."""
    await client.submit(type_, **fields)
    task_id, token = await client.hold(await client.register(types=[type_]))
    body = {"claim_token": token, "error": error, "category": "auth_failure"}
    failed = await client.post(f"/v1/tasks/{task_id}/fail", body)
    assert failed.json["status"] == "DEAD_LETTERED"
    return task_id


async def test_changing_a_task(client: Client) -> None:
    task = await client.submit(deadline="2031-01-01T00:00:00Z")
    path = f"/v1/tasks/{task['id']}"

    changed = await client.patch(path, {"priority": 3, "tags": ["a"]})
    without = await client.patch(path, {"deadline": None})

    assert (changed.status, changed.json["priority"], changed.json["tags"]) == (200, 3, ["a"])
    assert changed.json["deadline"] == "2031-01-01T00:00:00Z"
    assert without.json["deadline"] is None
    assert (await client.patch(path, {"priority": 500})).code == "invalid_input"
    assert (await client.patch(path, {"type": "b"})).code == "invalid_input"
    await client.post(f"{path}/cancel", {})
    assert (await client.patch(path, {"priority": 3})).code == "invalid_transition"
    assert (await client.patch("/v1/tasks/unknown", {"priority": 3})).code == "not_found"


async def test_adding_dependencies(client: Client) -> None:
    one, two = await client.submit(), await client.submit()

    added = await client.post(f"/v1/tasks/{two['id']}/dependencies", {"depends_on": [one["id"]]})
    cycle = await client.post(f"/v1/tasks/{one['id']}/dependencies", {"depends_on": [two["id"]]})
    missing = await client.post(f"/v1/tasks/{one['id']}/dependencies", {"depends_on": ["unknown"]})

    assert (added.status, added.json["status"], added.json["blocked_by"]) == (200, "PENDING", [one["id"]])
    assert (cycle.status, cycle.code) == (422, "cycle_detected")
    assert [error["loc"] for error in cycle.json["errors"]] == ["depends_on"]
    assert set(cycle.json["cycle"]) == {one["id"], two["id"]}
    assert (missing.status, missing.code) == (422, "dependency_not_found")
    assert [error["loc"] for error in missing.json["errors"]] == ["depends_on"]


async def test_cancelling_cascades_and_can_be_repeated(client: Client) -> None:
    one = await client.submit()
    two = await client.submit(depends_on=[one["id"]])

    cancelled = await client.post(f"/v1/tasks/{one['id']}/cancel", {"reason": "enough"})
    again = await client.post(f"/v1/tasks/{one['id']}/cancel", {"reason": "other"})

    assert (cancelled.json["status"], cancelled.json["cancel_reason"]) == ("CANCELLED", "enough")
    assert again.status == 200
    assert again.json["cancel_reason"] == "enough"
    assert (await client.task(two["id"]))["cancel_reason"] == f"Parent {one['id']} cancelled"
    kept = await client.submit()
    below = await client.submit(depends_on=[kept["id"]])
    await client.post(f"/v1/tasks/{kept['id']}/cancel", {"cascade": False})
    assert (await client.task(below["id"]))["status"] == "PENDING"


async def test_what_has_ended_cant_be_cancelled(client: Client) -> None:
    dead = await dead_letter(client)

    reply = await client.post(f"/v1/tasks/{dead}/cancel", {})

    assert (reply.status, reply.code) == (409, "invalid_transition")
    assert (await client.post("/v1/tasks/unknown/cancel", {})).code == "not_found"


async def test_an_agent_cancels_what_it_holds(client: Client) -> None:
    await client.submit()
    task_id, token = await client.hold(await client.register())

    body = {"claim_token": token, "reason": "makes no sense"}
    cancelled = await client.post(f"/v1/tasks/{task_id}/cancel", body)
    again = await client.post(f"/v1/tasks/{task_id}/cancel", body)

    assert cancelled.json["status"] == "CANCELLED"
    assert (again.status, again.json) == (200, cancelled.json)


async def test_retrying_by_hand(client: Client) -> None:
    dead = await dead_letter(client)

    revived = await client.post(f"/v1/tasks/{dead}/retry")
    refused = await client.post(f"/v1/tasks/{dead}/retry")

    assert (revived.json["status"], revived.json["attempts"]) == ("READY", 0)
    assert (refused.status, refused.code) == (409, "invalid_transition")
    assert (await client.post("/v1/tasks/unknown/retry")).code == "not_found"


async def test_a_revived_key_that_was_retaken(client: Client) -> None:
    task = await client.submit(idempotency_key="k")
    await client.post(f"/v1/tasks/{task['id']}/cancel", {})
    await client.submit(idempotency_key="k")

    reply = await client.post(f"/v1/tasks/{task['id']}/retry")

    assert (reply.status, reply.code) == (409, "already_exists")


async def test_pausing_and_resuming(client: Client) -> None:
    await client.submit("a")
    await client.submit("b")
    agent = await client.register()

    assert (await client.post("/v1/pause", {"type": "a"})).json == {"type": "a", "paused": True}
    assert [item["task"]["type"] for item in await client.claim(agent, limit=5)] == ["b"]
    await client.post("/v1/pause", {})
    assert (await client.post("/v1/resume", {"type": "a"})).status == 200
    assert await client.claim(agent) == []
    assert (await client.post("/v1/resume")).json == {"type": None, "paused": False}
    assert [item["task"]["type"] for item in await client.claim(agent)] == ["a"]
    assert (await client.post("/v1/pause", {"typ": "a"})).code == "invalid_input"


async def test_breakers_by_hand(client: Client) -> None:
    await client.submit("a/b")
    agent = await client.register()
    path = "/v1/breakers/a%2Fb"

    opened = await client.post(f"{path}/open")

    assert opened.json | {"opened_at": 0} == {
        "key": "a/b",
        "state": "open",
        "failures": 0,
        "last_failure": None,
        "opened_at": 0,
        "half_open_at": None,
        "probe_task_id": None,
        "forced": True,
        "probe_at": None,
    }
    assert (await client.get("/v1/breakers")).json["items"] == [opened.json]
    assert await client.claim(agent) == []
    reset = await client.post(f"{path}/reset")
    assert (reset.json["state"], reset.json["forced"]) == ("closed", False)
    assert len(await client.claim(agent)) == 1
    assert (await client.post("/v1/breakers/never-seen/reset")).json["state"] == "closed"


async def test_several_and_shared_locks(client: Client) -> None:
    locks = ["b", {"key": "a", "shared": True}]
    one = await client.submit(lock_keys=locks)
    assert one["lock_keys"] == [{"key": "a", "shared": True}, {"key": "b", "shared": False}]
    assert one["lock_key"] is None
    alone = await client.submit(lock_keys=["c"])
    assert (alone["lock_key"], alone["lock_keys"]) == ("c", [])
    two = await client.submit(lock_keys=locks)
    await client.submit(lock_keys=[{"key": "a", "shared": True}])
    agent = await client.register(max_concurrent_tasks=5)
    found = await client.claim(agent, limit=5)
    assert len(found) == 3
    items = (await client.get("/v1/locks")).json["items"]
    assert [(item["key"], item["shared"]) for item in items] == [
        *[("a", True)] * 2,
        *[("b", False), ("c", False)],
    ]
    assert items[2]["waiting"] == 1
    why = (await client.get(f"/v1/tasks/{two['id']}/why")).json
    assert why["reasons"][0]["code"] == "lock_held"
    assert f"Lock 'b' is held by task {one['id']}" in why["reasons"][0]["detail"]
    for bad in (["a"] * 2, [{"key": "a", "mode": "x"}], [str(n) for n in range(9)], "a", [{"shared": True}]):
        assert (await client.post("/v1/tasks", {"type": "code", "lock_keys": bad})).status == 422


async def test_locks_by_hand(client: Client) -> None:
    await client.submit(lock_key="doc:1/2")
    await client.submit(lock_key="doc:1/2")
    agent = await client.register()
    held, _ = await client.hold(agent)
    assert await client.claim(agent) == []

    (lock,) = (await client.get("/v1/locks")).json["items"]
    assert set(lock) >= {
        *("key", "holder_task_id", "agent_id", "token", "acquired_at", "expires_at", "waiting")
    }
    assert (lock["key"], lock["holder_task_id"], lock["waiting"]) == ("doc:1/2", held, 1)

    gone = await client.delete("/v1/locks/doc%3A1%2F2")
    assert (gone.status, gone.body) == (204, b"")
    assert len(await client.claim(agent)) == 1, "the next waiter has it now"
    assert (await client.delete("/v1/locks/unknown")).code == "not_found"


async def test_a_dead_letter_is_looked_at_and_resolved(client: Client) -> None:
    dead = await dead_letter(client, spec={"path": "/old"})
    listed = (await client.get("/v1/dead-letters", reviewed="false", type="code")).json
    entry = (await client.get(f"/v1/dead-letters/{dead}")).json

    assert listed["items"] == [entry]
    assert (entry["task_id"], entry["category"], entry["reviewed"]) == (dead, "auth_failure", False)
    assert (entry["error"], entry["spec"]) == ("no access to the vault", {"path": "/old"})
    assert len(entry["failure_history"]) == 1
    assert {"total_cost_usd", "dead_lettered_at", "poison_pill", "resolution"} <= entry.keys()
    assert (await client.get("/v1/dead-letters", poison_pill="true")).json["items"] == []

    decision = {
        "resolution": "modify_and_retry",
        "spec": {"path": "/new"},
        "note": "it moved",
        "reviewer": "ada",
    }
    resolved = await client.post(f"/v1/dead-letters/{dead}/resolve", decision)
    again = await client.post(f"/v1/dead-letters/{dead}/resolve", decision)

    assert resolved.status == 200
    assert (resolved.json["status"], resolved.json["spec"]) == ("READY", {"path": "/new"})
    assert (again.status, again.code) == (409, "invalid_transition")
    entry = (await client.get(f"/v1/dead-letters/{dead}")).json
    assert (entry["reviewed"], entry["resolution"]) == (True, "modify_and_retry")
    assert (await client.get("/v1/dead-letters", reviewed="false")).json["items"] == []


async def test_faults_of_a_decision(client: Client) -> None:
    dead = await dead_letter(client)

    async def code(**body: Any) -> str:
        return (await client.post(f"/v1/dead-letters/{dead}/resolve", body)).code

    assert await code(resolution="burn", reviewer="ada") == "invalid_input"
    assert await code(resolution="retry", reviewer="ada", spec={}) == "invalid_input"
    assert await code(resolution="retry", reviewer="ada", nte="x") == "invalid_input"
    missing = {"resolution": "retry", "reviewer": "ada"}
    assert (await client.post("/v1/dead-letters/unknown/resolve", missing)).code == "not_found"


async def test_many_dead_letters_at_once(client: Client) -> None:
    one, two = await dead_letter(client, "a"), await dead_letter(client, "b")
    other = await dead_letter(client, "c")

    reply = await client.post(
        "/v1/dead-letters/resolve",
        {
            "filter": {"task_ids": [one, two], "error_contains": "vault", "category": "auth_failure"},
            "resolution": "cancel",
            "note": "all of them",
            "reviewer": "ada",
        },
    )

    assert reply.status == 200
    assert sorted(reply.json["resolved"]) == sorted([one, two])
    assert (await client.task(one))["status"] == "CANCELLED"
    assert (await client.task(other))["status"] == "DEAD_LETTERED"


async def test_an_output_waits_for_a_person(client: Client) -> None:
    await client.submit(output={"validation": "human"})
    task_id, token = await client.hold(await client.register())
    handed_in = await client.post(
        f"/v1/tasks/{task_id}/complete", {"claim_token": token, "output": {"data": {"draft": 1}}}
    )
    assert handed_in.json["status"] == "VALIDATING"

    (waiting,) = (await client.get("/v1/approvals")).json["items"]
    assert (waiting["task"]["id"], waiting["kind"]) == (task_id, "gate")
    assert waiting["task"]["output"]["data"] == {"draft": 1}
    assert {"schema", "since"} <= waiting.keys()
    why = (await client.get(f"/v1/tasks/{task_id}/why")).json
    assert [reason["code"] for reason in why["reasons"]] == ["waiting_approval"]
    approved = await client.post(
        f"/v1/approvals/{task_id}", {"approve": True, "note": "fine", "reviewer": "ada"}
    )

    assert (approved.status, approved.json["status"]) == (200, "COMPLETED")
    assert (await client.get("/v1/approvals")).json["items"] == []
    late = await client.post(f"/v1/approvals/{task_id}", {"approve": False, "reviewer": "bob"})
    assert (late.status, late.code) == (409, "invalid_transition")
    unknown = await client.post("/v1/approvals/unknown", {"approve": True, "reviewer": "ada"})
    assert (unknown.status, unknown.code) == (404, "not_found")


async def test_a_task_that_is_a_persons(client: Client) -> None:
    task = await client.submit("sign-off", required_capabilities=["human"])

    (waiting,) = (await client.get("/v1/approvals")).json["items"]
    done = await client.post(
        f"/v1/approvals/{task['id']}",
        {"approve": True, "data": {"ok": True}, "note": "", "reviewer": "ada"},
    )

    assert (waiting["task"]["id"], waiting["kind"]) == (task["id"], "task")
    assert (done.json["status"], done.json["output"]["data"]) == ("COMPLETED", {"ok": True})


async def test_dead_letters_by_pattern_decision_and_whether_they_were_deleted(client: Client) -> None:
    """R-132, R-137."""
    one, two, three = [await dead_letter(client, error=f"page {n} of {n} is broken") for n in (1, 22, 333)]
    other = await dead_letter(client, error="no such file")
    (pattern,) = {(await client.get(f"/v1/dead-letters/{name}")).json["pattern"] for name in (one, two)}

    async def listed(**query: Any) -> list[str]:
        return [item["task_id"] for item in (await client.get("/v1/dead-letters", **query)).json["items"]]

    assert await listed(pattern=pattern) == [three, two, one]
    deleted = {"filter": {"pattern": pattern, "task_ids": [one]}, "resolution": "delete", "reviewer": "ada"}
    assert (await client.post("/v1/dead-letters/resolve", deleted)).json["resolved"] == [one]
    escalated = {"resolution": "escalate", "reviewer": "ada"}
    await client.post(f"/v1/dead-letters/{two}/resolve", escalated)
    assert await listed() == [other, three, two]
    assert await listed(hidden=True) == [other, three, two, one]
    assert await listed(resolution="escalate") == [two]
    assert await listed(resolution=["escalate", "delete"], hidden=True) == [two, one]
    assert (await client.get("/v1/dead-letters", resolution="odd")).code == "invalid_input"
    retried = {"filter": {"pattern": [pattern]}, "resolution": "retry", "reviewer": "ada", "note": "all"}
    assert sorted((await client.post("/v1/dead-letters/resolve", retried)).json["resolved"]) == sorted(
        [two, three]
    )


async def test_tasks_are_cancelled_and_retried_by_filter(client: Client) -> None:
    ids = {(await client.submit("crawl", tags=["t"]))["id"] for _ in range(3)}
    other = await client.submit("report")

    rehearsed = await client.post("/v1/tasks/cancel", {"filter": {"tag": ["t"]}, "dry_run": True})
    cancelled = await client.post("/v1/tasks/cancel", {"filter": {"tag": "t"}, "reason": "outdated"})
    retried = await client.post("/v1/tasks/retry", {"filter": {"type": ["crawl"], "status": ["CANCELLED"]}})

    for reply in (rehearsed, cancelled, retried):
        assert (reply.status, set(reply.json["ids"]), reply.json["count"]) == (200, ids, 3)
    assert {(await client.task(name))["status"] for name in (*ids, other["id"])} == {"READY"}


@pytest.mark.parametrize(
    "body", [{}, {"filter": {}}, {"filter": {"typ": ["x"]}}, {"filter": {"status": ["NEW"]}}]
)
async def test_a_filter_must_say_something(client: Client, body: dict[str, Any]) -> None:
    await client.submit()

    reply = await client.post("/v1/tasks/cancel", body)

    assert (reply.status, reply.code) == (422, "invalid_input")


async def test_the_limits_of_a_dead_letter_are_raised(client: Client) -> None:
    agent = await client.register()
    await client.submit(max_attempts=1, max_cost_usd=0.5)
    task_id, token = await client.hold(agent)
    await client.post(f"/v1/tasks/{task_id}/fail", {"claim_token": token, "error": "x"})

    changed = await client.patch(f"/v1/tasks/{task_id}", {"max_attempts": 4, "max_cost_usd": None})

    assert (changed.status, changed.json["status"]) == (200, "DEAD_LETTERED")
    assert (changed.json["max_attempts"], changed.json["max_cost_usd"]) == (4, None)
    refused = await client.patch(f"/v1/tasks/{task_id}", {"priority": 1})
    assert (refused.status, refused.code) == (409, "invalid_transition")


async def test_a_key_may_contain_any_character(client: Client) -> None:
    """Keys in paths are percent-encoded."""
    key = "a/b\nc\x87 %\n"

    opened = await client.post(f"/v1/breakers/{quote(key, safe='')}/open", {})

    assert (opened.status, opened.json["key"]) == (200, key)
