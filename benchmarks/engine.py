"""`make bench`: the engine against the floor: the plainest SQL with the same durability on the same server.

Every figure is a ratio to a reference measured in the same run, in turns; absolute times are this machine's.
`--json FILE` writes the figures as a flat object, `--quick` runs everything small to see that it works, and
names (`submit cycle …`) choose parts.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psycopg

from benchmarks.bare import BARE_CLAIM, BARE_TABLE
from benchmarks.common import Report, alternate, fresh_database, progress, seconds_async, server
from lineshaft.engine.engine import Engine
from lineshaft.model.tasks import NewTask
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimedTask, ClaimRef, Completion, Release

#: About what a prompt's description takes; the floor's rows are as wide.
PAYLOAD = "x" * 260
OUTPUT = b'{"ok":true}'

FILL_TASKS = """
INSERT INTO lineshaft.task (id, dag_id, type, title, spec)
SELECT 'task_f' || lpad(i::text, 25, '0'), 'dag_f' || lpad(i::text, 25, '0'), 'lane' || 1 + mod(i, %(lanes)s),
    't', '{"prompt": "x"}'
FROM generate_series(1, %(n)s) AS i
"""
FILL_LIVE = """
INSERT INTO lineshaft.task_live (id, status, lane_id, rank, ready_at, generation)
SELECT task.id, 'READY', lane.id, lineshaft.rank(50::smallint, 0::smallint, 0.1, now(), NULL, now()), now(),
    (SELECT last_value FROM lineshaft.generation_no)
FROM lineshaft.task JOIN lineshaft.lane ON lane.type = task.type
"""
FILL_REPLICAS = """
INSERT INTO lineshaft.instance
    (agent_id, incarnation, name, max_concurrent_tasks, registered_at, last_heartbeat)
SELECT 'one', i, 'process-' || i, 3, now(), now() FROM generate_series(2, %(n)s) AS i
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    submit: int = 20
    cycle: int = 10_000
    depth: int = 1_000_000
    shallow: int = 1_000
    lanes: int = 200
    waiters: int = 10_000
    claims: int = 60
    sustained: int = 300_000
    fanout: int = 9_998
    chain: int = 500
    big: int = 10_000
    replicas: int = 1_000


QUICK = Sizes(2, 400, 2_000, 200, 20, 200, 5, 3_000, 200, 20, 200, 20)


def tasks(n: int, type_: str = "noop") -> list[NewTask]:
    return [NewTask(type_, spec={"prompt": PAYLOAD, "n": i}) for i in range(n)]


def completions(claimed: Sequence[ClaimedTask]) -> list[Completion]:
    return [Completion(ClaimRef(task.id, task.epoch), OUTPUT) for task in claimed]


async def drain(
    engine: Engine, agent: str, incarnation: int, batch: int = 100, most: float = float("inf")
) -> int:
    done = 0
    while done < most and (
        claimed := (await engine.claims.claim(agent, incarnation, limit=batch, start=True)).tasks
    ):
        await engine.work.complete(completions(claimed))
        done += len(claimed)
    return done


def fill_bare(connection: psycopg.Connection, n: int) -> None:
    connection.execute(BARE_TABLE.encode())
    connection.execute(
        "INSERT INTO public.bare SELECT 'task_' || lpad(i::text, 26, '0'), 'READY', 50, i, NULL, NULL,"
        " jsonb_build_object('prompt', repeat('x', 260), 'n', i) FROM generate_series(1, %s) AS i",
        [n],
    )


def drain_bare(connection: psycopg.Connection, batch: int = 100) -> int:
    done = 0
    while rows := connection.execute(BARE_CLAIM, [batch]).fetchall():
        connection.execute("DELETE FROM public.bare WHERE id = ANY (%s)", [[row[0] for row in rows]])
        done += len(rows)
    return done


def work_until_told(dsn: str, agent: str, orders: Connection) -> None:
    """A process that drains on demand, with its connection made and its statements prepared beforehand."""

    async def work() -> None:
        async with Engine(dsn, max_connections=1) as engine:
            with psycopg.connect(dsn, autocommit=True) as connection:
                while (order := orders.recv()) != "stop":
                    orders.send(await drain(engine, agent, 1) if order == "ours" else drain_bare(connection))

    asyncio.run(work())


@contextmanager
def two_workers(dsn: str) -> Iterator[Callable[[str], float]]:
    """Return a function that lets both drain the queue, and returns their tasks per second together."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    processes = []
    for agent in ("one", "two"):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=work_until_told, args=(dsn, agent, theirs)))
        processes[-1].start()
        pipes.append(ours)

    def drain_both(order: str) -> float:
        start = time.perf_counter()
        for pipe in pipes:
            pipe.send(order)
        done = sum(pipe.recv() for pipe in pipes)
        return float(done / (time.perf_counter() - start))

    try:
        yield drain_both
    finally:
        for pipe in pipes:
            pipe.send("stop")
        for process in processes:
            process.join()


async def bench_submit(dsn: str, sizes: Sizes, report: Report) -> None:
    """Batches of 1,000 against COPY of rows of the same size into one table with two indexes."""
    async with Engine(dsn) as engine:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(BARE_TABLE.encode())
            number = 0

            async def copy() -> float:
                nonlocal number
                start = time.perf_counter()
                for _ in range(sizes.submit):
                    with (
                        connection.transaction(),
                        connection.cursor().copy(
                            "COPY public.bare (id, status, rank, no, payload) FROM STDIN"
                        ) as copied,
                    ):
                        for _ in range(1000):
                            number += 1
                            payload = json.dumps({"prompt": PAYLOAD, "n": number})
                            copied.write_row((f"task_{number:026d}", "READY", 50.0, number, payload))
                return sizes.submit * 1000 / (time.perf_counter() - start)

            async def submit() -> float:
                start = time.perf_counter()
                for _ in range(sizes.submit):
                    await engine.submission.submit(tasks(1000))
                return sizes.submit * 1000 / (time.perf_counter() - start)

            await submit()
            report.ratio("submit_ratio", *await alternate(submit, copy), "≥ 0.35", unit="tasks/s")


async def bench_cycle(dsn: str, sizes: Sizes, report: Report) -> None:
    """Claim, start and complete 100 at a time over two connections, against the bare cycle in two commits."""
    async with Engine(dsn) as engine:
        for agent in ("one", "two"):
            await engine.fleet.register(NewAgent(id=agent, max_concurrent_tasks=10_000))
        with two_workers(dsn) as drain_both, psycopg.connect(dsn, autocommit=True) as connection:

            async def ours() -> float:
                for _ in range(-(-sizes.cycle // 10_000)):
                    await engine.submission.submit(tasks(min(sizes.cycle, 10_000)))
                connection.execute("CHECKPOINT")
                return drain_both("ours")

            async def bare() -> float:
                fill_bare(connection, sizes.cycle)
                connection.execute("CHECKPOINT")
                return drain_both("bare")

            # Once for nothing: to connect and to prepare.
            await bare()
            await ours()
            report.ratio("cycle_ratio", *await alternate(ours, bare), "≥ 0.55", unit="tasks/s")


async def median_claim(engine: Engine, agent: str, claims: int) -> float:
    """Milliseconds of a claim of ten, which is handed back each time."""
    times = []
    for _ in range(claims):
        start = time.perf_counter()
        claimed = (await engine.claims.claim(agent, 1, limit=10)).tasks
        times.append((time.perf_counter() - start) * 1000)
        await engine.work.release([Release(ClaimRef(task.id, task.epoch)) for task in claimed])
    return statistics.median(times)


def fill_lanes(dsn: str, n: int, lanes: int) -> None:
    """READY tasks in many lanes, written by plain SQL: a million by the API would take a minute more."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO lineshaft.lane (type, required_capabilities, models, boost_per_minute)"
            " SELECT 'lane' || i, '{}', '{}', 0.1 FROM generate_series(1, %s) AS i ON CONFLICT DO NOTHING",
            [lanes],
        )
        connection.execute(FILL_TASKS, {"lanes": lanes, "n": n})
        connection.execute(FILL_LIVE)
        connection.execute("VACUUM ANALYZE lineshaft.task_live")


async def bench_depth(dsn: str, deep_dsn: str, sizes: Sizes, report: Report) -> None:
    """A claim of ten with a million READY tasks in 200 lanes, against the same with a thousand."""
    fill_lanes(dsn, sizes.shallow, sizes.lanes)
    fill_lanes(deep_dsn, sizes.depth, sizes.lanes)
    async with Engine(dsn) as shallow, Engine(deep_dsn) as deep:
        for engine in (shallow, deep):
            await engine.fleet.register(NewAgent(id="claimer", max_concurrent_tasks=100))
            await median_claim(engine, "claimer", 3)
        subject, reference = await alternate(
            lambda: median_claim(deep, "claimer", sizes.claims // 5),
            lambda: median_claim(shallow, "claimer", sizes.claims // 5),
        )
        report.ratio("claim_depth_ratio", subject, reference, "≤ 1.5", unit="ms")


async def bench_lock(dsn: str, sizes: Sizes, report: Report) -> None:
    """A claim of ten with ten thousand tasks waiting for one document lock, against none waiting."""
    async with Engine(dsn) as engine:
        await engine.fleet.register(NewAgent(id="claimer", max_concurrent_tasks=100))
        await engine.submission.submit(tasks(200))
        reference = await median_claim(engine, "claimer", sizes.claims)
        await engine.submission.submit([NewTask("noop", lock_key="doc:1", priority=1)])
        (holder,) = (await engine.claims.claim("claimer", 1, limit=1)).tasks
        await engine.submission.submit(
            [NewTask("noop", lock_key="doc:1", priority=1) for _ in range(sizes.waiters)]
        )
        first = time.perf_counter()
        claimed = (await engine.claims.claim("claimer", 1, limit=10)).tasks
        report.figure("claim_that_parks_sec", time.perf_counter() - first, "s")
        await engine.work.release([Release(ClaimRef(task.id, task.epoch)) for task in claimed])
        subject = await median_claim(engine, "claimer", sizes.claims)
        report.ratio("claim_lock_ratio", subject, reference, "≤ 1.5", unit="ms")
        await engine.work.release([Release(ClaimRef(holder.id, holder.epoch))])


async def sustained(dsn: str, total: int, step: Callable[[str], None], *, pinned: bool) -> float:
    """Submit 1,000, drain 1,000, again and again: the rate of the last tenth over the second tenth."""
    pin = psycopg.connect(dsn)
    if pinned:
        pin.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        pin.execute("SELECT count(*) FROM lineshaft.task_live")
    rates = []
    rounds = max(total // 10 // 1000, 1)
    async with Engine(dsn, max_connections=2) as engine:
        await engine.fleet.register(NewAgent(id="steady", max_concurrent_tasks=10_000))
        for tenth in range(10):
            step(f"{'pinned' if pinned else 'sustained'} {tenth + 1}/10")
            start = time.perf_counter()
            for _ in range(rounds):
                await engine.submission.submit(tasks(total // 10 // rounds))
                await drain(engine, "steady", 1)
            rates.append(total / 10 / (time.perf_counter() - start))
    pin.rollback()
    pin.close()
    return rates[9] / rates[1]


async def bench_fanout(dsn: str, sizes: Sizes, report: Report) -> None:
    """A fan-out and a join against as many independent tasks; and a chain, hop by hop."""
    async with Engine(dsn) as engine:
        await engine.fleet.register(NewAgent(id="worker", max_concurrent_tasks=10_000))

        async def fan() -> float:
            keys = [str(i) for i in range(sizes.fanout)]
            leaves = [NewTask("noop", key=key, depends_on=["root"]) for key in keys]
            dag = [NewTask("noop", key="root"), *leaves, NewTask("noop", key="join", depends_on=keys)]
            start = time.perf_counter()
            await engine.submission.submit_dag("fan", dag)
            done = await drain(engine, "worker", 1)
            return (time.perf_counter() - start) / done * 1000

        async def flat() -> float:
            start = time.perf_counter()
            await engine.submission.submit(tasks(sizes.fanout))
            done = await drain(engine, "worker", 1)
            return (time.perf_counter() - start) / done * 1000

        report.ratio("fanout_ratio", *await alternate(fan, flat, 3), "≤ 1.5", unit="ms/task")
        chain = [
            NewTask("noop", key=str(i), depends_on=[str(i - 1)] if i else []) for i in range(sizes.chain)
        ]
        await engine.submission.submit_dag("chain", chain)
        hop = await seconds_async(lambda: drain(engine, "worker", 1, batch=1)) / sizes.chain * 1000
        with psycopg.connect(dsn, autocommit=True) as connection:
            start = time.perf_counter()
            for _ in range(200):
                connection.execute(
                    "UPDATE lineshaft.instance SET last_heartbeat = now() WHERE agent_id = 'worker'"
                )
            trip = (time.perf_counter() - start) / 200 * 1000
        report.ratio("chain_hop_commits", hop, trip, "", unit="ms")
    async with Engine(dsn, max_connections=1) as engine:
        await engine.submission.submit_dag("chain", chain[:20])
        await drain(engine, "worker", 1, batch=1)
        await engine.submission.submit_dag("chain", chain)
        trips = await round_trips(engine, lambda: drain(engine, "worker", 1, batch=1, most=sizes.chain))
        report.figure("chain_hop_round_trips", trips / sizes.chain, "round trips a hop", "≤ 3")


async def round_trips(engine: Engine, work: Callable[[], Awaitable[object]]) -> int:
    """How often the client waited for the server, counted in what libpq says it sent (F) and got (B)."""
    with tempfile.TemporaryFile() as file:
        async with engine.database.connection() as connection:
            connection.pgconn.trace(file.fileno())
        await work()
        async with engine.database.connection() as connection:
            connection.pgconn.untrace()
        file.seek(0)
        sides = [line.split(b"\t")[1] for line in file if line.count(b"\t") > 1]
    return sum(before == b"F" and after == b"B" for before, after in itertools.pairwise(sides))


async def bench_big(dsn: str, sizes: Sizes, report: Report) -> None:
    """The largest single operations, in seconds."""
    async with Engine(dsn) as engine:
        await engine.fleet.register(NewAgent(id="worker", max_concurrent_tasks=10_000))
        n = sizes.big - 2
        await engine.submission.submit_dag(
            "wide", [NewTask("root", key="root"), *(NewTask("leaf", depends_on=["root"]) for _ in range(n))]
        )
        (root,) = (await engine.claims.claim("worker", 1, limit=1, types=["root"], start=True)).tasks
        report.figure(
            "complete_with_dependents_sec",
            await seconds_async(lambda: engine.work.complete(completions([root]))),
            "s",
        )
        await engine.submission.submit([NewTask("extra")])
        again = await engine.submission.submit_dag(
            "cancelled",
            [NewTask("root2", key="root"), *(NewTask("leaf2", depends_on=["root"]) for _ in range(n))],
        )
        report.figure(
            "cancel_dag_sec",
            await seconds_async(lambda: engine.cancel.cancel(again.tasks["root"].id, "bench")),
            "s",
        )
        meshed = [
            NewTask("mesh", key=str(i), depends_on=[str(i - d) for d in range(1, 6) if i >= d])
            for i in range(sizes.big)
        ]
        report.figure(
            "submit_meshed_dag_sec",
            await seconds_async(lambda: engine.submission.submit_dag("mesh", meshed)),
            "s",
        )


async def bench_replicas(dsn: str, sizes: Sizes, report: Report) -> None:
    """Claims of one task by 1,000 instances of one agent, all at once, against those of 1,000 agents."""
    async with Engine(dsn, max_connections=20) as engine:
        replicas = [("one", i + 1) for i in range(sizes.replicas)]
        agents = [(f"agent-{i}", 1) for i in range(sizes.replicas)]
        for agent, incarnation in (replicas[0], *agents):
            await engine.fleet.register(NewAgent(id=agent, instance=f"process-{incarnation}"))
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(FILL_REPLICAS, {"n": sizes.replicas})

        async def rate(claimers: Sequence[tuple[str, int]]) -> float:
            await engine.submission.submit(tasks(len(claimers)))
            start = time.perf_counter()
            found = await asyncio.gather(
                *(
                    engine.claims.claim(agent, incarnation, limit=1, start=True)
                    for agent, incarnation in claimers
                )
            )
            taken = time.perf_counter() - start
            await engine.work.complete(completions([task for each in found for task in each.tasks]))
            return len(claimers) / taken

        # Once for nothing: to connect and to prepare.
        await rate(agents)
        await rate(replicas)
        subject, reference = await alternate(lambda: rate(replicas), lambda: rate(agents), 9)
        report.ratio("replicas_ratio", subject, reference, "≥ 0.9", unit="claims/s")


async def main(args: argparse.Namespace) -> None:
    sizes = QUICK if args.quick else Sizes()
    report = Report("Lineshaft's engine against the floor")
    chosen = set(args.parts) or {
        "submit",
        "cycle",
        "depth",
        "lock",
        "sustained",
        "pinned",
        "fanout",
        "big",
        "replicas",
    }
    with server() as running, progress(len(chosen) + 20) as step:

        def database(name: str) -> str:
            return fresh_database(running, f"bench_{name}")

        parts: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("submit", lambda: bench_submit(database("submit"), sizes, report)),
            ("cycle", lambda: bench_cycle(database("cycle"), sizes, report)),
            ("lock", lambda: bench_lock(database("lock"), sizes, report)),
            ("fanout", lambda: bench_fanout(database("fanout"), sizes, report)),
            ("big", lambda: bench_big(database("big"), sizes, report)),
            ("replicas", lambda: bench_replicas(database("replicas"), sizes, report)),
            ("depth", lambda: bench_depth(database("shallow"), database("deep"), sizes, report)),
        ]
        for name, part in parts:
            if name in chosen:
                step(name)
                await part()
        for name, goal in (("sustained", "≥ 0.85"), ("pinned", "≥ 0.75")):
            if name in chosen:
                ratio = await sustained(database(name), sizes.sustained, step, pinned=name == "pinned")
                report.figure(f"{name}_ratio", ratio, "last tenth / second tenth", goal)
    report.show(args.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts", nargs="*", help="submit cycle depth lock sustained pinned fanout big replicas"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    asyncio.run(main(parser.parse_args()))
