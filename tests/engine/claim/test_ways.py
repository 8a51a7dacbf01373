"""All ways of claiming, and all ways of completing, leave the same rows behind.

A way that leaves a task to the complete statement is compared by what its caller ends up with.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import psycopg
import pytest
from msgspec.structs import asdict

from lineshaft.clock import MovableClock
from lineshaft.engine.claim.fast_path import FastClaim, FastPath, claim_fast
from lineshaft.engine.claim.single import claim_one, complete_one
from lineshaft.engine.engine import Engine
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.pipeline import pipelined
from lineshaft.engine.transition.complete import _completion_columns
from lineshaft.model.states import Status
from lineshaft.types import AgentInfo
from lineshaft.types.work import Cancellation, Claim, Completion, Failure, Moved, Presence, Release
from tests.engine.claim.ways import RandomWorld, Rows, Snapshot, differences
from tests.invariants import check_invariants
from tests.world import ref

WORLDS = 24
#: Of the worlds in which something can be claimed or completed, at least this share goes each way.
LEAST_SHARE = 0.2
_NOW = datetime(2030, 1, 1, tzinfo=UTC)
COMPLETE = catalog.load("lineshaft.engine.transition.complete")


class Always(FastPath):
    """Open for all callers."""

    def __init__(self, taken: Counter[str]) -> None:
        super().__init__()
        self._taken = taken

    def is_open(self, caller: str = "") -> bool:  # noqa: ARG002
        return True

    def tried(self, caller: str = "", *, worked: bool) -> None:  # noqa: ARG002
        self._taken["completion of several"] += worked


class Never(FastPath):
    def is_open(self, caller: str = "") -> bool:  # noqa: ARG002 - it is closed for all
        return False


class Ways:
    """Makes one engine go one way or another, and counts what it did."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.taken: Counter[str] = Counter()

    def claims_with(self, way: str) -> None:
        async def look(agent_id: str, parameters: dict[str, Any]) -> FastClaim | None:
            if parameters["follows"] is not None or way == "complete statement":
                return None
            if way == "one slot":
                agent = Presence(agent_id, parameters["incarnation"])
                options = {name: parameters[name] for name in ("types", "start")}
                fast = await claim_one(self.engine.database, agent, **options)
            else:
                values = {**self.engine.database.now, **parameters}
                fast = await self.engine.database.run_alone(lambda own: claim_fast(own, values))
            self.taken[f"claim, {way}"] += bool(fast.tasks) and fast.is_all
            return fast

        self.engine.claims._look = look  # type: ignore[method-assign]
        self.engine.claims._probers.clear()
        self.engine.task_types._reported.clear()

    def completes_with(self, way: str) -> None:
        complete = self.engine.work._complete
        complete._single_path = Always(self.taken) if way == "one slot" else Never()
        complete._fast_path = Always(self.taken) if way == "several" else Never()

    async def complete(self, way: str, item: Completion) -> dict[str, Any]:
        """One task. Calls use the statement for several tasks only for more than one."""
        (item,) = await self.engine.work.within_ceilings([item])
        done = False
        if way == "several":
            call = COMPLETE["complete_fast"], {**self.engine.database.now, **_completion_columns([item])}
            (rows,) = await self.engine.database.run_alone(lambda own: pipelined(own, call, named=False))
            done = bool(rows)
        elif way == "one slot":
            done = await complete_one(self.engine.database, item)
        self.taken[f"completion, {way}"] += done
        if done:
            return as_seen(Moved(item.claim.id, Status.COMPLETED))
        self.completes_with("complete statement")
        (moved,) = await self.engine.work.complete([item])
        return as_seen(moved)


@pytest.fixture
async def engine(dsn: str, clock: MovableClock) -> AsyncIterator[Engine]:
    async with Engine(dsn, clock=clock, max_connections=2) as opened:
        yield opened


@pytest.fixture
def ways(engine: Engine) -> Ways:
    return Ways(engine)


class Comparison:
    """Random worlds, in each of which several calls are made, each from the same start."""

    def __init__(self, engine: Engine, connection: psycopg.Connection, clock: MovableClock) -> None:
        self._engine = engine
        self._connection = connection
        self._clock = clock
        self._empty = Snapshot(connection, "empty")
        self._start = Snapshot(connection, "start")

    def new(self, seed: int) -> RandomWorld:
        self._empty.restore()
        return RandomWorld(self._engine, self._connection, self._clock, seed)

    async def outcomes(self, calls: dict[str, Callable[[], Awaitable[Any]]]) -> dict[str, tuple[Any, Rows]]:
        """By the name of the call: what it returned, and all rows that it left."""
        self._start.save()
        found = {}
        for name, call in calls.items():
            self._start.restore()
            answer = await call()
            found[name] = answer, self._start.rows()
        check_invariants(self._connection)
        return found


@pytest.fixture
def comparison(engine: Engine, connection: psycopg.Connection, clock: MovableClock) -> Comparison:
    return Comparison(engine, connection, clock)


def compare(seed: int, outcomes: dict[str, tuple[Any, Rows]], *, in_order: bool = True) -> list[str]:
    """What differs between the first of them and the others."""
    first, *others = outcomes
    expected, rows = outcomes[first]
    found = []
    for name in others:
        answer, compared = outcomes[name]
        faults = differences(rows, compared, in_order=in_order)
        if answer != expected:
            faults.append(f"answers: {expected!r}, {answer!r}")
        found += [f"world {seed}, {first} / {name}: {fault}" for fault in faults]
    return found


def as_seen(answer: Claim | Moved) -> dict[str, Any]:
    """What a caller gets; errors are compared by their text."""
    return {name: str(value) if name == "error" else value for name, value in asdict(answer).items()}


def without_marks(outcome: tuple[Any, Rows]) -> tuple[Any, Rows]:
    """Without what a claim of its own transaction has, and what one with a completion has.

    The event of the former names the completion; and while the latter was made the agent was busy.
    """
    (moved, claim), rows = outcome
    for row in rows["event"]:
        if row["data"] and "follows" in row["data"]:
            row["data"] = None
    for row in rows["instance"]:
        since = row.pop("busy_since")
        row["busy_sec"] += 0 if since is None else (_NOW - datetime.fromisoformat(since)).total_seconds()
    return (moved, {**claim, "inputs": None}), rows


def ledgers(rows: Rows) -> Rows:
    """All that counts money, and slots."""
    return {
        "agent": rows["agent"],
        "instance": rows["instance"],
        "spend": rows["spend"],
        **{
            table: [
                {name: row.get(name) for name in ("id", "spent_usd", "reserved_usd")} for row in rows[table]
            ]
            for table in ("dag", "limits")
        },
    }


# Claims.


@pytest.mark.parametrize("limit", [1, 3])
async def test_claims(ways: Ways, comparison: Comparison, limit: int) -> None:
    """R-233: all ways take the same tasks, in the same order, and reserve the same."""
    names = ["complete statement", "several", *(["one slot"] if limit == 1 else [])]
    different: list[str] = []
    some = 0
    for seed in range(WORLDS):
        agent = await comparison.new(seed).make()

        async def claim(way: str, agent: AgentInfo = agent, start: bool = seed % 3 > 0) -> Any:
            ways.claims_with(way)
            claim = await ways.engine.claims.claim(agent.id, agent.incarnation, limit=limit, start=start)
            return as_seen(claim)

        outcomes = await comparison.outcomes({name: partial(claim, name) for name in names})
        different += compare(seed, outcomes, in_order=limit == 1)
        some += bool(outcomes["complete statement"][0]["tasks"])
    assert not different, "\n".join(different)
    assert some >= WORLDS / 2
    for name in names[1:]:
        assert ways.taken[f"claim, {name}"] >= LEAST_SHARE * some, (ways.taken, some)


# Completions.


@pytest.mark.slow("many random worlds")
async def test_completions(ways: Ways, comparison: Comparison) -> None:
    """Of one task. A report just before the completion changes nothing either."""
    names = ("complete statement", "several", "one slot", "complete statement, reported before")
    different: list[str] = []
    some = 0
    for seed in range(WORLDS):
        world = comparison.new(seed)
        agent = await world.make()
        ways.claims_with("complete statement")
        if not (held := await world.hold(agent)):
            continue
        some += 1
        item = Completion(ref(held[0]), output=b'{"n": 1}', spent=world.spent())

        async def complete(
            way: str, item: Completion = item, agent: AgentInfo = agent, world: RandomWorld = world
        ) -> dict[str, Any]:
            if way.endswith("reported before"):
                await world.report(agent, item.claim, item.spent)
            return await ways.complete(way, item)

        outcomes = await comparison.outcomes({name: partial(complete, name) for name in names})
        different += compare(seed, outcomes)
    assert not different, "\n".join(different)
    assert some >= WORLDS / 2
    for name in names[1:3]:
        assert ways.taken[f"completion, {name}"] >= LEAST_SHARE * some, (ways.taken, some)


@pytest.mark.slow("many random worlds")
async def test_completions_of_several(ways: Ways, comparison: Comparison) -> None:
    names = ("complete statement", "several")
    different: list[str] = []
    some = 0
    for seed in range(WORLDS):
        world = comparison.new(seed)
        agent = await world.make()
        ways.claims_with("complete statement")
        held = await world.hold(agent)
        if len(held) < 2:
            continue
        some += 1
        items = [Completion(ref(task), output=b'{"n": 1}', spent=world.spent()) for task in held]

        async def complete(way: str, items: list[Completion] = items) -> Any:
            ways.completes_with(way)
            return [as_seen(moved) for moved in await ways.engine.work.complete(items)]

        outcomes = await comparison.outcomes({name: partial(complete, name) for name in names})
        different += compare(seed, outcomes, in_order=False)
    assert not different, "\n".join(different)
    assert some >= WORLDS / 6
    assert ways.taken["completion of several"] >= LEAST_SHARE * some, (ways.taken, some)


@pytest.mark.slow("many random worlds")
async def test_completions_with_the_next_claim(ways: Ways, comparison: Comparison) -> None:
    """In one transaction, in two of one call, or in two calls."""
    names = ("two calls", "complete statement", "one slot")
    different: list[str] = []
    some = 0
    for seed in range(WORLDS):
        world = comparison.new(seed)
        agent = await world.make()
        ways.claims_with("complete statement")
        if not (held := await world.hold(agent)):
            continue
        item = Completion(ref(held[0]), output=b'{"n": 1}', spent=world.spent())

        async def complete_and_claim(
            way: str, item: Completion = item, agent: AgentInfo = agent
        ) -> tuple[Any, Any]:
            ways.claims_with("complete statement")
            ways.completes_with(way)
            if way == "two calls":
                (moved,) = await ways.engine.work.complete([item])
                claim = await ways.engine.claims.claim(agent.id, agent.incarnation, start=True)
            else:
                moved, claim = await ways.engine.work.complete_and_claim(item)
            ways.taken["both, in one transaction"] += claim.inputs.keys() >= {item.claim.id}
            return as_seen(moved), as_seen(claim)

        outcomes = await comparison.outcomes({name: partial(complete_and_claim, name) for name in names})
        some += bool(outcomes["two calls"][0][1]["tasks"])
        different += compare(seed, {name: without_marks(outcome) for name, outcome in outcomes.items()})
    assert not different, "\n".join(different)
    assert some >= WORLDS / 4
    assert ways.taken["both, in one transaction"] >= LEAST_SHARE * some, (ways.taken, some)


@pytest.mark.slow("many random worlds")
async def test_every_end_of_a_claim_settles_the_same(ways: Ways, comparison: Comparison) -> None:
    """What a claim has reserved is free again, and what it cost is spent, however it ends."""
    different: list[str] = []
    some = 0
    for seed in range(WORLDS):
        world = comparison.new(seed)
        agent = await world.make()
        ways.claims_with("complete statement")
        if not (held := await world.hold(agent)):
            continue
        spent = world.spent()
        claim, work = ref(held[0]), ways.engine.work
        some += bool(spent.cost_usd)

        outcomes = await comparison.outcomes(
            {
                "complete": partial(
                    ways.complete, "complete statement", Completion(claim, b"1", spent=spent)
                ),
                "fail": partial(work.fail, [Failure(claim, "it broke", "timeout", spent=spent)]),
                "release": partial(work.release, [Release(claim, spent=spent)]),
                "cancel": partial(work.cancel, [Cancellation(claim, "not needed", spent=spent)]),
            }
        )
        different += compare(seed, {name: (None, ledgers(rows)) for name, (_, rows) in outcomes.items()})
    assert not different, "\n".join(different)
    assert some >= WORLDS / 4
