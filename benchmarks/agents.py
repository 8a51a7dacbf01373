"""`make bench-agents`: the agent's loop against the engine it drives, and against the database alone.

Every figure but the idle one is a ratio to a reference measured in the same run, in turns. `--json FILE`
writes the figures as a flat object, `--quick` runs everything small to see that it works, and names
(`drain latency idle`) choose parts.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psycopg

from benchmarks.bare import BARE_CLAIM, BARE_TABLE
from benchmarks.common import Report, alternate, fresh_database, progress, server
from benchmarks.engine import drain, tasks
from lineshaft import Agent, Lineshaft, NewTask
from lineshaft.engine.engine import Engine
from lineshaft.types import NewAgent

BARE_SUBMIT = """
WITH submitted AS (
    INSERT INTO public.bare VALUES ('task_' || %s, 'READY', 50, 1, NULL, NULL, '{}')
)
SELECT pg_notify('bare', '1')
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    drain: int = 20_000
    turns: int = 5
    latencies: int = 500
    idle_agents: int = 200
    idle_sec: float = 60.0


QUICK = Sizes(400, 1, 20, 10, 1.0)
SLOTS = 200
BATCH = 100
#: Once for nothing: to connect and to prepare.
WARM_UP = 20
UNTIL_IDLE_SEC = 0.05


async def bench_drain(dsn: str, sizes: Sizes, report: Report) -> None:
    """No-op tasks by one agent of 200 slots, against claims and completions of 100 on one connection."""

    async def fill(engine: Engine) -> None:
        for part in range(0, sizes.drain, 10_000):
            await engine.submission.submit(tasks(min(10_000, sizes.drain - part)))

    agent = Agent("drainer", max_concurrent_tasks=SLOTS)

    @agent.task("noop")
    async def noop() -> dict[str, bool]:
        return {"ok": True}

    async with Lineshaft(dsn) as shaft, Engine(dsn, max_connections=1) as engine:
        await engine.fleet.register(NewAgent(id="engine", max_concurrent_tasks=10_000))

        async def agents() -> float:
            await fill(engine)
            start = time.perf_counter()
            await agent.run(shaft, until_idle=True, handle_signals=False)
            return sizes.drain / (time.perf_counter() - start)

        async def alone() -> float:
            await fill(engine)
            start = time.perf_counter()
            done = await drain(engine, "engine", 1, batch=BATCH)
            return done / (time.perf_counter() - start)

        # Once for nothing: to connect and to prepare.
        await alone()
        await agents()
        report.ratio("drain_ratio", *await alternate(agents, alone, sizes.turns), "≥ 0.6", unit="tasks/s")


async def bench_latency(dsn: str, sizes: Sizes, report: Report) -> None:
    """From a submission to its handler's first line, against insert, NOTIFY and claim by hand."""
    started = asyncio.Event()
    agent = Agent("idle")
    begun = 0.0

    @agent.task("noop")
    async def noop() -> None:
        nonlocal begun
        begun = time.perf_counter()
        started.set()

    ours: list[float] = []
    floor: list[float] = []
    async with Lineshaft(dsn) as submitter, Lineshaft(dsn) as shaft:
        with (
            psycopg.connect(dsn, autocommit=True) as writer,
            psycopg.connect(dsn, autocommit=True) as listener,
        ):
            writer.execute(BARE_TABLE.encode())
            listener.execute("LISTEN bare")
            running = asyncio.create_task(agent.run(shaft, handle_signals=False))

            async def submit() -> None:
                started.clear()
                begin = time.perf_counter()
                submitted = await submitter.submit(NewTask("noop"))
                await started.wait()
                ours.append((begun - begin) * 1000)
                await submitter.wait(submitted, 60)
                # Its outcome is written; it looks for more once, and is idle.
                await asyncio.sleep(UNTIL_IDLE_SEC)

            def pipelined() -> None:
                begin = time.perf_counter()
                writer.execute(BARE_SUBMIT, [str(time.perf_counter_ns())])
                for _ in listener.notifies(timeout=10, stop_after=1):
                    pass
                (claimed,) = listener.execute(BARE_CLAIM, [1]).fetchall()
                floor.append((time.perf_counter() - begin) * 1000)
                writer.execute("DELETE FROM public.bare WHERE id = %s", [claimed[0]])

            for n in range(WARM_UP + sizes.latencies):
                if n == WARM_UP:
                    ours.clear()
                    floor.clear()
                await submit()
                pipelined()
            agent.stop()
            await running
    for name, share, goal in (("p50", 50, "≤ 2"), ("p99", 99, "≤ 3")):
        subject, reference = (statistics.quantiles(times, n=100)[share - 1] for times in (ours, floor))
        report.ratio(f"latency_{name}_ratio", subject, reference, goal, unit="ms")


def idle_process(dsn: str, agents: int, seconds: float, answers: Connection) -> None:
    """Agents that wait; sends the share of a core that the whole process has used."""

    async def work() -> float:
        crew = [Agent(f"idle-{n}") for n in range(agents)]
        for agent in crew:

            @agent.task("nothing")
            async def handler() -> None: ...

        async with Lineshaft(dsn) as shaft:
            running = [asyncio.create_task(agent.run(shaft, handle_signals=False)) for agent in crew]
            async with Engine(dsn, max_connections=1) as engine:
                while len(await _registered(engine)) < agents:  # noqa: ASYNC110 - only the database knows
                    await asyncio.sleep(0.1)
            # Their first look for work is over by then.
            await asyncio.sleep(min(5.0, seconds))
            wall, used = time.perf_counter(), time.process_time()
            await asyncio.sleep(seconds)
            share = (time.process_time() - used) / (time.perf_counter() - wall)
            for agent in crew:
                agent.stop()
            await asyncio.gather(*running)
            return share

    answers.send(asyncio.run(work()))


async def _registered(engine: Engine) -> list[str]:
    async with engine.database.connection() as connection:
        cursor = await connection.execute("SELECT id FROM lineshaft.agent")
        return [row[0] for row in await cursor.fetchall()]


async def bench_idle(dsn: str, sizes: Sizes, report: Report) -> None:
    """What agents without work cost, heartbeats and upkeep included."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=idle_process, args=(dsn, sizes.idle_agents, sizes.idle_sec, theirs))
    process.start()
    theirs.close()
    share = await asyncio.to_thread(ours.recv)
    process.join()
    report.figure("idle_cpu_percent", 100 * share, "% of a core", "< 2")


async def main(args: argparse.Namespace) -> None:
    sizes = QUICK if args.quick else Sizes()
    report = Report("Lineshaft's agents against its engine and the database")
    chosen = set(args.parts) or {"drain", "latency", "idle"}
    with server() as running, progress(len(chosen)) as step:
        parts: list[tuple[str, Callable[[str, Sizes, Report], Awaitable[None]]]] = [
            ("drain", bench_drain),
            ("latency", bench_latency),
            ("idle", bench_idle),
        ]
        for name, part in parts:
            if name in chosen:
                step(name)
                await part(fresh_database(running, f"bench_{name}"), sizes, report)
    report.show(args.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="drain latency idle")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    asyncio.run(main(parser.parse_args()))
