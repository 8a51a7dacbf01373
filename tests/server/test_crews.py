"""Calls of Lineshaft's own client: what a process with agents asks for beyond what its tests see."""

import asyncio

import psycopg

from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.lane_directory import LaneDirectory
from lineshaft.model.tasks import NewTask
from lineshaft.server.long_poll import DEPARTURE
from lineshaft.server.waiting_room import WaitingRoom
from lineshaft.types import NewAgent
from tests.server.conftest import Served, until

TYPES = ["code"]


async def test_what_was_claimed_for_a_client_that_has_left_goes_back(
    served: Served, dsn: str, connection: psycopg.Connection
) -> None:
    """Otherwise it would be RUNNING in nobody's hands, and its lease would cost it an attempt."""
    client = served.client
    agent, task = await client.register(), await client.submit()
    asked = {"agent_id": agent["id"], "incarnation": agent["incarnation"], "limit": 1, "types": TYPES}
    waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    released = "SELECT FROM lineshaft.events WHERE kind = 'task.released'"
    with psycopg.connect(dsn) as locking:
        locking.execute("SELECT FROM lineshaft.agent WHERE id = %s FOR UPDATE", [agent["id"]])
        _, writer = await client.send("POST", "/v1/crew/claim", asked)
        await until(lambda: connection.execute(waiting.encode()).fetchone() is not None)
        writer.transport.abort()
        # The server has noticed before the claim goes on.
        await until(lambda: DEPARTURE not in {task.get_name() for task in asyncio.all_tasks()})

    await until(lambda: connection.execute(released.encode()).fetchone() is not None)
    found = await client.task(task["id"])
    assert (found["status"], found["attempts"]) == ("READY", 0)


async def test_one_run_of_upkeep_serves_all_who_asked_before_it_began(served: Served) -> None:
    replies = await asyncio.gather(*(served.client.post("/v1/crew/upkeep", {}) for _ in range(20)))

    assert {reply.status for reply in replies} == {200}
    assert served.service.on_demand.runs < 20


async def test_a_wake_up_that_was_used_is_not_passed_around(engine: Engine) -> None:
    """Two idle agents would wake each other for ever."""
    await engine.submission.submit([NewTask("code")])  # so that the lane is known
    directory = LaneDirectory(engine.database)
    async with directory.wakeups as wakeups:
        await wakeups.wait_until(healthy=True)
        room = WaitingRoom(directory, wakeups, engine.fleet)
        agents = [await engine.fleet.register(NewAgent(id=name)) for name in ("a", "b")]
        never = asyncio.create_task(asyncio.Event().wait())
        departure: asyncio.Task[None] = never  # type: ignore[assignment]

        async def wait(number: int, seconds: float = 60) -> bool:
            agent = agents[number]
            return await room.wait(
                agent.id, agent.incarnation, types=frozenset(TYPES), seconds=seconds, departure=departure
            )

        # A new seat sends its agent to look.
        assert [await wait(0), await wait(1)] == [True, True]
        waits = [asyncio.create_task(wait(number)) for number in (0, 1)]
        await asyncio.sleep(0)
        await engine.submission.submit([NewTask("code")])
        done, _ = await asyncio.wait(waits, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        (woken,) = done
        assert woken.result()
        first = waits.index(woken)

        # It has looked, and waits again: nobody has a reason to look, also not the other one.
        assert await wait(first, 0.2) is False
        assert not waits[1 - first].done()

        # It leaves without having looked after it was woken: the other one does.
        again = asyncio.create_task(wait(first))
        await asyncio.sleep(0)
        room.leave(agents[1 - first].id, agents[1 - first].incarnation)
        assert await waits[1 - first] is False
        await engine.submission.submit([NewTask("code")])
        assert await asyncio.wait_for(again, 30)
        room.close()
        never.cancel()
        await directory.close()
