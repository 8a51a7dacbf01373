"""`make bench-single`: what one task costs, for agents that work one task at a time.

Every figure is a ratio to a reference measured in the same run, in turns. `--json FILE` writes the figures as
a flat object, `--quick` runs everything small to see that it works, and names choose parts.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg

from benchmarks.bare import BARE_CLAIM, BARE_TABLE
from benchmarks.common import Report, alternate, fresh_database, progress, server
from benchmarks.engine import tasks
from lineshaft import Agent, Lineshaft, NewTask
from lineshaft.engine.engine import Engine
from lineshaft.types import NewAgent
from lineshaft.types.work import HeldTask, Presence

PAYLOAD = '{"prompt": "x"}'
INSERT = "INSERT INTO public.bare VALUES (%s, %s, 50, %s, NULL, NULL, %s)"


@dataclass(frozen=True, slots=True)
class Sizes:
    chain: int = 200
    tasks: int = 1_000
    turns: int = 7
    heartbeats: int = 15


QUICK = Sizes(10, 20, 1, 2)


async def bench_chain(dsn: str, sizes: Sizes, report: Report) -> None:
    """A hop of a chain, from one handler's first line to the next one's, against plain SQL with NOTIFY."""
    agent = Agent("walker", max_concurrent_tasks=1)
    begun: list[float] = []

    @agent.task("hop")
    async def hop() -> None:
        begun.append(time.perf_counter())

    def between() -> float:
        times = [after - before for before, after in itertools.pairwise(begun)]
        begun.clear()
        return statistics.mean(times) * 1000

    async with Lineshaft(dsn) as shaft:

        async def ours() -> float:
            await shaft.submit_dag(
                "chain",
                [
                    NewTask("hop", key=str(n), depends_on=[str(n - 1)] if n else [])
                    for n in range(sizes.chain)
                ],
            )
            await agent.run(shaft, until_idle=True, handle_signals=False)
            return between()

        async def bare() -> float:
            await asyncio.to_thread(walk, dsn, sizes.chain, begun)
            return between()

        await ours()
        report.ratio("hop_ratio", *await alternate(ours, bare, sizes.turns), "≤ 1.0", unit="ms")


def walk(dsn: str, length: int, begun: list[float]) -> None:
    """A chain in plain SQL: delete the task, make the next one READY, notify; then hear it, and claim."""
    with psycopg.connect(dsn, autocommit=True) as writer, psycopg.connect(dsn, autocommit=True) as listener:
        writer.execute(BARE_TABLE.encode())
        for n in range(length):
            writer.execute(INSERT, [f"task_{n}", "READY" if n == 0 else "PENDING", n, PAYLOAD])
        listener.execute("LISTEN bare")
        ((task_id, _),) = writer.execute(BARE_CLAIM, [1]).fetchall()
        for n in range(length):
            begun.append(time.perf_counter())
            if n + 1 == length:
                break
            with writer.transaction(), writer.pipeline():
                writer.execute("DELETE FROM public.bare WHERE id = %s", [task_id])
                writer.execute("UPDATE public.bare SET status = 'READY' WHERE id = %s", [f"task_{n + 1}"])
                writer.execute("SELECT pg_notify('bare', '1')")
            for _ in listener.notifies(timeout=10, stop_after=1):
                pass
            ((task_id, _),) = writer.execute(BARE_CLAIM, [1]).fetchall()


async def bench_slot(dsn: str, sizes: Sizes, report: Report) -> None:
    """One agent with one slot, against claim and delete of one row at a time."""
    agent = Agent("single", max_concurrent_tasks=1)

    @agent.task("noop")
    async def noop() -> None: ...

    async with Lineshaft(dsn) as shaft, Engine(dsn, max_connections=1) as engine:

        async def ours() -> float:
            await engine.submission.submit(tasks(sizes.tasks))
            start = time.perf_counter()
            await agent.run(shaft, until_idle=True, handle_signals=False)
            return sizes.tasks / (time.perf_counter() - start)

        def cycles() -> float:
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(BARE_TABLE.encode())
                for n in range(sizes.tasks):
                    connection.execute(INSERT, [f"task_{n}", "READY", n, PAYLOAD])
                start = time.perf_counter()
                while claimed := connection.execute(BARE_CLAIM, [1]).fetchall():
                    connection.execute("DELETE FROM public.bare WHERE id = %s", [claimed[0][0]])
                return sizes.tasks / (time.perf_counter() - start)

        async def bare() -> float:
            return await asyncio.to_thread(cycles)

        await ours()
        report.ratio("slot_ratio", *await alternate(ours, bare, sizes.turns), "≥ 0.7", unit="tasks/s")


async def bench_submit(dsn: str, sizes: Sizes, report: Report) -> None:
    """One by one, each committed, against a bare INSERT with NOTIFY."""
    async with Lineshaft(dsn) as shaft:

        async def ours() -> float:
            start = time.perf_counter()
            for _ in range(sizes.tasks):
                await shaft.submit(NewTask("noop", spec={"prompt": "x"}))
            return sizes.tasks / (time.perf_counter() - start)

        def inserts() -> float:
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(BARE_TABLE.encode())
                start = time.perf_counter()
                for n in range(sizes.tasks):
                    with connection.transaction(), connection.pipeline():
                        connection.execute(INSERT, [f"task_{n}", "READY", n, PAYLOAD])
                        connection.execute("SELECT pg_notify('bare', '1')")
                return sizes.tasks / (time.perf_counter() - start)

        async def bare() -> float:
            return await asyncio.to_thread(inserts)

        await ours()
        report.ratio("submit_one_ratio", *await alternate(ours, bare, sizes.turns), "≥ 0.75", unit="tasks/s")


async def server_cpu(engine: Engine, work: Callable[[], Awaitable[object]], times: int) -> float:
    """Microseconds of CPU that the backend of the engine's only connection uses for one call."""
    async with engine.database.connection() as connection:
        pid = connection.info.backend_pid
    await work()
    before = _cpu_ticks(pid)
    for _ in range(times):
        await work()
    return (_cpu_ticks(pid) - before) / times


def _cpu_ticks(pid: int) -> float:
    """Exact: nanoseconds on the CPU, as the scheduler counts them."""
    on_cpu, *_ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    return int(on_cpu) / 1000


async def bench_empty(dsn: str, sizes: Sizes, report: Report) -> None:
    """The server's CPU for a claim that finds nothing, against SELECT 1 with a parameter."""
    async with Engine(dsn, max_connections=1) as engine:
        await engine.fleet.register(NewAgent(id="idle", types=("noop",)))

        async def select() -> None:
            async with engine.database.connection() as connection:
                await connection.execute("SELECT %s::integer", [1])

        async def claim() -> None:
            await engine.claims.claim("idle", 1, start=True)

        async def of(work: Callable[[], Awaitable[object]]) -> float:
            return await server_cpu(engine, work, sizes.tasks)

        figures = await alternate(lambda: of(claim), lambda: of(select), sizes.turns)
        report.ratio("empty_claim_ratio", *figures, "≤ 3", unit="µs")


async def bench_heartbeat(dsn: str, sizes: Sizes, report: Report) -> None:
    """The server's CPU for each task of a heartbeat with 1,000 tasks, against one with 100."""
    async with Engine(dsn, max_connections=1) as engine:
        await engine.fleet.register(NewAgent(id="busy", max_concurrent_tasks=1_000))
        await engine.submission.submit(tasks(1_000))
        claim = await engine.claims.claim("busy", 1, limit=1_000, start=True)
        holder = Presence("busy", 1)
        held = [HeldTask(task.id, task.epoch, holder) for task in claim.tasks]

        async def each(n: int) -> float:
            cpu = await server_cpu(
                engine, lambda: engine.work.heartbeat([holder], held[:n]), sizes.heartbeats
            )
            return cpu / n

        figures = await alternate(lambda: each(1_000), lambda: each(100), sizes.turns)
        report.ratio("heartbeat_growth", *figures, "≤ 1.1", unit="µs")


PARTS: dict[str, Callable[[str, Sizes, Report], Awaitable[None]]] = {
    "chain": bench_chain,
    "slot": bench_slot,
    "submit": bench_submit,
    "empty": bench_empty,
    "heartbeat": bench_heartbeat,
}


async def main(args: argparse.Namespace) -> None:
    sizes = QUICK if args.quick else Sizes()
    report = Report("One task at a time")
    chosen = args.parts or list(PARTS)
    with server() as running, progress(len(chosen)) as step:
        for name in chosen:
            step(name)
            await PARTS[name](fresh_database(running, f"bench_{name}"), sizes, report)
    report.show(args.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=" ".join(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    asyncio.run(main(parser.parse_args()))
