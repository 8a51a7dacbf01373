"""Accounts with providers, over HTTP: registration, claim, failure, and what is shown."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.server.client import Client

TWO = ["team-1", "team-2"]


async def fail(client: Client, item: dict[str, Any], **fields: Any) -> Any:
    body = {"claim_token": item["claim_token"], "error": "usage limit", "category": "rate_limit", **fields}
    return await client.post(f"/v1/tasks/{item['task']['id']}/fail", body)


async def test_from_registration_to_an_account_that_is_closed(client: Client) -> None:
    for _ in range(3):
        await client.submit()
    agent = await client.register(accounts=TWO)
    assert "accounts" in agent["features"]
    assert agent["accounts"] == [{"name": name, "open": True, "until": None} for name in TWO]
    (first,) = await client.claim(agent)
    (second,) = await client.claim(agent)
    assert (first["account"], second["account"]) == ("team-1", "team-2")
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=5)

    closed = await fail(client, first, retry_at=until.isoformat())
    other = await fail(client, second, retry_at=(until + timedelta(days=1)).isoformat())
    assert other.status == 200, other.json

    assert (closed.status, closed.json["status"], closed.json["attempts"]) == (200, "RETRYING", 0)
    waiting = (await client.get("/v1/tasks?status=READY")).json["items"][0]["id"]
    why = (await client.get(f"/v1/tasks/{waiting}/why")).json
    assert [(reason["code"], reason["until"]) for reason in why["reasons"]] == [
        ("account_closed", until.isoformat().replace("+00:00", "Z"))
    ]
    assert await client.claim(agent) == []
    (seen,) = (await client.get("/v1/agents")).json["items"]
    assert [(each["name"], each["open"]) for each in seen["accounts"]] == [(name, False) for name in TWO]
    keys = [item["key"] for item in (await client.get("/v1/slowdowns")).json["items"]]
    assert keys == ["account:team-1", "account:team-2"]
    history = (await client.get(f"/v1/tasks/{first['task']['id']}/attempts")).json["items"]
    assert [(past["outcome"], past["account"]) for past in history] == [("rate_limited", "team-1")]
    ended = await client.delete("/v1/slowdowns/account:team-2")
    assert ended.status == 204
    (third,) = await client.claim(agent)
    assert third["account"] == "team-2"


async def test_without_accounts_it_is_null(client: Client) -> None:
    await client.submit()
    (item,) = await client.claim(await client.register())

    assert item["account"] is None


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"retry_at": "2030-01-01T00:00:00"}, "retry_at"),
        ({"retry_at": "tomorrow"}, "retry_at"),
        ({"account": "\n"}, "account"),
    ],
)
async def test_failures_that_make_no_sense(client: Client, fields: dict[str, Any], place: str) -> None:
    await client.submit()
    (item,) = await client.claim(await client.register())

    refused = await fail(client, item, **fields)

    assert refused.status == 422
    assert place in str(refused.json)
