"""One run: start everything, let the nemesis loose, heal, wait until all work is done, and check."""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from lineshaft.sql import migrate
from tests.chaos import checker, evidence
from tests.chaos.cluster import Cluster, free_port
from tests.chaos.faults import QUICK, Fault, Kind, schedule
from tests.chaos.fleet import Line, Member, copy_code, python
from tests.chaos.nemesis import Disk, Nemesis
from tests.chaos.pooler import Pooler
from tests.chaos.report import Report, summarize

#: Guards are part of it: five failures in a row open a breaker, which is probed soon after.
_BREAKERS = """
defaults: {failureThreshold: 1000}
overrides:
  flaky: {failureThreshold: 5, cooldownSeconds: 5, halfOpenAfter: 0.5}
"""
_VARIABLES = {
    "LINESHAFT_REAPER_INTERVAL_SEC": "0.5",
    "LINESHAFT_PROMOTER_INTERVAL_SEC": "0.5",
    "LINESHAFT_LOG_FORMAT": "json",
}
#: Those that know the servers only.
_OVER_HTTP = frozenset({"agent-2", "client-http", "reader-http"})
#: Those behind PgBouncer, where there is one.
_POOLED = frozenset({"agent-1", "server-1", "reader-db"})
#: So many tasks wait at the most: clients are held back beyond that, and the rest is soon done in the end.
_MOST_OPEN = 300
_START_SEC, _DRAIN_SEC = 120.0, 60.0
_DISK_BYTES = 256 * 1024

_OPEN = """
    WITH RECURSIVE stuck AS (
        SELECT id FROM lineshaft.task_live WHERE parked = 'dag_budget'
        UNION
        SELECT edge.task_id FROM lineshaft.edge JOIN lineshaft.task_end AS ended ON ended.id = edge.depends_on
        WHERE NOT edge.satisfied
        UNION
        SELECT edge.task_id FROM stuck JOIN lineshaft.edge ON edge.depends_on = stuck.id
        WHERE NOT edge.satisfied
    )
    SELECT count(*) FROM lineshaft.task_live WHERE id NOT IN (SELECT id FROM stuck)
"""
#: Agents, once there was something for them to do.
_AT_WORK = "SELECT count(*) FROM lineshaft.agent WHERE EXISTS (SELECT FROM lineshaft.task_end)"
_COUNTS = """
    SELECT (SELECT count(*) FROM lineshaft.task), (SELECT count(*) FROM lineshaft.task_end),
        (SELECT count(*) FROM lineshaft.attempt WHERE outcome = 'failed')
"""


@dataclass(kw_only=True)
class Plan:
    seed: int
    seconds: float
    kinds: Sequence[Kind] = QUICK
    agents: int = 4
    #: Seconds between faults, and between the calls of a client, on average.
    faults_every_sec: float = 2.0
    calls_every_sec: float = 0.3
    #: The program, if some of the processes shall be behind it.
    pgbouncer: str | None = None
    major: int | None = None
    #: Where logs and histories stay; None: they go with the run, unless it fails.
    keep: Path | None = None
    tell: Callable[[str], None] = field(default=lambda _: None)

    @property
    def processes(self) -> list[str]:
        agents = [f"agent-{n}" for n in range(self.agents)]
        return [*agents, "server-0", "server-1", "client-db", "client-http", "reader-db", "reader-http"]

    def faults(self) -> list[Fault]:
        return schedule(self.seed, self.seconds, self.processes, self.kinds, every_sec=self.faults_every_sec)


def possible(kinds: Sequence[Kind]) -> dict[Kind, str]:
    """Of these kinds, those that can't be done on this machine, and why."""
    missing = {}
    if Kind.DISK_FULL in kinds and not _can_mount():
        missing[Kind.DISK_FULL] = "needs the right to mount a tmpfs"
    return missing


def _can_mount() -> bool:
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as place:
        if _mount(Path(place)):
            _unmount(Path(place))
            return True
    return False


def _mount(place: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _unmount(place: Path) -> None:
    subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)  # noqa: S607


class Run:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._began = time.monotonic()
        self._directory = Path(tempfile.mkdtemp(prefix="lineshaft-chaos-"))
        # The server's account must be able to reach its data.
        self._directory.chmod(0o711)
        self._history = self._place("history")
        self._logs = self._place("logs")
        self._members: dict[str, Member] = {}
        self._disks: dict[str, Disk] = {}
        self._clocks: dict[str, Path] = {}
        self._trouble: list[str] = []
        self._brake = self._directory / "brake"

    def _place(self, name: str) -> Path:
        place = self._directory / name
        place.mkdir()
        return place

    def _tell(self, text: str) -> None:
        self._plan.tell(f"{time.monotonic() - self._began:6.1f} s  {text}")

    async def run(self) -> Report:
        plan = self._plan
        cluster = Cluster(self._directory, major=plan.major)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(cluster.stop)
            await cluster.start(standby=Kind.FAIL_OVER in plan.kinds)
            await asyncio.to_thread(migrate.up, cluster.primary.dsn)
            self._tell(f"PostgreSQL {cluster.version}, seed {plan.seed}")
            await self._start(stack, cluster)
            await self._wait_for(cluster, _AT_WORK, self._plan.agents, _START_SEC)
            self._tell("everybody is at work")
            nemesis = Nemesis(cluster, self._members, self._disks, self._clocks, self._tell)
            began = time.monotonic()
            async with self._watching(cluster):
                await asyncio.gather(nemesis.run(plan.faults(), began), asyncio.sleep(plan.seconds))
            nemesis.heal()
            self._trouble += nemesis.trouble
            await self._wind_down(cluster)
            found = await asyncio.to_thread(evidence.gather, self._history, cluster.primary.dsn)
        verdicts = checker.check(found)
        report = summarize(
            found,
            verdicts,
            seed=plan.seed,
            seconds=time.monotonic() - self._began,
            postgres=cluster.version,
            faults=nemesis.done,
            skipped=nemesis.skipped,
            trouble=self._trouble,
            members=self._members,
        )
        self._tidy(report)
        return report

    async def _start(self, stack: AsyncExitStack, cluster: Cluster) -> None:
        breakers = self._directory / "breakers.yaml"
        breakers.write_text(_BREAKERS)
        code = await asyncio.to_thread(copy_code, self._directory)
        ports = [free_port(), free_port()]
        turns = itertools.cycle(ports)
        history = str(self._history)
        nodes = [cluster.primary, cluster.spare]
        pooler = self._pooler(stack, cluster)
        for name in self._plan.processes:
            line = Line()
            variables = _VARIABLES | {"LINESHAFT_CIRCUIT_BREAKERS": str(breakers)}
            if name in _OVER_HTTP:
                # A little load balancer: each connection goes to another server.
                await line.add(stack, lambda: next(turns))
            elif pooler is not None and name in _POOLED:
                await line.add(stack, lambda: pooler.port)
                variables["LINESHAFT_POOLER"] = "transaction"
            elif name == "agent-0" and Kind.FAIL_OVER in self._plan.kinds:
                # This one knows both servers, and finds out itself which of them is the primary.
                for node in nodes:
                    await line.add(stack, lambda node=node: node.port)  # type: ignore[misc]  # bound now
            else:
                await line.add(stack, lambda: cluster.primary.port)
            urls = [f"--url=http://127.0.0.1:{line.ports[0]}"]
            role, _, number = name.partition("-")
            match role:
                case "agent":
                    scratch = self._scratch(name, stack)
                    options = [*self._clock(name), *(["--budget=1"] if number == "2" else [])]
                    where = urls[0].removeprefix("--url=") if name in _OVER_HTTP else line.dsn
                    command = python("tests.chaos.worker", name, where, history, str(scratch), *options)
                case "server":
                    variables["LINESHAFT_DATABASE_URL"] = line.dsn
                    command = python(
                        "lineshaft.interfaces.cli.main", "up", "--port", str(ports[int(number)]), "--json"
                    )
                case "client":
                    way = urls if number == "http" else [f"--dsn={line.dsn}"]
                    pace = [f"--seed={self._plan.seed}", f"--pause={self._plan.calls_every_sec}"]
                    brake = f"--brake={self._brake}"
                    command = python("tests.chaos.submitter", name, history, *way, *pace, brake)
                case _:
                    way = urls if number == "http" else [f"--dsn={line.dsn}"]
                    command = python("tests.chaos.reader", name, history, *way)
            member = Member(name, line, command, variables, log=self._logs / f"{name}.log", code=code)
            self._members[name] = member
            stack.push_async_callback(member.destroy)
            member.start()

    def _pooler(self, stack: AsyncExitStack, cluster: Cluster) -> Pooler | None:
        if self._plan.pgbouncer is None:
            return None
        pooler = Pooler(self._plan.pgbouncer, self._directory, cluster.account, lambda: cluster.primary.port)
        pooler.start()
        stack.callback(pooler.stop)
        cluster.followers.append(pooler.follow)
        return pooler

    def _scratch(self, name: str, stack: AsyncExitStack) -> Path:
        place = self._place(f"{name}.disk")
        if Kind.DISK_FULL in self._plan.kinds and _mount(place):
            stack.callback(_unmount, place)
        self._disks[name] = Disk(place)
        return place

    def _clock(self, name: str) -> list[str]:
        clock = self._clocks[name] = self._directory / f"{name}.clock"
        clock.write_text("0")
        return [f"--clock={clock}"]

    @asynccontextmanager
    async def _watching(self, cluster: Cluster) -> AsyncIterator[None]:
        """Tell now and then how far it is, and let nobody submit more than can be done."""
        rounds = itertools.count(1)

        async def watch() -> None:
            while True:
                await asyncio.sleep(2)
                with contextlib.suppress(psycopg.Error):
                    tasks, ended, failed = await self._count(cluster)
                    if tasks - ended > _MOST_OPEN:
                        self._brake.touch()
                    else:
                        self._brake.unlink(missing_ok=True)
                    if next(rounds) % 5 == 0:
                        self._tell(f"{tasks} tasks, {ended} ended, {failed} failed attempts")

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    async def _count(self, cluster: Cluster) -> tuple[int, int, int]:
        """Tasks, how many of them have ended, and failed attempts."""
        ((tasks, ended, failed),) = await cluster.primary.execute(_COUNTS)
        return int(str(tasks)), int(str(ended)), int(str(failed))

    async def _wait_for(self, cluster: Cluster, query: str, goal: int, patience_sec: float) -> object:
        """Until a count is this, or nothing has moved for so long; gives what it was in the end."""
        before, deadline = None, 0.0
        while True:
            ((found,),) = await cluster.primary.execute(query)
            if (counts := await self._count(cluster)) != before:
                before, deadline = counts, time.monotonic() + patience_sec
            if found == goal or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.2)

    async def _wind_down(self, cluster: Cluster) -> None:
        """No more faults and no more work: all that is there must come to its end."""
        self._tell("healed; waiting for all work to be done")
        await self._stop("client")
        left = await self._wait_for(cluster, _OPEN, 0, _DRAIN_SEC)
        if left:
            self._tell(f"{left} tasks don't come to an end")
        await self._stop("agent")
        await self._stop("reader")
        await self._stop("server")

    async def _stop(self, role: str) -> None:
        members = [member for name, member in self._members.items() if name.startswith(role)]
        codes = await asyncio.gather(*(member.stop() for member in members))
        for member, code in zip(members, codes, strict=True):
            # Without a word: it had just been started, and had not begun.
            if code not in {0, -signal.SIGTERM}:
                why = "had to be killed" if code is None else f"ended with code {code}"
                self._trouble.append(f"{member.name} was asked to stop, and {why}")

    def _tidy(self, report: Report) -> None:
        keep = self._plan.keep
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            for place in (self._history, self._logs):
                shutil.copytree(place, keep / place.name, dirs_exist_ok=True)
            for log in self._directory.glob("*.log"):
                shutil.copy(log, keep)
        if report.held:
            shutil.rmtree(self._directory, ignore_errors=True)
        else:
            report.left_in = str(self._directory)
