"""Claims by the long way that wait for their agent's row: what they go by is older than what they find."""

import asyncio
from decimal import Decimal

import psycopg
import pytest

from lineshaft.engine.engine import Engine
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.changes import TaskChange
from lineshaft.types.work import Claim, Completion
from tests.races.helpers import DONE, held, race, running, waiting
from tests.world import World, ref, spawn_children

Engines = tuple[Engine, Engine]
AGENT = "SELECT FROM lineshaft.instance WHERE agent_id = 'a1' FOR UPDATE"
LIVE = "SELECT FROM lineshaft.task_live WHERE id = %s FOR UPDATE"


@pytest.fixture
async def weighing(engines: Engines) -> Engines:
    """Something is paused, though nothing of these tests: the fast path is closed."""
    await engines[0].pauses.pause("something else")
    return engines


@pytest.mark.parametrize("kind", ["lock", "dag"])
async def test_tasks_are_changed_while_their_claim_waits(weighing: Engines, dsn: str, kind: str) -> None:
    """What is reserved for a task goes to it."""
    one, two = weighing
    if kind == "lock":
        tasks = await one.submission.submit([NewTask("x", lock_key=f"doc:{n}") for n in range(3)])
    else:
        costly = [NewTask("x", max_cost_usd=1) for _ in range(3)]
        tasks = list((await one.submission.submit_dag("d", costly, budget_ceiling_usd=9)).tasks.values())
    with held(dsn, AGENT) as holder, psycopg.connect(dsn, autocommit=True) as look:
        claiming = asyncio.ensure_future(one.claims.claim("a1", 1, limit=3, start=True))
        await waiting(look, 1)
        await two.edit.edit(tasks[1].id, TaskChange(tags=["t"]))
        holder.rollback()
        assert {task.id for task in (await claiming).tasks} == {task.id for task in tasks}


async def test_a_ceiling_makes_a_dag_while_its_task_is_claimed(weighing: Engines, dsn: str) -> None:
    one, two = weighing
    await one.submission.submit([NewTask("x")])
    with held(dsn, AGENT) as holder, psycopg.connect(dsn, autocommit=True) as look:
        claiming = asyncio.ensure_future(one.claims.claim("a1", 1, start=True))
        await waiting(look, 1)
        (dag_id,) = look.execute("SELECT dag_id FROM lineshaft.task").fetchone() or ("",)
        await two.budgets.set_dag_budget(dag_id, 3)
        holder.rollback()
        assert len((await claiming).tasks) == 1
        assert look.execute("SELECT status::text FROM lineshaft.dag").fetchone() == ("running",)


async def test_a_dag_is_made_while_its_only_task_completes(engines: Engines, dsn: str) -> None:
    """The completion's snapshot is older than the DAG: it must count all the same."""
    one, two = engines
    await one.submission.submit([NewTask("x", max_cost_usd=1)])
    (task,) = await running(one)
    with psycopg.connect(dsn, autocommit=True) as look, psycopg.connect(dsn) as holder:
        # A breaker has a failure to forget: the fast path is closed.
        look.execute("INSERT INTO lineshaft.breaker (key, failures) VALUES ('something else', 1)")
        # A key that is just being taken holds up a spawn after its parent's DAG was made.
        holder.execute("INSERT INTO lineshaft.task_key (key, task_id, content_hash) VALUES ('k', 'o', '')")
        child = NewTask("c", idempotency_key="k")
        spawning = asyncio.ensure_future(spawn_children(two, ref(task), [child]))
        await waiting(look, 1)
        completing = asyncio.ensure_future(one.work.complete([Completion(ref(task), DONE)]))
        await waiting(look, 2)
        holder.rollback()
        await spawning
        (moved,) = await completing
        assert moved.status is Status.COMPLETED
        dag = look.execute("SELECT total, completed, reserved_usd FROM lineshaft.dag").fetchone()
        assert dag == (2, 1, 0)


async def has_looked(look: psycopg.Connection, claiming: "asyncio.Future[Claim]") -> None:
    """Until a claim has gone the long way once."""
    while not claiming.done():
        found = look.execute(
            "SELECT FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle'"
            " AND query LIKE '%claim_tasks%'"
        ).fetchall()
        if found:
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize("lane", ["plain", "locked"])
async def test_a_task_that_is_locked_for_a_moment_is_found_afterwards(
    world: World, dsn: str, connection: psycopg.Connection, lane: str
) -> None:
    """No notification follows a change of a task or of the generation, or a claim that can't pay."""
    await world.agent("ann")
    (task,) = await world.engine.submission.submit(
        [NewTask("x", lock_key="doc" if lane == "locked" else None)]
    )
    with held(dsn, LIVE, task.id) as holder:
        claiming = asyncio.ensure_future(world.engine.claims.claim("ann", 1, start=True))
        await has_looked(connection, claiming)
        holder.rollback()
        assert [found.id for found in (await claiming).tasks] == [task.id]


async def test_any_number_of_tasks_may_be_in_the_way(world: World) -> None:
    """F-53."""
    await world.agent("ann", max_concurrent_tasks=100)
    documents = [f"doc:{n}" for n in range(25)]
    await world.engine.submission.submit([NewTask("a", lock_key=key) for key in documents])
    assert len((await world.engine.claims.claim("ann", 1, limit=25, start=True)).tasks) == 25
    await world.engine.submission.submit([NewTask("a", priority=0, lock_key=key) for key in documents])
    (plain,) = await world.engine.submission.submit([NewTask("a", priority=90)])
    assert [task.id for task in (await world.engine.claims.claim("ann", 1)).tasks] == [plain.id]


async def test_an_agent_s_money_is_used_as_far_as_it_goes(world: World) -> None:
    await world.agent("ann", max_concurrent_tasks=10, budget_usd=Decimal(1))
    costs = ((0, "0.6"), (10, "0.6"), (20, "0.3"))
    made = await world.engine.submission.submit(
        [NewTask("a", priority=priority, max_cost_usd=Decimal(cost)) for priority, cost in costs]
    )
    claim = await world.engine.claims.claim("ann", 1, limit=3, start=True)
    assert [task.id for task in claim.tasks] == [made[0].id, made[2].id]


async def test_an_agent_is_set_offline_while_it_claims(engines: tuple[Engine, Engine], dsn: str) -> None:
    """R-058: the claim that waits for the agent's row finds the new status."""
    one, two = engines
    await one.submission.submit([NewTask("code")])
    with (
        held(dsn, AGENT) as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        patching = asyncio.ensure_future(one.fleet.patch("a1", status="offline"))
        await waiting(look, 1)
        (claim,) = await race(look, holder, two.claims.claim("a1", 1), already=1)

    assert (await patching).status == "offline"
    assert claim.tasks == []
    assert (await two.fleet.read("a1")).status == "offline"
