"""Claim tokens: only the holder of a claim has one, and any server verifies it. Tokens bound to one agent."""

import asyncio
from collections.abc import Mapping
from typing import Any

import psycopg
import pytest
from psycopg import sql

from lineshaft.engine.claim.claim_tokens import ClaimTokens
from lineshaft.types.work import ClaimRef
from tests.conftest import superuser
from tests.server.client import Client
from tests.server.conftest import Serve, Served, until
from tests.server.test_trust import everything

#: Every route of work on a claim: method, path and a body that costs the holder money.
ROUTES: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "start": ("POST", "start", {}),
    "checkpoint": ("PUT", "checkpoint", {"data": 1}),
    "steps": ("PUT", "steps/search", {"data": 1, "cost_usd": 50}),
    "spawn": ("POST", "subtasks", {"tasks": [{"type": "code"}], "cost_usd": 50}),
    "suspend": ("POST", "suspend", {"name": "nap", "timeout_sec": 60, "cost_usd": 50}),
    "release": ("POST", "release", {"cost_usd": 50}),
    "fail": ("POST", "fail", {"error": "x", "cost_usd": 50}),
    "cancel": ("POST", "cancel", {"reason": "x", "cost_usd": 50}),
    "complete": ("POST", "complete", {"output": {"data": 1}, "cost_usd": 50}),
}
OK = "ok"


async def call(client: Client, route: str, task_id: str, token: str) -> str:
    """The code of the refusal, or OK."""
    method, path, body = ROUTES[route]
    reply = await client.request(method, f"/v1/tasks/{task_id}/{path}", {**body, "claim_token": token})
    return OK if reply.status in {200, 201} else reply.code


async def call_batch(client: Client, route: str, task_id: str, token: str) -> str:
    """As `call`, over the route for batches."""
    item = {**ROUTES[route][2], "id": task_id, "claim_token": token}
    if route == "steps":
        item["name"] = "search"
    reply = await client.post(f"/v1/work/{route}", {"items": [item]})
    assert reply.status == 200, reply
    (found,) = reply.json["items"]
    return str(found["problem"]["code"]) if "problem" in found else OK


async def agent_client(served: Served, name: str, **options: Any) -> Client:
    made = await served.service.tokens.create(name, "agent", **options)
    return Client(served.client.port, made.token)


async def operator(served: Served) -> Client:
    return Client(served.client.port, (await served.service.tokens.create("boss", "operate")).token)


async def test_a_token_is_of_one_task_and_one_key(served: Served) -> None:
    await served.client.submit()
    (item,) = await served.client.claim(await served.client.register())
    task_id, token = item["task"]["id"], item["claim_token"]
    tokens = await served.service.engine.claim_key.tokens()

    assert tokens.find(task_id, token) == ClaimRef(task_id, item["task"]["claim"]["epoch"])
    assert tokens.find("task_other", token) is None
    assert ClaimTokens(bytes(32)).find(task_id, token) is None


@pytest.mark.parametrize("route", ROUTES)
async def test_every_server_verifies_the_tokens_of_the_others(serve: Serve, route: str) -> None:
    async with serve() as one, serve() as two:
        agent = await one.client.register()
        await one.client.submit()
        (item,) = await one.client.claim(agent, start=route != "start")

        assert await call(two.client, route, item["task"]["id"], item["claim_token"]) == OK


async def test_servers_that_start_together_have_one_key(serve: Serve, dsn: str) -> None:
    """One finds that there is no key while another is about to commit the first one."""
    waiting = (
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        " AND query LIKE '%claim_key%'"
    )
    key = bytes(range(32))
    async with serve() as served:
        with psycopg.connect(dsn) as other, psycopg.connect(dsn, autocommit=True) as watcher:
            other.execute("INSERT INTO lineshaft.claim_key (key) VALUES (%s)", [key])
            reading = asyncio.create_task(served.service.engine.claim_key.tokens())
            await until(lambda: watcher.execute(waiting).fetchall())
            other.commit()
            await reading
        await served.client.submit()
        (item,) = await served.client.claim(await served.client.register())

    assert ClaimTokens(key).find(item["task"]["id"], item["claim_token"]) is not None


async def test_roles_that_only_read_dont_see_the_key(client: Client, dsn: str) -> None:
    """Neither with SELECT on every table, nor as a member of pg_read_all_data; a role that writes does."""
    await client.submit()
    await client.claim(await client.register())
    seen: dict[str, int] = {}
    roles = {
        "lineshaft_test_reader": ["GRANT SELECT ON ALL TABLES IN SCHEMA lineshaft TO {}"],
        "lineshaft_test_auditor": ["GRANT pg_read_all_data TO {}"],
        "lineshaft_test_server": ["GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA lineshaft TO {}"],
    }
    with psycopg.connect(superuser(dsn)) as own:
        for role, grants in roles.items():
            name = sql.Identifier(role)
            own.execute(sql.SQL("CREATE ROLE {}").format(name))
            own.execute(sql.SQL("GRANT USAGE ON SCHEMA lineshaft TO {}").format(name))
            for grant in grants:
                own.execute(sql.SQL(grant).format(name))
            own.execute(sql.SQL("SET LOCAL ROLE {}").format(name))
            (seen[role],) = own.execute("SELECT count(*) FROM lineshaft.claim_key").fetchone() or (None,)
            assert own.execute("SELECT FROM lineshaft.task").fetchall(), "everything else"
            own.execute("RESET ROLE")
        own.rollback()

    assert seen == {"lineshaft_test_reader": 0, "lineshaft_test_auditor": 0, "lineshaft_test_server": 1}


# Tokens that are bound to an agent.


async def test_a_bound_token_registers_only_its_agent(serve: Serve) -> None:
    async with serve(auth=True) as served:
        client = await agent_client(served, "w", agent_id="writer")

        other = await client.post("/v1/agents", {"id": "reviewer"})
        named = await client.post("/v1/agents", {"id": "writer"})
        unnamed = await client.post("/v1/agents", {})

        assert (other.status, other.code) == (403, "forbidden")
        assert "bound to agent 'writer'" in other.json["detail"]
        assert (named.status, named.json["id"], named.json["warnings"]) == (201, "writer", [])
        assert (unnamed.status, unnamed.json["id"]) == (200, "writer")
        assert (await client.get("/v1/agents/reviewer")).status == 404


async def test_a_bound_token_acts_only_as_its_agent(serve: Serve) -> None:
    """Every route that names an agent, and every route with the claim token of another agent."""
    async with serve(auth=True) as served:
        boss = await operator(served)
        writer = await agent_client(served, "w", agent_id="writer")
        reviewer = await agent_client(served, "r", agent_id="reviewer")
        victim = await reviewer.register("reviewer")
        await writer.register("writer")
        waiting = await boss.submit(priority=1)
        await boss.submit(priority=90)
        held, token = await reviewer.hold(victim)
        before = await everything(boss)
        body = {"incarnation": victim["incarnation"]}

        calls: dict[str, dict[str, Any]] = {
            "/v1/agents/reviewer/claim": {},
            "/v1/agents/reviewer/heartbeat": {"tasks": [{"id": held, "claim_token": token}]},
            "/v1/agents/reviewer/drain": {},
            "/v1/agents/reviewer/leave": {},
            f"/v1/tasks/{waiting['id']}/claim": {"agent_id": "reviewer"},
        }
        for path, more in calls.items():
            refused = await writer.post(path, {**body, **more})
            assert (refused.status, refused.code) == (403, "forbidden"), path
        for route in ("claim", "heartbeat"):
            batch = {"items": [{**body, "agent_id": "reviewer"}]}
            (found,) = (await writer.post(f"/v1/work/{route}", batch)).json["items"]
            assert found["problem"]["code"] == "forbidden"
        for route in ROUTES:
            assert await call(writer, route, held, token) == "forbidden", route
            assert await call_batch(writer, route, held, token) == "forbidden", route

        assert await everything(boss) == before
        assert await call(reviewer, "complete", held, token) == OK
        assert await call(writer, "complete", held, token) == "forbidden", "nor repeats it"


async def test_an_item_of_another_agent_affects_no_other_item(serve: Serve) -> None:
    async with serve(auth=True) as served:
        boss = await operator(served)
        writer = await agent_client(served, "w", agent_id="writer")
        reviewer = await agent_client(served, "r", agent_id="reviewer")
        agents = [await writer.register("writer"), await reviewer.register("reviewer")]
        items = [{"agent_id": agent["id"], "incarnation": agent["incarnation"]} for agent in agents]
        await boss.submit()
        await boss.submit()

        mine, other = (await writer.post("/v1/work/claim", {"items": items})).json["items"]
        theirs = await reviewer.claim(agents[1], start=True)
        (own,) = mine["tasks"]
        tasks = [{"id": each["task"]["id"], "claim_token": each["claim_token"]} for each in (own, *theirs)]
        started, refused = (await writer.post("/v1/work/start", {"items": tasks})).json["items"]
        beaten, silent = (await writer.post("/v1/work/heartbeat", {"items": items})).json["items"]

        assert (
            other["problem"]["code"] == refused["problem"]["code"] == silent["problem"]["code"] == "forbidden"
        )
        assert (started["status"], beaten["status"]) == ("RUNNING", "active")


async def test_a_bound_token_finishes_what_its_agent_holds(serve: Serve) -> None:
    async with serve(auth=True) as served:
        client = await agent_client(served, "w", agent_id="writer")
        agent = await client.register("writer")
        for route in ("complete", "fail", "release", "cancel"):
            task = await client.submit()
            (item,) = [
                each for each in await client.claim(agent, start=True) if each["task"]["id"] == task["id"]
            ]
            for step in ("checkpoint", "steps", "spawn", route):
                assert await call(client, step, task["id"], item["claim_token"]) == OK, (route, step)
            for left in (await client.get("/v1/tasks", status="READY")).json["items"]:
                await served.service.engine.cancel.cancel(left["id"], "not needed", cascade=True)
        for path in ("drain", "leave"):
            body = {"incarnation": agent["incarnation"]}
            assert (await client.post(f"/v1/agents/writer/{path}", body)).status == 200


async def test_the_budget_of_a_token_counts(serve: Serve) -> None:
    """An agent doesn't declare its own budget, and neither a restart nor another token refills it."""
    async with serve(auth=True) as served:
        client = await agent_client(served, "w", agent_id="writer", budget_usd=5)

        greedy = await client.register("writer", budget_usd=1_000)
        modest = await client.register("writer")
        other = await agent_client(served, "w2", agent_id="writer", budget_usd=7.5)
        later = await other.register("writer")

        assert [agent["budget_usd"] for agent in (greedy, modest, later)] == [5, 5, 5]
        (warning,) = greedy["warnings"]
        assert warning.startswith("budget_usd=1000 is ignored: agent 'writer' has a budget of 5 USD.")
        assert "lineshaft agents change writer --budget USD" in warning
        assert modest["warnings"] == []
        (warning,) = later["warnings"]
        assert warning.startswith("The budget of the token, 7.5 USD, is ignored")


async def test_the_budget_of_a_token_applies_to_an_agent_without_one(serve: Serve) -> None:
    async with serve(auth=True) as served:
        anyone = await agent_client(served, "any")
        assert (await anyone.register("writer"))["budget_usd"] is None
        client = await agent_client(served, "w", agent_id="writer", budget_usd=5)

        assert (await client.register("writer"))["budget_usd"] == 5


async def test_tokens_are_bound_over_http(serve: Serve) -> None:
    async with serve(auth=True) as served:
        admin = Client(served.client.port, (await served.service.tokens.create("admin", "admin")).token)
        bound = {"name": "w", "scope": "agent", "agent_id": "writer", "budget_usd": 5.5}

        made = (await admin.post("/v1/tokens", bound)).json
        plain = (await admin.post("/v1/tokens", {"name": "p", "scope": "read"})).json
        listed = (await admin.get("/v1/tokens")).json["items"]

        assert {**made, **bound} == made
        assert plain.keys() == {"id", "name", "scope", "token"}
        assert [(each["agent_id"], each["budget_usd"]) for each in listed] == [
            (None, None),
            ("writer", 5.5),
            (None, None),
        ]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"scope": "operate", "agent_id": "writer"}, "agent_id"),
        ({"scope": "agent", "agent_id": ""}, "agent_id"),
        ({"scope": "agent", "agent_id": "x" * 201}, "agent_id"),
        ({"scope": "agent", "budget_usd": 5}, "budget_usd"),
        ({"scope": "agent", "agent_id": "writer", "budget_usd": -1}, "budget_usd"),
        ({"scope": "agent", "agent_id": "writer", "budget_usd": 1e12}, "budget_usd"),
    ],
)
async def test_impossible_tokens_are_refused(client: Client, body: Mapping[str, Any], place: str) -> None:
    reply = await client.post("/v1/tokens", {"name": "x", **body})

    assert reply.status == 422
    assert place in {error["loc"] for error in reply.json["errors"]}
    assert (await client.get("/v1/tokens")).json["items"] == []
