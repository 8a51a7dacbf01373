"""`python -m benchmarks.dashboard`: how long pages take, and what open tabs cost the server.

One server on a database with a million ended and 100,000 live tasks. Every page is asked some times; the CPU
time of server and database together says on a busy machine what the time would be on a quiet one. Then tasks
move, first without tabs and then with 50 of them, and the server's share of a core is compared.
`--quick` fills a small database to see that it works.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg

from benchmarks.common import Report, fresh_database, progress, server
from benchmarks.large_database import fill
from lineshaft import Lineshaft
from lineshaft.operations import agents
from lineshaft.types import NewAgent, NewTask
from lineshaft.types.work import ClaimRef, Completion

_TURNS = 10
_GOAL_MS = 300
_TABS, _TASKS_PER_SEC = 50, 100
_GOAL_SHARE = 10
_SETTLE_SEC = 5.0
#: How often tasks are submitted, claimed and completed.
_BEAT_SEC = 0.1


@contextlib.contextmanager
def dashboard(dsn: str) -> Iterator[tuple[str, int]]:
    """A server without duties: its address and its process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
    environment |= {"LINESHAFT_DATABASE_URL": dsn, "LINESHAFT_LOG_LEVEL": "warning"}
    command = [sys.executable, "-m", "lineshaft", "up", "--port", "0", "--no-duties", "--json"]
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(command, env=environment, stdout=output) as process,  # noqa: S603 - our own module
    ):
        try:
            text = ""
            while not text.endswith("}\n"):
                if process.poll() is not None:
                    raise RuntimeError("The server could not be started.")
                time.sleep(0.1)
                output.seek(0)
                text = output.read().decode()
            yield json.loads(text)["url"], process.pid
        finally:
            process.terminate()
            process.wait()


def pages(dsn: str) -> dict[str, str]:
    """An address of each page."""
    with psycopg.connect(dsn) as connection:

        def one(statement: str) -> str:
            found = connection.execute(statement.encode()).fetchone()
            return "" if found is None else quote(str(found[0]), safe="")

        dead = one("SELECT id FROM lineshaft.tasks WHERE status = 'DEAD_LETTERED' LIMIT 1")
        ready = one("SELECT id FROM lineshaft.tasks WHERE status = 'READY' LIMIT 1")
        running = one("SELECT id FROM lineshaft.tasks WHERE status = 'RUNNING' LIMIT 1")
        done = one("SELECT id FROM lineshaft.tasks WHERE status = 'COMPLETED' LIMIT 1")
        dag = one("SELECT id FROM lineshaft.dags WHERE total > 1 AND status = 'running' LIMIT 1")
    return {
        "overview": "/",
        "tasks": "/tasks",
        "completed tasks": "/tasks?status=COMPLETED",
        "tasks of a type": "/tasks?type=type-7",
        "tasks by title": "/tasks?q=no+such+text",
        "a READY task": f"/tasks/{ready}",
        "a RUNNING task": f"/tasks/{running}",
        "a COMPLETED task": f"/tasks/{done}",
        "cancel all of a type": "/bulk/cancel?type=type-7",
        "DAGs": "/dags",
        "failed DAGs": "/dags?status=failed",
        "a DAG": f"/dags/{dag}",
        "dead letters": "/dead-letters",
        "decided dead letters": "/dead-letters?tab=decided",
        "a dead letter": f"/dead-letters/{dead}",
        "edit a dead letter": f"/dead-letters/{dead}/edit",
        "approvals": "/approvals",
        "agents": "/agents",
        "an agent": "/agents/agent-7",
        "guards": "/guards",
        "sources": "/sources",
        "new source": "/sources/new",
        "costs": "/costs",
        "costs of 90 days": "/costs?days=90",
        "new task": "/new",
        "new DAG": "/new/dag",
        "new goal": "/new/goal",
    }


async def ask(url: str, path: str) -> float:
    """The time until the whole page is there."""
    reader, writer = await _connect(url)
    host = url.partition("://")[2]
    began = time.perf_counter()
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    status = (await reader.readline()).split()[1]
    await reader.read()
    took = time.perf_counter() - began
    writer.close()
    if status != b"200":
        raise RuntimeError(f"{path} answered {status.decode()}")
    return took


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.partition("://")[2].partition(":")
    return await asyncio.open_connection(host, int(port), limit=1 << 24)


def _stat(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()


def database_cpu_seconds(postmaster: int) -> float:
    """Of all its processes, also of those that have ended."""
    ticks = sum(map(int, _stat(postmaster)[11:15]))
    for child in Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text(encoding="ascii").split():
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _stat(int(child))[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


async def measure_pages(url: str, process: int, dsn: str, report: Report) -> None:
    asked = pages(dsn)
    with psycopg.connect(dsn) as connection:
        postmaster = int(_stat(connection.info.backend_pid)[1])

    def cpu() -> float:
        return cpu_seconds(process) + database_cpu_seconds(postmaster)

    with progress(len(asked)) as step:
        for name, path in asked.items():
            step(name)
            await ask(url, path)
            before = cpu()
            times = [await ask(url, path) for _ in range(_TURNS)]
            used = (cpu() - before) / _TURNS
            report.figure(name, statistics.median(times) * 1000, "ms", f"< {_GOAL_MS}")
            report.figure("… CPU", used * 1000, "ms")
            report.figures[f"{name}, CPU"] = report.figures.pop("… CPU")


# Tabs.


class Tab:
    """A stream of an open page."""

    def __init__(self) -> None:
        self.received = 0
        self.updates = 0

    async def follow(self, url: str, path: str) -> None:
        reader, writer = await _connect(url)
        host = url.partition("://")[2]
        writer.write(f"GET /live?page={quote(path, safe='')} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        try:
            while chunk := await reader.read(1 << 20):
                self.received += len(chunk)
                self.updates += chunk.count(b"event: page")
        finally:
            writer.close()


async def move(dsn: str) -> None:
    """Submit, claim and complete tasks, by way of the database: the server isn't involved."""
    async with Lineshaft(dsn) as shaft:
        new = NewAgent(id="mover", instance="mover-1", types=("moving",), max_concurrent_tasks=1_000)
        agent = await shaft.backend.call(agents.register_agent, agents.RegisterAgent(agent=new))
        batch = int(_TASKS_PER_SEC * _BEAT_SEC)
        due = time.perf_counter()
        while True:
            await shaft.submit_many([NewTask(type="moving", title="Moves") for _ in range(batch)])
            found = await shaft.backend.claim("mover", agent.own.incarnation, limit=batch, types=["moving"])
            claims = [ClaimRef(item.task.id, item.task.epoch, item.claim_token) for item in found]
            await shaft.backend.complete([Completion(claim, b'{"done": true}') for claim in claims])
            due = max(due + _BEAT_SEC, time.perf_counter() - 1)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


def cpu_seconds(process: int) -> float:
    return sum(map(int, _stat(process)[11:13])) / os.sysconf("SC_CLK_TCK")


async def share(process: int, seconds: float) -> float:
    """Percent of a core."""
    began, used = time.perf_counter(), cpu_seconds(process)
    await asyncio.sleep(seconds)
    return 100 * (cpu_seconds(process) - used) / (time.perf_counter() - began)


@contextlib.asynccontextmanager
async def running(*work: "asyncio.Task[None]") -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def measure_tabs(url: str, process: int, dsn: str, report: Report, seconds: float) -> None:
    found = pages(dsn)
    names = ("overview", "tasks", "a RUNNING task", "a READY task", "DAGs", "a DAG", "dead letters", "agents")
    mix = [found[name] for name in (*names, "guards", "costs")]
    async with running(asyncio.create_task(move(dsn))):
        await asyncio.sleep(_SETTLE_SEC)
        without = await share(process, seconds)
        tabs = [Tab() for _ in range(_TABS)]
        streams = [
            asyncio.create_task(tab.follow(url, mix[number % len(mix)])) for number, tab in enumerate(tabs)
        ]
        async with running(*streams):
            await asyncio.sleep(_SETTLE_SEC)
            updates = sum(tab.updates for tab in tabs)
            with_tabs = await share(process, seconds)
            updates = sum(tab.updates for tab in tabs) - updates
    report.figure("server without tabs", without, "% of a core")
    report.figure(f"server with {_TABS} tabs", with_tabs, "% of a core")
    report.figure("difference", with_tabs - without, "% of a core", f"< {_GOAL_SHARE}")
    report.figure("updates of all tabs", updates / seconds, "/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ended", type=int, default=1_000_000)
    parser.add_argument("--live", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of the CPU")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.ended, args.live, args.seconds = 2_000, 1_000, 5.0
    report = Report(f"The dashboard with {args.ended:,} ended and {args.live:,} live tasks")
    with server() as postgres:
        dsn = fresh_database(postgres, "dashboard")
        fill(dsn, ended=args.ended, live=args.live)
        with dashboard(dsn) as (url, process):
            asyncio.run(measure_pages(url, process, dsn, report))
            asyncio.run(measure_tabs(url, process, dsn, report, args.seconds))
    report.show(args.json)


if __name__ == "__main__":
    main()
