"""`make bench-sources`: webhooks against a bare insert over HTTP, and ticks of schedules per second.

Both servers run in this process, on the same database, and are called over loopback in turns. A delivery
is verified (GitHub's signature), rendered, deduplicated and recorded; the bare route inserts one row. When
the response is there, the task is committed and can be claimed. `--json FILE` writes the figures, `--quick`
runs everything small to see that it works.
"""

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import psycopg
import structlog
import uvicorn
from psycopg_pool import AsyncConnectionPool
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.common import Report, fresh_database, server
from lineshaft.duties.scheduler import Scheduler
from lineshaft.engine.engine import Engine
from lineshaft.server.server import Server, listen
from lineshaft.server.service import Service
from lineshaft.settings import Settings
from lineshaft.types.sources import NewSource, SourceKind, Verification

SECRET = "a-secret-of-the-benchmark"  # noqa: S105 - made up
VARIABLE = "LINESHAFT_HOOK_BENCHMARK"
TURNS = 5
_PULL_REQUEST = {"action": "opened", "pull_request": {"title": "Fix typo", "body": "x" * 2_000}}


class Line:
    """One connection that is kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, url: str) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])))

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        answered = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", answered)
        found = await self._reader.readexactly(int(length[1]) if length else 0)
        if answered[9:10] != b"2":
            raise RuntimeError(f"POST {path} answered {answered[9:12].decode()}: {found.decode()}")

    def close(self) -> None:
        self._writer.close()


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


@asynccontextmanager
async def lineshaft(dsn: str) -> AsyncIterator[str]:
    bound = listen("127.0.0.1", 0)
    port = bound.getsockname()[1]
    running = Server(Service(dsn, Settings(port=port), max_connections=10), bound, duties=False)
    ready = asyncio.Event()
    task = asyncio.create_task(running.run(ready.set))
    await ready.wait()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.stop()
        await task
        bound.close()


@asynccontextmanager
async def bare(dsn: str) -> AsyncIterator[str]:
    """A route that inserts a row with the body, and nothing else."""
    async with AsyncConnectionPool(dsn, min_size=10, max_size=10, kwargs={"autocommit": True}) as pool:

        async def insert(request: Request) -> JSONResponse:
            body = await request.body()
            async with pool.connection() as connection:
                await connection.execute("INSERT INTO bare (body) VALUES (%s)", [body])
            return JSONResponse({"ok": True})

        bound = listen("127.0.0.1", 0)
        config = uvicorn.Config(Starlette(routes=[Route("/", insert, methods=["POST"])]), log_config=None)
        running = uvicorn.Server(config)
        task = asyncio.create_task(running.serve(sockets=[bound]))
        while not running.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            running.should_exit = True
            await task
            with contextlib.suppress(OSError):
                bound.close()


def deliveries() -> Callable[[], tuple[bytes, dict[str, str]]]:
    """Makes deliveries that differ."""
    number = 0

    def new() -> tuple[bytes, dict[str, str]]:
        nonlocal number
        number += 1
        body = json.dumps({**_PULL_REQUEST, "number": number}).encode()
        digest = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        headers = {"X-Hub-Signature-256": f"sha256={digest}", "X-GitHub-Delivery": f"d{number}"}
        return body, headers

    return new


async def measure(post: Callable[[], Awaitable[Any]], calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        await post()
        times.append(time.perf_counter() - began)
    return times


async def webhooks(dsn: str, calls: int, report: Report) -> None:
    os.environ[VARIABLE] = SECRET
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE bare (id bigint GENERATED ALWAYS AS IDENTITY, body bytea)")
    async with Engine(dsn) as engine:
        await engine.sources.put(
            NewSource(
                name="hook",
                kind=SourceKind.WEBHOOK,
                verify=Verification(scheme="github", secret_env=VARIABLE),
                when="event.action == 'opened'",
                template={"task": {"type": "review", "title": "${event.pull_request.title}"}},
            )
        )
    ours: list[float] = []
    reference: list[float] = []
    new = deliveries()
    async with lineshaft(dsn) as url, bare(dsn) as bare_url:
        line, bare_line = await Line.to(url), await Line.to(bare_url)

        async def deliver() -> None:
            await line.post("/hooks/hook", *new())

        async def insert() -> None:
            await bare_line.post("/", *new())

        await measure(deliver, 5)
        await measure(insert, 5)
        for _ in range(TURNS):
            reference += await measure(insert, calls // TURNS)
            ours += await measure(deliver, calls // TURNS)
        line.close()
        bare_line.close()
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        figures = percentile(ours, share) * 1000, percentile(reference, share) * 1000
        report.ratio(f"webhook_{name}", *figures, "", unit="ms")


async def ticks(dsn: str, schedules: int, report: Report) -> None:
    rates = []
    async with Engine(dsn) as engine:
        for number in range(schedules):
            await engine.sources.put(
                NewSource(
                    name=f"s{number}",
                    kind=SourceKind.SCHEDULE,
                    every_sec=3600.0,
                    template={"task": {"type": "report", "title": "${event.tick}"}},
                )
            )
        for turn in range(TURNS):
            async with engine.database.connection() as connection:
                await connection.execute(
                    "UPDATE lineshaft.source SET next_tick = now() - make_interval(secs => %s),"
                    " next_at = now() - make_interval(secs => %s),"
                    " created_at = now() - make_interval(secs => 3600 + %s) WHERE kind = 'schedule'",
                    [TURNS - turn, TURNS - turn, TURNS - turn],
                )
            began = time.perf_counter()
            counts = await Scheduler(engine.schedules).run_once()
            rates.append(sum(counts.values()) / (time.perf_counter() - began))
    report.figure("ticks_per_sec", statistics.median(rates), "1/s")


async def run(calls: int, schedules: int) -> Report:
    report = Report("Sources")
    with server() as running:
        await webhooks(fresh_database(running, "webhooks"), calls, report)
        await ticks(fresh_database(running, "ticks"), schedules, report)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    report = asyncio.run(run(50, 20) if args.quick else run(2_000, 500))
    report.show(args.json)


if __name__ == "__main__":
    main()
