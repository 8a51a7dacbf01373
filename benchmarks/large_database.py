"""`python -m benchmarks.large_database`: how long reads take with a million ended and 100,000 live tasks.

`fill` makes such a database; `--dsn` uses one that exists and is empty, to look at it with the command line
or the dashboard. `--quick` fills a small one to see that it works.
"""

import argparse
import asyncio
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path

import psycopg

from benchmarks.common import Report, fresh_database, progress, seconds_async, server
from lineshaft.engine.engine import Engine
from lineshaft.types import DagFilter, DeadLetterFilter, TaskFilter, TaskOrder

_STATEMENTS = Path(__file__).with_suffix(".sql")
#: Ended tasks that have events, the newest, and how many of them one transaction writes.
_WITH_EVENTS, _AT_ONCE = 100_000, 5_000
_EVENTS = """
INSERT INTO lineshaft.event (at, kinds, task_id, agent_id, epoch)
SELECT ended_at + happened.later, happened.kinds::text[], 'task_' || name,
    CASE WHEN happened.epoch = 1 THEN agent_id END, happened.epoch
FROM past CROSS JOIN (VALUES
    (interval '-10 minutes', '{task.created,task.ready}', 0),
    (interval '-5 minutes', '{task.claimed,task.started}', 1)
) AS happened (later, kinds, epoch)
WHERE n >= %(first)s AND n < %(end)s
UNION ALL
SELECT ended_at, CASE status
        WHEN 'COMPLETED' THEN '{task.completed}' WHEN 'CANCELLED' THEN '{task.cancelled}'
        ELSE '{task.failed,task.dead_lettered}'
    END::text[], 'task_' || name, agent_id, 1
FROM past WHERE n >= %(first)s AND n < %(end)s
"""
_TURNS = 5
_GOAL_MS = 100


def fill(dsn: str, *, ended: int, live: int, with_events: int = _WITH_EVENTS) -> None:
    """Fill an empty, migrated database with tasks, DAGs, attempts, dead letters, agents, costs and events.

    Without statistics: run VACUUM ANALYZE afterwards.
    """
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        text = (
            _STATEMENTS.read_text(encoding="utf-8")
            .replace("{ended}", str(ended))
            .replace("{live}", str(live))
        )
        for statement in text.split(";\n"):
            if statement.strip():
                connection.execute(statement.encode())
        for first in range(max(ended - with_events, 0) + 1, ended + 1, _AT_ONCE):
            connection.execute(_EVENTS, {"first": first, "end": first + _AT_ONCE})
        connection.execute("DROP TABLE past, present")


def reads(engine: Engine) -> dict[str, Callable[[], Awaitable[object]]]:
    """What the pages of the dashboard read."""
    read = engine.read
    task = f"task_02{0x7:024X}"
    return {
        "attention": read.attention,
        "stats": read.stats,
        "waiting": read.waiting,
        "throughput": read.throughput,
        "costs of 7 days": read.costs,
        "costs of 400 days": lambda: read.costs(days=400),
        "costs of a model": lambda: read.costs(days=30, model="openai/1"),
        "tasks": read.tasks,
        "tasks by priority": lambda: read.tasks(order=TaskOrder.PRIORITY),
        **{
            f"tasks {status}": lambda status=status: read.tasks(TaskFilter(status=status))  # type: ignore[misc] # a default of a lambda
            for status in (
                "PENDING",
                "READY",
                "RUNNING",
                "VALIDATING",
                "RETRYING",
                "COMPLETED",
                "DEAD_LETTERED",
                "CANCELLED",
            )
        },
        "tasks of a type": lambda: read.tasks(TaskFilter(type="type-7")),
        "READY tasks of a type": lambda: read.tasks(TaskFilter(status="READY", type="type-7")),
        "tasks of an unknown type": lambda: read.tasks(TaskFilter(type="unknown")),
        "tasks with a tag": lambda: read.tasks(TaskFilter(tag="nightly")),
        "tasks of an agent": lambda: read.tasks(TaskFilter(agent_id="agent-7")),
        "tasks with a text": lambda: read.tasks(TaskFilter(q="long history")),
        "tasks with an unknown text": lambda: read.tasks(TaskFilter(q="no such text")),
        "DAGs": lambda: read.dags(DagFilter(virtual=False)),
        "DAGs and standalone tasks": read.dags,
        "running DAGs": lambda: read.dags(DagFilter(status="running", virtual=False)),
        "failed DAGs": lambda: read.dags(DagFilter(status="failed", virtual=False)),
        "DAGs with a text": lambda: read.dags(DagFilter(q="Live DAG", virtual=False)),
        "DAGs with an unknown text": lambda: read.dags(DagFilter(q="no such text", virtual=False)),
        "groups of dead letters": engine.dead_letters.groups,
        "dead letters": lambda: engine.dead_letters.find(DeadLetterFilter(reviewed=False)),
        "approvals": engine.approvals.waiting,
        "agents": lambda: engine.fleet.page(status=(), limit=50, cursor=None),
        "breakers": read.breakers,
        "locks": read.locks,
        "why": lambda: read.why(task),
        "task": lambda: read.task(task),
    }


async def measure(dsn: str, report: Report) -> None:
    async with Engine(dsn, max_connections=2) as engine:
        with progress(len(reads(engine))) as step:
            for name, read in reads(engine).items():
                step(name)
                await read()
                times = [await seconds_async(read) for _ in range(_TURNS)]
                report.figure(name, statistics.median(times) * 1000, "ms", f"< {_GOAL_MS}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ended", type=int, default=1_000_000)
    parser.add_argument("--live", type=int, default=100_000)
    parser.add_argument("--dsn", help="an empty database; default: one of its own, deleted afterwards")
    parser.add_argument("--only-fill", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.ended, args.live = 2_000, 1_000
    report = Report(f"Reads with {args.ended:,} ended and {args.live:,} live tasks")
    if args.dsn:
        _run(args, args.dsn, report)
    else:
        with server() as running:
            _run(args, fresh_database(running, "large"), report)
    if not args.only_fill:
        report.show(args.json)


def _run(args: argparse.Namespace, dsn: str, report: Report) -> None:
    fill(dsn, ended=args.ended, live=args.live)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
    if not args.only_fill:
        asyncio.run(measure(dsn, report))


if __name__ == "__main__":
    main()
