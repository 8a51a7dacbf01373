"""The event bus: everything that happens, in order, published by one server at a time."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import psycopg
import pytest

from lineshaft.duties.publisher import Publisher
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.event_stream import EventStream
from lineshaft.errors import UnavailableError
from lineshaft.integrations.redis.connection import RedisServer
from lineshaft.integrations.redis.stream import EVENTS, EventBus
from lineshaft.model.tasks import NewTask
from lineshaft.types import Event
from tests.valkey import Valkey, valkey_server
from tests.world import World


@pytest.fixture(scope="module")
def shared() -> Iterator[Valkey]:
    with valkey_server() as server:
        yield server


@pytest.fixture
async def bus(shared: Valkey) -> AsyncIterator[EventBus]:
    shared.flush()
    opened = EventBus(RedisServer(shared.url, timeout_sec=60))
    yield opened
    await opened.close()


def publisher(engine: Engine, bus: EventBus) -> Publisher:
    return Publisher(EventStream(engine.database, EVENTS), bus)


def entries(valkey: Valkey) -> list[dict[str, str]]:
    with valkey.client() as client:
        found: Any = client.xrange(EVENTS)
    return [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in found]


async def test_everything_that_happens_is_published_in_order(
    world: World, bus: EventBus, shared: Valkey
) -> None:
    publish = publisher(world.engine, bus)
    await publish.run_once()  # it begins here
    agent = await world.agent()
    (submitted,) = await world.engine.submission.submit([NewTask("a", title="First")])
    await publish.run_once()
    await world.complete(await world.take(agent), {"answer": 42})
    await publish.run_once()
    assert await publish.run_once() == {"published": 0}

    found = entries(shared)
    of_task = [entry for entry in found if entry.get("task_id") == submitted.id]
    assert [entry["kind"] for entry in of_task] == [
        *("task.created", "task.ready", "task.claimed", "task.started"),
        *("task.validating", "task.completed"),
    ]
    assert [int(entry["seq"]) for entry in found] == list(range(1, len(found) + 1))
    assert of_task[0]["title"] == "First"
    assert of_task[0]["type"] == "a"


async def test_two_servers_publish_each_event_once(world: World, bus: EventBus, shared: Valkey) -> None:
    servers = [publisher(world.engine, bus) for _ in range(3)]
    await servers[0].run_once()
    for _ in range(10):
        await world.engine.submission.submit([NewTask("a")])
        await asyncio.gather(*(server.run_once() for server in servers))
    for server in servers:
        await server.run_once()

    found = entries(shared)
    assert [int(entry["seq"]) for entry in found] == list(range(1, len(found) + 1))
    assert sum(entry["kind"] == "task.created" for entry in found) == 10


async def test_a_crash_repeats_a_batch_with_the_same_numbers(
    world: World, bus: EventBus, shared: Valkey, connection: psycopg.Connection
) -> None:
    """It published, and died before the place moved; in the meantime more happened."""
    publish = publisher(world.engine, bus)
    await publish.run_once()

    class CrashError(Exception):
        pass

    async def crash(seq: int, events: Sequence[Event]) -> None:
        await publish._publish(seq, events)
        raise CrashError

    late = connection.execute
    connection.execute("BEGIN")
    await world.engine.submission.submit([NewTask("a"), NewTask("a")])
    with pytest.raises(CrashError):
        await publish.stream.publish_next(crash, most=100)
    late("COMMIT")
    await world.engine.submission.submit([NewTask("b")])
    await publish.run_once()

    found = entries(shared)
    by_seq: dict[str, dict[str, str]] = {}
    for entry in found:
        assert by_seq.setdefault(entry["seq"], entry) == entry
    assert len(by_seq) < len(found), "a batch was repeated"
    assert sorted(map(int, by_seq)) == list(range(1, len(by_seq) + 1))
    assert sum(entry["kind"] == "task.created" for entry in by_seq.values()) == 3


async def test_nothing_is_lost_while_redis_is_away(world: World) -> None:
    with valkey_server() as valkey:
        bus = EventBus(RedisServer(valkey.url))
        publish = publisher(world.engine, bus)
        await publish.run_once()
        valkey.kill()
        await world.engine.submission.submit([NewTask("a")])
        with pytest.raises(UnavailableError):
            await publish.run_once()
        valkey.start()
        # On a busy machine its deadline may pass by chance.
        async with asyncio.timeout(60):
            while not entries(valkey):
                try:
                    await publish.run_once()
                except UnavailableError:
                    await asyncio.sleep(0.1)
        await bus.close()

        assert [entry["kind"] for entry in entries(valkey)][:2] == ["task.created", "task.ready"]
