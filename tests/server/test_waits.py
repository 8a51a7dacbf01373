"""Waiting without a slot over HTTP: suspensions of claims, and who may send a signal."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.server.client import Client, Reply
from tests.server.conftest import Serve, Served
from tests.server.test_claim_tokens import agent_client, operator


async def suspend(client: Client, task_id: str, token: str, **body: Any) -> Any:
    reply = await client.post(f"/v1/tasks/{task_id}/suspend", {"claim_token": token, **body})
    assert reply.status == 200, reply
    return reply.json


async def signal(client: Client, task_id: str, name: str = "go", **body: Any) -> Reply:
    return await client.post(f"/v1/tasks/{task_id}/signals/{name}", body)


async def test_a_claim_is_over_until_the_signal_comes(served: Served) -> None:
    client = served.client
    agent = await client.register()
    await client.submit()
    task_id, token = await client.hold(agent)

    answer = await suspend(client, task_id, token, name="review", signal="approved/eu", timeout_sec=60)
    assert (answer["suspended"], answer["id"]) == (True, task_id)
    assert answer["until"].endswith("Z")
    assert (await client.task(task_id))["status"] == "PENDING"
    why = (await client.get(f"/v1/tasks/{task_id}/why")).json
    assert [reason["code"] for reason in why["reasons"]] == ["waiting_signal"]

    sent = await signal(client, task_id, "approved%2Feu", data={"by": "ann"}, idempotency_key="k")
    assert sent.status == 202
    again = await signal(client, task_id, "approved%2Feu", data=None, idempotency_key="k")
    assert again.json == {**sent.json, "duplicate": True}
    (item,) = await client.claim(agent, start=True)
    (received,) = item["signals"]
    # The same instant; a zero at the end may be left out.
    assert datetime.fromisoformat(received.pop("at")) == datetime.fromisoformat(sent.json["at"])
    assert received == {"id": sent.json["id"], "name": "approved/eu", "data": {"by": "ann"}}
    token = item["claim_token"]
    for _ in range(2):
        answer = await suspend(client, task_id, token, name="review", signal="approved/eu", timeout_sec=60)
        assert answer["suspended"] is False
        assert answer["signal"]["id"] == received["id"]
    steps = (await client.get(f"/v1/tasks/{task_id}/steps")).json
    assert steps["review"]["signal"]["data"] == {"by": "ann"}


async def test_a_step_receives_signals_that_it_names(served: Served) -> None:
    client = served.client
    agent = await client.register()
    await client.submit()
    task_id, token = await client.hold(agent)
    sent = [(await signal(client, task_id, data=n)).json["id"] for n in range(3)]
    body = {"claim_token": token, "data": 1, "received": sent[:2]}
    assert (await client.put(f"/v1/tasks/{task_id}/steps/two", body)).status == 200
    await client.post(f"/v1/tasks/{task_id}/release", {"claim_token": token})

    (item,) = await client.claim(agent)

    assert [each["id"] for each in item["signals"]] == sent[2:]


async def test_the_time_may_be_an_instant(served: Served) -> None:
    client = served.client
    await client.submit()
    task_id, token = await client.hold(await client.register())
    answer = await suspend(client, task_id, token, name="past", until="2020-01-31T09:00:00Z")
    assert (answer["suspended"], answer["signal"]) == (False, None)
    answer = await suspend(client, task_id, token, name="future", until="2999-01-31T09:00:00+01:00")
    assert answer == {"id": task_id, "suspended": True, "until": "2999-01-31T08:00:00Z"}
    run_at = datetime.fromisoformat((await client.task(task_id))["run_at"])
    assert abs(run_at - datetime(2999, 1, 31, 8, tzinfo=UTC)) < timedelta(milliseconds=1), "as a delay"


@pytest.mark.parametrize(
    "body",
    [
        {"name": "nap"},
        {"name": "nap", "until": "2999-01-31T09:00:00"},
        {"name": "nap", "until": "2999-01-31T09:00:00Z", "timeout_sec": 1},
        {"name": "", "timeout_sec": 1},
        {"name": "nap", "timeout_sec": -1},
        {"name": "nap", "timeout_sec": 1, "mispelt": 1},
        {"name": "not\0storable", "timeout_sec": 1},
    ],
)
async def test_a_suspension_that_makes_no_sense_is_refused(served: Served, body: dict[str, Any]) -> None:
    client = served.client
    await client.submit()
    task_id, token = await client.hold(await client.register())
    reply = await client.post(f"/v1/tasks/{task_id}/suspend", {"claim_token": token, **body})
    assert (reply.status, reply.code) == (422, "invalid_input")
    assert (await client.task(task_id))["status"] == "RUNNING"


async def test_a_signal_that_makes_no_sense_is_refused(served: Served) -> None:
    client = served.client
    task_id = (await client.submit())["id"]
    for body in ({"data": "x" * 65_536}, {"date": 1}, {"idempotency_key": ""}, {"data": "\0"}):
        reply = await signal(client, task_id, **body)
        assert (reply.status, reply.code) == (422, "invalid_input"), body
    assert (await signal(client, "task_nope")).code == "not_found"
    assert (await signal(client, task_id, "%00")).code == "invalid_input"
    await client.post(f"/v1/tasks/{task_id}/cancel")
    assert (await signal(client, task_id)).code == "invalid_transition"


async def test_who_may_send_a_signal(serve: Serve) -> None:
    """What steers a task needs `operate`, the token that created it, or the claim of its parent."""
    async with serve(auth=True) as served:
        boss, tokens = await operator(served), served.service.tokens
        creator = Client(served.client.port, (await tokens.create("creator", "submit")).token)
        other = Client(served.client.port, (await tokens.create("other", "submit")).token)
        reader = Client(served.client.port, (await tokens.create("reader", "read")).token)
        agents = await agent_client(served, "agents")
        task_id = (await creator.submit("parent"))["id"]

        assert (await signal(boss, task_id)).status == 202
        assert (await signal(creator, task_id)).status == 202
        for stranger in (other, agents, reader):
            assert (await signal(stranger, task_id)).code == "forbidden"

        one, two = await agents.register("one"), await agents.register("two")
        parent, token = await agents.hold(one, types=["parent"])
        made = await boss.post(
            f"/v1/tasks/{parent}/subtasks", {"claim_token": token, "tasks": [{"type": "child"}]}
        )
        child = made.json["items"][0]["id"]
        assert (await signal(other, child)).code == "forbidden"
        assert (await signal(other, child, claim_token=token)).status == 202
        # The token is of the parent, not of the child, and only while it is held.
        assert (await signal(other, task_id, claim_token=token)).code == "stale_claim"
        _, of_child = await agents.hold(two, types=["child"])
        assert (await signal(other, child, claim_token=of_child)).code == "stale_claim"
        assert (await signal(other, child, claim_token="nonsense")).code == "stale_claim"
        await agents.post(f"/v1/tasks/{parent}/release", {"claim_token": token})
        assert (await signal(other, child, claim_token=token)).code == "stale_claim"

        events = (await boss.get("/v1/events", task_id=task_id, kind="task.signalled")).json["items"]
        assert [event["data"] for event in events] == [
            {"signal": "go", "actor": "boss"},
            {"signal": "go", "actor": "creator"},
        ]
