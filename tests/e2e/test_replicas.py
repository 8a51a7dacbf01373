"""Replicas of one agent in their own processes: stopped, replaced and killed without harm to anyone.

REPLICAS_SEC=120 for the full length of the restart loops.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from lineshaft import Lineshaft, NewTask
from lineshaft.operations import agents
from lineshaft.types import NewAgent
from tests.agent.helpers import PATIENCE, until
from tests.e2e.replica import BUDGET_USD, SLOTS, STEP_USD, STEPS
from tests.invariants import check_invariants

ROOT = Path(__file__).parents[2]
REPLICAS = 3
SECONDS = float(os.environ.get("REPLICAS_SEC", "15"))
#: So many tasks are open at any time, until the end.
BACKLOG = 30
#: What a task costs, and what it may cost.
TASK_USD, MAX_COST_USD = Decimal(str(STEP_USD)) * STEPS, Decimal("0.05")
LOST = ["agent_restarted", "heartbeat_timeout", "claim_expired"]
#: Processes look at each other every second, and leases are longer than a minute. The machine may be busy.
NOTICED_SEC = 30.0


class Replica:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def starts(self, tasks: int = 1) -> None:
        """Wait until it has started so many more tasks."""
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            for _ in range(tasks):
                assert await self._process.stdout.readline(), f"It ended: {await self._process.wait()}"

    async def end(self, number: signal.Signals) -> int:
        if self._process.returncode is None:
            self._process.send_signal(number)
        # What it printed since is read, or it could block.
        await asyncio.wait_for(self._process.communicate(), PATIENCE)
        assert self._process.returncode is not None
        return self._process.returncode


class Site:
    """Processes of one agent, and the work that they are given."""

    def __init__(self, shaft: Lineshaft, where: str, dsn: str) -> None:
        self.shaft = shaft
        self._where = where
        self._dsn = dsn
        self._running: set[Replica] = set()
        self.counts: Counter[str] = Counter()

    async def start(self) -> Replica:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.e2e.replica", self._where),
            cwd=ROOT,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
        )
        replica = Replica(process)
        self._running.add(replica)
        return replica

    async def end(self, replica: Replica, number: signal.Signals = signal.SIGTERM) -> None:
        code = await replica.end(number)
        self._running.discard(replica)
        assert code == (0 if number == signal.SIGTERM else -number)

    async def end_all(self) -> None:
        await asyncio.gather(*(replica.end(signal.SIGKILL) for replica in self._running))

    async def register(self) -> None:
        """Register the role, so that its budget can be raised before its processes start."""
        new = NewAgent(id="writer", budget_usd=BUDGET_USD)
        registered = await self.shaft.backend.call(agents.register_agent, agents.RegisterAgent(agent=new))
        left = agents.InstanceOfAgent(id="writer", incarnation=registered.incarnation)
        await self.shaft.backend.call(agents.leave_agent, left)

    async def submit(self, number: int) -> None:
        """With money for exactly these tasks."""
        if not number:
            return
        await self.shaft.submit_many([NewTask("write", max_cost_usd=MAX_COST_USD) for _ in range(number)])
        await self.shaft.change_agent("writer", add_budget_usd=TASK_USD * number)

    async def submit_endless(self, number: int) -> None:
        """Tasks that only wait."""
        await self.shaft.submit_many([NewTask("write", spec={"waits": True}) for _ in range(number)])

    async def keep_supplied(self, enough: asyncio.Event) -> None:
        """Not to be cancelled: what was submitted last would not be paid for."""
        while not enough.is_set():
            await asyncio.sleep(0.1)
            await self.submit(max(0, BACKLOG - self._open_tasks()))

    async def has_done_all(self) -> bool:
        return self._open_tasks() == 0

    def has_seen_all(self, *, kills: bool) -> bool:
        """Whether processes were replaced in each way, at least once in the middle of a task."""
        ways, trace = {"restarted", "rolled out"}, "outcome = 'released'"
        if kills:
            ways, trace = ways | {"killed"}, "error = ANY (%s)"
        if not ways <= self.counts.keys():
            return False
        attempts = f"SELECT count(*) FROM lineshaft.attempt WHERE {trace}"
        return int(self.row(attempts, *([LOST] if kills else []))[0]) > 0

    def _open_tasks(self) -> int:
        return int(self.row("SELECT count(*) FROM lineshaft.task_live")[0])

    def row(self, query: str, *parameters: object) -> tuple[Any, ...]:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            found = connection.execute(query.encode(), parameters or None).fetchone()
        assert found is not None
        return found

    async def watch_the_budget(self) -> None:
        while True:
            agent = await self.shaft.get_agent("writer")
            assert agent.budget_usd is not None
            assert agent.spent_usd + agent.reserved_usd <= agent.budget_usd
            self.counts["looks at the budget"] += 1
            await asyncio.sleep(0.05)


@asynccontextmanager
async def running(where: str, dsn: str) -> AsyncIterator[Site]:
    async with Lineshaft(where, max_connections=4) as shaft:
        site = Site(shaft, where, dsn)
        try:
            yield site
        finally:
            await site.end_all()
    check_invariants(dsn)


async def restart(site: Site, replica: Replica, dice: random.Random, *, kills: bool) -> Replica:
    """Replace a replica once it has been at work for a while, in one of the ways in which that happens."""
    await replica.starts(dice.randint(1, 12))
    if kills and dice.random() < 0.4:
        site.counts["killed"] += 1
        await site.end(replica, signal.SIGKILL)
        replacement = await site.start()
    elif dice.random() < 0.5:
        site.counts["restarted"] += 1
        await site.end(replica)
        replacement = await site.start()
    else:
        site.counts["rolled out"] += 1
        replacement = await site.start()
        await replacement.starts()
        await site.end(replica)
    return replacement


async def restart_loops(site: Site, *, kills: bool) -> None:
    """Three replicas, each of which is replaced again and again; then all work is done."""
    dice = random.Random(16)
    end = time.monotonic() + SECONDS

    async def loop() -> Replica:
        replica = await site.start()
        # A busy machine may need longer for one of each, with its consequence.
        while time.monotonic() < end or not site.has_seen_all(kills=kills):
            replica = await restart(site, replica, dice, kills=kills)
        return replica

    await site.register()
    await site.submit(BACKLOG)
    async with asyncio.TaskGroup() as beside:
        enough = asyncio.Event()
        supplying = beside.create_task(site.keep_supplied(enough))
        watching = beside.create_task(site.watch_the_budget())
        replicas = await asyncio.gather(*(loop() for _ in range(REPLICAS)))
        enough.set()
        await supplying
        await until(site.has_done_all)
        watching.cancel()
    for replica in replicas:
        await site.end(replica)


def report(site: Site) -> dict[str, object]:
    """What became of the tasks."""
    tasks, attempts, dead = site.row(
        "SELECT count(*), sum(attempts), count(*) FILTER (WHERE status <> 'COMPLETED')"
        " FROM lineshaft.task_end"
    )
    failed, lost, released = site.row(
        "SELECT count(*) FILTER (WHERE outcome = 'failed'), count(*) FILTER (WHERE error = ANY (%s)),"
        " count(*) FILTER (WHERE outcome = 'released') FROM lineshaft.attempt",
        LOST,
    )
    figures = {"tasks": tasks, "attempts used": attempts, "not completed": dead, "failed": failed}
    found = {**site.counts, **figures, "lost": lost, "handed back": released}
    print(found)  # noqa: T201 - the figures of a long run
    return found


async def check_money(site: Site) -> None:
    """Each task has cost at least what its steps cost, and the agent has paid exactly for the tasks."""
    agent = await site.shaft.get_agent("writer")
    tasks, cost = site.row("SELECT count(*), sum(cost_usd) FROM lineshaft.task_end")
    assert agent.spent_usd == cost
    assert agent.reserved_usd == 0
    # A step that was interrupted is paid for, and runs again.
    assert agent.budget_remaining_usd is not None
    assert 0 <= agent.budget_remaining_usd <= Decimal(str(BUDGET_USD))
    assert cost >= tasks * TASK_USD


async def breaker_states(site: Site) -> list[str]:
    return [breaker.state for breaker in (await site.shaft.breakers()).items]


@pytest.mark.slow("processes are replaced for many seconds")
async def test_restarts_and_roll_outs_use_no_attempt(where: str, dsn: str) -> None:
    """R-083."""
    async with running(where, dsn) as site:
        await restart_loops(site, kills=False)

        found = report(site)
        assert (found["not completed"], found["attempts used"], found["failed"]) == (0, 0, 0)
        assert found["restarted"]
        assert found["rolled out"]
        assert found["handed back"], "some were stopped at the beginning of a task"
        assert set(await breaker_states(site)) <= {"closed"}
        await check_money(site)


@pytest.mark.slow("processes are replaced for many seconds")
async def test_each_killed_process_costs_its_tasks_one_attempt(where: str, dsn: str) -> None:
    async with running(where, dsn) as site:
        await restart_loops(site, kills=True)

        found = report(site)
        assert found["not completed"] == 0
        assert found["killed"]
        assert found["lost"] == found["failed"] == found["attempts used"]
        assert 0 < int(str(found["lost"])) <= SLOTS * site.counts["killed"]
        await check_money(site)


async def noticed_after(site: Site, since: str) -> float:
    """Seconds until the loss of a process was recorded: its tasks follow their retry policy from then."""
    found = "SELECT count(*) FROM lineshaft.attempt WHERE error = 'agent_restarted'"

    async def is_recorded() -> bool:
        return int(site.row(found)[0]) > 0

    await until(is_recorded)
    return float(site.row(f"SELECT extract(epoch FROM max(ended_at) - {since}) FROM lineshaft.attempt")[0])


@pytest.mark.slow("agents in their own processes")
async def test_a_killed_process_is_noticed_by_its_sibling(where: str, dsn: str) -> None:
    """Long before its lease expires."""
    async with running(where, dsn) as site:
        await site.submit_endless(SLOTS + 1)
        victim = await site.start()
        await victim.starts(SLOTS)
        sibling = await site.start()
        await sibling.starts()

        (killed_at,) = site.row("SELECT extract(epoch FROM clock_timestamp())")
        await site.end(victim, signal.SIGKILL)

        assert await noticed_after(site, f"to_timestamp({killed_at})") < NOTICED_SEC
        assert await breaker_states(site) == ["closed"], "the loss counts once"
        await site.end(sibling)


@pytest.mark.slow("agents in their own processes")
async def test_a_killed_process_is_noticed_by_its_restart(where: str, dsn: str) -> None:
    async with running(where, dsn) as site:
        await site.submit_endless(SLOTS + 1)
        victim = await site.start()
        await victim.starts(SLOTS)
        await site.end(victim, signal.SIGKILL)

        replacement = await site.start()

        registered = "(SELECT max(registered_at) FROM lineshaft.instance)"
        assert await noticed_after(site, registered) < NOTICED_SEC
        await replacement.starts()
        await site.end(replacement)
