"""One agent of the demo as a process: `python -m lineshaft.cli.demo_agents NAME`.

The agents simulate LLM calls that take a fraction of a second and cost a few cents. Each has a failure: the
first researcher is killed in the middle of its work, the designer is rate limited, the coder returns an
invalid output once, and the deploy key of the operator has expired.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from lineshaft import Agent, Fail, Lineshaft, TaskContext

MODEL = "demo-model"
_THINKING_SEC = 0.4


async def think(ctx: TaskContext, result: Any, usd: float) -> Any:
    """Simulate an LLM call: it takes time and costs money."""
    await asyncio.sleep(_THINKING_SEC)
    ctx.spend(usd, tokens_input=900, tokens_output=250)
    return result


async def research(ctx: TaskContext, prompt: str) -> dict[str, Any]:
    found = await ctx.step("search the web", think, ctx, ["one.example", "two.example"], 0.02)
    if ctx.epoch == 1:
        # The machine goes down without cleaning up. The next attempt finds the search done and paid for.
        os.kill(os.getpid(), signal.SIGKILL)
    return {"about": prompt, "competitors": await ctx.step("read them", think, ctx, found, 0.03)}


async def design(ctx: TaskContext) -> dict[str, Any]:
    if not ctx.previous_attempts:
        raise RuntimeError("HTTP 429 Too Many Requests, retry-after: 1")
    return {"wireframe": await ctx.step("draw", think, ctx, "hero, three columns, footer", 0.04)}


async def implement(ctx: TaskContext) -> dict[str, Any]:
    if ctx.last_error is None:
        return {"page": await ctx.step("write", think, ctx, "<html>…</html>", 0.05)}
    # The error of the first attempt is part of the prompt of the second one.
    return {"html": await ctx.step("write again", think, ctx, "<html>…</html>", 0.05)}


async def synthesize(ctx: TaskContext) -> dict[str, Any]:
    ctx.progress({"percent": 50})
    return {"requirements": await ctx.step("merge", think, ctx, ["fast", "clear", "one page"], 0.02)}


async def deploy(ctx: TaskContext) -> dict[str, Any]:
    if not ctx.previous_attempts:
        raise Fail("The deploy key has expired", "auth_failure")
    await asyncio.sleep(_THINKING_SEC)
    return {"url": "https://client-x.example"}


HANDLERS: dict[str, Callable[..., Any]] = {
    "research": research,
    "design": design,
    "implement": implement,
    "synthesize": synthesize,
    "deploy": deploy,
}
#: Two researchers: one of them is killed.
FLEET = {
    "researcher-1": ["research", "synthesize"],
    "researcher-2": ["research", "synthesize"],
    "designer": ["design"],
    "coder": ["implement"],
    "operator": ["deploy"],
}


async def main(name: str) -> None:
    agent = Agent(
        name,
        models=[MODEL],
        max_concurrent_tasks=2,
        budget_usd=5,
        heartbeat_interval_sec=0.5,
        poll_interval_sec=1,
        grace_sec=1,
    )
    for task_type in FLEET[name]:
        agent.task(task_type)(HANDLERS[task_type])
    async with Lineshaft() as shaft:
        await agent.run(shaft)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
