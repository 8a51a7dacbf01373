"""Defaults of types change while tasks are submitted and claimed: none slips between."""

import asyncio
from collections.abc import AsyncIterator
from decimal import Decimal

import psycopg
import pytest

from lineshaft import Lineshaft
from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.model.tasks import NewTask
from lineshaft.model.type_defaults import TypeDefaults
from lineshaft.types import NewAgent, RegisteredAgent
from lineshaft.types.work import ClaimedTask
from tests.invariants import check_invariants
from tests.races.helpers import blocked_by, held, passes_or_waits, patient, race

TYPES = "SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.types', 0))"


@pytest.fixture
async def engines(dsn: str, clock: MovableClock) -> AsyncIterator[tuple[Engine, Engine]]:
    place = patient(dsn)
    async with Engine(place, clock=clock) as one, Engine(place, clock=clock) as two:
        # Both have read that no type has defaults.
        await one.submission.submit([NewTask("other")])
        await two.submission.submit([NewTask("other")])
        yield one, two
    check_invariants(dsn)


async def declare(engine: Engine, agent_id: str, cost: float, **fields: object) -> RegisteredAgent:
    return await engine.fleet.register(
        NewAgent(
            id=agent_id,
            types=("pay",),
            max_concurrent_tasks=10,
            task_defaults={"pay": TypeDefaults(max_cost_usd=cost, max_attempts=1)},
            **fields,  # type: ignore[arg-type]  # the fields of an agent
        )
    )


async def claimed(engine: Engine, agent: RegisteredAgent, limit: int = 1) -> list[ClaimedTask]:
    return (await engine.claims.claim(agent.id, agent.incarnation, limit=limit, start=True)).tasks


@pytest.mark.parametrize("size", [1, 5, 60])
async def test_a_process_with_an_old_cache_submits_with_the_new_defaults(
    engines: tuple[Engine, Engine], size: int
) -> None:
    """Two servers: an agent registers at one, a task is submitted at the other."""
    one, two = engines
    await declare(one, "a", 0.1)
    tasks = [NewTask("pay") for _ in range(size)]
    ids = [task.id for task in await two.submission.submit(tasks)]
    dag = await two.submission.submit_dag("a DAG", [NewTask("pay", key=str(n)) for n in range(size)])
    ids += [task.id for task in dag.tasks.values()]
    await declare(one, "b", 0.05)
    ids += [task.id for task in await two.submission.submit(tasks)]

    assert {(await two.read.task(task_id)).max_cost_usd for task_id in ids} == {Decimal("0.05")}


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
async def test_a_task_that_is_committed_after_the_registration(
    engines: tuple[Engine, Engine], dsn: str, isolation: str
) -> None:
    """A transaction of the caller's that was open for long: the registration didn't see its tasks."""
    one, two = engines
    async with Lineshaft(dsn) as shaft, await psycopg.AsyncConnection.connect(dsn) as theirs:
        await theirs.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}".encode())
        before = await shaft.submit(NewTask("pay"), connection=theirs)
        agent = await declare(one, "a", 0.1, budget_usd=0.1)
        after = await shaft.submit(NewTask("pay"), connection=theirs)
        assert await claimed(two, agent, 5) == []
        await theirs.commit()

        (task,) = await claimed(two, agent, 5)
        assert task.id in {before.id, after.id}
        assert (task.max_cost_usd, task.max_attempts) == (Decimal("0.1"), 1)
        # The budget is reserved: nothing more is claimed.
        assert await claimed(two, agent, 5) == []
        assert (await one.fleet.read("a")).reserved_usd == Decimal("0.1")


async def test_a_task_that_is_locked_while_the_defaults_apply(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    """Another process claims or changes it: the registration doesn't wait, and the claim corrects it."""
    one, two = engines
    (locked, _) = await one.submission.submit([NewTask("pay"), NewTask("pay")])
    with held(dsn, "SELECT FROM lineshaft.task_live WHERE id = %s FOR UPDATE", locked.id):
        agent = await declare(one, "a", 0.1)
        assert (await one.read.task(locked.id)).max_cost_usd is None
    # All ways of claiming: by id, one, several.
    by_id = (await two.claims.claim_task("a", agent.incarnation, locked.id)).tasks
    tasks = by_id + await claimed(two, agent, 5)

    assert {task.max_cost_usd for task in tasks} == {Decimal("0.1")}
    assert len(tasks) == 2


async def test_two_agents_declare_different_defaults_at_once(
    engines: tuple[Engine, Engine], connection: psycopg.Connection, dsn: str
) -> None:
    """The second sees what the first has declared, and both revisions are their own."""
    one, two = engines
    (task,) = await one.submission.submit([NewTask("pay")])
    with held(dsn, TYPES) as holder:
        await race(connection, holder, declare(one, "a", 0.3), declare(two, "b", 0.2))

    assert (await one.read.task(task.id)).max_cost_usd == Decimal("0.2")
    info = await one.task_types.read("pay")
    assert (info.defaults.max_cost_usd, info.origins["max_cost_usd"]) == (Decimal("0.2"), "agent:b")


async def test_stricter_defaults_are_declared_while_others_are_applied(
    engines: tuple[Engine, Engine], connection: psycopg.Connection, dsn: str
) -> None:
    """The first agent's defaults are being written to a waiting task when the second declares its own."""
    one, two = engines
    (task,) = await one.submission.submit([NewTask("pay")])
    with held(dsn, "SELECT FROM lineshaft.task WHERE id = %s FOR UPDATE", task.id) as holder:
        first = asyncio.ensure_future(declare(one, "a", 0.3))
        await blocked_by(connection, holder)
        second = asyncio.ensure_future(declare(two, "b", 0.2))
        await passes_or_waits(connection, second, 2)
        holder.rollback()
        await asyncio.gather(first, second)

    assert (await one.read.task(task.id)).max_cost_usd == Decimal("0.2")


async def test_submissions_claims_and_registrations_at_once(engines: tuple[Engine, Engine]) -> None:
    """Whatever comes first: no agent gets a task without the limits that it declared, or stricter ones."""
    one, two = engines
    got: list[ClaimedTask] = []

    async def submit(engine: Engine) -> None:
        for size in (1, 3, 60, 1, 3):
            await engine.submission.submit([NewTask("pay") for _ in range(size)])

    async def work(engine: Engine, agent_id: str, cost: float) -> None:
        agent = await declare(engine, agent_id, cost)
        for limit in (1, 1, 2, 2):
            tasks = await claimed(engine, agent, limit)
            assert all(
                task.max_cost_usd is not None and task.max_cost_usd <= Decimal(str(cost)) for task in tasks
            )
            got.extend(tasks)

    await asyncio.gather(
        submit(one), work(two, "a", 0.4), submit(two), work(one, "b", 0.2), work(two, "c", 0.3)
    )

    assert {task.max_attempts for task in got} <= {1}
    (task,) = await one.submission.submit([NewTask("pay")])
    assert (await one.read.task(task.id)).max_cost_usd == Decimal("0.2")
