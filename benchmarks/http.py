# noqa: A005 - it is run as a module, and nothing here imports the library's
"""`make bench-http`: the server against a bare route, and many waiting agents against few.

Every ratio is to a reference measured in the same run, in turns. All of it is on this machine: a server
process, its database, and calls over loopback. `--json FILE` writes the figures as a flat object, `--quick`
runs everything small to see that it works, and names (`longpoll cycle`) choose parts.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psycopg
import uvicorn
from fastapi import FastAPI
from psycopg_pool import AsyncConnectionPool

from benchmarks.common import Report, alternate, fresh_database, progress, server
from lineshaft.server.server import listen

#: Calls at once, in the cycle and against the bare route.
CALLERS = 16
#: Connections that each server has to its database.
POOL = 10
WAIT_SEC = 60
#: So often in a row the database must be found idle.
QUIET_LOOKS = 10


@dataclass(frozen=True, slots=True)
class Sizes:
    few: int = 10
    many: int = 2_000
    arrivals: int = 200
    cycles: int = 500
    turns: int = 5


QUICK = Sizes(few=3, many=30, arrivals=10, cycles=60, turns=1)


class Line:
    """One connection that is kept open, and speaks as much HTTP as this needs."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, url: str) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])))

    async def post(self, path: str, body: Any = None) -> Any:
        data = json.dumps(body or {}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n"
        self._writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        answered = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", answered)
        found = await self._reader.readexactly(int(length[1]) if length else 0)
        if answered[9:10] != b"2":
            raise RuntimeError(f"POST {path} answered {answered[9:12].decode()}: {found.decode()}")
        return json.loads(found)

    def close(self) -> None:
        self._writer.close()


async def post(url: str, path: str, body: Any) -> Any:
    """One call on a line of its own."""
    line = await Line.to(url)
    try:
        return await line.post(path, body)
    finally:
        line.close()


@contextmanager
def lineshaft_server(dsn: str) -> Iterator[tuple[str, int]]:
    """`lineshaft up` as a process: its URL and its id."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
    command = [sys.executable, "-m", "lineshaft.cli.main", "up", "--json", "--port", "0"]
    with subprocess.Popen(  # noqa: S603 - our own program
        command,
        env=environment | {"LINESHAFT_DATABASE_URL": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - asked for above
            output = ""
            while not output.endswith("\n}\n"):
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"The server ended before it was ready, after printing {output!r}")
                output += line
            yield json.loads(output)["url"], process.pid
        finally:
            process.terminate()


def memory(pid: int) -> float:
    """What a process has in memory, in MiB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


# Many agents that wait.


class Crowd:
    """Agents that wait for work, each on a line of its own; who gets a task does it, and waits again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.claimed: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
        self._agents: list[asyncio.Task[None]] = []

    async def gather(self, number: int) -> None:
        gate = asyncio.Semaphore(CALLERS)

        async def join(agent_id: str) -> tuple[Line, dict[str, Any]]:
            async with gate:
                line = await Line.to(self._url)
                return line, await line.post("/v1/agents", {"id": agent_id, "types": ["arrival"]})

        found = await asyncio.gather(*(join(f"waiter-{n}") for n in range(number)))
        self._agents = [asyncio.create_task(self._work(line, agent)) for line, agent in found]

    async def _work(self, line: Line, agent: dict[str, Any]) -> None:
        try:
            while True:
                asked = {"incarnation": agent["incarnation"], "wait_sec": WAIT_SEC}
                items = (await line.post(f"/v1/agents/{agent['id']}/claim", asked))["tasks"]
                for item in items:
                    self.claimed.put_nowait((item["task"]["id"], time.perf_counter()))
                    path = f"/v1/tasks/{item['task']['id']}"
                    token = {"claim_token": item["claim_token"]}
                    await line.post(f"{path}/start", token)
                    await line.post(f"{path}/complete", token)
        finally:
            line.close()

    async def next_claim(self) -> tuple[str, float]:
        """The agent and the time of the next claim; raises an agent's error, or TimeoutError."""
        claim = asyncio.create_task(self.claimed.get())
        done, _ = await asyncio.wait(
            {claim, *self._agents}, timeout=WAIT_SEC, return_when=asyncio.FIRST_COMPLETED
        )
        for agent in done - {claim}:
            agent.result()
        if not claim.done():
            claim.cancel()
            raise TimeoutError("A task was submitted, and no agent has claimed it.")
        return claim.result()

    async def disperse(self) -> None:
        for agent in self._agents:
            agent.cancel()
        for error in await asyncio.gather(*self._agents, return_exceptions=True):
            if isinstance(error, Exception):
                raise error


async def settled(dsn: str) -> None:
    """Wait until the database is idle: all agents have asked and wait."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as own:
        quiet = 0
        while quiet < QUIET_LOOKS:
            row = await (
                await own.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND state <> 'idle' AND pid <> pg_backend_pid()"
                )
            ).fetchone()
            quiet = 0 if row and row[0] else quiet + 1
            await asyncio.sleep(0.05)


async def arrivals(url: str, dsn: str, agents: int, number: int, pid: int) -> tuple[list[float], float]:
    """Seconds from each submission to its claim, and MiB that the waiting agents use."""
    before = memory(pid)
    crowd = Crowd(url)
    await crowd.gather(agents)
    await settled(dsn)
    taken = memory(pid) - before
    line = await Line.to(url)
    times = []
    for _ in range(number):
        start = time.perf_counter()
        task = await line.post("/v1/tasks", {"type": "arrival"})
        name, at = await crowd.next_claim()
        if name != task["id"]:
            raise RuntimeError(f"Task {name} was claimed twice, or {task['id']} was lost.")
        times.append(at - start)
    await settled(dsn)
    line.close()
    await crowd.disperse()
    return times, taken


async def bench_longpoll(dsn: str, sizes: Sizes, report: Report) -> None:
    """From submission to claim, with many agents that wait and with few."""
    few: list[float] = []
    with lineshaft_server(dsn) as (url, pid):
        # Once for nothing: to connect and to prepare.
        await arrivals(url, dsn, sizes.few, sizes.arrivals // 4 + 1, pid)
        few += (await arrivals(url, dsn, sizes.few, sizes.arrivals, pid))[0]
        many, taken = await arrivals(url, dsn, sizes.many, sizes.arrivals, pid)
        few += (await arrivals(url, dsn, sizes.few, sizes.arrivals, pid))[0]
    async with await psycopg.AsyncConnection.connect(dsn) as own:
        row = await (
            await own.execute("SELECT count(*) FROM lineshaft.tasks WHERE status <> 'COMPLETED'")
        ).fetchone()
    if row is None or row[0]:
        raise RuntimeError(f"Of all tasks {row and row[0]} are not COMPLETED.")
    subject, reference = (1000 * statistics.median(times) for times in (many, few))
    report.ratio("longpoll_ratio", subject, reference, "≤ 3", unit="ms")
    report.figure("longpoll_p99_ms", 1000 * statistics.quantiles(many, n=100)[98], "ms")
    report.figure("waiting_agent_kib", 1024 * taken / sizes.many, "KiB")


# A cycle against a bare route.


def bare_server(dsn: str, answers: Connection) -> None:
    """What anybody would write: FastAPI, a pool, and one insert a call."""
    pool = AsyncConnectionPool(dsn, min_size=POOL, max_size=POOL, open=False)

    @asynccontextmanager
    async def opened(_: FastAPI) -> AsyncIterator[None]:
        async with pool:
            yield

    app = FastAPI(lifespan=opened)

    @app.post("/insert")
    async def insert(body: dict[str, Any]) -> dict[str, Any]:
        async with pool.connection() as connection:
            await connection.execute("INSERT INTO public.bare (data) VALUES (%s)", [json.dumps(body)])
        return {"inserted": True}

    bound = listen("127.0.0.1", 0)
    answers.send(f"http://127.0.0.1:{bound.getsockname()[1]}")
    uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).run(sockets=[bound])


@contextmanager
def bare(dsn: str) -> Iterator[str]:
    with psycopg.connect(dsn, autocommit=True) as own:
        own.execute("CREATE TABLE public.bare (id bigserial PRIMARY KEY, data jsonb)")
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=bare_server, args=(dsn, there))
    process.start()
    try:
        yield here.recv()
    finally:
        process.terminate()
        process.join()


async def rate(url: str, number: int, work: Callable[[int, Line], Awaitable[None]]) -> float:
    """How many a second, by all callers together."""
    left = iter(range(number))
    # New ones for each turn: servers close unused connections.
    lines = [await Line.to(url) for _ in range(CALLERS)]

    async def call(caller: int, line: Line) -> None:
        for _ in left:
            await work(caller, line)

    start = time.perf_counter()
    await asyncio.gather(*(call(caller, line) for caller, line in enumerate(lines)))
    taken = time.perf_counter() - start
    for line in lines:
        line.close()
    return number / taken


def completions_with_next(
    url: str, agents: list[dict[str, Any]], sizes: Sizes
) -> Callable[[], Awaitable[float]]:
    """Calls that complete a task and start the next one."""
    held: dict[int, dict[str, Any]] = {}

    async def call(caller: int, line: Line) -> None:
        item = held.pop(caller, None)
        if item is None:
            asked = {"incarnation": agents[caller]["incarnation"], "start": True}
            (item,) = (await line.post(f"/v1/agents/{agents[caller]['id']}/claim", asked))["tasks"]
        done = {"id": item["task"]["id"], "claim_token": item["claim_token"], "next": True}
        body = {"items": [done | {"output": {"data": {"n": 1}}}], "view": "work"}
        (answer,) = (await line.post("/v1/work/complete", body))["items"]
        if "next_claim" in answer:
            held[caller] = answer["next_claim"]

    async def calls() -> float:
        # Every caller holds one at the end.
        await post(url, "/v1/tasks/batch", {"tasks": [{"type": "noop"}] * (sizes.cycles + CALLERS)})
        return await rate(url, sizes.cycles, call)

    return calls


async def bench_cycle(dsn: str, sizes: Sizes, report: Report) -> None:
    """Claim, start and complete, each a call, or all in one, against one insert."""
    with lineshaft_server(dsn) as (url, _), bare(dsn) as bare_url:
        agents = [await post(url, "/v1/agents", {"id": f"caller-{n}"}) for n in range(CALLERS)]

        async def cycle(caller: int, line: Line) -> None:
            agent = agents[caller]
            asked = {"incarnation": agent["incarnation"]}
            (item,) = (await line.post(f"/v1/agents/{agent['id']}/claim", asked))["tasks"]
            path, token = f"/v1/tasks/{item['task']['id']}", {"claim_token": item["claim_token"]}
            await line.post(f"{path}/start", token)
            await line.post(f"{path}/complete", {**token, "output": {"data": {"n": 1}}})

        async def insert(_: int, line: Line) -> None:
            await line.post("/insert", {"n": 1})

        async def subject() -> float:
            for part in range(0, sizes.cycles, 1_000):
                tasks = [{"type": "noop"}] * min(1_000, sizes.cycles - part)
                await post(url, "/v1/tasks/batch", {"tasks": tasks})
            return await rate(url, sizes.cycles, cycle)

        async def reference() -> float:
            return await rate(bare_url, 3 * sizes.cycles, insert)

        # Once for nothing.
        await subject(), await reference()
        rates = await alternate(subject, reference, sizes.turns)
        report.ratio("http_cycle_ratio", *rates, "", unit="/s")
        one_call = completions_with_next(url, agents, sizes)
        await one_call()
        rates = await alternate(one_call, reference, sizes.turns)
        report.ratio("http_next_ratio", *rates, "≥ 0.6", unit="/s")


async def main(args: argparse.Namespace) -> None:
    sizes = QUICK if args.quick else Sizes()
    report = Report("Lineshaft over HTTP")
    # Here and, inherited, in the server: two ends of each line.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    chosen = set(args.parts) or {"longpoll", "cycle"}
    parts: list[tuple[str, Callable[[str, Sizes, Report], Awaitable[None]]]] = [
        ("longpoll", bench_longpoll),
        ("cycle", bench_cycle),
    ]
    with server() as running, progress(len(chosen)) as step:
        for name, part in parts:
            if name in chosen:
                step(name)
                await part(fresh_database(running, f"bench_{name}"), sizes, report)
    report.show(args.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="longpoll cycle")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    asyncio.run(main(parser.parse_args()))
