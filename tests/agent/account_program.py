"""An agent with two accounts in its own process: `python -m tests.agent.account_program WHERE FOLDER`.

Its provider is a folder: a file with the name of an account has the instant at which its window ends.
"""

import asyncio
import sys
from datetime import datetime
from pathlib import Path

from lineshaft import Agent, Lineshaft, RateLimited, TaskContext

ACCOUNTS = ("team-1", "team-2")
SLOTS = 4


def make_agent(folder: Path) -> Agent:
    agent = Agent(
        "coder", accounts=ACCOUNTS, models=["opus"], max_concurrent_tasks=SLOTS, heartbeat_interval_sec=0.5
    )

    @agent.task("code")
    async def code(ctx: TaskContext) -> str:
        assert ctx.account is not None
        window = folder / ctx.account
        if window.exists():
            raise RateLimited("usage limit reached", retry_at=datetime.fromisoformat(window.read_text()))
        return ctx.account

    return agent


async def main(where: str, folder: Path) -> None:
    async with Lineshaft(where) as shaft:
        running = asyncio.create_task(make_agent(folder).run(shaft))
        print("started", flush=True)  # noqa: T201
        await running


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
