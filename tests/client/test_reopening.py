"""Opening a client again after it was closed, each time in a new event loop."""

import asyncio

from lineshaft import Agent, Lineshaft, NewTask, Snooze, TaskContext
from lineshaft.model.states import Status
from tests.agent.helpers import PATIENCE, at_work, ended
from tests.client.helpers import engine_beside, engine_of, finish_all


def test_waiting_continues_until_the_end(where: str, dsn: str) -> None:
    shaft = Lineshaft(where, max_connections=2)

    async def wait() -> Status:
        async with shaft, engine_beside(shaft, dsn):
            done = await shaft.submit(NewTask("done"))
            await finish_all(engine_of(shaft))
            task = await shaft.submit(NewTask("t"))
            waiting = asyncio.create_task(shaft.wait(task, PATIENCE))
            # One look is for both of them: when this one returns, the other was not found ended.
            await shaft.wait(done, PATIENCE)
            await finish_all(engine_of(shaft))
            # More at once than there are connections.
            await asyncio.gather(*(shaft.get(done) for _ in range(5)))
            return (await waiting).status

    assert [asyncio.run(wait()) for _ in range(2)] == [Status.COMPLETED] * 2


def test_postponed_tasks_come_back(where: str) -> None:
    shaft = Lineshaft(where, max_connections=3)

    async def work() -> Status:
        agents = [Agent(name) for name in "abc"]
        for agent in agents:

            @agent.task("t")
            async def handler(ctx: TaskContext) -> Snooze | None:
                return None if ctx.resume else Snooze(0.01)

        async with shaft, at_work(*agents, shaft=shaft):
            return (await ended(shaft, (await shaft.submit(NewTask("t"))).id)).status

    assert [asyncio.run(work()) for _ in range(2)] == [Status.COMPLETED] * 2
