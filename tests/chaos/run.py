"""One run: start everything, let the nemesis loose, heal, wait until all work is done, and check."""

import asyncio
import contextlib
import itertools
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import psycopg

from lineshaft.engine.postgres import migrate
from tests.chaos import checker, evidence
from tests.chaos.cluster import Cluster
from tests.chaos.faults import Kind
from tests.chaos.nemesis import Nemesis
from tests.chaos.plan import Plan
from tests.chaos.report import Report, summarize
from tests.chaos.stage import Stage

#: So many tasks wait at the most: clients are held back beyond that, and the rest is soon done in the end.
_MOST_OPEN = 300
_START_SEC, _DRAIN_SEC = 120.0, 60.0

#: What is left to do, apart from what waits for a dead letter or for money.
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


class Run:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._began = time.monotonic()
        self._stage = Stage(plan)
        self._trouble: list[str] = []

    def _log(self, text: str) -> None:
        self._plan.log(f"{time.monotonic() - self._began:6.1f} s  {text}")

    async def run(self) -> Report:
        plan, stage = self._plan, self._stage
        cluster = Cluster(stage.directory, major=plan.major, lossy=plan.lossy)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(cluster.stop)
            await cluster.start(standby=Kind.FAIL_OVER in plan.kinds)
            await asyncio.to_thread(migrate.up, cluster.primary.dsn)
            self._log(f"PostgreSQL {cluster.version}, seed {plan.seed}")
            await stage.set_up(stack, cluster)
            # One in each process, and the one that all of them share.
            await self._wait_for(cluster, _AT_WORK, plan.agents + 1, _START_SEC)
            self._log("all processes are at work")
            nemesis = Nemesis(cluster, stage.members, stage.disks, stage.clocks, self._log, redis=stage.redis)
            began = time.monotonic()
            async with self._watching(cluster):
                await asyncio.gather(nemesis.run(plan.faults(), began), asyncio.sleep(plan.seconds))
            nemesis.heal()
            self._trouble += nemesis.trouble
            self._trouble += [
                f"{member.name} ended {member.ended_at_work} times while the database was away"
                for member in stage.members.values()
                if member.ended_at_work
            ]
            await self._wind_down(cluster)
            found = await asyncio.to_thread(evidence.gather, stage.history, cluster.primary.dsn)
        report = summarize(
            found,
            checker.check(found),
            seed=plan.seed,
            seconds=time.monotonic() - self._began,
            postgres=cluster.version,
            faults=nemesis.done,
            skipped=nemesis.skipped,
            trouble=self._trouble,
            members=stage.members,
        )
        self._tidy(report)
        return report

    @asynccontextmanager
    async def _watching(self, cluster: Cluster) -> AsyncIterator[None]:
        """Log the progress now and then, and hold submitters back if the queue grows too long."""
        rounds = itertools.count(1)

        async def watch() -> None:
            while True:
                await asyncio.sleep(2)
                with contextlib.suppress(psycopg.Error):
                    tasks, ended, failed = await self._count(cluster)
                    if tasks - ended > _MOST_OPEN:
                        self._stage.brake.touch()
                    else:
                        self._stage.brake.unlink(missing_ok=True)
                    if next(rounds) % 5 == 0:
                        self._log(f"{tasks} tasks, {ended} ended, {failed} failed attempts")

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
        self._log("healed; waiting for all work to be done")
        await self._stop("attacker")
        await self._stop("client")
        left = await self._wait_for(cluster, _OPEN, 0, _DRAIN_SEC)
        if left:
            self._log(f"{left} tasks don't come to an end")
        await self._stop("agent")
        await self._stop("reader")
        await self._stop("server")

    async def _stop(self, role: str) -> None:
        members = [member for name, member in self._stage.members.items() if name.startswith(role)]
        codes = await asyncio.gather(*(member.stop() for member in members))
        for member, code in zip(members, codes, strict=True):
            # By the signal itself: it had just been started, and had not begun.
            if code not in {0, -signal.SIGTERM}:
                why = "had to be killed" if code is None else f"ended with code {code}"
                self._trouble.append(f"{member.name} was asked to stop, and {why}")

    def _tidy(self, report: Report) -> None:
        stage, keep = self._stage, self._plan.keep
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            for place in (stage.history, stage.logs):
                shutil.copytree(place, keep / place.name, dirs_exist_ok=True)
            for log in stage.directory.glob("*.log"):
                shutil.copy(log, keep)
        if report.held:
            shutil.rmtree(stage.directory, ignore_errors=True)
        else:
            report.left_in = str(stage.directory)
