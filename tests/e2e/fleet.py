"""Agents in their own process, over HTTP: `python -m tests.e2e.fleet URL AGENT…`.

They print what they are about to do, so that a test can kill them at that moment.
"""

import asyncio
import os
import sys
from typing import Any

from lineshaft import Agent, Fail, Lineshaft, NewTask, TaskContext


def announce(what: str) -> None:
    print(what, flush=True)  # noqa: T201


async def echo(ctx: TaskContext) -> dict[str, object]:
    return {"by": ctx.agent_id, "spec": ctx.spec, "inputs": ctx.inputs}


async def fragile(ctx: TaskContext) -> str:
    if ctx.spec["breaks"]:
        raise Fail("the service is down")
    return "it is back"


async def limited(ctx: TaskContext) -> str:
    if not ctx.resume:
        raise Fail("HTTP 429: Too Many Requests", retry_after_sec=0.5)
    return "served"


async def divide(ctx: TaskContext) -> list[object]:
    parts = [NewTask("echo", spec={"part": n}) for n in range(3)]
    children = await ctx.spawn("parts", parts, wait=True)
    return sorted(child.output["spec"]["part"] for child in children)


async def poison(ctx: TaskContext) -> None:
    announce(f"swallowed by {ctx.agent_id}")
    os._exit(9)


async def stuck(ctx: TaskContext) -> str:
    """Does half of its work, and then nothing more, unless it is a quick one."""
    if "quick" not in ctx.spec:
        await ctx.step("half", lambda: ctx.agent_id)
        announce("half done")
        try:
            await asyncio.Event().wait()
        finally:
            announce("stopped")
    return ctx.agent_id


HANDLERS: dict[str, dict[str, Any]] = {
    "worker": {"echo": echo, "fragile": fragile, "divide": divide},
    "limiter": {"limited": limited},
    "victim": {"poison": poison},
    "crasher": {"crash": stuck},
    "sleeper": {"frozen": stuck},
}


def employ(name: str) -> Agent:
    """`worker-1` is a worker. Others beat so often that they soon learn that a claim is over."""
    kind = name.partition("-")[0]
    interval = 30.0 if kind in {"worker", "limiter"} else 1.0
    agent = Agent(name, heartbeat_interval_sec=interval, models=[f"model of {name}"])
    for type_, handler in HANDLERS[kind].items():
        agent.task(type_)(handler)
    return agent


async def main() -> None:
    url, *names = sys.argv[1:]
    async with Lineshaft(url) as shaft, asyncio.TaskGroup() as running:
        for name in names:
            running.create_task(employ(name).run(shaft, handle_signals=False))


if __name__ == "__main__":
    asyncio.run(main())
