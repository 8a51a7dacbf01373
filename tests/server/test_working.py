"""An agent's way through its tasks, over HTTP."""

import asyncio
from typing import Any

import pytest

from lineshaft.clock import MovableClock
from tests.server.client import Client
from tests.server.conftest import Serve, Served, serving


async def test_from_claim_to_completion(client: Client) -> None:
    await client.submit(spec={"prompt": "x"}, max_cost_usd=1)
    agent = await client.register(models_available=["large"])

    (item,) = await client.claim(agent)
    task_id, token = item["task"]["id"], item["claim_token"]
    assert item["task"]["status"] == "CLAIMED"
    assert item["task"]["claim"] | {"claimed_at": 0, "heartbeat_at": 0} == {
        "agent_id": "a1",
        "instance": "",
        "claimed_at": 0,
        "heartbeat_at": 0,
        "heartbeat_interval_sec": 30.0,
        "epoch": 1,
    }
    assert (item["model"], item["inputs"], item["children"], item["resume"]) == ("large", {}, {}, False)
    assert (item["checkpoint"], item["steps"], item["last_error"]) == (None, {}, None)

    early = await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token, "output": {"data": 1}})
    assert (early.status, early.code) == (409, "invalid_transition")

    started = await client.post(f"/v1/tasks/{task_id}/start", {"claim_token": token})
    assert started.json["status"] == "RUNNING"

    output = {"data": {"answer": [1, "ü"]}, "artifacts": [{"name": "a.txt"}]}
    body = {
        "claim_token": token,
        "output": output,
        "cost_usd": 0.25,
        "tokens_used": {"input": 10, "output": 3},
    }
    done = await client.post(f"/v1/tasks/{task_id}/complete", body)
    again = await client.post(f"/v1/tasks/{task_id}/complete", body)

    assert done.status == 200
    task = done.json
    assert task["status"] == "COMPLETED"
    assert task["output"]["data"] == {"answer": [1, "ü"]}
    assert task["output"]["artifacts"] == [{"name": "a.txt"}]
    assert (task["cost_usd"], task["tokens_used"]) == (0.25, {"input": 10, "output": 3})
    assert again.json == task, "repeating the call that won answers as it did the first time"


async def test_a_failure_is_retried_and_shown_to_the_next_agent(client: Client) -> None:
    """R-094, R-110: failures are reported by `fail`; a flag beside an output is refused."""
    task = await client.submit(retry={"strategy": "immediate"})
    agent = await client.register()
    task_id, token = await client.hold(agent)
    contradicting = {"claim_token": token, "output": {"data": 1}, "success": False}
    refused = await client.post(f"/v1/tasks/{task_id}/complete", contradicting)
    assert (refused.status, refused.code) == (422, "invalid_input")
    assert (await client.task(task_id))["status"] == "RUNNING"

    failed = await client.post(
        f"/v1/tasks/{task_id}/fail",
        {"claim_token": token, "error": "boom", "category": "timeout", "cost_usd": 0.1},
    )
    assert failed.json["status"] in {"RETRYING", "READY"}
    assert failed.json["failure_category"] == "timeout"
    (entry,) = failed.json["failure_history"]
    assert set(entry) >= {"attempt", "agent", "category", "error", "started_at", "duration_sec", "cost_usd"}

    await client.post(f"/v1/tasks/{task['id']}/retry")
    (item,) = await client.claim(agent)
    assert item["resume"] is True
    assert item["last_error"] == {"category": "timeout", "error": "boom"}


async def test_a_rate_limit_slows_the_model_down(client: Client) -> None:
    await client.submit()
    agent = await client.register(models_available=["large"])
    task_id, token = await client.hold(agent)

    await client.post(f"/v1/tasks/{task_id}/fail", {"claim_token": token, "error": "429 Too Many Requests"})

    (slowdown,) = (await client.get("/v1/slowdowns")).json["items"]
    assert slowdown["key"] == "model:large"
    assert {"until", "reason"} <= slowdown.keys()
    reply = await client.post(f"/v1/agents/{agent['id']}/claim", {"incarnation": agent["incarnation"]})
    assert reply.json["tasks"] == []
    assert reply.json["slowdown_until"] == slowdown["until"]
    beat = await client.post(f"/v1/agents/{agent['id']}/heartbeat", {"incarnation": agent["incarnation"]})
    assert beat.json == {
        "tasks": {},
        "status": "active",
        "max_concurrent_tasks": 10,
        "slowdown_until": slowdown["until"],
    }

    assert (await client.delete("/v1/slowdowns/model%3Alarge")).status == 204
    assert (await client.get("/v1/slowdowns")).json["items"] == []
    assert (await client.delete("/v1/slowdowns/model%3Alarge")).code == "not_found"


async def test_a_slow_down_of_a_provider_is_told_to_those_who_use_it(client: Client, served: Served) -> None:
    agents = [await client.register(name, models_available=[f"{name}/large"]) for name in ("one", "two")]
    await served.service.engine.slowdowns.slow_down("provider:one", 60)

    beats = [
        await client.post(f"/v1/agents/{agent['id']}/heartbeat", {"incarnation": agent["incarnation"]})
        for agent in agents
    ]

    assert ["slowdown_until" in beat.json for beat in beats] == [True, False]


async def test_heartbeats_tell_what_became_of_each_task(client: Client) -> None:
    for _ in range(3):
        await client.submit()
    agent = await client.register()
    held = [await client.hold(agent) for _ in range(3)]
    await client.post(f"/v1/tasks/{held[1][0]}/cancel", {"reason": "not needed"})
    await client.post(f"/v1/tasks/{held[2][0]}/release", {"claim_token": held[2][1]})
    beats: list[dict[str, Any]] = [{"id": name, "claim_token": token} for name, token in held]
    beats[0] |= {"progress": {"percent": 40}, "cost_usd": 0.5, "tokens_used": {"input": 7, "output": 1}}

    reply = await client.post(
        "/v1/agents/a1/heartbeat", {"incarnation": agent["incarnation"], "tasks": beats}
    )

    assert reply.json == {
        "tasks": {held[0][0]: "continue", held[1][0]: "cancel", held[2][0]: "lost"},
        "status": "active",
        "max_concurrent_tasks": 10,
    }
    task = await client.task(held[0][0])
    assert task["progress"] == {"percent": 40}
    assert task["cost_usd"] == 0.5


@pytest.mark.parametrize("status", ["draining", "offline"])
async def test_an_agent_with_a_status_set_by_hand_gets_no_work(client: Client, status: str) -> None:
    """R-058."""
    await client.submit()
    agent = await client.register()

    patched = await client.patch("/v1/agents/a1", {"status": status})
    beat = await client.post("/v1/agents/a1/heartbeat", {"incarnation": agent["incarnation"]})

    assert patched.json["status"] == status
    assert beat.json["status"] == status
    assert await client.claim(agent) == []
    assert (await client.get("/v1/agents/a1")).json["status"] == status


@pytest.mark.parametrize("token", ["", "nonsense", "7.task_other", "1.", "999999999999999.x"])
async def test_a_token_that_is_none_is_stale(client: Client, token: str) -> None:
    await client.submit()
    task_id, _ = await client.hold(await client.register())

    calls: list[tuple[str, dict[str, Any]]] = [
        ("start", {}),
        ("complete", {"output": {"data": 1}}),
        ("fail", {"error": "x"}),
        ("release", {}),
        ("subtasks", {"tasks": [{"type": "x"}]}),
        ("cancel", {}),
    ]
    for call, more in calls:
        reply = await client.post(f"/v1/tasks/{task_id}/{call}", {"claim_token": token, **more})
        assert (reply.status, reply.code) == (409, "stale_claim"), (call, reply)
    for path in ("checkpoint", "steps/s"):
        reply = await client.put(f"/v1/tasks/{task_id}/{path}", {"claim_token": token, "data": 1})
        assert (reply.status, reply.code) == (409, "stale_claim"), (path, reply)
    assert (await client.task(task_id))["status"] == "RUNNING"


async def test_a_superseded_agents_token_is_stale_and_its_result_is_kept(client: Client) -> None:
    await client.submit()
    agent = await client.register()
    task_id, token = await client.hold(agent)
    newer = await client.register()
    assert newer["incarnation"] == agent["incarnation"] + 1

    for reply in (
        await client.post("/v1/agents/a1/claim", {"incarnation": agent["incarnation"]}),
        await client.post("/v1/agents/a1/heartbeat", {"incarnation": agent["incarnation"]}),
        await client.post(f"/v1/tasks/{task_id}/claim", {"agent_id": "a1", "incarnation": 1}),
    ):
        assert (reply.status, reply.code) == (409, "superseded")
    late = await client.post(
        f"/v1/tasks/{task_id}/complete", {"claim_token": token, "output": {"data": "late"}}
    )
    assert (late.status, late.code) == (409, "stale_claim")
    task = await client.task(task_id)
    assert task["failure_category"] == "crash"
    assert task["failure_reason"] == "agent_restarted"
    kinds = [e["kind"] for e in (await client.get(f"/v1/tasks/{task_id}/events")).json["items"]]
    assert "task.late_result" in kinds


@pytest.mark.parametrize("call", ["start", "complete", "fail", "release", "subtasks"])
async def test_a_task_that_doesnt_exist(client: Client, call: str) -> None:
    bodies: dict[str, Any] = {"fail": {"error": "x"}, "subtasks": {"tasks": [{"type": "x"}]}}
    more: dict[str, Any] = bodies.get(call, {})
    reply = await client.post(f"/v1/tasks/task_unknown/{call}", {"claim_token": "1.task_unknown", **more})

    assert (reply.status, reply.code) == (404, "not_found")


async def test_an_agent_that_doesnt_exist(client: Client) -> None:
    for call in ("claim", "heartbeat"):
        reply = await client.post(f"/v1/agents/unknown/{call}", {"incarnation": 1})
        assert (reply.status, reply.code) == (404, "not_found")
    assert (await client.get("/v1/agents/unknown")).code == "not_found"
    assert (await client.patch("/v1/agents/unknown", {"status": "draining"})).code == "not_found"


async def test_release_hands_back_without_using_an_attempt(client: Client) -> None:
    task = await client.submit()
    agent = await client.register()
    task_id, token = await client.hold(agent)

    released = await client.post(f"/v1/tasks/{task_id}/release", {"claim_token": token})
    assert (released.json["status"], released.json["attempts"]) == ("READY", 0)

    _, token = await client.hold(agent)
    later = await client.post(f"/v1/tasks/{task['id']}/release", {"claim_token": token, "delay_sec": 3600})
    assert (later.json["status"], later.json["attempts"]) == ("PENDING", 0)


async def test_checkpoint_and_steps_are_handed_back(client: Client) -> None:
    await client.submit()
    agent = await client.register()
    task_id, token = await client.hold(agent)

    saved = await client.put(f"/v1/tasks/{task_id}/checkpoint", {"claim_token": token, "data": {"page": 7}})
    first = await client.put(f"/v1/tasks/{task_id}/steps/a%2Fb", {"claim_token": token, "data": [1]})
    second = await client.put(f"/v1/tasks/{task_id}/steps/a%2Fb", {"claim_token": token, "data": [2]})
    assert [r.status for r in (saved, first, second)] == [200, 200, 200]
    assert (second.json["name"], second.json["data"]) == ("a/b", [1]), "the first result counts"
    assert (await client.get(f"/v1/tasks/{task_id}/steps")).json == {"a/b": [1]}

    await client.post(f"/v1/tasks/{task_id}/release", {"claim_token": token})
    (item,) = await client.claim(agent)
    assert (item["resume"], item["checkpoint"], item["steps"]) == (True, {"page": 7}, {"a/b": [1]})


async def test_digests_of_steps_are_handed_back(client: Client) -> None:
    """So that an agent in any language can refuse a recorded step whose arguments changed."""
    await client.submit()
    agent = await client.register()
    task_id, token = await client.hold(agent)
    plain = f"/v1/tasks/{task_id}/steps/plain"
    with_digest = f"/v1/tasks/{task_id}/steps/digested"

    await client.put(plain, {"claim_token": token, "data": 1})
    await client.put(with_digest, {"claim_token": token, "data": 1, "digest": "d1"})
    await client.post(f"/v1/tasks/{task_id}/release", {"claim_token": token})
    (item,) = await client.claim(agent, start=True)
    assert item["step_digests"] == {"plain": None, "digested": "d1"}

    again = await client.put(with_digest, {"claim_token": item["claim_token"], "data": 2, "digest": "d2"})
    assert again.json["data"] == 2, "it ran again, with other arguments"
    invalid = await client.put(with_digest, {"claim_token": item["claim_token"], "data": 2, "digest": ""})
    assert (invalid.status, invalid.json["errors"][0]["loc"]) == (422, "digest")


async def test_a_parent_waits_for_its_children(client: Client) -> None:
    await client.submit("parent")
    agent = await client.register()
    parent, token = await client.hold(agent)

    reply = await client.post(
        f"/v1/tasks/{parent}/subtasks",
        {
            "claim_token": token,
            "tasks": [{"type": "child", "key": "one"}, {"type": "child", "depends_on": ["one"]}],
            "wait": True,
            "checkpoint": {"asked": 2},
        },
    )
    assert reply.status == 201
    children = [item["id"] for item in reply.json["items"]]
    assert [item["duplicate"] for item in reply.json["items"]] == [False, False]
    assert (await client.task(parent))["status"] == "PENDING"
    assert (await client.get("/v1/agents/a1")).json["current_tasks"] == 0

    for number, child in enumerate(children):
        held, child_token = await client.hold(agent)
        assert held == child
        done = {"claim_token": child_token, "output": {"data": number}}
        await client.post(f"/v1/tasks/{child}/complete", done)
    (item,) = await client.claim(agent)
    assert item["task"]["id"] == parent
    assert item["children"] == {
        children[0]: {"status": "COMPLETED", "output": 0},
        children[1]: {"status": "COMPLETED", "output": 1},
    }
    assert item["checkpoint"] == {"asked": 2}


@pytest.mark.parametrize("key", [None, "k1"])
async def test_a_call_that_paused_its_task_answers_the_same_again(client: Client, key: str | None) -> None:
    """The first answer may have been lost, and with it the ids of the children."""
    await client.submit("parent")
    agent = await client.register()
    parent, token = await client.hold(agent)
    headers = {} if key is None else {"Idempotency-Key": key}
    asked = {"claim_token": token, "tasks": [{"type": "child"}], "wait": True, "checkpoint": {"n": 1}}

    replies = [await client.post(f"/v1/tasks/{parent}/subtasks", asked, headers=headers) for _ in range(2)]
    assert [reply.status for reply in replies] == [201, 201]
    assert replies[0].json == replies[1].json

    other = {**asked, "tasks": [{"type": "another"}]}
    refused = await client.post(f"/v1/tasks/{parent}/subtasks", other, headers=headers)
    assert (refused.status, refused.code) == (409, "stale_claim")

    child, child_token = await client.hold(agent)
    assert child == replies[0].json["items"][0]["id"]
    await client.post(f"/v1/tasks/{child}/complete", {"claim_token": child_token, "output": {"data": 1}})
    (item,) = await client.claim(agent)
    assert (item["task"]["id"], item["checkpoint"]) == (parent, {"n": 1})


async def test_what_children_are_refused_keeps_the_checkpoint_of_before(client: Client) -> None:
    await client.submit("parent")
    agent = await client.register()
    parent, token = await client.hold(agent)
    tasks = [{"type": "child", "depends_on": ["unknown"]}]
    asked = {"claim_token": token, "tasks": tasks, "wait": True, "checkpoint": {"n": 1}}

    refused = await client.post(f"/v1/tasks/{parent}/subtasks", asked)

    assert refused.status in {404, 422}
    await client.post(f"/v1/tasks/{parent}/release", {"claim_token": token})
    (item,) = await client.claim(agent)
    assert item["checkpoint"] is None


async def test_inputs_are_handed_over_by_reference(client: Client) -> None:
    source = await client.submit("source")
    agent = await client.register()
    task_id, token = await client.hold(agent)
    await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token, "output": {"data": {"n": 1}}})
    refs = [f"task:{source['id']}:output"]
    await client.submit("sink", spec={"context_refs": refs})

    (item,) = await client.claim(agent)

    assert item["inputs"] == {refs[0]: {"n": 1}}


async def test_claiming_one_task_by_its_id(client: Client) -> None:
    first, second = await client.submit(), await client.submit()
    agent = await client.register()

    async def claim(task_id: str, agent_id: str = "a1") -> Any:
        return await client.post(f"/v1/tasks/{task_id}/claim", {"agent_id": agent_id, "incarnation": 1})

    got = await claim(second["id"])
    assert got.status == 200
    assert got.json["task"]["id"] == second["id"]
    assert got.json["claim_token"]
    assert (await claim(second["id"])).code == "already_claimed"

    blocked = await client.submit(depends_on=[first["id"]])
    assert (await claim(blocked["id"])).code == "invalid_transition"
    picky = await client.submit(required_capabilities=["fly"])
    refused = await claim(picky["id"])
    assert (refused.status, refused.code) == (403, "capability_mismatch")
    await client.register("poor", budget_usd=1)
    expensive = await client.submit(max_cost_usd=2)
    refused = await claim(expensive["id"], "poor")
    assert (refused.status, refused.code) == (402, "budget_exceeded")
    await client.post("/v1/pause", {})
    refused = await claim(first["id"])
    assert (refused.status, refused.code) == (409, "not_claimable")
    assert [reason["code"] for reason in refused.json["reasons"]] == ["paused"]
    assert refused.json["retryable"] is True
    assert (await claim("task_unknown")).code == "not_found"
    assert agent["id"] == "a1"


async def test_agents_are_registered_listed_and_changed(client: Client) -> None:
    asked = {
        "id": "team/coder 1",
        "type": "coder",
        "capabilities": ["python"],
        "types": ["code"],
        "models_available": ["large"],
        "max_concurrent_tasks": 2,
        "budget_usd": 10,
        "claim_ttl_sec": 30,
        "heartbeat_interval_sec": 5,
    }
    made = await client.post("/v1/agents", asked)
    again = await client.post("/v1/agents", asked | {"budget_usd": 99})

    assert (made.status, again.status) == (201, 200)
    assert {name: made.json[name] for name in asked} == asked
    assert set(made.json) >= {
        *("current_tasks", "budget_remaining_usd", "reserved_usd", "status"),
        *("last_heartbeat", "poll_interval_sec", "incarnation"),
    }
    assert again.json["incarnation"] == made.json["incarnation"] + 1
    assert again.json["budget_usd"] == 10, "registering again doesn't refill it"

    path = "/v1/agents/team%2Fcoder%201"
    changed = await client.patch(path, {"add_budget_usd": 2.5, "max_concurrent_tasks": 7})
    assert (changed.json["budget_usd"], changed.json["max_concurrent_tasks"]) == (12.5, 7)
    assert (await client.get(path)).json == changed.json
    assert (await client.post(f"{path}/claim", {"incarnation": 2})).json == {"tasks": []}

    for number in range(3):
        await client.register(f"b{number}")
    page = (await client.get("/v1/agents", limit=3)).json
    rest = (await client.get("/v1/agents", limit=3, cursor=page["next_cursor"])).json
    assert [a["id"] for a in page["items"] + rest["items"]] == ["b0", "b1", "b2", "team/coder 1"]
    assert rest["next_cursor"] is None
    generated = await client.post("/v1/agents", {})
    assert generated.json["id"].startswith("agent_")


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"max_concurrent_tasks": 0}, "max_concurrent_tasks"),
        ({"budget_usd": -1}, "budget_usd"),
        ({"claim_ttl_sec": 0}, "claim_ttl_sec"),
        ({"capabilities": "python"}, "capabilities"),
        ({"id": ""}, "id"),
        ({"capabilites": []}, "capabilites"),
    ],
)
async def test_a_fault_of_a_registration(client: Client, body: Any, place: str) -> None:
    reply = await client.post("/v1/agents", body)

    assert (reply.status, reply.code) == (422, "invalid_input")
    assert [error["loc"] for error in reply.json["errors"]] == [place]


async def test_a_task_over_its_cost_is_a_dead_letter(client: Client) -> None:
    await client.submit(max_cost_usd=1)
    task_id, token = await client.hold(await client.register())

    done = await client.post(
        f"/v1/tasks/{task_id}/complete", {"claim_token": token, "output": {"data": 1}, "cost_usd": 1.5}
    )

    assert done.status == 200
    assert (done.json["status"], done.json["failure_category"]) == ("DEAD_LETTERED", "budget_exceeded")


async def test_an_agent_that_asks_for_work_is_there(serve: Serve, clock: MovableClock) -> None:
    """It was taken for offline; asking again brings it back."""
    async with serve(clock=clock) as served:
        client = served.client
        agent = await client.register()
        clock.advance(600)
        await served.service.engine.fleet.mark_offline()
        assert (await client.get("/v1/agents/a1")).json["status"] == "offline"
        await client.submit()

        assert len(await client.claim(agent)) == 1
        assert (await client.get("/v1/agents/a1")).json["status"] == "active"


async def test_data_that_no_database_can_hold_is_refused(client: Client) -> None:
    await client.submit()
    task_id, token = await client.hold(await client.register())

    # PostgreSQL would take 1e999, and no program could read it again.
    for data in (b'"\\u0000"', b'"\\ud800"', b"1e999999", b'{"a": [1e999]}', b"-1e400", b"NaN", b"Infinity"):
        raw = b'{"claim_token": "%s", "output": {"data": %s}}' % (token.encode(), data)
        reply = await client.request("POST", f"/v1/tasks/{task_id}/complete", raw=raw)
        assert (reply.status, reply.code) == (422, "invalid_input"), data
        raw = b'{"claim_token": "%s", "data": %s}' % (token.encode(), data)
        for place in ("checkpoint", "steps/one"):
            reply = await client.request("PUT", f"/v1/tasks/{task_id}/{place}", raw=raw)
            assert (reply.status, reply.code) == (422, "invalid_input"), data
    assert (await client.task(task_id))["status"] == "RUNNING"
    assert (await client.get(f"/v1/tasks/{task_id}/steps")).json == {}


async def test_a_registration_that_is_sent_again_supersedes_nothing(serve: Serve) -> None:
    """The response to the first one was lost; also if the agent has no name of its own."""
    async with serve() as one, serve() as two:
        client = one.client
        await client.submit()
        first = await client.post("/v1/agents", {"id": "a1"}, headers={"Idempotency-Key": "boot 1"})
        await client.hold(first.json)
        again = await two.client.post("/v1/agents", {"id": "a1"}, headers={"Idempotency-Key": "boot 1"})
        assert (first.status, again.status) == (201, 201)
        assert (again.json["incarnation"], again.json["current_tasks"]) == (1, 1)

        next_boot = await client.post("/v1/agents", {"id": "a1"}, headers={"Idempotency-Key": "boot 2"})
        assert (next_boot.status, next_boot.json["incarnation"]) == (200, 2)
        taken = await client.post("/v1/agents", {"id": "a2"}, headers={"Idempotency-Key": "boot 2"})
        assert (taken.status, taken.code) == (409, "already_exists")
        assert "a1" in taken.json["detail"]
        assert (await client.post("/v1/agents", {"id": "a1"})).json["incarnation"] == 3

        asking = [
            server.client.post("/v1/agents", {}, headers={"Idempotency-Key": "x"})
            for server in (one, two, one, two)
        ]
        made = {reply.json["id"] for reply in await asyncio.gather(*asking)}
        assert len(made) == 1, "made once, however many ask at the same time"


async def test_what_an_output_is_said_to_be_is_kept(client: Client) -> None:
    """R-020: in place of what the task asked for, if it asked for anything; through a gate too."""
    agent = await client.register()
    cases: list[tuple[dict[str, Any], str | None, str | None]] = [
        ({}, None, None),
        ({}, "markdown", "markdown"),
        ({"type": "json"}, None, "json"),
        ({"type": "json"}, "code", "code"),
        ({"type": "json", "validation": "human"}, "artifact", "artifact"),
    ]
    for contract, said, kept in cases:
        task = await client.submit(output=contract)
        _, token = await client.hold(agent)
        output = {"data": 1} | ({} if said is None else {"type": said})
        body = {"claim_token": token, "output": output}
        done = await client.post(f"/v1/tasks/{task['id']}/complete", body)
        assert done.json["output"]["type"] == kept
        if "validation" in contract:
            assert done.json["status"] == "VALIDATING"
            for call in ({"error": "sorry"}, {}, {"reason": "no"}):
                name = "fail" if "error" in call else "cancel" if call else "release"
                refused = await client.post(f"/v1/tasks/{task['id']}/{name}", {"claim_token": token, **call})
                assert (refused.status, refused.code) == (409, "invalid_transition"), "R-093: people decide"
            done = await client.post(f"/v1/approvals/{task['id']}", {"approve": True, "reviewer": "ada"})
        assert (done.json["status"], done.json["output"]["type"]) == ("COMPLETED", kept)
    await client.submit()
    task_id, token = await client.hold(agent)
    for wrong in ("", "x" * 1001, "a\0b", "poem"):
        body = {"claim_token": token, "output": {"type": wrong}}
        refused = await client.post(f"/v1/tasks/{task_id}/complete", body)
        assert (refused.code, refused.json["errors"][0]["loc"]) == ("invalid_input", "output.type")
        refused = await client.post("/v1/tasks", {"type": "x", "output": {"type": wrong}})
        assert (refused.code, refused.json["errors"][0]["loc"]) == ("invalid_input", "output.type")
        assert "must be one of code, markdown, json, artifact, got" in refused.json["detail"]


async def test_a_traceback_is_stored_with_the_attempt(client: Client) -> None:
    """R-018: its last 16 KiB, by both ways of failing."""
    await client.submit()
    agent = await client.register()
    task_id, token = await client.hold(agent)
    long = "x" * 20_000 + "\nthe end"
    body = {"claim_token": token, "error": "e", "traceback": long}
    failed = await client.post(f"/v1/tasks/{task_id}/fail", body)
    assert failed.json["failure_history"][0]["traceback"] == long[-16384:]

    await client.submit("other")
    task_id, token = await client.hold(agent)
    item = {"id": task_id, "claim_token": token, "error": "e", "traceback": "short\u0000"}
    await client.post("/v1/work/fail", {"items": [item]})
    attempts = await client.get(f"/v1/tasks/{task_id}/attempts")
    assert attempts.json["items"][0]["traceback"].startswith("short")


@pytest.mark.parametrize("wait", [True, False])
async def test_subtasks_asked_for_again_are_the_same(client: Client, wait: bool) -> None:
    """R-145: the same body under the same claim is a repeated call; another body isn't."""
    agent = await client.register()
    await client.submit("parent")
    parent, token = await client.hold(agent)
    body = {"claim_token": token, "tasks": [{"type": "x", "key": "a"}, {"type": "y", "depends_on": ["a"]}]}

    first = await client.post(f"/v1/tasks/{parent}/subtasks", body | {"wait": wait})
    again = await client.post(f"/v1/tasks/{parent}/subtasks", body | {"wait": wait})

    assert (first.status, again.status) == (201, 201)
    assert first.json["items"] == again.json["items"]
    found = (await client.get("/v1/tasks", parent_id=parent)).json["items"]
    assert {task["id"] for task in found} == {item["id"] for item in first.json["items"]}
    if not wait:
        other = await client.post(f"/v1/tasks/{parent}/subtasks", body | {"tasks": [{"type": "x"}]})
        assert {item["id"] for item in other.json["items"]}.isdisjoint(task["id"] for task in found)


async def test_subtasks_asked_for_under_a_new_claim_are_new(client: Client) -> None:
    """R-145: without a key."""
    agent = await client.register()
    await client.submit("parent", priority=1)
    ids = []
    for _ in range(2):
        parent, token = await client.hold(agent, types=["parent"])
        reply = await client.post(
            f"/v1/tasks/{parent}/subtasks", {"claim_token": token, "tasks": [{"type": "x"}]}
        )
        ids += [item["id"] for item in reply.json["items"]]
        await client.post(f"/v1/tasks/{parent}/release", {"claim_token": token})

    assert len(set(ids)) == 2


async def test_the_next_task_comes_with_the_completion(client: Client) -> None:
    first, second, third = [(await client.submit(type=kind))["id"] for kind in ("code", "code", "other")]
    agent = await client.register(types=["code", "other"])
    task_id, token = await client.hold(agent)
    assert task_id == first

    body = {"claim_token": token, "output": {"data": 1}, "next": True}
    done = await client.post(f"/v1/tasks/{first}/complete", body)
    again = await client.post(f"/v1/tasks/{first}/complete", body)

    assert (done.json["id"], done.json["status"]) == (first, "COMPLETED")
    following = done.json["next_claim"]
    assert (following["task"]["id"], following["task"]["status"]) == (second, "RUNNING")
    repeated = again.json["next_claim"]
    assert repeated["task"]["id"] == second
    assert repeated["claim_token"] == following["claim_token"], "the same claim, while it is held"

    only_code = {"claim_token": following["claim_token"], "output": {"data": 2}, "next": {"types": ["code"]}}
    last = await client.post(f"/v1/tasks/{second}/complete", only_code)
    assert (last.json["status"], last.json["next_claim"]) == ("COMPLETED", None)
    assert (await client.task(third))["status"] == "READY"


async def test_a_rejected_output_has_a_next_task_too(client: Client) -> None:
    """Whatever became of this one, the instance goes on."""
    first = await client.submit(max_cost_usd=1)
    second = await client.submit()
    agent = await client.register()
    task_id, token = await client.hold(agent)
    assert task_id == first["id"]

    body = {"claim_token": token, "output": {"data": 1}, "cost_usd": 2, "next": True}
    done = await client.post(f"/v1/tasks/{task_id}/complete", body)

    assert (done.json["status"], done.json["failure_category"]) == ("DEAD_LETTERED", "budget_exceeded")
    assert done.json["next_claim"]["task"]["id"] == second["id"]
    again = await client.post(f"/v1/tasks/{task_id}/complete", body)
    assert again.json["next_claim"]["claim_token"] == done.json["next_claim"]["claim_token"]


async def test_a_batch_of_completions_with_and_without_next_tasks(client: Client) -> None:
    for _ in range(5):
        await client.submit()
    agent = await client.register(max_concurrent_tasks=3)
    held = await client.claim(agent, limit=3, start=True)
    items = [
        {"id": item["task"]["id"], "claim_token": item["claim_token"], "next": number == 1}
        for number, item in enumerate(held)
    ]

    answer = (await client.post("/v1/work/complete", {"items": items, "view": "work"})).json["items"]

    assert [item["status"] for item in answer] == ["COMPLETED"] * 3
    assert ["next_claim" in item for item in answer] == [False, True, False]


async def test_a_heartbeat_prepares_again_what_the_driver_has_dropped(dsn: str) -> None:
    """The driver drops all prepared statements of a connection after a rollback."""
    async with serving(dsn, max_connections=1) as served:
        client = served.client
        agent = await client.register()
        await client.submit()
        task_id, token = await client.hold(agent)
        path, body = f"/v1/agents/{agent['id']}/heartbeat", {"incarnation": agent["incarnation"]}
        for cost in (1, 2):
            task = {"id": task_id, "claim_token": token, "cost_usd": cost}
            reply = await client.post(path, {**body, "tasks": [task]})
            assert (reply.status, reply.json["tasks"]) == (200, {task_id: "continue"}), cost
            async with served.service.engine.database.connection() as connection:
                await connection.execute("DEALLOCATE ALL")

        assert (await client.task(task_id))["cost_usd"] == 2


async def test_a_failure_has_its_tokens(client: Client) -> None:
    await client.submit()
    task_id, token = await client.hold(await client.register())
    used = {"input": 7, "output": 3}
    body = {"claim_token": token, "error": "no", "tokens_used": used}

    failed = await client.post(f"/v1/tasks/{task_id}/fail", body)

    assert failed.json["failure_history"][0]["tokens_used"] == used


async def test_a_large_output_of_an_agent_without_a_library_becomes_an_artifact(client: Client) -> None:
    """As that of one in Python does: lists, claims and events stay small."""
    agent = await client.register()
    large = "x" * (2 << 20)
    task = await client.submit()
    below = await client.submit("below", depends_on=[task["id"]])
    task_id, token = await client.hold(agent)
    body = {"claim_token": token, "output": {"data": large}}

    done = await client.post(f"/v1/tasks/{task_id}/complete", body)

    assert done.json["output"]["data"] is None
    assert done.json["output"]["size"] == len(large) + 2
    ref = done.json["output"]["data_ref"]
    assert (await client.get(f"/v1/tasks/{task_id}?full=1")).json["output"]["data"] == large
    (item,) = await client.claim(agent)
    assert item["task"]["id"] == below["id"]
    assert item["inputs"][task["id"]] == {"data": None, "data_ref": ref, "size": len(large) + 2}
    assert (await client.post(f"/v1/tasks/{task_id}/complete", body)).json["status"] == "COMPLETED", (
        "repeated"
    )
