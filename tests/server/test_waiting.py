"""Long polls: they hold a connection to the server, and none to the database."""

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from lineshaft.clock import MovableClock
from lineshaft.errors import UnavailableError
from lineshaft.types.protocol import ClaimItem
from tests.server.client import Client, Reply, read_reply
from tests.server.conftest import Serve, Served, until


async def waiting(served: Served, agents: int) -> None:
    """Returns when so many agents wait. A claim that has returned instead doesn't make this hang."""
    async with asyncio.timeout(60):
        while served.service.wakeups.waiting < agents:
            await served.client.get("/healthz")


def claiming(client: Client, agent: Any, **fields: Any) -> "asyncio.Task[Reply]":
    asked = {"incarnation": agent["incarnation"], "wait_sec": 60, **fields}
    return asyncio.create_task(client.post(f"/v1/agents/{agent['id']}/claim", asked))


async def test_a_new_task_wakes_one_who_waits(served: Served) -> None:
    client = served.client
    waiter = claiming(client, await client.register(capabilities=["python"]))
    await waiting(served, 1)

    task = await client.submit("never seen before", required_capabilities=["python"])

    (item,) = (await waiter).json["tasks"]
    assert item["task"]["id"] == task["id"]


async def test_those_who_cant_take_it_sleep_on(served: Served) -> None:
    """Agents of any type wait for lanes they can take from, so a wake-up is not lost on one that can't."""
    client = served.client
    others = [claiming(client, await client.register(f"other{n}")) for n in range(3)]
    picky = claiming(client, await client.register("picky", types=["other"], capabilities=["fly"]))
    await waiting(served, 4)
    able = claiming(client, await client.register("able", capabilities=["fly"]))
    await waiting(served, 5)

    task = await client.submit("code", required_capabilities=["fly"])

    assert (await able).json["tasks"][0]["task"]["id"] == task["id"]
    assert not any(waiter.done() for waiter in [*others, picky])
    await served.stop()
    assert [(await waiter).json for waiter in [*others, picky]] == [{"tasks": []}] * 4


async def test_many_tasks_wake_many(served: Served) -> None:
    client = served.client
    waiters = [claiming(client, await client.register(f"agent{n}")) for n in range(10)]
    await waiting(served, 10)

    made = await client.post("/v1/tasks/batch", {"tasks": [{"type": "code"}] * 10})

    taken = [item["task"]["id"] for waiter in waiters for item in (await waiter).json["tasks"]]
    assert sorted(taken) == sorted(item["id"] for item in made.json["items"])


async def test_waiting_holds_no_database_connection(serve: Serve) -> None:
    async with serve(max_connections=1) as served:
        client = served.client
        waiters = [claiming(client, await client.register(f"agent{n}")) for n in range(20)]
        await waiting(served, 20)

        await client.submit()

        done, _ = await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1


async def test_the_end_of_a_slow_down_wakes_those_who_wait(served: Served) -> None:
    client = served.client
    await client.submit()
    agent = await client.register(models_available=["large"])
    task_id, token = await client.hold(agent)
    limit = {"claim_token": token, "error": "429 Too Many Requests", "retry_after_sec": 0.3}
    await client.post(f"/v1/tasks/{task_id}/fail", limit)
    # Or it would be due when the slowdown ends, and come first.
    await client.post(f"/v1/tasks/{task_id}/cancel", {})
    waiter = claiming(client, agent)
    await waiting(served, 1)
    other = await client.submit("other")

    (item,) = (await waiter).json["tasks"]
    assert item["task"]["id"] == other["id"]


async def test_an_empty_list_when_the_time_is_up(client: Client) -> None:
    agent = await client.register()

    assert await client.claim(agent, wait_sec=0.05) == []


async def test_work_that_is_there_is_had_at_once(client: Client) -> None:
    await client.submit()
    await client.submit()
    agent = await client.register()

    items = await client.claim(agent, wait_sec=60, limit=5)

    assert len(items) == 2


async def test_an_undelivered_claim_is_released(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client leaves while its claim is being made: no attempt is used, and another gets it at once."""
    client, polls = served.client, served.service.long_polls
    agent = await client.register()
    left = asyncio.Event()
    claim = served.service.engine.claims.claim

    async def claim_and_see_it_leave(*args: Any, **options: Any) -> Any:
        found = await claim(*args, **options)
        if found.tasks:
            left.set()
            # The disconnection is noticed in this moment.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return found

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    monkeypatch.setattr(served.service.engine.claims, "claim", claim_and_see_it_leave)

    async def find() -> None:
        item = ClaimItem(agent_id=agent["id"], incarnation=agent["incarnation"])
        async with polls.claimed([item], receive, wait_sec=60):
            pass

    finding = asyncio.create_task(find())
    await waiting(served, 1)
    task = await client.submit()

    with pytest.raises(ClientDisconnect):
        await finding
    monkeypatch.undo()
    (item,) = await client.claim(agent, wait_sec=60)
    assert (item["task"]["id"], item["task"]["attempts"]) == (task["id"], 0)


async def test_a_client_that_has_left_is_not_waited_for(served: Served) -> None:
    client = served.client
    agent = await client.register()
    asked = {"incarnation": agent["incarnation"], "wait_sec": 60}
    _, writer = await client.send("POST", f"/v1/agents/{agent['id']}/claim", asked)
    await waiting(served, 1)

    writer.close()
    while served.service.wakeups.waiting:
        await client.get("/healthz")

    task = await client.submit()
    assert [item["task"]["id"] for item in await client.claim(agent)] == [task["id"]]


async def test_waiting_ends_when_the_server_stops(serve: Serve) -> None:
    async with serve() as served:
        agent = await served.client.register()
        reader, writer = await served.client.send(
            "POST", f"/v1/agents/{agent['id']}/claim", {"incarnation": agent["incarnation"], "wait_sec": 60}
        )
        await waiting(served, 1)

        await served.stop()

        reply = await read_reply(reader)
        assert (reply.status, reply.json) == (200, {"tasks": []})
        writer.close()


async def test_two_servers_on_one_database_wake_each_other(serve: Serve) -> None:
    async with serve() as one, serve() as two:
        waiter = claiming(one.client, await one.client.register())
        await waiting(one, 1)

        task = await two.client.submit()

        (item,) = (await waiter).json["tasks"]
        assert item["task"]["id"] == task["id"]
        done = await two.client.post(f"/v1/tasks/{task['id']}/start", {"claim_token": item["claim_token"]})
        assert done.json["status"] == "RUNNING", "a claim made at one server holds at the other"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"incarnation": 1, "wait_sec": 61},
        {"incarnation": 1, "wait_sec": -1},
        {"incarnation": 1, "limit": 0},
    ],
)
async def test_faults_of_a_claim(client: Client, body: Any) -> None:
    await client.register()

    reply = await client.post("/v1/agents/a1/claim", body)

    assert (reply.status, reply.code) == (422, "invalid_input")


async def test_a_new_day_brings_money(serve: Serve) -> None:
    """R-237: agents that wait for work which today's budget can't pay for are woken at midnight UTC."""
    clock = MovableClock(datetime(2026, 2, 8, 23, 59, 59, tzinfo=UTC))
    async with serve(clock=clock, daily_budget_usd=Decimal(1)) as served:
        client = served.client
        agent = await client.register()
        await client.submit(max_cost_usd=1)
        task_id, token = await client.hold(agent)
        done = {"claim_token": token, "output": {"data": 1}, "cost_usd": 1}
        await client.post(f"/v1/tasks/{task_id}/complete", done)
        next_one = await client.submit(max_cost_usd=1)
        waiter = claiming(client, agent)
        await waiting(served, 1)

        clock.advance(1)

        (item,) = (await asyncio.wait_for(waiter, 60)).json["tasks"]
        assert item["task"]["id"] == next_one["id"]


def polling(client: Client, *agents: Any, **fields: Any) -> "asyncio.Task[Reply]":
    items = [{"agent_id": agent["id"], "incarnation": agent["incarnation"]} for agent in agents]
    return asyncio.create_task(client.post("/v1/work/claim", {"items": items, "wait_sec": 60, **fields}))


async def test_a_batch_of_claims_answers_as_soon_as_one_has_work(served: Served) -> None:
    client = served.client
    agents = [await client.register(f"a{n}", types=[f"t{n}"]) for n in range(3)]
    waiter = polling(client, *agents)
    await waiting(served, 3)

    task = await client.submit("t1")

    first, second, third = (await waiter).json["items"]
    assert (first, third) == ({"tasks": []}, {"tasks": []})
    assert [item["task"]["id"] for item in second["tasks"]] == [task["id"]]
    assert served.service.wakeups.waiting == 0


async def test_a_batch_of_claims_answers_as_soon_as_one_has_a_problem(served: Served) -> None:
    client = served.client
    agent = await client.register()

    items = (await polling(client, agent, {"id": "unknown", "incarnation": 1})).json["items"]

    assert items[0] == {"tasks": []}
    assert items[1]["problem"]["code"] == "not_found"


async def test_a_later_call_ends_the_poll_with_the_same_name(served: Served) -> None:
    """The client keeps what the poll has claimed: nothing is lost on a connection that is closed."""
    client = served.client
    waiter = polling(client, await client.register(), poll="p1")
    other = polling(client, await client.register("other", types=["other"]), poll="p2")
    await waiting(served, 2)

    ended = await polling(client, poll="p1")

    assert ended.json == {"items": []}
    assert (await asyncio.wait_for(waiter, 60)).json == {"items": [{"tasks": []}]}
    assert not other.done()
    await served.stop()
    await other


@pytest.mark.parametrize("call", ["drain", "leave"])
async def test_an_agent_that_takes_no_more_work_is_not_kept_waiting(served: Served, call: str) -> None:
    client = served.client
    agent = await client.register()
    waiter = claiming(client, agent)
    await waiting(served, 1)

    changed = await client.post(f"/v1/agents/{agent['id']}/{call}", {"incarnation": agent["incarnation"]})

    assert changed.json["status"] == {"drain": "draining", "leave": "offline"}[call]
    assert (await asyncio.wait_for(waiter, 60)).json == {"tasks": []}


async def test_a_wake_up_that_was_used_is_not_passed_around(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two idle agents would wake each other forever."""
    client = served.client
    claim, calls = served.service.engine.claims.claim, 0

    async def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return await claim(*args, **options)

    await client.submit()  # so that the lane is known
    # Its notification would wake one of those who wait below.
    await until(lambda: served.service.wakeups.moves == 1)
    assert await client.claim(await client.register("first"))
    waiters = [claiming(client, await client.register(f"a{n}"), limit=2) for n in range(2)]
    await waiting(served, 2)
    monkeypatch.setattr(served.service.engine.claims, "claim", counted)

    await client.submit()

    done, (left,) = await asyncio.wait(waiters, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert len(done.pop().result().json["tasks"]) == 1
    await asyncio.sleep(0.2)
    assert calls == 1
    assert not left.done()
    await served.stop()
    await left


async def test_a_wake_up_is_not_lost_on_one_whose_hands_are_full(served: Served) -> None:
    client = served.client
    busy = await client.register("busy", max_concurrent_tasks=1)
    await client.submit()
    assert (await claiming(client, busy)).json["tasks"]
    first = claiming(client, busy)
    await waiting(served, 1)
    free = claiming(client, await client.register("free"))
    await waiting(served, 2)

    await client.submit()

    assert (await free).json["tasks"]
    assert not first.done()
    await served.stop()
    await first


async def test_who_can_not_sit_down_is_not_remembered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = served.client
    agent = await client.register()

    async def gone(_: Any) -> Any:
        raise UnavailableError("the database went away in this moment")

    monkeypatch.setattr(served.service.directory, "_lanes_of", gone)
    reply = await claiming(client, agent)

    assert (reply.status, reply.code) == (503, "unavailable")
    assert not served.service.directory._interests


async def test_a_due_retry_wakes_one_who_waits(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """No duty runs here, nobody else claims, and the one who waits doesn't look by itself."""
    monkeypatch.setattr("lineshaft.engine.feed.wakeups.POLL_SUBSCRIBED", 1_000)
    async with serve() as served:
        client = served.client
        agent = await client.register(max_concurrent_tasks=2)
        retry = {"strategy": "fixed", "initial_delay_sec": 1, "jitter": False}
        task = await client.submit(retry=retry)
        _, token = await client.hold(agent)
        waiter = claiming(client, agent)
        await waiting(served, 1)

        failed = await client.post(f"/v1/tasks/{task['id']}/fail", {"claim_token": token, "error": "no"})

        assert failed.json["status"] == "RETRYING"
        # At the end of its wait, after a minute, it would look.
        async with asyncio.timeout(30):
            (item,) = (await waiter).json["tasks"]
        assert item["task"]["id"] == task["id"]
