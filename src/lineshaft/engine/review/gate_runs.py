"""Runs of gates that cost money: what they may cost is reserved before they begin, as for an attempt.

The money is the task's (of `max_total_cost_usd`), its DAG's, the day's, and that of the agent which made
the output. Without it the gate waits. A run is a row until its cost is booked, whatever becomes of its task.
A run that doesn't say what it cost, because its validator died or the judge didn't answer, is taken to have
cost what was reserved for it, so that limits hold.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from msgspec import Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_rows
from lineshaft.engine.review.gated_output import GatedOutput, RunKey
from lineshaft.engine.transition.effects import Effects, log_events
from lineshaft.engine.transition.rows import NewEvent
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.model.budget import money

_SQL = catalog.load(__name__)
#: Outputs that wait for money are looked at again after this time; so many of them at once.
LOOK_AGAIN_SEC = 10.0
#: What a run reports counts up to this many times its reservation, and at least up to this many dollars.
_CEILING = 10
_AT_ONCE = 100


class EndedRun(Struct, frozen=True):
    """A run whose cost is to be booked."""

    task_id: str
    epoch: int
    agent_id: str | None
    dag_id: str | None
    reserved_usd: Decimal = Decimal(0)
    agent_reserved: bool = False
    day_reserved: bool = False

    @property
    def ceiling_usd(self) -> Decimal:
        return _CEILING * max(self.reserved_usd, Decimal(1))

    def cost(self, reported: Decimal | None) -> Decimal:
        """What the run has cost if it reports this; None: an unknown amount."""
        return self.reserved_usd if reported is None else money(reported)


class _DueRun(Struct, frozen=True):
    id: str
    epoch: int
    gate: str
    blocked_by: str | None
    agent_id: str | None
    dag_id: str | None
    type: str
    #: What is left of the total of its task; None: no limit.
    left_usd: Decimal | None


class _Funds(Struct, frozen=True):
    id: str
    #: None: no limit.
    money: Decimal | None


class _Installation(Struct, frozen=True):
    reserved_usd: Decimal
    needed_usd: Decimal
    money: Decimal | None
    #: Types whose spending is stopped; * is all.
    stopped: list[str]


class _Ledgers:
    """What is left for runs, while they are taken one after another."""

    def __init__(self, agents: Iterable[_Funds], dags: Iterable[_Funds], limits: _Installation) -> None:
        self._agents = {agent.id: agent.money for agent in agents}
        self._dags = {dag.id: dag.money for dag in dags}
        self._day = limits.money
        self._limits = limits
        #: Agents that have a budget.
        self.limited = frozenset(self._agents)

    def blocked_by(self, due: _DueRun) -> str | None:
        """The limit that has no money for this run, by its name in answers to heartbeats; None: none."""
        if {"*", due.type} & set(self._limits.stopped):
            return "velocity"
        purses = {
            "max_total_cost": due.left_usd,
            "agent_budget": self._agents.get(due.agent_id or ""),
            "dag_budget": self._dags.get(due.dag_id or ""),
            "daily_budget": self._day,
        }
        needed = self._limits.needed_usd
        return next((name for name, left in purses.items() if left is not None and left < needed), None)

    def reserve(self, due: _DueRun) -> None:
        usd = self._limits.reserved_usd
        for purse, name in ((self._agents, due.agent_id), (self._dags, due.dag_id)):
            left = purse.get(name or "")
            if name is not None and left is not None:
                purse[name] = left - usd
        self._day = None if self._day is None else self._day - usd


class GateRuns:
    def __init__(self, transitions: Transitions) -> None:
        self._database: Database = transitions.database
        self._locks = transitions.locks

    async def take(self, methods: Sequence[str], *, limit: int, lease_sec: float) -> list[GatedOutput]:
        """Outputs that wait for one of these gates, each with its reservation, under a lease."""
        await self.settle_lost()
        if not limit:
            return []

        async def work(connection: Connection) -> list[GatedOutput]:
            now = self._database.now
            await connection.execute(_SQL["lock_day"])
            wanted = {**now, "methods": list(methods), "limit": _AT_ONCE}
            if not (due := await fetch_rows(connection, _DueRun, _SQL["due_runs"], wanted)):
                return []
            agents = await self._lock(connection, "lock_agents", (each.agent_id for each in due))
            dags = await self._lock(connection, "lock_dags", (each.dag_id for each in due))
            (limits,) = await fetch_rows(connection, _Installation, _SQL["installation"], now)
            ledgers = _Ledgers(agents, dags, limits)
            taken: list[_DueRun] = []
            blocked: list[tuple[_DueRun, str]] = []
            for run in due:
                if (limit_name := ledgers.blocked_by(run)) is not None:
                    blocked.append((run, limit_name))
                elif len(taken) < limit:
                    ledgers.reserve(run)
                    taken.append(run)
            await self._block(connection, blocked, limits)
            return await self._begin(connection, taken, limits, ledgers.limited, lease_sec) if taken else []

        return await self._database.run(work)

    async def _lock(self, connection: Connection, name: str, ids: Iterable[str | None]) -> list[_Funds]:
        wanted = sorted({each for each in ids if each is not None})
        return await fetch_rows(connection, _Funds, _SQL[name], {"ids": wanted}) if wanted else []

    async def _block(
        self, connection: Connection, blocked: Sequence[tuple[_DueRun, str]], limits: _Installation
    ) -> None:
        if not blocked:
            return
        columns = {
            "ids": [run.id for run, _ in blocked],
            "epochs": [run.epoch for run, _ in blocked],
            "reasons": [name for _, name in blocked],
        }
        await connection.execute(
            _SQL["block_runs"], {**self._database.now, **columns, "pause": LOOK_AGAIN_SEC}
        )
        usd = float(limits.reserved_usd)
        events = [
            NewEvent.of(
                ["budget.blocked"],
                run.id,
                run.dag_id,
                epoch=run.epoch,
                data={"purse": name, "gate": run.gate, "judge_max_cost_usd": usd},
            )
            for run, name in blocked
            if run.blocked_by is None
        ]
        await log_events(connection, self._database.now, events)

    async def _begin(
        self,
        connection: Connection,
        taken: Sequence[_DueRun],
        limits: _Installation,
        limited: Collection[str],
        lease_sec: float,
    ) -> list[GatedOutput]:
        of_day = limits.money is not None
        outputs = await fetch_rows(
            connection,
            GatedOutput,
            _SQL["begin_runs"],
            {
                **self._database.now,
                "ids": [run.id for run in taken],
                "epochs": [run.epoch for run in taken],
                "limited": list(limited),
                "of_day": of_day,
                "reserved": limits.reserved_usd,
                "lease": lease_sec,
            },
        )
        paying = [run.agent_id for run in taken if run.agent_id in limited]
        dags = [run.dag_id for run in taken if run.dag_id is not None]
        for name, ids in (("reserve_of_agents", paying), ("reserve_of_dags", dags)):
            if ids:
                await connection.execute(_SQL[name], {"ids": ids, "reserved": limits.reserved_usd})
        if of_day:
            await connection.execute(_SQL["reserve_of_day"], {"usd": limits.reserved_usd * len(taken)})
        return outputs

    async def renew(self, connection: Connection, keys: Sequence[RunKey], *, lease_sec: float) -> None:
        await connection.execute(
            _SQL["renew_runs"], {**self._database.now, **_columns(keys), "lease": lease_sec}
        )

    async def end(
        self, connection: Connection, keys: Sequence[RunKey], *, only_lost: bool = False
    ) -> dict[str, EndedRun]:
        """Those of these runs whose cost isn't booked yet, by task. Their tasks are locked."""
        if not keys:
            return {}
        parameters = {**self._database.now, **_columns(keys), "only_lost": only_lost}
        return {
            run.task_id: run for run in await fetch_rows(connection, EndedRun, _SQL["end_runs"], parameters)
        }

    async def within_ceilings(
        self, connection: Connection, costs: Sequence[tuple[EndedRun, Decimal]]
    ) -> list[tuple[EndedRun, Decimal]]:
        """What counts of these costs. The rest is disputed, as what agents report (live/disputes.py)."""
        beyond = [(run, cost - run.ceiling_usd) for run, cost in costs if cost > run.ceiling_usd]
        if beyond:
            columns = {
                "ids": [run.task_id for run, _ in beyond],
                "epochs": [run.epoch for run, _ in beyond],
                "amounts": [amount for _, amount in beyond],
                "ceilings": [run.ceiling_usd for run, _ in beyond],
            }
            await connection.execute(_SQL["dispute"], {**self._database.now, **columns})
        return [(run, min(cost, run.ceiling_usd)) for run, cost in costs]

    async def charge(
        self, connection: Connection, effects: Effects, costs: Sequence[tuple[EndedRun, Decimal]]
    ) -> None:
        """Book what runs have cost; `effects` settle their reservations."""
        if not costs:
            return
        await connection.execute(
            _SQL["charge"],
            {
                "ids": [run.task_id for run, _ in costs],
                "epochs": [run.epoch for run, _ in costs],
                "costs": [cost for _, cost in costs],
            },
        )
        for run, cost in costs:
            effects.charge(
                run.agent_id,
                run.dag_id,
                cost,
                reserved=run.reserved_usd,
                agent_reserved=run.agent_reserved,
                day_reserved=run.day_reserved,
            )

    async def settle_lost(self) -> int:
        """Runs whose validators have ended cost what was reserved for them; returns how many there were."""
        async with self._database.connection() as connection:
            parameters = {**self._database.now, "limit": _AT_ONCE}
            keys = await fetch_rows(connection, RunKey, _SQL["lost_runs"], parameters)
        if not keys:
            return 0

        async def work(connection: Connection) -> int:
            await self._locks.lock(connection, sorted({key.id for key in keys}))
            lost = await self.end(connection, keys, only_lost=True)
            effects = Effects(self._database.now)
            await self.charge(connection, effects, [(run, run.cost(None)) for run in lost.values()])
            await effects.write(connection)
            return len(lost)

        return await self._database.run(work)


def _columns(keys: Sequence[RunKey]) -> Mapping[str, Any]:
    return {
        "ids": [key.id for key in keys],
        "epochs": [key.epoch for key in keys],
        "gate_nos": [key.gate_no for key in keys],
        "runs": [key.run for key in keys],
    }
