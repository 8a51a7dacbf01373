"""What quotas cost: claims of work that they don't concern, and of work that they do; and releases.

Every figure is a ratio to a reference measured in the same run, in turns. `--json FILE` writes the figures as
a flat object, and `--quick` runs everything small to see that it works.
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg

from benchmarks.common import Report, alternate, fresh_database, progress, server
from lineshaft.engine.engine import Engine
from lineshaft.model.tasks import NewTask
from lineshaft.operations.quotas import SetQuota
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimRef, Completion

#: Many quotas at once, as people would have set them one by one.
MANY_QUOTAS = """
    INSERT INTO lineshaft.quota (name, match, max_running, changed_at)
    SELECT 'q' || n, CASE WHEN n %% 2 = 0 THEN 'type:other-' ELSE 'customer:' END || n, 1, now()
    FROM generate_series(1, %s) AS n
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    cycles: int = 400
    turns: int = 7
    many: tuple[int, ...] = (1, 100, 10_000)
    keys: int = 10_000
    parked: int = 100_000
    releases: int = 300


QUICK = Sizes(20, 1, (1, 100), 50, 500, 10)


async def cycles(engine: Engine, n: int, keys: tuple[str, ...] = ()) -> float:
    """Seconds of one task: a claim and a completion, each committed."""
    await engine.submission.submit([NewTask("noop", quota_keys=keys) for _ in range(n)])
    start = time.perf_counter()
    for _ in range(n):
        (task,) = (await engine.claims.claim("worker", 1, start=True)).tasks
        await engine.work.complete([Completion(ClaimRef(task.id, task.epoch), b"1")])
    return (time.perf_counter() - start) / n


async def opened(dsn: str, quotas: int = 0) -> Engine:
    engine = await Engine(dsn, max_connections=1).__aenter__()
    await engine.fleet.register(NewAgent(id="worker", max_concurrent_tasks=10_000))
    if quotas:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(MANY_QUOTAS.encode(), [quotas - 1])
        await engine.quotas.set(SetQuota(name="last", match="type:other", max_running=1))
    await cycles(engine, 10)
    return engine


async def bench_others(dsns: dict[int, str], sizes: Sizes, report: Report) -> None:
    """Quotas of other types and keys, against none."""
    plain = await opened(dsns[0])
    for n in sizes.many:
        limited = await opened(dsns[n], n)
        subject, reference = await alternate(
            partial(cycles, limited, sizes.cycles), partial(cycles, plain, sizes.cycles), sizes.turns
        )
        goal = "≤ 1.03" if n == 1 else "≤ 1.2"
        report.ratio(f"cycle_beside_{n}_quotas_ratio", subject * 1000, reference * 1000, goal, unit="ms")
        await limited.__aexit__(None, None, None)
    await plain.quotas.set(SetQuota(name="keys", match="key:*", max_running=100))
    subject, reference = await alternate(
        lambda: cycles(plain, sizes.cycles, ("key:1",)),
        lambda: cycles(plain, sizes.cycles),
        sizes.turns,
    )
    report.ratio("cycle_with_a_quota_ratio", subject * 1000, reference * 1000, "", unit="ms")
    await plain.__aexit__(None, None, None)


async def released(dsn: str, keys: int, tasks: int, releases: int) -> tuple[float, float]:
    """Seconds until all tasks of full keys are parked; and of a completion with the claim of what it woke."""
    engine = await opened(dsn)
    await engine.quotas.set(SetQuota(name="keys", match="key:*", max_running=1))
    for _ in range(0, tasks, 1_000):
        await engine.submission.submit(
            [NewTask("noop", quota_keys=(f"key:{n % keys}",)) for n in range(min(1_000, tasks))]
        )
    held = (await engine.claims.claim("worker", 1, limit=min(keys, 1_000), start=True)).tasks
    start = time.perf_counter()
    while claimed := (await engine.claims.claim("worker", 1, limit=1_000, start=True)).tasks:
        held += claimed
    parking = time.perf_counter() - start
    took = []
    for task in held[:releases]:
        begun = time.perf_counter()
        await engine.work.complete([Completion(ClaimRef(task.id, task.epoch), b"1")])
        await engine.claims.claim("worker", 1, start=True)
        took.append(time.perf_counter() - begun)
    await engine.__aexit__(None, None, None)
    return parking, statistics.median(took)


async def bench_release(few: str, many: str, sizes: Sizes, report: Report) -> None:
    """With many keys and parked tasks, against few."""
    _, reference = await released(few, 10, 1_000, min(sizes.releases, 10))
    parking, subject = await released(many, sizes.keys, sizes.parked, sizes.releases)
    report.figure("parks_all_sec", parking, "s")
    report.ratio("release_among_many_ratio", subject * 1000, reference * 1000, "≤ 1.5", unit="ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    args = parser.parse_args()
    sizes = QUICK if args.quick else Sizes()
    report = Report("quotas")
    with server() as running, progress(2) as step:
        names = {n: fresh_database(running, f"bench_quotas_{n}") for n in (0, *sizes.many)}
        step("claims beside quotas")
        asyncio.run(bench_others(names, sizes, report))
        step("releases")
        few, many = fresh_database(running, "bench_few"), fresh_database(running, "bench_many")
        asyncio.run(bench_release(few, many, sizes, report))
    report.show(args.json)


if __name__ == "__main__":
    main()
