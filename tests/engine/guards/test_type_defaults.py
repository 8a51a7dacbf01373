"""Defaults of types: what applies to which tasks, and what registrations write."""

import logging
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from lineshaft.engine.engine import Engine
from lineshaft.errors import InvalidInputError, NotFoundError
from lineshaft.model.tasks import NewTask, RetrySpec
from lineshaft.model.type_defaults import TypeDefaults
from lineshaft.types import AgentInfo, RegisteredAgent
from lineshaft.types.changes import TaskChange
from tests.world import World, ref, spawn_children

FIXED = RetrySpec(strategy="fixed", initial_delay_sec=7.0)
LIMITS = TypeDefaults(max_cost_usd=0.1, max_attempts=1, max_duration_sec=20, retry=FIXED)
APPLIED = (Decimal("0.1"), 1, 20.0, "fixed")
#: What a task has that no type, preset or caller limits.
FACTORY = (None, 3, 3600.0, "exponential")


async def declare(
    world: World, agent_id: str = "a", version: str | None = None, **defaults: Any
) -> RegisteredAgent:
    """Register an agent that serves `pay`."""
    agent = await world.agent(
        agent_id,
        instance=f"{agent_id} {version}",
        version=version,
        types=("pay",),
        task_defaults={"pay": TypeDefaults(**defaults)},
    )
    assert isinstance(agent, RegisteredAgent)
    return agent


async def limits(world: World, task_id: str) -> tuple[Any, ...]:
    task = await world.engine.read.task(task_id)
    return task.max_cost_usd, task.max_attempts, task.max_duration_sec, task.retry.strategy


async def test_every_way_of_submitting_applies_them(world: World) -> None:
    """One task, a few, many alike, many different, a DAG, a batch with children, and subtasks."""
    agent = await declare(world, **msgspec.structs.asdict(LIMITS))
    engine = world.engine
    await world.one("warm-up")
    ids = [await world.one("pay"), await world.one("pay")]
    ids += await world.submit(*[NewTask("pay") for _ in range(3)])
    ids += (await world.submit(*[NewTask("pay") for _ in range(60)]))[:1]
    ids += (await world.submit(*[NewTask("pay", tags=[str(n)]) for n in range(60)]))[:1]
    dag = await world.dag(NewTask("pay", key="one"), NewTask("pay", key="two", depends_on=["one"]))
    ids += [task.id for task in dag.tasks.values()]
    (batch,) = await engine.submission.submit([NewTask("all", children=[NewTask("pay")])])
    ids += [row["id"] for row in world.rows("SELECT id FROM lineshaft.task WHERE parent_id = %s", batch.id)]
    parent = await world.take(agent)
    ids += [child.id for child in await spawn_children(engine, ref(parent), [NewTask("pay")])]
    async with engine.database.connection() as connection, connection.transaction():
        submitted = await engine.submission.submit([NewTask("pay")], connection=connection)
    ids.append(submitted[0].id)

    assert {await limits(world, task_id) for task_id in ids} == {APPLIED}
    assert await limits(world, batch.id) == FACTORY


async def test_the_order_of_precedence(world: World) -> None:
    """A field, a preset that the caller names, the type, the preset of the API, the installation."""
    await declare(world, **msgspec.structs.asdict(LIMITS))
    submit = world.engine.submission.submit

    async def of(task: NewTask, preset: str | None = None) -> tuple[Any, ...]:
        ((submitted,),) = [await submit([task], preset=preset)]
        return await limits(world, submitted.id)

    own = NewTask(
        "pay", max_cost_usd=5, max_attempts=9, max_duration_sec=60, retry=RetrySpec(strategy="immediate")
    )
    assert await of(own) == (5, 9, 60.0, "immediate")
    assert await of(NewTask("pay", spec={"constraints": {"max_cost_usd": 2, "max_duration_sec": 3}})) == (
        *(2, 1, 3.0),
        "fixed",
    )
    # Of a preset's fields only those that it has: neither has a cost, and factory has no duration.
    assert await of(NewTask("pay", preset="factory")) == (Decimal("0.1"), 3, 20.0, "exponential")
    assert (await of(NewTask("pay", preset="officeplane")))[:3:2] == (Decimal("0.1"), 300.0)
    assert await of(NewTask("pay"), "officeplane") == APPLIED
    assert await of(NewTask("other")) == FACTORY


async def test_waiting_tasks_get_them_before_the_first_claim(world: World) -> None:
    """R-231: also those that wait for others, for their time, or for a retry; not what was set, or runs."""
    first = await world.agent("first")
    held = await world.one("pay")
    await world.take(first)
    retried = await world.one("pay")
    await world.fail(await world.take(first))
    ready, own = await world.one("pay"), await world.one("pay", max_cost_usd=9, max_attempts=9)
    later = await world.one("pay", run_at=world.clock.now().replace(year=2040))
    dag = await world.dag(NewTask("wait", key="one"), NewTask("pay", key="two", depends_on=["one"]))
    blocked = dag.tasks["two"].id
    changed = await world.one("pay")
    await world.engine.edit.edit(changed, TaskChange(max_cost_usd=None, max_attempts=7))

    agent = await declare(world, **msgspec.structs.asdict(LIMITS))

    for task_id in (ready, later, blocked, retried):
        assert await limits(world, task_id) == APPLIED
    assert await limits(world, own) == (9, 9, 20.0, "fixed")
    assert await limits(world, changed) == (None, 7, 20.0, "fixed")
    assert await limits(world, held) == FACTORY
    (event,) = world.rows(
        "SELECT data FROM lineshaft.event WHERE task_id = %s AND 'task.changed' = ANY (kinds)", ready
    )
    assert event["data"]["max_cost_usd"] == {"from": None, "to": 0.1}
    assert event["data"]["because"] == "type_defaults"
    claimed = {task.id: task.max_cost_usd for task in await world.claim(agent, 10)}
    assert claimed == {ready: Decimal("0.1"), own: Decimal(9), changed: None}


async def test_the_stricter_value_counts_until_a_person_decides(world: World) -> None:
    one = await declare(world, "one", max_cost_usd=0.5, max_attempts=2, retry=RetrySpec(strategy="immediate"))
    two = await declare(world, "two", max_cost_usd=0.2, max_attempts=5, retry=FIXED)
    task_id = await world.one("pay")

    assert one.warnings == []
    assert [warning.split(" doesn't count")[0] for warning in two.warnings] == [
        "max_attempts=5 of type 'pay'"
    ]
    assert "lineshaft types set pay --max-attempts" in two.warnings[0]
    assert await limits(world, task_id) == (Decimal("0.2"), 2, 3600.0, "fixed")
    types = world.engine.task_types
    info = await types.read("pay")
    assert info.origins == {"max_cost_usd": "agent:two", "max_attempts": "agent:one", "retry": "agent:two"}
    assert info.agents == ["one", "two"]
    assert len(info.warnings) == 3

    info = await types.set("pay", {"max_cost_usd": 3, "max_duration_sec": 50}, reason="they agreed")
    assert await limits(world, task_id) == (3, 2, 50.0, "fixed")
    assert (info.origins["max_cost_usd"], info.origins["max_duration_sec"]) == ("hand", "hand")
    assert "a person has set 3" in (await declare(world, "one", max_cost_usd=0.5)).warnings[0]
    await types.set("pay", {"max_cost_usd": None, "max_duration_sec": None})
    # Of `one` it is now all that it declares.
    assert await limits(world, task_id) == (Decimal("0.2"), 5, 3600.0, "fixed")
    changes = world.rows("SELECT data FROM lineshaft.event WHERE kinds = '{type.changed}' ORDER BY at, xid")
    (by_hand,) = [change["data"] for change in changes if change["data"].get("reason") == "they agreed"]
    assert by_hand["max_cost_usd"] == {"from": 0.2, "to": 3}


async def test_a_known_version_writes_nothing(world: World) -> None:
    """Old and new processes don't take turns; the declarations of a version end with its processes."""
    tables = "SELECT xmin::text, ctid::text, * FROM lineshaft.type_declaration ORDER BY version"
    kinds = "SELECT xmin::text, ctid::text, * FROM lineshaft.task_type"

    await declare(world, "a", "1", max_cost_usd=0.1)
    before = world.rows(tables), world.rows(kinds)
    await declare(world, "a", "1", max_cost_usd=0.1)
    # An older client, or another program, that says nothing withdraws nothing.
    await world.agent("a", instance="old", version="1", types=("pay",))
    assert (world.rows(tables), world.rows(kinds)) == before

    new = await declare(world, "a", "2", max_cost_usd=0.7)
    assert "which is stricter" in new.warnings[0]
    both = world.rows(tables), world.rows(kinds)
    await declare(world, "a", "1", max_cost_usd=0.1)
    await declare(world, "a", "2", max_cost_usd=0.7)
    assert (world.rows(tables), world.rows(kinds)) == both
    task_id = await world.one("pay")
    assert (await limits(world, task_id))[0] == Decimal("0.1")

    old = await declare(world, "a", "1", max_cost_usd=0.1)
    for row in world.rows("SELECT incarnation FROM lineshaft.instance WHERE version = '1'"):
        await world.engine.fleet.leave(old.id, row["incarnation"])
    await world.engine.fleet.forget(silent_sec=86_400, unused_sec=86_400, limit=10)
    assert (await limits(world, task_id))[0] == Decimal("0.7")
    # Without a running process, the last declaration stays, until the agent is deleted.
    for row in world.rows("SELECT incarnation FROM lineshaft.instance"):
        await world.engine.fleet.leave("a", row["incarnation"])
    await world.engine.fleet.forget(silent_sec=86_400, unused_sec=86_400, limit=10)
    assert (await limits(world, await world.one("pay")))[0] == Decimal("0.7")
    await world.engine.fleet.delete("a")
    assert (await limits(world, task_id))[0] is None


async def test_declarations_are_checked(world: World) -> None:
    with pytest.raises(InvalidInputError, match="not among the types that the agent serves"):
        await world.agent("a", types=("pay",), task_defaults={"other": LIMITS})
    with pytest.raises(InvalidInputError) as caught:
        await declare(world, max_cost_usd=-1, max_attempts=0, retry=RetrySpec(strategy="never"))
    assert [place for place, _ in caught.value.errors] == [
        "task_defaults.pay.max_cost_usd",
        "task_defaults.pay.max_attempts",
        "task_defaults.pay.retry.strategy",
    ]
    with pytest.raises(InvalidInputError, match="max_attempts"):
        await world.engine.task_types.set("pay", {"max_attempts": 0})
    with pytest.raises(InvalidInputError, match="retry: must be a RetrySpec"):
        await world.engine.task_types.set("pay", {"retry": {"strategi": "fixed"}})
    with pytest.raises(NotFoundError, match="no task type 'pay'"):
        await world.engine.task_types.read("pay")


async def test_a_retry_policy_may_be_a_dict(world: World) -> None:
    """As it is over HTTP and in files: of a task, of an agent and by hand."""
    policy: Any = {"strategy": "fixed", "initial_delay_sec": 7, "jitter": False}
    await declare(world, retry=policy)
    tasks = [await world.one("pay"), await world.one("pay", retry={**policy, "initial_delay_sec": 8})]
    assert [(await world.engine.read.task(name)).retry.initial_delay_sec for name in tasks] == [7, 8]

    info = await world.engine.task_types.set("pay", {"retry": {**policy, "initial_delay_sec": 9}})

    assert (info.defaults.retry or {})["initial_delay_sec"] == 9
    with pytest.raises(InvalidInputError, match="retry: must be a RetrySpec"):
        await world.one("pay", retry={"strategi": "fixed"})


async def test_a_task_that_was_held_meanwhile_is_corrected_when_it_is_claimed_again(world: World) -> None:
    """Its attempt goes on with the limits that it began with."""
    other = await world.agent("other")
    task_id = await world.one("pay")
    held = await world.take(other)
    agent = await declare(world, max_cost_usd=0.1)
    assert (await limits(world, task_id))[0] is None
    await world.release(held)

    task = await world.take(agent)

    assert (task.id, task.max_cost_usd, task.attempts) == (task_id, Decimal("0.1"), 0)
    (row,) = world.rows(
        "SELECT reserved_usd, held FROM lineshaft.task_live, lineshaft.instance WHERE held > 0"
    )
    assert (row["reserved_usd"], row["held"]) == (Decimal("0.1"), 1)


@pytest.mark.slow("thousands of tasks")
async def test_many_waiting_tasks_get_them_in_batches(world: World) -> None:
    """10,000 of the type among others: batches of their own transactions, and only rows of the type."""
    await world.submit(*[NewTask("pay") for _ in range(10_000)])
    await world.submit(*[NewTask("other") for _ in range(100)])

    await declare(world, max_cost_usd=0.1)

    done = world.rows(
        "SELECT type, max_cost_usd, count(*) AS n, count(DISTINCT xmin::text) AS transactions"
        " FROM lineshaft.task GROUP BY type, max_cost_usd ORDER BY type"
    )
    assert [(row["type"], row["max_cost_usd"], row["n"]) for row in done] == [
        ("other", None, 100),
        ("pay", Decimal("0.1"), 10_000),
    ]
    assert done[1]["transactions"] == 20
    lanes = world.rows(
        "SELECT lane.cost_from_usd IS NULL AS uncapped, count(*) AS n FROM lineshaft.task_live AS live"
        " JOIN lineshaft.lane ON lane.id = live.lane_id WHERE lane.type = 'pay' GROUP BY 1"
    )
    assert [(row["uncapped"], row["n"]) for row in lanes] == [(False, 10_000)]


async def uncapped_warnings(world: World, caplog: pytest.LogCaptureFixture, agent: AgentInfo) -> list[str]:
    with caplog.at_level(logging.WARNING, "lineshaft.engine"):
        caplog.clear()
        await world.claim(agent, 2)
        return [record.getMessage() for record in caplog.records]


async def test_an_agent_with_a_budget_and_tasks_without_a_limit_is_warned_about_once(
    world: World, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    agent = await world.agent("spender", budget_usd=1)
    await world.submit(*[NewTask("pay") for _ in range(6)], NewTask("capped", max_cost_usd=0.1))

    (warning,) = await uncapped_warnings(world, caplog, agent)
    assert "'spender'" in warning
    assert "'pay'" in warning
    assert await uncapped_warnings(world, caplog, agent) == []
    async with Engine(dsn, clock=world.clock) as restarted:
        with caplog.at_level(logging.WARNING, "lineshaft.engine"):
            caplog.clear()
            assert (await restarted.claims.claim("spender", agent.incarnation, limit=3)).tasks
            assert caplog.records == []
    assert [(claim.agent_id, claim.type) for claim in await world.engine.task_types.uncapped()] == [
        ("spender", "pay")
    ]
    assert warning in (await world.engine.task_types.read("pay")).warnings

    await world.engine.task_types.set("pay", {"max_cost_usd": 0.1})
    assert await world.engine.task_types.uncapped() == []
