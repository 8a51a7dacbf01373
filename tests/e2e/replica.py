"""One replica of the agent `writer` in its own process: `python -m tests.e2e.replica WHERE`.

It prints a line for each task that it starts, so that a test can stop or kill it in the middle of one. A task
is a few steps, each of which costs a cent.
"""

import asyncio
import logging
import sys

from lineshaft import Agent, Lineshaft, TaskContext

BUDGET_USD, SLOTS = 0.10, 2
STEPS, STEP_SEC, STEP_USD = 3, 0.1, 0.01
#: Shorter than a task: one that is stopped at its beginning is handed back after its first step.
GRACE_SEC = 0.15


async def write(ctx: TaskContext, waits: bool = False) -> int:
    async def step(number: int) -> int:
        await asyncio.sleep(STEP_SEC)
        ctx.spend(STEP_USD)
        return number

    print("started", flush=True)  # noqa: T201
    if waits:
        await asyncio.Event().wait()
    return sum([await ctx.step(f"step-{number}", step, number) for number in range(STEPS)])


async def main() -> None:
    # Not that the budget has been raised since.
    logging.basicConfig(level=logging.ERROR)
    agent = Agent("writer", budget_usd=BUDGET_USD, max_concurrent_tasks=SLOTS, grace_sec=GRACE_SEC)
    agent.task("write")(write)
    async with Lineshaft(sys.argv[1], max_connections=3) as shaft:
        await agent.run(shaft)


if __name__ == "__main__":
    asyncio.run(main())
