"""Completing and claiming one task in one call has the same effects as the statements for batches."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.rows import dict_row

from lineshaft.clock import MovableClock
from lineshaft.engine.claim.claims import inputs_to_read
from lineshaft.engine.claim.fast_path import FastPath
from lineshaft.engine.claim.single import complete_one
from lineshaft.engine.engine import Engine
from lineshaft.errors import StaleClaimError
from lineshaft.ids import new_id
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import ClaimedTask, Completion, Spent
from tests.examples import examples
from tests.invariants import check_invariants
from tests.races.helpers import held, waiting
from tests.world import Actions, World, ref, spawn_children

#: Tables that both ways write, with the columns that name tasks or DAGs.
TABLES = ("task_live", "task_end", "edge", "dag", "event", "instance", "agent")
#: Columns that differ between two histories, whichever way they were made.
OWN = {"submission_no", "seq", "xid", "rank", "created_at", "generation"}


class Closed(FastPath):
    def is_open(self, caller: str = "") -> bool:  # noqa: ARG002 - it is closed for all
        return False


class History:
    """A DAG that one agent works off, one task at a time; and what is in the tables then."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.actions = Actions(engine)

    async def run(self, tasks: Sequence[NewTask], cost: Decimal | None, *, stop_after: int = 99) -> list[str]:
        await self.actions.agent(self.name, models_available=["m1", "m2"], max_concurrent_tasks=1)
        dag = await self.actions.dag(*tasks)
        self.names = {dag.id: "the DAG", self.name: "the agent"}
        self.names |= {found.id: key for key, found in dag.tasks.items()}
        order: list[str] = []
        claim = await self.engine.claims.claim(self.name, 1, types=[self.name], start=True)
        while claim.tasks and len(order) < stop_after:
            (task,) = claim.tasks
            order.append(self.names[task.id])
            item = Completion(ref(task), output=b'{"n": 1}', spent=Spent(cost, 3, 4))
            moved, claim = await self.engine.work.complete_and_claim(item, types=[self.name])
            order.append(str(moved.status))
        return order

    def rows(self, dsn: str) -> dict[str, list[dict[str, Any]]]:
        with psycopg.connect(dsn, row_factory=dict_row) as connection:
            found = {
                table: connection.execute(f"SELECT * FROM lineshaft.{table}".encode()).fetchall()
                for table in TABLES
            }
        found["event"].sort(key=lambda row: row["seq"])
        return {
            table: sorted(
                (self.named(row) for row in rows if self.names.keys() & set(map(str, row.values()))),
                key=str if table != "event" else lambda _: "",
            )
            for table, rows in found.items()
        }

    def named(self, row: dict[str, Any]) -> dict[str, Any]:
        return {
            column: self.named_value(value)
            for column, value in row.items()
            if column not in OWN and not (column == "lane_id" or column.startswith("xm"))
        }

    def named_value(self, value: Any) -> Any:
        # Only a claim in a transaction of its own names the completion that it follows.
        if isinstance(value, dict) and "follows" in value:
            return None
        return self.names.get(value, value) if isinstance(value, str) else value


@pytest.fixture
async def long_way(dsn: str, clock: MovableClock) -> AsyncIterator[Engine]:
    async with Engine(dsn, clock=clock) as engine:
        engine.claims._fast_path = Closed()
        engine.work._complete._single_path = Closed()
        yield engine


def chain(name: str, n: int, **fields: Any) -> list[NewTask]:
    return [
        NewTask(name, key=f"t{i}", depends_on=[f"t{i - 1}"] if i else [], title="a task", **fields)
        for i in range(n)
    ]


SHAPES: dict[str, Any] = {
    "chain": lambda name: chain(name, 3),
    "chain with costs": lambda name: chain(name, 3, max_cost_usd=Decimal(1)),
    "chain with models": lambda name: chain(name, 3, model_preferences=("m2", "m1")),
    "fan-out": lambda name: [
        NewTask(name, key="first", title="a"),
        *(NewTask(name, key=f"t{n}", depends_on=["first"], priority=n, title="a") for n in range(4)),
    ],
    "wide fan-out": lambda name: [
        NewTask(name, key="first", title="a"),
        *(NewTask(name, key=f"t{n}", depends_on=["first"], priority=n, title="a") for n in range(60)),
    ],
    "join": lambda name: [
        *(NewTask(name, key=f"t{n}", priority=n, title="a") for n in range(3)),
        NewTask(name, key="last", depends_on=["t0", "t1", "t2"], title="a"),
    ],
}


@pytest.mark.parametrize("stop_after", [1, 3, 99])
@pytest.mark.parametrize("shape", SHAPES)
async def test_both_ways_leave_the_same_rows(
    world: World, long_way: Engine, dsn: str, shape: str, stop_after: int
) -> None:
    short, long = History(world.engine, "short"), History(long_way, "long")

    orders = [
        await history.run(SHAPES[shape](history.name), Decimal("0.25"), stop_after=stop_after)
        for history in (short, long)
    ]

    assert orders[0] == orders[1]
    rows = [history.rows(dsn) for history in (short, long)]
    for table in TABLES:
        assert [{**row, "type": ""} for row in rows[0][table]] == [
            {**row, "type": ""} for row in rows[1][table]
        ], table
    check_invariants(dsn)


async def test_a_task_that_many_wait_for_is_left_to_the_statements_for_batches(world: World) -> None:
    """One after the other, 10,000 dependents took seconds, and their number counted twice."""
    agent = await world.agent("ann")
    for dependents, is_completed in ((50, True), (51, False)):
        await world.dag(
            NewTask("first", key="first"),
            *(NewTask("code", depends_on=["first"]) for _ in range(dependents)),
        )
        (first,) = await world.claim(agent, types=["first"])
        assert await complete_one(world.engine.database, Completion(ref(first))) is is_completed


async def test_tasks_with_the_same_inputs_are_one_reader(world: World) -> None:
    """A claim of a hundred tasks of a fan-out reads one output."""
    agent = await world.agent("ann", max_concurrent_tasks=9)
    tasks = [NewTask("code", key=key) for key in "ab"]
    tasks += [NewTask("code", depends_on=["a"]) for _ in range(4)]
    dag = await world.dag(*tasks, NewTask("code", depends_on=["a", "b"]))
    a, b = dag.tasks["a"].id, dag.tasks["b"].id
    first = await world.engine.claims.claim("ann", agent.incarnation, limit=9, start=True)
    await world.engine.work.complete([Completion(ref(task), b"[1]") for task in first.tasks])

    claim = await world.engine.claims.claim("ann", agent.incarnation, limit=9, start=True)

    assert len(claim.tasks) == 5
    assert claim.inputs == {a: b"[1]", b: b"[1]"}
    claim.inputs.clear()
    readers: dict[int, list[str]] = {}
    for reader, name in inputs_to_read(claim):
        readers.setdefault(reader, []).append(name)
    assert sorted(readers.values(), key=len) == [[a], [a, b]]


async def test_the_next_task_is_claimed_in_the_transaction_of_the_completion(world: World, dsn: str) -> None:
    await world.agent("ann", max_concurrent_tasks=1)
    await world.dag(*chain("code", 2))
    (first,) = (await world.engine.claims.claim("ann", 1, start=True)).tasks

    _, claim = await world.engine.work.complete_and_claim(Completion(ref(first)))

    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "SELECT kinds FROM lineshaft.event"
            " WHERE xid = (SELECT xid FROM lineshaft.event WHERE 'task.completed' = ANY (kinds)) ORDER BY seq"
        ).fetchall()
    assert len(claim.tasks) == 1
    assert [kinds for (kinds,) in rows] == [
        ["task.validating", "task.completed"],
        ["task.ready"],
        ["task.claimed", "task.started"],
    ]


async def test_the_next_task_gets_the_output_that_was_just_recorded(world: World) -> None:
    """Without reading it, and as it is read by another claim; other inputs are read."""
    agent = await world.agent("ann")
    known = await world.one("code", priority=99)
    (first,) = await world.claim(agent)
    await world.engine.work.complete([Completion(ref(first), b"[1]")])
    tasks = [NewTask("code", key="a"), NewTask("code", key="b", depends_on=["a", known])]
    dag = await world.engine.submission.submit_dag("two", tasks)
    (held_task,) = await world.claim(agent)

    moved, claim = await world.engine.work.complete_and_claim(Completion(ref(held_task), b'{"text": "x"}'))

    assert moved.status is Status.COMPLETED
    assert claim.inputs == {dag.tasks["a"].id: b'{"text": "x"}', known: b"[1]"}
    await world.release(claim.tasks[0])
    again = await world.engine.claims.claim("ann", agent.incarnation, start=True)
    assert again.inputs == claim.inputs


async def test_a_claim_that_finds_nothing_locks_nothing(world: World, dsn: str) -> None:
    await world.agent("ann")
    with held(dsn, "SELECT FROM lineshaft.instance FOR UPDATE"):
        assert (await world.engine.claims.claim("ann", 1, start=True)).tasks == []


async def test_a_claim_that_waits_for_its_instance_keeps_no_task_from_others(world: World, dsn: str) -> None:
    ann, bob = await world.agent("ann"), await world.agent("bob")
    await world.submit(NewTask("code"))
    with (
        held(dsn, "SELECT FROM lineshaft.instance WHERE agent_id = 'ann' FOR UPDATE") as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        claiming = asyncio.ensure_future(world.claim(ann))
        await waiting(look, 1)
        assert len(await world.claim(bob)) == 1
        holder.rollback()
        assert await claiming == []


async def test_a_repeated_call_has_the_same_next_claim_while_it_is_held(world: World) -> None:
    """The answer to the first call was lost."""
    await world.agent("ann", max_concurrent_tasks=1)
    await world.dag(*chain("code", 3))
    (first,) = (await world.engine.claims.claim("ann", 1, start=True)).tasks
    call = Completion(ref(first))

    answers = [await world.engine.work.complete_and_claim(call) for _ in range(2)]
    (again,) = answers[1][1].tasks
    assert again == answers[0][1].tasks[0]
    world.age(seconds=91)
    assert (await world.engine.work.complete_and_claim(call))[1].tasks == [], "its lease is over"

    await world.complete(again)
    moved, claim = await world.engine.work.complete_and_claim(call)
    # Another claim would be one that the instance asked for once and gets twice.
    assert (moved.status, claim.tasks) == (Status.COMPLETED, [])


async def test_a_repeated_call_has_the_same_next_claim_also_where_it_was_made_afterwards(
    world: World, long_way: Engine
) -> None:
    """An instance with free slots gets one task for one completion, whichever way the first call took."""
    await world.agent("ann", max_concurrent_tasks=3)
    await world.submit(*(NewTask("code") for _ in range(4)))
    (first,) = (await world.engine.claims.claim("ann", 1, start=True)).tasks
    call = Completion(ref(first))

    (taken,) = (await long_way.work.complete_and_claim(call))[1].tasks
    for engine in (world.engine, long_way):
        _, claim = await engine.work.complete_and_claim(call)
        assert [(task.id, task.epoch) for task in claim.tasks] == [(taken.id, taken.epoch)]

    await world.complete(taken)
    for engine in (world.engine, long_way):
        assert (await engine.work.complete_and_claim(call))[1].tasks == []


async def test_a_refused_completion_claims_nothing(world: World) -> None:
    """Its caller gets an error: a task that was claimed with it would wait for its lease to expire."""
    agent = await world.agent("ann")
    await world.submit(NewTask("code"), NewTask("code"))
    task = await world.take(agent)
    await world.engine.cancel.cancel(task.id, "changed my mind")

    moved, claim = await world.engine.work.complete_and_claim(Completion(ref(task)))

    assert isinstance(moved.error, StaleClaimError)
    assert claim.tasks == []
    assert len(await world.claim(agent, limit=2)) == 1


async def test_an_agent_that_may_not_claim_completes_all_the_same(world: World) -> None:
    agent = await world.agent("ann")
    first, _ = await world.submit(NewTask("code"), NewTask("code"))
    task = await world.take(agent)
    await world.engine.fleet.patch("ann", status="draining")

    moved, claim = await world.engine.work.complete_and_claim(Completion(ref(task)))

    assert (moved.id, moved.status, claim.tasks) == (first, Status.COMPLETED, [])


BREAKER = "INSERT INTO lineshaft.breaker (key, state, opened_at, probe_at) VALUES"
SLOWDOWN = "INSERT INTO lineshaft.slowdown (key, signalled_at, until) VALUES"


@pytest.mark.parametrize(
    ("obstacle", "barred"),
    [
        ("INSERT INTO lineshaft.pause (type, since) VALUES ('code', now())", True),
        ("INSERT INTO lineshaft.pause (type, since) VALUES ('other', now())", False),
        ("INSERT INTO lineshaft.pause (type, since) VALUES ('*', now())", True),
        (f"{BREAKER} ('code', 'open', now(), '2100-01-01')", True),
        (f"{BREAKER} ('other', 'open', now(), '2100-01-01')", False),
        (f"{BREAKER} ('model:m1', 'open', now(), '2100-01-01')", True),
        (f"{BREAKER} ('model:m2', 'open', now(), '2100-01-01')", False),
        (f"{SLOWDOWN} ('*', now(), '2100-01-01')", True),
        (f"{SLOWDOWN} ('model:m1', now(), '2100-01-01')", True),
        (f"{SLOWDOWN} ('model:m2', now(), '2100-01-01')", False),
    ],
)
async def test_types_that_are_paused_or_broken_are_left(
    world: World, dsn: str, obstacle: str, barred: bool
) -> None:
    agent = await world.agent("ann", models_available=["m1"])
    await world.submit(NewTask("code"))
    with psycopg.connect(dsn) as connection:
        connection.execute(obstacle.encode())

    assert bool(await world.claim(agent)) is not barred


async def test_a_breaker_with_failures_forgets_them_when_a_task_of_its_type_completes(
    world: World, dsn: str
) -> None:
    agent = await world.agent("ann", max_concurrent_tasks=1)
    await world.submit(NewTask("code"), NewTask("other"), NewTask("code"))
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO lineshaft.breaker (key, failures) VALUES ('code', 2)")
        task = await world.take(agent, types=["other"])
        _, claim = await world.engine.work.complete_and_claim(Completion(ref(task)))
        assert connection.execute("SELECT failures FROM lineshaft.breaker").fetchone() == (2,)
        await world.engine.work.complete_and_claim(Completion(ref(claim.tasks[0])))
        row = connection.execute("SELECT failures FROM lineshaft.breaker").fetchone()
    assert row in {None, (0,)}


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_dag_is_worked_off_in_the_same_way(data: st.DataObject, dsn: str) -> None:
    """Random DAGs, priorities, costs and limits of money."""
    n = data.draw(st.integers(1, 5))
    plans: list[dict[str, Any]] = [
        {
            "depends_on": data.draw(st.lists(st.integers(0, max(i - 1, 0)), unique=True)) if i else [],
            "priority": data.draw(st.sampled_from([10, 50, 90])),
            "max_cost_usd": data.draw(st.sampled_from([None, Decimal(0), Decimal(1), Decimal(2)])),
        }
        for i in range(n)
    ]
    cost = data.draw(st.sampled_from([None, Decimal(0), Decimal("0.5"), Decimal("1.5")]))

    async def outcome_of(name: str, *, short: bool) -> tuple[list[str], Any]:
        clock = MovableClock()
        async with Engine(dsn, clock=clock) as engine:
            if not short:
                engine.claims._fast_path = Closed()
                engine.work._complete._single_path = Closed()
            history = History(engine, name)
            tasks = [
                NewTask(
                    name,
                    key=f"t{i}",
                    title="a",
                    **{**plan, "depends_on": [f"t{d}" for d in plan["depends_on"]]},
                )
                for i, plan in enumerate(plans)
            ]
            order = await history.run(tasks, cost)
            with psycopg.connect(dsn, row_factory=dict_row) as connection:
                ends = connection.execute(
                    "SELECT id, status::text, cost_usd, attempts, tokens_input FROM lineshaft.task_end"
                ).fetchall()
                dag = connection.execute(
                    "SELECT status::text, completed, dead_lettered, reserved_usd, spent_usd"
                    " FROM lineshaft.dag WHERE id = ANY (%s)",
                    [list(history.names)],
                ).fetchall()
            outcome = sorted(str(history.named(end)) for end in ends if end["id"] in history.names)
            return order, (outcome, dag)

    tag = new_id("agent")
    assert asyncio.run(outcome_of(f"s{tag}", short=True)) == asyncio.run(outcome_of(f"l{tag}", short=False))
    check_invariants(dsn)


# Races.


async def test_a_dependent_that_is_added_meanwhile_is_woken(world: World, dsn: str) -> None:
    """The edge is committed while the completion waits for the task's row."""
    agent = await world.agent("ann")
    task = await _new(world, agent)
    with psycopg.connect(dsn) as adding, psycopg.connect(dsn, autocommit=True) as look:
        adding.execute("SELECT FROM lineshaft.task_live WHERE id = %s FOR KEY SHARE", [task.id])
        completing = asyncio.ensure_future(world.engine.work.complete_and_claim(Completion(ref(task))))
        await waiting(look, 1)
        async with Engine(dsn) as other:
            (dependent,) = await other.submission.submit([NewTask("code", depends_on=[task.id])])
        adding.rollback()
        moved, claim = await completing
    assert moved.status is Status.COMPLETED
    waiting_for = await world.engine.read.task(dependent.id)
    assert waiting_for.status in {"READY", "RUNNING"}
    assert waiting_for.status == "READY" or [t.id for t in claim.tasks] == [waiting_for.id]
    check_invariants(dsn)


async def _new(world: World, agent: Any) -> ClaimedTask:
    await world.submit(NewTask("code"))
    return await world.take(agent)


async def test_a_cancelled_task_is_not_completed(world: World, dsn: str) -> None:
    """The cancellation commits while the completion waits for the row. The next task isn't claimed."""
    agent = await world.agent("ann")
    task = await _new(world, agent)
    await world.submit(NewTask("code"))
    with (
        held(dsn, "SELECT FROM lineshaft.task_live WHERE id = %s FOR UPDATE", task.id) as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        cancelling = asyncio.ensure_future(world.engine.cancel.cancel(task.id, "changed my mind"))
        await waiting(look, 1)
        completing = asyncio.ensure_future(world.engine.work.complete_and_claim(Completion(ref(task))))
        await waiting(look, 2)
        holder.rollback()
        await cancelling
        moved, claim = await completing
    assert moved.error is not None
    assert claim.tasks == []
    assert (await world.engine.read.task(task.id)).status == "CANCELLED"
    check_invariants(dsn)


async def test_a_superseded_instance_claims_nothing(world: World, dsn: str) -> None:
    """The instance is reported gone while the completion waits for its row."""
    agent = await world.agent("ann")
    task = await _new(world, agent)
    await world.submit(NewTask("code"))
    with psycopg.connect(dsn) as holder, psycopg.connect(dsn, autocommit=True) as look:
        holder.execute("UPDATE lineshaft.instance SET status = 'offline'")
        completing = asyncio.ensure_future(world.engine.work.complete_and_claim(Completion(ref(task))))
        await waiting(look, 1)
        holder.commit()
        moved, claim = await completing
    assert moved.status is Status.COMPLETED
    assert claim.tasks == []
    check_invariants(dsn)


async def test_two_instances_and_one_task_that_was_woken(world: World, dsn: str) -> None:
    """Both complete at once; the dependent is claimed exactly once."""
    ann, bob = (
        await world.agent("ann", max_concurrent_tasks=1),
        await world.agent("bob", max_concurrent_tasks=1),
    )
    await world.dag(
        NewTask("code", key="a"), NewTask("code", key="b"), NewTask("code", key="c", depends_on=["a", "b"])
    )
    held_by = {agent.id: await world.take(agent) for agent in (ann, bob)}
    async with Engine(dsn) as other:
        answers = await asyncio.gather(
            *(
                engine.work.complete_and_claim(Completion(ref(held_by[name])))
                for engine, name in ((world.engine, "ann"), (other, "bob"))
            )
        )
    assert [moved.status for moved, _ in answers] == [Status.COMPLETED] * 2
    assert sum(len(claim.tasks) for _, claim in answers) == 1
    check_invariants(dsn)


async def test_the_last_child_of_a_batch_ends_it(world: World, dsn: str) -> None:
    agent = await world.agent("ann")
    parent = await _new(world, agent)
    await spawn_children(world.engine, ref(parent), [NewTask("code")], wait=True)
    child = await world.take(agent)

    moved, claim = await world.engine.work.complete_and_claim(Completion(ref(child)))

    assert moved.status is Status.COMPLETED
    assert [task.id for task in claim.tasks] == [parent.id]
    assert claim.resumed[parent.id].children is not None
    check_invariants(dsn)
