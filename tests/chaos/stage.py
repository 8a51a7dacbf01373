"""Sets up the processes of a run: their names, their connections to the database, their arguments."""

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from lineshaft.engine.engine import Engine
from tests.chaos.cluster import Cluster
from tests.chaos.faults import OF_REDIS, Kind
from tests.chaos.fleet import Line, Member, copy_code, python
from tests.chaos.nemesis import Disk
from tests.chaos.plan import Plan, mount, unmount
from tests.chaos.pooler import Pooler
from tests.chaos.redis import Redis, breakable
from tests.ports import reserved_port

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
#: It finds out itself which of two database servers is the primary.
_KNOWS_BOTH = "agent-0"
#: Those that don't know Redis, if there is one: they wake the others, and are woken by them.
_WITHOUT_REDIS = frozenset({"agent-3", "client-db"})
#: Its budget is soon used up.
_POOR = "agent-2"


def _token(name: str, tokens: dict[str, str]) -> dict[str, str]:
    return {"LINESHAFT_TOKEN": tokens["ADMIN"]} if tokens and name in _OVER_HTTP else {}


async def _tokens(dsn: str) -> dict[str, str]:
    """One for honest processes, which may do everything, and those of the attackers, by scope."""
    async with Engine(dsn, max_connections=2) as engine:
        create = engine.tokens.create
        made = {
            "ADMIN": await create("honest", "admin"),
            "READ": await create("attacker-read", "read"),
            "SUBMIT": await create("attacker-submit", "submit"),
            "AGENT": await create("attacker-agent", "agent", agent_id="attacker"),
        }
    return {scope: token.token for scope, token in made.items()}


def _new_directory() -> Path:
    made = Path(tempfile.mkdtemp(prefix="lineshaft-chaos-"))
    # The server's account must be able to reach its data.
    made.chmod(0o711)
    return made


@dataclass
class Stage:
    plan: Plan
    directory: Path = field(default_factory=_new_directory)
    members: dict[str, Member] = field(default_factory=dict)
    disks: dict[str, Disk] = field(default_factory=dict)
    #: Files that say by how many seconds an agent's clock is off.
    clocks: dict[str, Path] = field(default_factory=dict)
    #: If the plan has its faults.
    redis: Redis | None = None

    def __post_init__(self) -> None:
        self.history.mkdir()
        self.logs.mkdir()

    @property
    def history(self) -> Path:
        return self.directory / "history"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def brake(self) -> Path:
        """While this file exists, clients ask for nothing."""
        return self.directory / "brake"

    async def set_up(self, stack: AsyncExitStack, cluster: Cluster) -> None:
        """Start all processes; the stack ends them."""
        breakers = self.directory / "breakers.yaml"
        breakers.write_text(_BREAKERS)
        code = await asyncio.to_thread(copy_code, self.directory)
        ports = {"server-0": reserved_port(), "server-1": reserved_port()}
        turns = itertools.cycle(ports.values())
        pooler = await self._pooler(stack, cluster)
        if not set(OF_REDIS).isdisjoint(self.plan.kinds):
            self.redis = await stack.enter_async_context(breakable())
        tokens = await _tokens(cluster.primary.dsn) if self.plan.attacks else {}
        for name in (*self.plan.processes, *self.plan.attackers):
            pooled = pooler if name in _POOLED else None
            line = await self._line(stack, cluster, name, turns, pooled)
            variables = _VARIABLES | {
                "LINESHAFT_CIRCUIT_BREAKERS": str(breakers),
                "LINESHAFT_POOLER": "none" if pooled is None else "transaction",
            }
            if self.redis is not None and name not in _WITHOUT_REDIS:
                variables |= {"LINESHAFT_REDIS_URL": self.redis.url, "LINESHAFT_REDIS_EVENTS": "1"}
            if name in self.plan.attackers:
                variables = {f"ATTACKER_{scope}": token for scope, token in tokens.items()}
                command = self._attacker(name, line)
            elif name in ports:
                variables["LINESHAFT_DATABASE_URL"] = line.dsn
                up = ("up", "--port", str(ports[name]), "--json")
                command = python("lineshaft.cli.main", *up)
            elif name.startswith("agent"):
                variables |= _token(name, tokens)
                command = self._agent(stack, name, line)
            else:
                variables |= _token(name, tokens)
                command = self._client(name, line)
            member = Member(name, line, command, variables, log=self.logs / f"{name}.log", code=code)
            self.members[name] = member
            stack.push_async_callback(member.destroy)
            member.start()

    async def _pooler(self, stack: AsyncExitStack, cluster: Cluster) -> Pooler | None:
        if self.plan.pgbouncer is None:
            return None
        pooler = Pooler(self.plan.pgbouncer, self.directory, cluster.account, lambda: cluster.primary.port)
        stack.callback(pooler.stop)
        await pooler.start()
        cluster.followers.append(pooler.follow)
        return pooler

    async def _line(
        self, stack: AsyncExitStack, cluster: Cluster, name: str, turns: Iterator[int], pooler: Pooler | None
    ) -> Line:
        line = Line()
        if name in _OVER_HTTP or name in self.plan.attackers:
            # A little load balancer: each connection goes to another server.
            await line.add(stack, lambda: next(turns))
        elif pooler is not None:
            await line.add(stack, lambda: pooler.port)
        elif name == _KNOWS_BOTH and Kind.FAIL_OVER in self.plan.kinds:
            for node in (cluster.primary, cluster.spare):
                await line.add(stack, lambda node=node: node.port)  # type: ignore[misc]  # bound now
        else:
            await line.add(stack, lambda: cluster.primary.port)
        return line

    def _agent(self, stack: AsyncExitStack, name: str, line: Line) -> list[str]:
        place = self.directory / f"{name}.disk"
        place.mkdir()
        if Kind.DISK_FULL in self.plan.kinds and mount(place):
            stack.callback(unmount, place)
        self.disks[name] = Disk(place)
        clock = self.clocks[name] = self.directory / f"{name}.clock"
        clock.write_text("0")
        where = line.url if name in _OVER_HTTP else line.dsn
        budget = ["--budget=1"] if name == _POOR else []
        return python(
            "tests.chaos.worker", name, where, str(self.history), str(place), f"--clock={clock}", *budget
        )

    def _attacker(self, name: str, line: Line) -> list[str]:
        seed = self.plan.seed + int(name.rpartition("-")[2])
        return python("tests.chaos.attacker", name, f"--url={line.url}", f"--seed={seed}")

    def _client(self, name: str, line: Line) -> list[str]:
        way = f"--url={line.url}" if name in _OVER_HTTP else f"--dsn={line.dsn}"
        if name.startswith("reader"):
            return python("tests.chaos.reader", name, str(self.history), way)
        pace = (f"--seed={self.plan.seed}", f"--pause={self.plan.calls_every_sec}", f"--brake={self.brake}")
        return python("tests.chaos.submitter", name, str(self.history), way, *pace)
