"""Retries as OfficePlane's users see them: how many there are, what ends them, and what holds a task back."""

from pathlib import Path
from typing import Any

from lineshaft.clock import MovableClock
from tests.integrations.officeplane.calls import create, fail, look
from tests.server.client import Client
from tests.server.conftest import Serve, Served


async def fail_with(served: Served, clock: MovableClock, agents: list[dict[str, Any]]) -> None:
    """One failed attempt by each of these agents in turn, each as soon as it is due."""
    for number, agent in enumerate(agents, 1):
        await fail(served.client, agent)
        clock.advance(5.0**number)
        await served.service.engine.maintenance.promote_due(10)


async def test_two_agents_use_up_the_retries_of_003(serve: Serve, clock: MovableClock) -> None:
    """The fourth attempt, after 125 s, comes; the poison flag is only shown."""
    async with serve(clock=clock) as served:
        client = served.client
        a, b = await client.register("a"), await client.register("b")
        made = await create(client)
        await fail_with(served, clock, [a, b, a])
        assert (await look(client, made["id"]))["state"] == "QUEUED", "a fourth attempt"
        await fail(client, b)

        found = await look(client, made["id"])
        assert (found["state"], found["retryCount"], found["maxRetries"]) == ("FAILED", 3, 3)
        dead = (await client.get(f"/v1/dead-letters/{made['id']}")).json
        assert dead["poison_pill"] is True


async def test_a_native_task_still_ends_as_a_poison_pill(serve: Serve, clock: MovableClock) -> None:
    async with serve(clock=clock) as served:
        client = served.client
        a, b = await client.register("a"), await client.register("b")
        made = await client.submit(max_attempts=9, retry={"strategy": "immediate"})
        await fail_with(served, clock, [a, b, a])

        assert (await client.task(made["id"]))["status"] == "DEAD_LETTERED"


async def test_retries_are_counted_without_the_first_attempt(serve: Serve, clock: MovableClock) -> None:
    """R-113, F-52: the last failure is not a retry, so a page that compares the two shows its button."""
    async with serve(clock=clock) as served:
        client = served.client
        agent = await client.register()
        made = await create(client, maxRetries=1)
        assert (made["retryCount"], made["canRetry"]) == (0, False)
        await fail_with(served, clock, [agent])
        found = await look(client, made["id"])
        assert (found["retryCount"], found["retries"], found["canRetry"]) == (1, 1, False)
        await fail(client, agent)
        found = await look(client, made["id"])
        assert (found["state"], found["retryCount"], found["retries"]) == ("FAILED", 1, 1)
        assert found["canRetry"] is True

        again = (await client.post(f"/api/tasks/{made['id']}/retry")).json
        assert (again["state"], again["retryCount"], again["canRetry"]) == ("QUEUED", 0, False)


async def test_a_failure_that_is_not_retried_counts_no_retry(client: Client) -> None:
    made = await create(client)
    await fail(client, await client.register(), "invalid_input")

    found = await look(client, made["id"])
    assert (found["state"], found["retryCount"], found["canRetry"]) == ("FAILED", 0, True)


async def test_what_ended_without_success_can_be_retried(client: Client) -> None:
    agent = await client.register()
    timed_out = await create(client, maxRetries=0)
    await fail(client, agent, "timeout")
    cancelled = await create(client)
    await client.post(f"/api/tasks/{cancelled['id']}/cancel")
    batch = await create(client, children=[{"taskType": "a"}], maxRetries=0)
    await fail(client, agent)

    for made, state in ((timed_out, "TIMEOUT"), (cancelled, "CANCELLED"), (batch, "FAILED")):
        found = await look(client, made["id"])
        assert (found["state"], found["canRetry"], found["retryCount"]) == (state, True, 0)


async def test_its_failures_open_no_breaker(serve: Serve, clock: MovableClock) -> None:
    async with serve(clock=clock) as served:
        client = served.client
        agent = await client.register()
        for _ in range(6):
            await create(client, maxRetries=0)
            await fail(client, agent)
        made = await create(client)
        assert await fail(client, agent) == made["id"], "still claimed"
        assert (await client.get("/v1/breakers")).json["items"] == []

        for _ in range(5):
            await client.submit("edit", max_attempts=1)
            await fail(client, agent)
        (breaker,) = (await client.get("/v1/breakers")).json["items"]
        assert (breaker["key"], breaker["state"]) == ("edit", "open"), "those of native tasks do"


async def test_a_type_with_a_configured_breaker_has_it(
    serve: Serve, clock: MovableClock, tmp_path: Path
) -> None:
    rules = tmp_path / "breakers.yaml"
    rules.write_text("overrides:\n  edit: {failureThreshold: 2}\n", encoding="utf-8")
    async with serve(clock=clock, circuit_breakers=rules) as served:
        client = served.client
        agent = await client.register()
        for _ in range(2):
            await create(client, maxRetries=0)
            await fail(client, agent)

        (breaker,) = (await client.get("/v1/breakers")).json["items"]
        assert (breaker["key"], breaker["state"]) == ("edit", "open")


async def test_a_failed_probe_keeps_the_breaker_open(serve: Serve, clock: MovableClock) -> None:
    """A breaker that native tasks opened is probed by whatever task is next: its result counts."""
    async with serve(clock=clock) as served:
        client = served.client
        agent = await client.register()
        await client.post("/v1/breakers/edit/open")
        await client.post("/v1/breakers/edit/reset")
        for _ in range(5):
            await client.submit("edit", max_attempts=1)
            await fail(client, agent)
        await create(client)
        clock.advance(61)
        await fail(client, agent)

        (breaker,) = (await client.get("/v1/breakers")).json["items"]
        assert (breaker["state"], breaker["probe_task_id"]) == ("open", None)


async def test_what_holds_a_task_back_is_said(client: Client) -> None:
    """A task behind an open breaker is QUEUED like any other; the reason and the way to more are shown."""
    await client.register()
    await client.post("/v1/breakers/edit/open")
    made = await create(client)
    other = await create(client, taskType="write")

    found = await look(client, made["id"])
    assert (found["state"], "breaker" in found["blockedReason"]) == ("QUEUED", True)
    assert found["why"] == f"/v1/tasks/{made['id']}/why"
    (reason, *_) = (await client.get(found["why"])).json["reasons"]
    assert found["blockedReason"] == reason["detail"]
    assert made["blockedReason"] == found["blockedReason"]
    assert other["blockedReason"] is None
    listed = {task["id"]: task["blockedReason"] for task in (await client.get("/api/tasks")).json}
    assert listed == {made["id"]: found["blockedReason"], other["id"]: None}
