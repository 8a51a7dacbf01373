"""Accounts against a model: random claims, windows, ends of tasks, lost leases and hours that pass."""

import random
from datetime import datetime, timedelta

import pytest

from lineshaft.duties.promoter import Promoter
from lineshaft.duties.reaper import Reaper
from lineshaft.types import AgentInfo
from lineshaft.types.work import ClaimedTask
from tests.world import World, ref

ACCOUNTS = ("a", "b", "c")
STEPS = 80


class Model:
    """One agent with three accounts, and what must be true of it after every step."""

    def __init__(self, world: World, agent: AgentInfo, seed: int) -> None:
        self.world = world
        self.agent = agent
        self.rng = random.Random(seed)
        self.closed: dict[str, datetime] = {}
        self.held: dict[str, ClaimedTask] = {}
        #: The account of the last attempt of each task that isn't held.
        self.last: dict[str, str | None] = {}
        self.crashed: set[str] = set()

    @property
    def open(self) -> set[str]:
        now = self.world.clock.now()
        return {name for name in ACCOUNTS if self.closed.get(name, now) <= now}

    def some(self) -> ClaimedTask | None:
        return self.rng.choice(list(self.held.values())) if self.held else None

    async def step(self) -> None:
        steps = (self.submit, self.claim, self.claim, self.window, self.window, self.complete, self.release)
        await self.rng.choice((*steps, self.wait, self.crash, self.reopen))()
        await self.world.heartbeat(self.agent.id, claims=[ref(task) for task in self.held.values()])
        await Promoter(self.world.engine.maintenance).run_once()
        await self.check()

    async def submit(self) -> None:
        self.last[await self.world.one(max_attempts=99)] = None

    async def claim(self) -> None:
        limit = self.rng.randint(1, 3)
        ready = self.world.rows("SELECT id FROM lineshaft.task_live WHERE status = 'READY'")
        tasks = await self.world.claim(self.agent, limit)
        assert len(tasks) == (min(limit, len(ready)) if self.open else 0)
        for task in tasks:
            before = self.last.pop(task.id)
            assert task.account in self.open
            assert task.account == before or before not in self.open
            self.held[task.id] = task

    async def window(self) -> None:
        if (task := self.some()) is None:
            return
        until = self.world.clock.now() + timedelta(hours=self.rng.choice([2, 5, 100]))
        await self.world.fail(task, "usage limit", category="rate_limit", retry_at=until)
        self.put_back(task)
        assert task.account is not None
        # A task that ran on it says later that it takes longer; never that it is shorter.
        self.closed[task.account] = max(until, self.closed.get(task.account, until))
        due = self.world.live(task.id)["due_at"]
        if self.open:
            assert due == self.world.clock.now()
        else:
            assert due == min(until, *(end for name, end in self.closed.items() if name != task.account))

    async def complete(self) -> None:
        if (task := self.some()) is not None:
            await self.world.complete(task)
            del self.held[task.id]

    async def release(self) -> None:
        if (task := self.some()) is not None:
            await self.world.release(task)
            self.put_back(task)

    def put_back(self, task: ClaimedTask) -> None:
        self.last[task.id] = self.held.pop(task.id).account

    async def wait(self) -> None:
        """What is held is held on: in steps that no lease is over."""
        for _ in range(self.rng.choice([1, 20, 60])):
            self.world.age(seconds=80)
            await self.world.heartbeat(self.agent.id, claims=[ref(task) for task in self.held.values()])

    async def crash(self) -> None:
        """What was held is lost, which does use an attempt."""
        self.world.age(seconds=600)
        await Reaper(self.world.engine.maintenance).run_once()
        self.crashed |= self.held.keys()
        for task in list(self.held.values()):
            self.put_back(task)
        self.world.connection.execute("DELETE FROM lineshaft.breaker")

    async def reopen(self) -> None:
        if shut := [name for name in self.closed if name not in self.open]:
            name = self.rng.choice(shut)
            await self.world.engine.slowdowns.end(f"account:{name}")
            del self.closed[name]

    async def check(self) -> None:
        world = self.world
        attempts = {row["id"] for row in world.rows("SELECT id FROM lineshaft.task_live WHERE attempts > 0")}
        assert attempts <= self.crashed
        assert world.rows("SELECT FROM lineshaft.dead_letter") == []
        reported = world.rows(
            "SELECT kinds[1] AS kind FROM lineshaft.event WHERE 'alert' = ANY (kinds) ORDER BY seq"
        )
        kinds = [row["kind"] for row in reported if row["kind"].startswith("accounts.")]
        assert kinds == ["accounts.closed", "accounts.opened"] * (len(kinds) // 2) + ["accounts.closed"] * (
            len(kinds) % 2
        )
        assert (len(kinds) % 2 == 1) is (not self.open)
        for row in world.rows("SELECT id FROM lineshaft.task_live WHERE status = 'READY' LIMIT 1"):
            why = await world.engine.read.why(row["id"])
            assert why.runnable is bool(self.open)
            if not self.open:
                assert [(reason.code, reason.until) for reason in why.reasons] == [
                    ("account_closed", min(self.closed.values()))
                ]


@pytest.mark.parametrize("seed", range(6))
async def test_accounts_at_random(world: World, seed: int) -> None:
    agent = await world.agent("ann", accounts=ACCOUNTS, heartbeat_interval_sec=30)
    model = Model(world, agent, seed)
    for _ in range(STEPS):
        await model.step()
