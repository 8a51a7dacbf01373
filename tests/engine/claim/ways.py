"""Random worlds, and a way to let several calls act on the same one: it is restored before each of them."""

import random
from collections.abc import Iterable
from datetime import timedelta
from decimal import Decimal
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from lineshaft.clock import MovableClock
from lineshaft.duties.promoter import Promoter
from lineshaft.engine.engine import Engine
from lineshaft.model.admission import LockKey
from lineshaft.model.tasks import NewTask, OutputContract
from lineshaft.operations.quotas import NewRate, SetQuota
from lineshaft.types import AgentInfo
from lineshaft.types.work import ClaimedTask, ClaimRef, HeldTask, Presence, Spent
from tests.factory import Factory
from tests.world import Actions, ref

Rows = dict[str, list[dict[str, Any]]]
#: Transactions have other numbers each time.
TRANSACTIONS = frozenset({"xid", "opened_by", "retired_by"})

GATED = OutputContract(validation="json-schema", validation_schema={})


class Snapshot:
    """The rows of all tables and the values of all sequences, to come back to."""

    def __init__(self, connection: psycopg.Connection, name: str) -> None:
        self._connection = connection
        self._schema = name
        # Engines remember lanes.
        self._tables = self._names(
            "relkind IN ('r', 'p') AND NOT relispartition AND relname NOT IN ('migration', 'lane')"
        )
        self._sequences = self._names("relkind = 'S' AND relname <> 'lane_id_seq'")
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        self._each(self._tables, "CREATE TABLE {schema}.{table} (LIKE lineshaft.{table})")
        self._saved: Rows = {table: [] for table in self._tables}
        self._values: list[tuple[Any, ...]] = []
        self.save()

    def _names(self, condition: str) -> list[str]:
        query = (
            "SELECT relname FROM pg_class WHERE relnamespace = 'lineshaft'::regnamespace"
            f" AND {condition} ORDER BY relname"
        )
        return [name for (name,) in self._connection.execute(query.encode()).fetchall()]

    def _each(self, tables: Iterable[str], *statements: LiteralString) -> None:
        """In one call."""
        calls = [
            sql.SQL(statement).format(schema=sql.Identifier(self._schema), table=sql.Identifier(table))
            for table in tables
            for statement in statements
        ]
        if calls:
            self._connection.execute(sql.SQL(";").join(calls))

    def _read(self, names: Iterable[str]) -> Rows:
        """All rows of these tables, in one query."""
        columns = [
            sql.SQL("(SELECT coalesce(jsonb_agg(t ORDER BY t::text), '[]') FROM lineshaft.{} AS t)").format(
                sql.Identifier(name)
            )
            for name in names
        ]
        row = self._connection.execute(sql.SQL("SELECT {}").format(sql.SQL(", ").join(columns))).fetchone()
        assert row is not None
        return dict(zip(names, row, strict=True))

    def save(self) -> None:
        rows = self._read(self._tables)
        self._each(
            [table for table in self._tables if rows[table] != self._saved[table]],
            "DELETE FROM {schema}.{table}",
            "INSERT INTO {schema}.{table} SELECT * FROM lineshaft.{table}",
        )
        self._saved = rows
        values = sql.SQL(" UNION ALL ").join(
            sql.SQL("SELECT {}, last_value, is_called FROM lineshaft.{}").format(
                f"lineshaft.{name}", sql.Identifier(name)
            )
            for name in self._sequences
        )
        self._values = self._connection.execute(values).fetchall()

    def restore(self) -> None:
        rows = self._read(self._tables)
        self._each(
            [table for table in self._tables if rows[table] != self._saved[table]],
            "DELETE FROM lineshaft.{table}",
            "INSERT INTO lineshaft.{table} OVERRIDING SYSTEM VALUE SELECT * FROM {schema}.{table}",
        )
        calls = [sql.SQL("setval({}, {}, {})").format(*value) for value in self._values]
        self._connection.execute(sql.SQL("SELECT {}").format(sql.SQL(", ").join(calls)))

    def rows(self) -> Rows:
        """All rows: events in their order, locks by the order of their tokens."""
        found = self._read(self._tables)
        found["event"].sort(key=lambda row: row["seq"])
        tokens = sorted(row["token"] for row in (*found["lock"], *found["lock_share"]))
        for row in (*found["lock"], *found["lock_share"], *found["task_live"]):
            for column in {"token", "lock_token"} & row.keys():
                if row[column] in tokens:
                    row[column] = tokens.index(row[column])
        return {
            table: [
                {name: value for name, value in row.items() if name not in TRANSACTIONS | {"seq"}}
                for row in (rows if table == "event" else sorted(rows, key=str))
            ]
            for table, rows in found.items()
        }


def differences(one: Rows, other: Rows, *, in_order: bool = True) -> list[str]:
    """What differs, by table and column; `in_order`: also the order of events."""
    found = []
    for table in one:
        rows, others = one[table], other[table]
        if table == "event" and not in_order:
            rows, others = sorted(rows, key=str), sorted(others, key=str)
        if len(rows) != len(others):
            found.append(f"{table}: {len(rows)} rows, {len(others)} rows")
        for row, compared in zip(rows, others, strict=False):
            name = row.get("id", row.get("task_id"))
            found += [
                f"{table}.{column} of {name}: {row[column]!r}, {compared[column]!r}"
                for column in row
                if row[column] != compared[column]
            ]
    return found


class RandomWorld:
    """Tasks, DAGs, agents, limits, guards and a past at random. Half of the worlds have nothing to weigh."""

    def __init__(
        self, engine: Engine, connection: psycopg.Connection, clock: MovableClock, seed: int
    ) -> None:
        self.engine = engine
        self.connection = connection
        self.factory = Factory(connection, clock)
        self.clock = clock
        self.rng = random.Random(seed)
        self.is_plain = seed % 2 == 0
        self.actions = Actions(engine)

    def maybe(self, chance: float) -> bool:
        return self.rng.random() < chance

    def amount(self, *amounts: str | None) -> Decimal | None:
        chosen = self.rng.choice(amounts)
        return None if chosen is None else Decimal(chosen)

    async def make(self) -> AgentInfo:
        """Returns the agent that is going to claim."""
        await self.engine.limits.patch({"default_max_cost_usd": self.amount(None, "0", "0.5", "2")})
        if not self.is_plain and self.maybe(0.3):
            await self.engine.limits.patch({"daily_budget_usd": self.amount("0.7", "5", "50")})
        agent = await self.actions.agent(
            "ann",
            capabilities=self.rng.choice([(), ("sql",)]),
            types=self.rng.choice([None, None, ("code",), ("code", "review")]),
            models_available=self.rng.choice([(), ("m1",), ("m1", "m2")]),
            max_concurrent_tasks=self.rng.choice([1, 2, 4, 4]),
            budget_usd=None if self.is_plain or self.maybe(0.6) else self.amount("0.6", "3", "50"),
            accounts=() if self.is_plain or self.maybe(0.6) else ("team-1", "team-2"),
        )
        await self.quotas()
        for _ in range(self.rng.randint(1, 5)):
            await self.submit()
        if self.maybe(0.5):
            await self.past()
        if not self.is_plain:
            self.guards()
        # As after a time in which no agent could afford them.
        for row in self.connection.execute(
            "SELECT id FROM lineshaft.task_live ORDER BY submission_no"
        ).fetchall():
            if self.maybe(0.2):
                self.connection.execute(
                    "UPDATE lineshaft.task_live SET budget_reported = true WHERE id = %s", row
                )
        return agent

    def fields(self) -> dict[str, Any]:
        now = self.clock.now()
        deadline = now + timedelta(minutes=5) if self.maybe(0.2) else None
        return {
            "priority": self.rng.choice([10, 50, 50, 90]),
            "required_capabilities": self.rng.choice([(), (), (), ("sql",)]),
            "model_preferences": self.rng.choice([(), (), ("m1",), ("m2", "m1")]),
            "max_cost_usd": self.amount(None, None, "0", "0.5", "1"),
            "max_total_cost_usd": self.amount(None, None, None, "0.6", "1.2"),
            "heartbeat_interval_sec": self.rng.choice([None, None, 7.0]),
            "max_duration_sec": self.rng.choice([10.0, 600.0]),
            "deadline": deadline,
            "expire_at_deadline": deadline is not None and self.maybe(0.5),
            **self.locks(),
            "output": None if self.is_plain or self.maybe(0.9) else GATED,
            "quota_keys": [] if self.is_plain or self.maybe(0.7) else [self.rng.choice(["k:a", "k:b"])],
            "tags": [] if self.is_plain or self.maybe(0.8) else ["slow"],
        }

    def locks(self) -> dict[str, Any]:
        if self.is_plain or self.maybe(0.7):
            return {}
        if self.maybe(0.5):
            return {"lock_key": "doc:1"}
        keys = self.rng.sample(["doc:1", "doc:2", "doc:3"], self.rng.randint(1, 3))
        return {"lock_keys": [LockKey(key, shared=self.maybe(0.5)) for key in keys]}

    async def submit(self) -> None:
        type_ = self.rng.choice(["code", "code", "review"])
        shape = self.rng.choice(["one", "one", "one", "one", "chain", "wide"])
        if shape == "one":
            await self.actions.one(type_, **self.fields())
            return
        tasks = [NewTask(type_, key=f"t{n}", **self.fields()) for n in range(3)]
        if shape == "chain":
            tasks = [
                NewTask(type_, key=f"t{n}", depends_on=[f"t{n - 1}"] if n else [], **self.fields())
                for n in range(3)
            ]
        ceiling = None if self.is_plain or self.maybe(0.5) else self.rng.choice([0.7, 3, 50])
        await self.actions.dag(*tasks, ceiling=ceiling)

    async def past(self) -> None:
        """Attempts of another agent, which cost something; their tasks may be claimed again."""
        accounts = () if self.is_plain else ("team-2", "team-3")
        bob = await self.actions.agent("bob", capabilities=("sql",), accounts=accounts)
        for task in await self.actions.claim(bob, self.rng.randint(1, 3)):
            spent = Spent(self.amount(None, "0.2", "0.4"), 5, 6)
            if self.maybe(0.3):
                await self.actions.complete(task)
            elif self.maybe(0.3):
                await self.actions.release(task)
            else:
                await self.actions.fail(task, category="timeout", spent=spent)
        self.clock.advance(60)
        await Promoter(self.engine.maintenance).run_once()
        if self.is_plain or self.maybe(0.5):
            # So that the failures don't count any more: most fleets have none.
            self.connection.execute("DELETE FROM lineshaft.breaker")

    async def quotas(self) -> None:
        """In worlds that have nothing to weigh, they concern other work: the short ways are still open."""
        others = ("type:other", "model:m3", "agent:carl", "o:*")
        matches = others if self.is_plain else ("type:code", "model:m1", "agent:ann", "tag:slow", "k:*")
        for n, match in enumerate(matches):
            if self.maybe(0.3):
                rate = self.rng.choice([None, None, NewRate(amount=2, unit="tasks", per_sec=30)])
                most = self.rng.choice([0, 1, 2, 3] if rate is None else [None, 1, 2])
                await self.engine.quotas.set(
                    SetQuota(name=f"q{n}", match=match, each=self.maybe(0.7), max_running=most, rate=rate)
                )

    def guards(self) -> None:
        now = self.clock.now()
        later = now + timedelta(days=1)
        if self.maybe(0.2):
            self.factory.insert(
                "pause", {"type": self.rng.choice(["review", "other", "code", "*"]), "since": now}
            )
        if self.maybe(0.2):
            key = self.rng.choice(["model:m1", "model:m2", "model:m3", "*", "agent:ann", "agent:bob"])
            self.factory.insert("slowdown", {"key": key, "signalled_at": now, "until": later})
        if self.maybe(0.3):
            for name in self.rng.choice([["team-1"], ["team-2"], ["team-1", "team-2"]]):
                values = {"key": f"account:{name}", "signalled_at": now, "until": later}
                self.factory.insert("slowdown", values)
        if self.maybe(0.2):
            key = self.rng.choice(["review", "other", "model:m2"])
            self.connection.execute("DELETE FROM lineshaft.breaker WHERE key = %s", [key])
            self.factory.insert(
                "breaker", {"key": key, "state": "open", "opened_at": now, "probe_at": later, "failures": 5}
            )

    async def hold(self, agent: AgentInfo) -> list[ClaimedTask]:
        """Tasks that the agent works on, some of which have reported what they cost so far."""
        tasks = await self.actions.claim(agent, self.rng.randint(1, 4))
        self.clock.advance(3)
        for task in tasks:
            if self.maybe(0.4):
                await self.report(agent, ref(task), Spent(self.amount("0.1", "0.5", "0.7", "25"), 1, 2))
        if self.maybe(0.2):
            # Reservations are only part of ledgers that had a limit when they were made.
            await self.engine.fleet.patch(agent.id, budget_usd=self.amount("0.6", "50"))
        if self.maybe(0.2):
            await self.engine.limits.patch({"default_max_cost_usd": self.amount(None, "0.5", "2")})
            await self.engine.maintenance.recheck_parked(100)
        return tasks

    async def report(self, agent: AgentInfo, claim: ClaimRef, spent: Spent) -> None:
        me = Presence(agent.id, agent.incarnation)
        await self.engine.work.heartbeat([], [HeldTask(claim.id, claim.epoch, me, None, spent)])

    def spent(self) -> Spent:
        """The last is more than the ceiling of any claim here."""
        return Spent(self.amount(None, "0", "0.3", "0.5", "1.5", "30"), 7, 8)
