"""`make bench-footprint`: what a task costs: CPU of server and client, WAL, rows, and room on the disk.

Bytes and rows are the same on any machine; CPU is this machine's. `--json FILE` writes the figures as a flat
object; `--tasks N` is how many standalone tasks go through (20,000). With `--finished N` and `--waiting N`
the tables hold so many tasks before: the figures should stay what they are without.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psycopg

from benchmarks.common import Report, fresh_database, progress, server
from benchmarks.engine import completions, tasks
from lineshaft.engine.engine import Engine
from lineshaft.types import NewAgent

BATCH = 100
#: What is measured, and not what waits beside it.
OWN = ["noop"]
#: What stays of a finished task.
KEPT = ("task", "task_end", "event")
SIZES = """
SELECT
    coalesce(parent.relname, kept.relname) AS name,
    sum(pg_table_size(kept.oid))::bigint AS heap, sum(pg_indexes_size(kept.oid))::bigint AS indexes
FROM pg_class AS kept
LEFT JOIN pg_inherits ON pg_inherits.inhrelid = kept.oid
LEFT JOIN pg_class AS parent ON parent.oid = pg_inherits.inhparent
WHERE kept.relnamespace = 'lineshaft'::regnamespace AND kept.relkind = 'r'
GROUP BY 1
"""

#: A finished task leaves a row in each table, and three events; a READY one waits in one of 200 lanes.
FILL = """
INSERT INTO lineshaft.lane (type, required_capabilities, models, boost_per_minute)
SELECT 'lane' || i, '{{}}', '{{}}', 0.1 FROM generate_series(1, 200) AS i;
INSERT INTO lineshaft.task (id, dag_id, type, title, spec)
SELECT
    'task_0' || lpad(i::text, 25, '0'), 'dag_0' || lpad(i::text, 25, '0'), 'lane' || 1 + mod(i, 200), 't',
    jsonb_build_object('prompt', repeat('x', 260), 'n', i)
FROM generate_series(1, {finished} + {waiting}) AS i;
INSERT INTO lineshaft.task_end (id, status, ended_at, ready_at, claimed_at, started_at, epoch, output)
SELECT 'task_0' || lpad(i::text, 25, '0'), 'COMPLETED', now(), now(), now(), now(), 1, '{{"ok": true}}'
FROM generate_series(1, {finished}) AS i;
INSERT INTO lineshaft.event (kinds, task_id, agent_id, epoch)
SELECT kinds::text[], 'task_0' || lpad(i::text, 25, '0'), 'one', 1
FROM generate_series(1, {finished}) AS i, unnest(ARRAY[
    '{{task.created,task.ready}}', '{{task.claimed,task.started}}', '{{task.validating,task.completed}}'
]) AS kinds;
INSERT INTO lineshaft.task_live (id, status, lane_id, rank, ready_at, generation)
SELECT
    'task_0' || lpad(i::text, 25, '0'), 'READY', lane.id,
    lineshaft.rank(50::smallint, 0::smallint, 0.1, now(), NULL, now()), now(),
    (SELECT last_value FROM lineshaft.generation_no)
FROM generate_series({finished} + 1, {finished} + {waiting}) AS i
JOIN lineshaft.lane ON lane.type = 'lane' || 1 + mod(i, 200);
"""


def cpu_seconds(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


class Meter:
    """CPU and WAL of one phase."""

    def __init__(self, look: psycopg.Connection, pid: int, report: Report, n: int) -> None:
        self._look, self._pid, self._report, self._n = look, pid, report, n

    async def measure(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        # What a checkpoint makes the WAL repeat is counted too, if one falls into the phase.
        wal, server_cpu, client_cpu = self._wal(), cpu_seconds(self._pid), time.process_time()
        await work()
        self._report.figure(f"{name}_wal_bytes", (self._wal() - wal) / self._n, "bytes/task")
        self._report.figure(
            f"{name}_server_us", (cpu_seconds(self._pid) - server_cpu) / self._n * 1e6, "µs/task"
        )
        self._report.figure(
            f"{name}_client_us", (time.process_time() - client_cpu) / self._n * 1e6, "µs/task"
        )

    def _wal(self) -> int:
        ((position,),) = self._look.execute(
            "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"
        ).fetchall()
        return int(position)


async def measure(dsn: str, n: int, report: Report, step: Callable[[str], None]) -> None:
    async with Engine(dsn, max_connections=1) as engine:
        await engine.fleet.register(NewAgent(id="one", max_concurrent_tasks=10_000))
        async with engine.database.connection() as own:
            pid = own.info.backend_pid
        # Everything is prepared, and the first pages of everything are there.
        await engine.submission.submit(tasks(1000))
        claimed = (await engine.claims.claim("one", 1, limit=1000, types=OWN, start=True)).tasks
        await engine.work.complete(completions(claimed))
        with psycopg.connect(dsn, autocommit=True) as look:
            look.execute("CHECKPOINT")
            before = sizes(look)
            meter = Meter(look, pid, report, n)

            async def submit() -> None:
                for _ in range(n // 1000):
                    await engine.submission.submit(tasks(1000))

            async def work() -> None:
                while claimed := (
                    await engine.claims.claim("one", 1, limit=BATCH, types=OWN, start=True)
                ).tasks:
                    await engine.work.complete(completions(claimed))

            step("submitting")
            await meter.measure("submit", submit)
            step("claiming and completing")
            await meter.measure("cycle", work)
            step("measuring tables")
            after = sizes(look)
            for table in KEPT:
                heap, indexes = (now - then for now, then in zip(after[table], before[table], strict=True))
                report.figure(f"{table}_heap_bytes", heap / n, "bytes/task")
                report.figure(f"{table}_index_bytes", indexes / n, "bytes/task")


def sizes(look: psycopg.Connection) -> dict[str, tuple[int, int]]:
    return {name: (heap, indexes) for name, heap, indexes in look.execute(SIZES.encode()).fetchall()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tasks", type=int, default=20_000, metavar="N")
    parser.add_argument("--finished", type=int, default=0, metavar="N")
    parser.add_argument("--waiting", type=int, default=0, metavar="N")
    args = parser.parse_args()
    report = Report("What a task costs (batches of 1,000 submitted, 100 claimed and completed)")
    with server() as running, progress(4) as step:
        dsn = fresh_database(running, "footprint")
        if args.finished or args.waiting:
            step("filling the tables (minutes for millions)")
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(FILL.format(finished=args.finished, waiting=args.waiting).encode())
                connection.execute("VACUUM ANALYZE")
        asyncio.run(measure(dsn, max(args.tasks, 1000), report, step))
    report.show(args.json)


if __name__ == "__main__":
    main()
