"""An agent with a model and tools in its own process, for tests that kill it.

`python -m tests.integrations.pydantic_ai.durable_program WHERE LOG [STOP_AT]`. It writes the points that it
reaches to LOG, and prints them. At STOP_AT it stays forever.
"""

import asyncio
import sys
from pathlib import Path

from pydantic_ai import Agent as Model
from pydantic_ai import RunContext

from lineshaft import Agent, Lineshaft, TaskContext
from lineshaft.integrations.pydantic_ai import LineshaftDurability

#: In the order in which a task passes them; the tools of the first answer run at the same time.
POINTS = ("started", "look id1", "look id2", "write", "ended")


class Points:
    def __init__(self, log: Path, stop_at: str | None = None) -> None:
        self._log = log
        self._stop_at = stop_at

    async def reach(self, point: str) -> None:
        with self._log.open("a") as log:
            log.write(point + "\n")
        print(point, flush=True)  # noqa: T201
        if point == self._stop_at:
            await asyncio.Event().wait()


def make_agent(agent_id: str, points: Points) -> Agent:
    writer = Model("m", name="writer", capabilities=[LineshaftDurability()])
    agent = Agent(agent_id, max_concurrent_tasks=1)

    @writer.tool
    async def look(ctx: RunContext[object], where: str) -> str:
        await points.reach(f"look {ctx.tool_call_id}")
        return f"{where} as {ctx.tool_call_id} saw it"

    @writer.tool_plain
    async def write(text: str) -> str:
        await points.reach("write")
        return f"wrote {text}"

    @agent.task("work")
    async def work(_ctx: TaskContext) -> str:
        await points.reach("started")
        output = (await writer.run("Look twice, then write.")).output
        await points.reach("ended")
        return output

    return agent


async def main(where: str, log: str, stop_at: str | None = None) -> None:
    async with Lineshaft(where, max_connections=4) as shaft:
        await make_agent("first", Points(Path(log), stop_at)).run(shaft)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
