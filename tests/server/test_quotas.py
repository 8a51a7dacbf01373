"""Reservations over HTTP: who may acquire and settle, what a refusal says, and calls that wait."""

import asyncio
from typing import Any

import pytest

from tests.server.client import Client, Reply
from tests.server.conftest import Served, until
from tests.server.test_claim_tokens import agent_client, operator

LIMIT = {"match": "model:m", "rate": {"amount": 100, "unit": "tokens", "per_sec": 3600}}


async def limit(client: Client, amount: float = 100) -> None:
    reply = await client.put("/v1/quotas/q", {**LIMIT, "rate": {**LIMIT["rate"], "amount": amount}})  # type: ignore[dict-item]
    assert reply.status == 200, reply


async def acquire(client: Client, claim: tuple[str, str], tokens: float, **more: Any) -> Reply:
    task_id, token = claim
    body = {"claim_token": token, "task_id": task_id, "key": "model:m", "units": {"tokens": tokens}, **more}
    return await client.post("/v1/quotas/acquire", body)


async def settle(client: Client, claim: tuple[str, str], reservation: str | None, **more: Any) -> Reply:
    task_id, token = claim
    body = {"claim_token": token, "task_id": task_id, "reservation": reservation, **more}
    return await client.post("/v1/quotas/settle", body)


async def used(client: Client) -> float:
    (quota,) = (await client.get("/v1/quotas")).json["items"]
    return float(quota["used"])


async def hold(client: Client, agent_id: str = "a1") -> tuple[str, str]:
    await client.submit()
    return await client.hold(await client.register(agent_id))


async def test_an_agent_reserves_and_settles(served: Served) -> None:
    client = served.client
    await limit(client)
    claim = await hold(client)

    reply = await acquire(client, claim, 80, idempotency_key="k")
    assert reply.status == 200, reply
    reservation = reply.json["reservation"]
    assert (await acquire(client, claim, 80, idempotency_key="k")).json == {"reservation": reservation}
    assert await used(client) == 80

    full = await acquire(client, claim, 30)
    assert (full.status, full.code, full.json["retryable"]) == (429, "rate_limited", True)
    assert 3500 < full.json["retry_after_sec"] <= int(full.headers["retry-after"]) <= 3662
    never = await acquire(client, claim, 101)
    assert (never.status, [fault["loc"] for fault in never.json["errors"]]) == (422, ["units.tokens"])

    for _ in range(2):
        settled = await settle(client, claim, reservation, units={"tokens": 70})
        assert (settled.status, settled.body) == (204, b"")
    assert (await acquire(client, claim, 30)).status == 200
    free = await acquire(client, claim, 5, key="model:other")
    assert free.json == {"reservation": None}
    assert (await settle(client, claim, None, units={"tokens": 5})).status == 204


@pytest.mark.parametrize(
    "wrong",
    [
        {"units": {"tasks": 1}},
        {"units": {"tokens": "many"}},
        {"units": {"tokens": -1}},
        {"wait_sec": 61},
        {"key": ""},
        {"apples": 1},
    ],
    ids=str,
)
async def test_a_wrong_request_is_refused(served: Served, wrong: dict[str, Any]) -> None:
    claim = await hold(served.client)
    reply = await acquire(served.client, claim, 1, **wrong)
    assert (reply.status, reply.code) == (422, "invalid_input")


async def test_only_the_holder_acquires_and_settles(served: Served) -> None:
    boss = await operator(served)
    await limit(boss)
    ann = await agent_client(served, "ann", agent_id="ann")
    bob = await agent_client(served, "bob", agent_id="bob")
    await boss.submit()
    claim = await ann.hold(await ann.register("ann"))
    reservation = (await acquire(ann, claim, 10)).json["reservation"]

    assert (await acquire(bob, claim, 10)).code == "forbidden"
    assert (await settle(bob, claim, reservation)).code == "forbidden"
    forged = (claim[0], "x" * 60)
    assert (await acquire(ann, forged, 10)).code == "stale_claim"
    assert (await acquire(ann, ("task_x", claim[1]), 10)).code == "not_found"
    assert (await settle(ann, claim, "reservation_x")).code == "not_found"
    reader = Client(ann.port, (await served.service.tokens.create("reader", "submit")).token)
    assert (await acquire(reader, claim, 10)).status == 403

    done = {"claim_token": claim[1], "output": {"data": 1}}
    assert (await ann.post(f"/v1/tasks/{claim[0]}/complete", done)).status == 200
    assert (await acquire(ann, claim, 10)).code == "stale_claim"
    assert (await settle(ann, claim, reservation, units={"tokens": 0})).code == "stale_claim"
    assert await used(boss) == 10


async def test_a_call_waits_for_room_without_a_connection_to_the_database(served: Served) -> None:
    """More calls wait than the server has connections; others are answered meanwhile."""
    client = served.client
    await limit(client)
    claim = await hold(client)
    await acquire(client, claim, 100)
    calls = [asyncio.create_task(acquire(client, claim, 10, wait_sec=60)) for _ in range(10)]

    def some_wait() -> bool:
        return any(turn.locked() for turn in served.service.engine.reservations._turns.values())

    await until(some_wait)
    assert (await client.get("/v1/quotas")).status == 200
    await limit(client, 200)
    assert [reply.status for reply in await asyncio.gather(*calls)] == [200] * 10
    assert await used(client) == 200


@pytest.mark.parametrize("end", ["disconnect", "stop"])
async def test_a_call_that_waits_ends_with_its_client_and_its_server(served: Served, end: str) -> None:
    client = served.client
    await limit(client)
    claim = await hold(client)
    await acquire(client, claim, 100)
    turns = served.service.engine.reservations._turns
    body = {"claim_token": claim[1], "task_id": claim[0], "key": "model:m", "units": {"tokens": 1}}
    reader, writer = await client.send("POST", "/v1/quotas/acquire", {**body, "wait_sec": 60})
    await until(lambda: any(turn.locked() for turn in turns.values()))

    if end == "disconnect":
        writer.transport.abort()
        await until(lambda: not any(turn.locked() for turn in turns.values()))
    else:
        await served.stop()
        assert b" 503 " in await reader.readline()
        writer.close()
