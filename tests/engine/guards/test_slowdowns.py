"""Slow-downs: who signals one, whom it holds back, who hears of it, and how it ends (R-214, R-218)."""

from datetime import datetime, timedelta

import pytest

from lineshaft.engine.feed.wakeups import Wakeups
from lineshaft.engine.guards.slowdowns import RateLimited
from lineshaft.engine.heartbeats import Heartbeats
from lineshaft.errors import InvalidInputError, NotFoundError
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import Presence
from tests.world import World


async def in_force(world: World) -> dict[str, datetime]:
    return {item.key: item.until for item in (await world.engine.read.slowdowns()).items}


async def signal(world: World, wait: float, model: str | None = "m") -> None:
    """As a task that met a rate limit does, in the transaction of its own."""
    limit = RateLimited("ann", 1, model, wait, "429")
    async with world.engine.database.connection() as connection:
        await world.engine.slowdowns.signal_slowdowns(connection, [limit])


async def test_a_rate_limit_slows_others_for_half_the_wait(world: World) -> None:
    """R-214."""
    agent = await world.agent(models_available=("m",))
    await world.one()
    await world.fail(await world.take(agent), "429", retry_after_sec=60)

    assert await in_force(world) == {"model:m": world.clock.now() + timedelta(seconds=30)}
    events = world.rows("SELECT data FROM lineshaft.events WHERE kind = 'signal.slowdown'")
    assert [(row["data"]["key"], row["data"]["wait"]) for row in events] == [("model:m", 30)]


@pytest.mark.parametrize(
    ("key", "held_back"),
    [
        ("model:acme/large", ["large"]),
        ("provider:acme", ["large", "small"]),
        ("provider:acm", []),
        ("*", ["large", "small", "other", "none"]),
    ],
)
async def test_whom_a_broadcast_holds_back(world: World, key: str, held_back: list[str]) -> None:
    """R-218: users of the model or the provider, else all; what runs goes on."""
    models = {"large": "acme/large", "small": "acme/small", "other": "else/large"}
    agent = await world.agent(models_available=tuple(models.values()))
    bare = await world.agent()
    for type_, model in models.items():
        await world.one(type_, model_preferences=[model])
    await world.one("none")

    until = await world.engine.slowdowns.slow_down(key, 30, "they said so")

    assert until == world.clock.now() + timedelta(seconds=30)
    claims = await world.claims(agent, 9, types=list(models))
    found = {task.type for task in claims.tasks} | {
        task.type for task in await world.claim(bare, types=["none"])
    }
    assert sorted({*models, "none"} - found) == sorted(held_back)
    assert claims.slowdown_until == (until if held_back else None)
    world.age(seconds=30)
    assert {task.type for task in await world.claim(agent, 9)} | found == {*models, "none"}


async def test_why_names_a_provider_that_is_slowed_down(world: World) -> None:
    await world.agent(models_available=("acme/large",))
    task_id = await world.one(model_preferences=["acme/large"])
    await world.engine.slowdowns.slow_down("provider:acme", 30)

    (reason,) = (await world.engine.read.why(task_id)).reasons

    assert reason.code == "slowdown"
    assert "acme/large until 2026-02-08T09:00:30Z" in reason.detail


async def test_the_latest_signal_decides(world: World) -> None:
    """R-218: even when it is the shorter one."""
    await world.agent("ann")
    await signal(world, 100)
    world.age(seconds=10)
    await signal(world, 5)

    assert await in_force(world) == {"model:m": world.clock.now() + timedelta(seconds=5)}


async def test_an_older_signal_never_prolongs_a_newer_one(world: World) -> None:
    """R-218: it was given before, and arrives after."""
    await world.agent("ann")
    await signal(world, 5)
    newest = await in_force(world)
    world.connection.execute(
        "UPDATE lineshaft.slowdown SET signalled_at = signalled_at + interval '1 second'"
    )

    await signal(world, 1000)
    assert await world.engine.slowdowns.slow_down("model:m", 1000) is None

    assert await in_force(world) == newest
    assert len(world.rows("SELECT FROM lineshaft.events WHERE kind = 'signal.slowdown'")) == 1


async def test_a_slowdown_that_was_ended_stays_ended(world: World) -> None:
    """An older signal that arrives late doesn't bring it back; a new one does."""
    agent = await world.agent("ann", models_available=("m",))
    await world.one()
    await signal(world, 100)
    async with Wakeups(world.engine.database.dsn) as wakeups:
        with wakeups.waiter(None) as waiter:
            await waiter.wait(0)
            await world.engine.slowdowns.end("model:m")
            assert await waiter.wait(20)

    assert await in_force(world) == {}
    assert len(await world.claim(agent)) == 1
    world.connection.execute(
        "UPDATE lineshaft.slowdown SET signalled_at = signalled_at + interval '1 second'"
    )
    await signal(world, 100)
    assert await in_force(world) == {}
    world.age(seconds=2)
    await signal(world, 100)
    assert list(await in_force(world)) == ["model:m"]
    with pytest.raises(NotFoundError):
        await world.engine.slowdowns.end("model:other")


async def test_heartbeats_tell(world: World) -> None:
    """R-218: visible to agents, each for its own models."""
    for name, models in {"ann": ("m",), "bob": ("acme/x", "n"), "cid": ("z",)}.items():
        await world.agent(name, models_available=models)
    until = await world.engine.slowdowns.slow_down("model:m", 30)
    later = await world.engine.slowdowns.slow_down("provider:acme", 60)
    heartbeats = Heartbeats(world.engine.database.dsn, clock=world.clock)
    everybody = [Presence(name, 1) for name in ("ann", "bob", "cid")]
    try:
        answers = await heartbeats.beat(everybody, [], answer_within_sec=20)
        assert answers.slowdowns == {everybody[0]: until, everybody[1]: later}

        world.age(seconds=30)
        answers = await heartbeats.beat(everybody, [], answer_within_sec=20)
        assert answers.slowdowns == {everybody[1]: later}
    finally:
        await heartbeats.close()


@pytest.mark.parametrize(
    ("key", "wait"),
    [
        ("", 1),
        ("code", 1),
        ("model:", 1),
        ("model:a\0", 1),
        ("model:" + "x" * 500, 1),
        ("*", -1),
        ("*", float("nan")),
    ],
)
async def test_broadcasts_that_make_no_sense(world: World, key: str, wait: float) -> None:
    with pytest.raises(InvalidInputError, match="must be"):
        await world.engine.slowdowns.slow_down(key, wait)

    assert world.rows("SELECT FROM lineshaft.slowdown") == []


async def test_a_slow_down_never_costs_an_attempt(world: World) -> None:
    agent = await world.agent()
    task_id = await world.one()
    await world.engine.slowdowns.slow_down("*", 30)
    assert await world.claim(agent) == []

    assert (world.task(task_id)["status"], world.task(task_id)["attempts"]) == ("READY", 0)
    assert await world.submit(NewTask("more"))
