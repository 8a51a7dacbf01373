"""One agent in its own process, of whatever version is on the path: `python worker.py WHERE NAME`.

It uses only what every version has. It prints a line when it is open, and one for each task that it starts,
so that a test can kill it in the middle of one.
"""

import asyncio
import logging
import sys

import lineshaft
from lineshaft import Agent, Fail, Lineshaft, NewTask, TaskContext


def say(what: str) -> None:
    print(what, flush=True)  # noqa: T201


async def work(ctx: TaskContext, number: int) -> int:
    async def step() -> int:
        await asyncio.sleep(0.03)
        return number

    say("work")
    await ctx.step("one", step)
    await ctx.step("two", step)
    return number


async def flaky(ctx: TaskContext) -> str:
    say("flaky")
    if not ctx.resume:
        raise Fail("not yet")
    return "now"


async def parent(ctx: TaskContext) -> int:
    say("parent")
    parts = [NewTask("work", spec={"number": number}) for number in range(3)]
    return len(await ctx.spawn("parts", parts, wait=True))


HANDLERS = (work, flaky, parent)


async def main() -> None:
    where, name = sys.argv[1:]
    logging.basicConfig(level=logging.ERROR)
    agent = Agent(name, heartbeat_interval_sec=1.0, max_concurrent_tasks=2)
    for handler in HANDLERS:
        agent.task(handler.__name__)(handler)
    async with Lineshaft(where, max_connections=3) as shaft:
        say(str(lineshaft.__file__))
        await agent.run(shaft)


if __name__ == "__main__":
    asyncio.run(main())
