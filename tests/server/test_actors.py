"""Events of what a person did by hand name the token and, where one was given, the reason."""

from collections.abc import Awaitable, Callable
from urllib.parse import quote

import pytest

from lineshaft.server.app import OPERATIONS
from lineshaft.types import Scope
from tests.server.client import Client, Reply
from tests.server.conftest import Serve
from tests.server.test_operating import dead_letter
from tests.server.test_sources import SCHEDULE

REASON = "moving to the new model"
BECAUSE = f"?reason={quote(REASON)}"
#: Acts by the operation's name: each prepares with the first client and acts with the second.
Act = Callable[[Client, Client], Awaitable[Reply]]
#: Each with the kind of its event, and whether the event has the reason.
ACTS: dict[str, tuple[Act, str, bool]] = {}


def act(kind: str, *, of: str | None = None, reason: bool = False) -> Callable[[Act], Act]:
    def add(function: Act) -> Act:
        ACTS[of or function.__name__] = (function, kind, reason)
        return function

    return add


# Tasks.


@act("task.cancelled", reason=True)
async def cancel_task(worker: Client, ann: Client) -> Reply:
    task = await worker.submit()
    return await ann.post(f"/v1/tasks/{task['id']}/cancel", {"reason": REASON})


@act("task.cancelled", reason=True)
async def cancel_batch(worker: Client, ann: Client) -> Reply:
    task = await worker.submit()
    return await ann.post("/v1/work/cancel", {"items": [{"id": task["id"], "reason": REASON}]})


@act("task.cancelled", reason=True)
async def cancel_matching(worker: Client, ann: Client) -> Reply:
    await worker.submit(tags=["many"])
    await worker.submit(tags=["many"])
    return await ann.post("/v1/tasks/cancel", {"filter": {"tag": ["many"]}, "reason": REASON})


@act("task.cancelled", reason=True)
async def cancel_document_task(worker: Client, ann: Client) -> Reply:
    task = await worker.submit()
    return await ann.post(f"/api/tasks/{task['id']}/cancel", {"reason": REASON})


@act("task.cancelled", reason=True)
async def cancel_dag(worker: Client, ann: Client) -> Reply:
    return await ann.post(f"/v1/dags/{await new_dag(worker)}/cancel", {"reason": REASON})


@act("task.resolved")
async def retry_task(worker: Client, ann: Client) -> Reply:
    return await ann.post(f"/v1/tasks/{await dead_letter(worker, 'retried')}/retry")


@act("task.resolved", reason=True)
async def rerun_task(worker: Client, ann: Client) -> Reply:
    await worker.submit("once more")
    task_id, token = await worker.hold(await worker.register("rerunner", types=["once more"]))
    await worker.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token})
    return await ann.post(f"/v1/tasks/{task_id}/rerun", {"reason": REASON})


@act("task.resolved")
async def retry_document_task(worker: Client, ann: Client) -> Reply:
    return await ann.post(f"/api/tasks/{await dead_letter(worker, 'document')}/retry")


@act("task.resolved")
async def retry_matching(worker: Client, ann: Client) -> Reply:
    await dead_letter(worker, "bulk")
    return await ann.post("/v1/tasks/retry", {"filter": {"type": ["bulk"]}})


@act("task.ready", of="retry_task of one that waits")
async def retry_waiting(worker: Client, ann: Client) -> Reply:
    return await ann.post(f"/v1/tasks/{await retrying(worker, 'late')}/retry")


@act("task.ready", of="retry_matching of one that waits")
async def retry_all_waiting(worker: Client, ann: Client) -> Reply:
    await retrying(worker, "later")
    return await ann.post("/v1/tasks/retry", {"filter": {"type": ["later"]}})


@act("task.changed")
async def change_task(worker: Client, ann: Client) -> Reply:
    task = await worker.submit()
    return await ann.patch(f"/v1/tasks/{task['id']}", {"priority": 7, "deadline": "2031-01-01T00:00:00Z"})


@act("task.changed", of="change_task of a dead letter")
async def change_dead_letter(worker: Client, ann: Client) -> Reply:
    return await ann.patch(f"/v1/tasks/{await dead_letter(worker, 'costly')}", {"max_cost_usd": 3})


@act("cost.corrected")
async def correct_cost(worker: Client, ann: Client) -> Reply:
    task = await worker.submit()
    return await ann.post(f"/v1/tasks/{task['id']}/cost", {"cost_usd": 0.31, "reason": REASON})


@act("task.changed")
async def add_dependencies(worker: Client, ann: Client) -> Reply:
    one, two = await worker.submit(), await worker.submit()
    return await ann.post(f"/v1/tasks/{two['id']}/dependencies", {"depends_on": [one["id"]]})


@act("dag.changed")
async def change_dag(worker: Client, ann: Client) -> Reply:
    return await ann.patch(f"/v1/dags/{await new_dag(worker)}", {"budget_ceiling_usd": 7})


# Decisions.


@act("task.resolved")
async def resolve_dead_letter(worker: Client, ann: Client) -> Reply:
    dead = await dead_letter(worker, "resolved")
    return await ann.post(
        f"/v1/dead-letters/{dead}/resolve", {"resolution": "escalate", "reviewer": "ada", "note": "?"}
    )


@act("task.cancelled")
async def resolve_dead_letters(worker: Client, ann: Client) -> Reply:
    filters = {"task_ids": [await dead_letter(worker, "gone")]}
    return await ann.post(
        "/v1/dead-letters/resolve", {"filter": filters, "resolution": "cancel", "reviewer": "ada"}
    )


@act("approval.decided")
async def decide(worker: Client, ann: Client) -> Reply:
    task_id = await waiting_output(worker)
    return await ann.post(f"/v1/approvals/{task_id}", {"approve": True, "reviewer": "ada", "note": "fine"})


@act("approval.decided", of="decide against an output")
async def reject(worker: Client, ann: Client) -> Reply:
    task_id = await waiting_output(worker)
    return await ann.post(f"/v1/approvals/{task_id}", {"approve": False, "reviewer": "ada", "note": "no"})


@act("approval.decided", of="decide a task of people")
async def answer(worker: Client, ann: Client) -> Reply:
    task = await worker.submit("sign-off", required_capabilities=["human"])
    return await ann.post(f"/v1/approvals/{task['id']}", {"approve": True, "data": 1, "reviewer": "ada"})


# Guards.


@act("limits.changed", reason=True)
async def change_limits(_: Client, ann: Client) -> Reply:
    return await ann.patch("/v1/limits", {"daily_budget_usd": 70, "reason": REASON})


@act("type.changed", reason=True)
async def set_type(_: Client, ann: Client) -> Reply:
    return await ann.put("/v1/types/review", {"max_attempts": 2, "reason": REASON})


@act("quota.changed", reason=True)
async def set_quota(_: Client, ann: Client) -> Reply:
    return await ann.put("/v1/quotas/reviews", {"match": "type:review", "max_running": 1, "reason": REASON})


@act("quota.changed", reason=True)
async def delete_quota(worker: Client, ann: Client) -> Reply:
    await worker.put("/v1/quotas/other", {"match": "type:other", "max_running": 1})
    return await ann.delete(f"/v1/quotas/other{BECAUSE}")


@act("breaker.opened", reason=True)
async def open_breaker(_: Client, ann: Client) -> Reply:
    return await ann.post("/v1/breakers/broken/open", {"reason": REASON})


@act("breaker.closed", reason=True)
async def reset_breaker(worker: Client, ann: Client) -> Reply:
    await worker.post("/v1/breakers/other/open")
    return await ann.post("/v1/breakers/other/reset", {"reason": REASON})


@act("lock.expired", reason=True)
async def release_lock(worker: Client, ann: Client) -> Reply:
    await worker.submit("locked", lock_key="doc:1")
    await worker.hold(await worker.register("locker", types=["locked"]))
    return await ann.delete(f"/v1/locks/doc%3A1{BECAUSE}")


@act("signal.slowdown", reason=True)
async def end_slowdown(worker: Client, ann: Client) -> Reply:
    await worker.submit("slow", model_preferences=["large"])
    task_id, token = await worker.hold(
        await worker.register("slow", types=["slow"], models_available=["large"])
    )
    await worker.post(
        f"/v1/tasks/{task_id}/fail",
        {"claim_token": token, "error": "429", "category": "rate_limit", "retry_after_sec": 600},
    )
    return await ann.delete(f"/v1/slowdowns/model%3Alarge{BECAUSE}")


@act("queue.paused", reason=True)
async def pause(_: Client, ann: Client) -> Reply:
    return await ann.post("/v1/pause", {"type": "held", "reason": REASON})


@act("queue.resumed", reason=True)
async def resume(worker: Client, ann: Client) -> Reply:
    await worker.post("/v1/pause", {"type": "resumed"})
    return await ann.post("/v1/resume", {"type": "resumed", "reason": REASON})


# Agents, sources and tokens.


@act("agent.changed", reason=True)
async def change_agent(worker: Client, ann: Client) -> Reply:
    await worker.register("drained")
    return await ann.patch("/v1/agents/drained", {"status": "draining", "budget_usd": 5, "reason": REASON})


@act("agent.changed", reason=True)
async def delete_agent(worker: Client, ann: Client) -> Reply:
    agent = await worker.register("deleted")
    await worker.post("/v1/agents/deleted/leave", {"incarnation": agent["incarnation"]})
    return await ann.delete(f"/v1/agents/deleted{BECAUSE}")


@act("source.created")
async def create_source(_: Client, ann: Client) -> Reply:
    return await ann.post("/v1/sources", {"name": "created", **SCHEDULE})


@act("source.created")
async def put_source(_: Client, ann: Client) -> Reply:
    return await ann.put("/v1/sources/put", SCHEDULE)


@act("source.created")
async def apply_sources(_: Client, ann: Client) -> Reply:
    return await ann.post(
        "/v1/sources/apply", {"origin": "file:x.yaml", "sources": [{"name": "applied", **SCHEDULE}]}
    )


@act("source.changed")
async def change_source(worker: Client, ann: Client) -> Reply:
    await worker.put("/v1/sources/changed", SCHEDULE)
    return await ann.patch("/v1/sources/changed", {"enabled": False})


@act("source.deleted")
async def delete_source(worker: Client, ann: Client) -> Reply:
    await worker.put("/v1/sources/deleted", SCHEDULE)
    return await ann.delete("/v1/sources/deleted")


@act("source.fired")
async def fire_source(worker: Client, ann: Client) -> Reply:
    await worker.put("/v1/sources/fired", SCHEDULE)
    return await ann.post("/v1/sources/fired/fire")


@act("token.created")
async def create_token(_: Client, ann: Client) -> Reply:
    return await ann.post("/v1/tokens", {"name": "new", "scope": "read"})


@act("token.revoked")
async def revoke_token(worker: Client, ann: Client) -> Reply:
    made = await worker.post("/v1/tokens", {"name": "old", "scope": "read"})
    return await ann.delete(f"/v1/tokens/{made.json['id']}")


async def new_dag(client: Client) -> str:
    made = await client.post("/v1/dags", {"title": "Page", "tasks": [{"key": "a", "type": "x"}]})
    return str(made.json["dag"]["id"])


async def retrying(client: Client, type_: str) -> str:
    await client.submit(type_)
    task_id, token = await client.hold(await client.register(types=[type_]))
    body = {"claim_token": token, "error": "no answer", "category": "network"}
    assert (await client.post(f"/v1/tasks/{task_id}/fail", body)).json["status"] == "RETRYING"
    return task_id


async def waiting_output(client: Client) -> str:
    await client.submit("checked", output={"validation": "human"})
    task_id, token = await client.hold(await client.register(types=["checked"]))
    done = {"claim_token": token, "output": {"data": 1}}
    assert (await client.post(f"/v1/tasks/{task_id}/complete", done)).json["status"] == "VALIDATING"
    return task_id


@pytest.mark.slow("calls every act")
async def test_every_act_names_its_actor_and_its_reason(serve: Serve) -> None:
    async with serve(auth=True) as served:
        tokens, port = served.service.tokens, served.client.port
        worker = Client(port, (await tokens.create("worker", "admin")).token)
        ann = Client(port, (await tokens.create("ann", "admin")).token)

        for name, (perform, kind, has_reason) in ACTS.items():
            cursor = (await ann.get("/v1/events", after="now")).json["next_cursor"]
            reply = await perform(worker, ann)
            assert reply.status < 300, (name, reply)

            events = (await ann.get("/v1/events", after=cursor, limit=500)).json["items"]
            acts = [event for event in events if (event["data"] or {}).get("actor") == "ann"]
            assert kind in {event["kind"] for event in acts}, (name, events)
            if has_reason:
                assert {event["data"]["reason"] for event in acts} == {REASON}, name

        # What was prepared with the other token isn't hers, and what agents do has no actor.
        everything = (await ann.get("/v1/events", limit=500)).json["items"]
        named = [event for event in everything if (event["data"] or {}).get("actor") is not None]
        assert {event["data"]["actor"] for event in named} == {"ann", "worker"}
        of_work = {"task.created", "task.failed", "task.dead_lettered", "task.completed", "agent.registered"}
        assert not of_work & {event["kind"] for event in named}
        assert "lsh_" not in str(everything), "a token's secret is in no event"


def test_every_operation_of_people_is_an_act_above() -> None:
    by_people = {
        operation.name
        for operation in OPERATIONS
        if operation.method != "GET" and operation.scope in {Scope.OPERATE, Scope.ADMIN}
    }
    assert by_people <= ACTS.keys()


async def test_a_pause_says_who_paused_it_and_why(client: Client) -> None:
    task = await client.submit("held")

    async def detail() -> str:
        reasons = (await client.get(f"/v1/tasks/{task['id']}/why")).json["reasons"]
        return next(str(reason["detail"]) for reason in reasons if reason["code"] == "paused")

    await client.post("/v1/pause", {"type": "held", "reason": REASON})
    assert await detail() == f"Type 'held' is paused by this machine: {REASON}. Resume it."
    # What is paused already keeps its reason, and nothing happens.
    await client.post("/v1/pause", {"type": "held", "reason": "another"})
    assert await detail() == f"Type 'held' is paused by this machine: {REASON}. Resume it."
    paused = (await client.get("/v1/events", kind="queue.paused")).json["items"]
    assert [event["data"] for event in paused] == [
        {"type": "held", "actor": "this machine", "reason": REASON}
    ]
    await client.post("/v1/resume", {"type": "held"})
    await client.post("/v1/resume", {"type": "held"})
    assert len((await client.get("/v1/events", kind="queue.resumed")).json["items"]) == 1
    await client.post("/v1/pause")
    assert await detail() == "Everything is paused by this machine. Resume it."


async def test_what_a_task_was_made_to_wait_for(client: Client) -> None:
    one, two = await client.submit(), await client.submit()
    path = f"/v1/tasks/{two['id']}/dependencies"

    await client.post(path, {"depends_on": [one["id"]]})
    await client.post(path, {"depends_on": [one["id"]]})

    (event,) = (await client.get("/v1/events", kind="task.changed")).json["items"]
    added = {"added": [one["id"]], "count": 1}
    assert event["data"] == {"depends_on": added, "actor": "this machine"}


@pytest.mark.parametrize("call", ["POST /v1/pause", "DELETE /v1/locks/x", "PATCH /v1/limits"])
async def test_a_reason_has_a_limit(client: Client, call: str) -> None:
    method, path = call.split()
    long = "x" * 2_001
    if method == "DELETE":
        refused = await client.request(method, path, query={"reason": long})
    else:
        refused = await client.request(method, path, {"reason": long})
    assert refused.code == "invalid_input"
    assert [error["loc"] for error in refused.json["errors"]] == ["reason"]
