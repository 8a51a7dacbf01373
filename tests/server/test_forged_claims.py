"""Forged claim tokens, on every route that takes one. The routes come from the OpenAPI document."""

import base64
import hmac
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lineshaft.server.app import describe
from tests.server.client import Client
from tests.server.conftest import Serve, Served
from tests.server.test_trust import everything

LOST = "lost"
OK = "ok"
#: Routes of work that take no claim token: they make claims, or name no task.
WITHOUT_CLAIM = {
    *("POST /v1/work/claim", "POST /v1/work/maintain", "GET /v1/work/retries", "GET /v1/work/left-behind"),
    "POST /v1/tasks/{id}/claim",
}
#: Those that belong to other things than work.
OTHERS = {"POST /v1/agents/{id}/heartbeat", "POST /v1/quotas/acquire", "POST /v1/quotas/settle"}
#: A signal takes the claim token of the task's parent: test_waits.py.
OF_THE_PARENT = "POST /v1/tasks/{id}/signals/{name}"


@dataclass(frozen=True)
class Route:
    """A call that takes a claim token, with the example of the document as its body."""

    method: str
    path: str
    schema: Mapping[str, Any]
    example: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    async def call(
        self, client: Client, agent: Mapping[str, Any], task_id: str, token: str, **more: Any
    ) -> str:
        """The code of the refusal, LOST, or OK. `more` are fields for each place that takes the token."""
        agent_names = {"agent_id": agent["id"], "incarnation": agent["incarnation"]}
        body = _filled(
            self.schema,
            self.example,
            {"claim_token": token, "id": task_id, "task_id": task_id, **more},
            agent_names,
        )
        path = self.path.replace("/agents/{id}", f"/agents/{agent['id']}")
        path = path.replace("{id}", task_id).replace("{name}", "search")
        reply = await client.request(self.method, path, body)
        if reply.status == 404 and path == "/v1/quotas/settle":
            # It takes the claim, which has no reservation with the id of the example.
            return OK
        if reply.status not in {200, 201}:
            return reply.code
        found = reply.json
        if "/work/" in path:
            (found,) = found["items"]
            if "problem" in found:
                return str(found["problem"]["code"])
        return LOST if found.get("tasks") == {task_id: "lost"} else OK


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = describe()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _takes_claim(schema: Mapping[str, Any], levels: int = 4) -> bool:
    """Itself or in its lists. Lists of tasks contain lists of tasks, hence the limit of levels."""
    fields = _resolved(schema).get("properties", {})
    return "claim_token" in fields or any(
        _takes_claim(field["items"], levels - 1) for field in fields.values() if "items" in field and levels
    )


def _filled(
    schema: Mapping[str, Any],
    example: Mapping[str, Any],
    claim: Mapping[str, Any],
    agent: Mapping[str, Any],
) -> dict[str, Any]:
    """The example with these values of a claim and an agent, in each place that takes them."""
    fields = _resolved(schema).get("properties", {})
    given = dict(agent) | dict(claim if "claim_token" in fields else {})
    body = dict(example) | {name: value for name, value in given.items() if name in fields}
    for name, field in fields.items():
        if "items" in field and _takes_claim(field["items"]) and "claim_token" not in fields:
            body[name] = [_filled(field["items"], item, claim, agent) for item in example[name]]
    return body


def _routes() -> Iterator[Route]:
    for path, item in describe()["paths"].items():
        for method, call in item.items():
            content = call.get("requestBody", {}).get("content", {}).get("application/json")
            if f"{method.upper()} {path}" == OF_THE_PARENT or content is None:
                continue
            if _takes_claim(content["schema"]):
                yield Route(method.upper(), path, content["schema"], content["example"])


ROUTES = list(_routes())


def test_every_route_of_work_takes_a_claim_token() -> None:
    """A new route of work either takes one, and is then tested here, or stands in the list above."""
    of_work = {
        f"{method.upper()} {path}"
        for path, item in describe()["paths"].items()
        for method, call in item.items()
        if call["tags"] == ["work"]
    }

    assert {str(route) for route in ROUTES} == (of_work - WITHOUT_CLAIM - {OF_THE_PARENT}) | OTHERS
    assert of_work >= WITHOUT_CLAIM


def forgeries(task: Mapping[str, Any], own_token: str) -> Iterator[str]:
    """Tokens made of everything that `GET /v1/tasks` shows, and of the forger's own token."""
    epoch, at = task["claim"]["epoch"], datetime.fromisoformat(task["claim"]["claimed_at"])
    claim = struct.pack(">IQ", epoch, (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1))
    own = base64.urlsafe_b64decode(own_token + "=" * (-len(own_token) % 4))
    text = f"{task['id']} {epoch} {task['claim']['claimed_at']}".encode()
    for digest in (
        b"",
        bytes(32),
        own[12:],
        hmac.digest(b"", b"lineshaft claim\0" + claim + task["id"].encode(), "sha256"),
        hmac.digest(bytes(32), text, "sha256"),
    ):
        yield base64.urlsafe_b64encode(claim + digest).rstrip(b"=").decode()
    yield own_token
    yield f"{epoch}.{task['id']}"
    yield from ("", "=", "é", "\0", "A" * 59, "A" * 100_000)


def damaged(token: str) -> Iterator[str]:
    """The right token, cut off, longer, or with another HMAC."""
    yield from (token[:-1], token[: len(token) // 2], token[:16], token + "A", token + "=", " " + token)
    raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    for place in (12, 30, len(raw) - 1):
        other = bytes([*raw[:place], raw[place] ^ 1, *raw[place + 1 :]])
        yield base64.urlsafe_b64encode(other).rstrip(b"=").decode()


async def _agent_client(served: Served, name: str) -> Client:
    return Client(served.client.port, (await served.service.tokens.create(name, "agent")).token)


@pytest.mark.parametrize("route", ROUTES, ids=str)
async def test_nothing_but_the_token_of_the_claim_is_accepted(serve: Serve, route: Route) -> None:
    """R-061, R-071: the token of a claim can't be derived from what other callers see."""
    async with serve(auth=True) as served:
        victim, thief = await _agent_client(served, "victim"), await _agent_client(served, "thief")
        await victim.submit(max_cost_usd=100)
        agent = await victim.register("victim")
        (item,) = await victim.claim(agent, start=not route.path.endswith("/start"))
        held, token = item["task"]["id"], item["claim_token"]
        await victim.submit()
        _, own_token = await thief.hold(await thief.register("thief"))
        task = (await thief.get(f"/v1/tasks/{held}")).json
        refusal = LOST if "heartbeat" in route.path else "stale_claim"
        before = _unchanged_by_presence(await everything(thief))

        for forged in (*forgeries(task, own_token), *damaged(token)):
            found = await route.call(thief, agent, held, forged, cost_usd=50)
            assert found == refusal, forged[:100]

        assert _unchanged_by_presence(await everything(thief)) == before, "no state, no cost, no event"
        assert await route.call(victim, agent, held, token) == OK


@pytest.mark.parametrize("route", ROUTES, ids=str)
async def test_the_token_of_an_earlier_claim_is_stale(serve: Serve, route: Route) -> None:
    """A claim of the same task before this one, also by the same agent. What was spent under it counts."""
    async with serve() as served:
        client = served.client
        agent = await client.register()
        await client.submit()
        task_id, old = await client.hold(agent)
        assert (await client.post(f"/v1/tasks/{task_id}/release", {"claim_token": old})).status == 200
        (item,) = await client.claim(agent, start=not route.path.endswith("/start"))
        assert item["task"]["id"] == task_id
        before = await client.task(task_id)

        found = await route.call(client, agent, task_id, old, cost_usd=0.5)

        assert found == (LOST if "heartbeat" in route.path else "stale_claim")
        after = await client.task(task_id)
        for name in ("status", "claim", "attempts", "output", "progress", "failure_history"):
            assert after[name] == before[name], name
        assert (await client.get(f"/v1/tasks/{task_id}/steps")).json == {}
        assert await route.call(client, agent, task_id, item["claim_token"]) == OK


def _unchanged_by_presence(found: list[Any]) -> list[Any]:
    """Without the times of heartbeats: a heartbeat is also a sign of life of its instance."""
    for agent in found[1][0]["items"]:
        for each in (agent, *agent["instances"]):
            del each["last_heartbeat"]
    return found
