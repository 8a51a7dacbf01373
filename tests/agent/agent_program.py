"""An agent in its own process, for tests that kill or stop it: `python -m tests.agent.agent_program`.

It prints each point that it reaches. At `--wait-at` it waits until the file `--wait-for` appears, or forever.
"""

import argparse
import asyncio
import time
from pathlib import Path

from lineshaft import Agent, CandidateOutput, Checks, Lineshaft, TaskContext

#: In the order in which a task passes them.
POINTS = ("claimed", "in a step", "between steps", "in another step", "completing", "validating")


class Points:
    def __init__(
        self,
        log: Path,
        wait_at: str | None = None,
        wait_for: Path | None = None,
        *,
        blocks: bool = True,
    ) -> None:
        self._log = log
        self._wait_at = wait_at
        self._wait_for = wait_for
        self._blocks = blocks

    async def reach(self, point: str) -> None:
        if point == self._wait_at and self._wait_for is None:
            self._tell(point)
            await asyncio.Event().wait()
        if point == self._wait_at and self._wait_for is not None and not self._blocks:
            self._tell(point)
            while not self._wait_for.exists():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.01)
            return
        # On purpose: nothing else in this process goes on, but its heartbeats.
        self.stay(point)

    def stay(self, point: str) -> None:
        self._tell(point)
        while point == self._wait_at and (self._wait_for is None or not self._wait_for.exists()):
            time.sleep(0.01)

    def _tell(self, point: str) -> None:
        with self._log.open("a") as log:
            log.write(point + "\n")
        print(point, flush=True)  # noqa: T201


def make_agent(agent_id: str, points: Points, *, interval: float, grace: float) -> Agent:
    agent = Agent(agent_id, heartbeat_interval_sec=interval, grace_sec=grace, max_concurrent_tasks=1)

    @agent.task("work")
    async def work(ctx: TaskContext) -> dict[str, object]:
        await points.reach("claimed")

        async def pay(point: str, amount: int) -> int:
            await points.reach(point)
            ctx.spend(amount)
            return amount

        first = await ctx.step("first", pay, "in a step", 1)
        await points.reach("between steps")
        second = await ctx.step("second", pay, "in another step", 2)
        await points.reach("completing")
        return {"sum": first + second, "by": ctx.agent_id}

    @agent.task("scan")
    async def scan() -> list[str]:
        await points.reach("completing")
        return ["a", "b", "c"]

    @agent.task("review")
    async def review(item: str, index: int) -> str:
        return f"{index}: {item}"

    return agent


def make_checks(points: Points) -> Checks:
    """The gate `look`, which the agent runs itself."""
    checks = Checks()

    def look(_: object, __: CandidateOutput) -> bool:
        points.stay("validating")
        return True

    checks.register("look", look)
    return checks


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("where")
    parser.add_argument("log", type=Path)
    parser.add_argument("--wait-at")
    parser.add_argument("--wait-for", type=Path)
    parser.add_argument("--responsive", action="store_true", help="while it waits, the event loop runs")
    parser.add_argument("--interval", type=float, default=60)
    parser.add_argument("--grace", type=float, default=30)
    args = parser.parse_args()
    points = Points(args.log, args.wait_at, args.wait_for, blocks=not args.responsive)
    agent = make_agent("first", points, interval=args.interval, grace=args.grace)
    # A server has checks of its own.
    checks = None if args.where.startswith("http") else make_checks(points)
    async with Lineshaft(args.where, max_connections=3, checks=checks) as shaft:
        await agent.run(shaft)
    print("ended", flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
