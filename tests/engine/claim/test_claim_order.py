"""Which task comes first: 004's formula, exactly."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lineshaft.model.priority import PriorityInputs, effective_priority
from lineshaft.model.tasks import NewTask
from lineshaft.types.changes import TaskChange
from tests.examples import examples
from tests.world import World


@dataclass(frozen=True)
class Ask:
    type: str
    priority: int
    boost: float
    #: Tasks that wait for it, one behind the other.
    chain: int
    deadline_minutes: int | None

    def tasks(self, number: int, now: datetime) -> list[NewTask]:
        names = [f"{number}.{step}" for step in range(self.chain + 1)]
        deadline = None
        if self.deadline_minutes is not None:
            deadline = now + timedelta(minutes=self.deadline_minutes)
        head = NewTask(
            self.type,
            key=names[0],
            priority=self.priority,
            priority_boost_per_minute=self.boost,
            deadline=deadline,
        )
        below = [NewTask("below", key=name, depends_on=[before]) for before, name in pairwise(names)]
        return [head, *below]


def asks(deadlines: st.SearchStrategy[int | None]) -> st.SearchStrategy[list[tuple[int, list[Ask]]]]:
    ask = st.builds(
        Ask,
        type=st.sampled_from(["a", "b", "c"]),
        priority=st.integers(0, 100) | st.sampled_from([40, 50]),
        boost=st.sampled_from([0.0, 0.1, 0.5, 2.0]),
        chain=st.sampled_from([0, 0, 0, 1, 3, 12]),
        deadline_minutes=deadlines,
    )
    return st.lists(
        st.tuples(st.integers(1, 6), st.lists(ask, min_size=4, max_size=14)), min_size=2, max_size=4
    )


#: Groups are submitted a multiple of this apart. A prime number of seconds: no two tasks of different ages
#: then come to the same value but for the last bit of a sum.
GAP_SEC = 7_919
FEW = settings(
    max_examples=examples(8),
    deadline=None,
    # Shrinking would go on for minutes: every try fills a database.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


async def submit_groups(world: World, groups: list[tuple[int, list[Ask]]]) -> dict[str, PriorityInputs]:
    """In order of submission."""
    for table in ("task", "task_live", "edge", "dag", "event", "agent", "instance"):
        world.connection.execute(f"DELETE FROM lineshaft.{table}".encode())
    found: dict[str, PriorityInputs] = {}
    for gaps, group in groups:
        world.age(seconds=gaps * GAP_SEC)
        now = world.clock.now()
        dag = await world.dag(*(task for n, ask in enumerate(group) for task in ask.tasks(n, now)))
        for number, ask in enumerate(group):
            deadline = ask.tasks(number, now)[0].deadline
            found[dag.tasks[f"{number}.0"].id] = PriorityInputs(
                priority=ask.priority,
                boost_per_minute=ask.boost,
                ready_at=now,
                deadline=deadline,
                downstream_length=ask.chain,
            )
    return found


async def drain(world: World, batch: int, total: int) -> list[str]:
    agent = await world.agent(max_concurrent_tasks=1_000)
    claimed: list[str] = []
    while found := await world.claim(agent, batch):
        claimed += [task.id for task in found]
        assert len(found) == batch or len(claimed) == total
    return claimed


@pytest.mark.parametrize("batch", [1, 3, 10])
@FEW
@given(groups=asks(st.none()), waits=st.sampled_from([0, GAP_SEC]))
async def test_the_order_of_claims_is_that_of_the_formula(
    world: World, batch: int, groups: list[tuple[int, list[Ask]]], waits: int
) -> None:
    """R-053, R-160, R-163, R-164, U1: lanes and ranks give exactly 004's order, first come first served."""
    inputs = await submit_groups(world, groups)
    world.age(seconds=waits)
    now = world.clock.now()

    claimed = await drain(world, batch, len(inputs))

    # A stable sort keeps the order of submission among equals. Rounded as claims do: the values of two tasks
    # of the same age may be equal but for the last bit.
    assert claimed == sorted(inputs, key=lambda name: round(effective_priority(inputs[name], now), 6))


@pytest.mark.parametrize("batch", [1, 3, 10])
@FEW
@given(groups=asks(st.none() | st.integers(-60, 2_000)), waits=st.integers(0, 5 * 3_600))
async def test_with_deadlines_the_order_is_exact_to_half_a_point(
    world: World, batch: int, groups: list[tuple[int, list[Ask]]], waits: int
) -> None:
    """R-160, R-162: the boost changes automatically; tasks are re-keyed before it is off by more than 0.5."""
    inputs = await submit_groups(world, groups)
    world.age(seconds=waits)
    now = world.clock.now()
    await world.engine.maintenance.rekey_deadlines(10_000)

    assert_ordered(inputs, await drain(world, batch, len(inputs)), now)


def assert_ordered(inputs: dict[str, PriorityInputs], claimed: list[str], now: datetime) -> None:
    assert sorted(claimed) == sorted(inputs)
    values = [effective_priority(inputs[name], now) for name in claimed]
    worst = float("-inf")
    for value in values:
        assert value >= worst - 0.5 - 1e-6
        worst = max(worst, value)


#: Which task, its new priority, and its new deadline in minutes from now.
Wish = tuple[int, int | None, int | str | None]
WISHES = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.none() | st.integers(0, 100),
        st.sampled_from(["as it is", None]) | st.integers(-60, 2_000),
    ),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize("batch", [1, 10])
@FEW
@given(groups=asks(st.none() | st.integers(-60, 2_000)), wishes=WISHES, waits=st.integers(0, 5 * 3_600))
async def test_after_changes_the_order_is_that_of_the_formula(
    world: World, batch: int, groups: list[tuple[int, list[Ask]]], wishes: list[Wish], waits: int
) -> None:
    """R-167: a task takes the same place as if it were submitted so."""
    inputs = await submit_groups(world, groups)
    names = list(inputs)
    for number, priority, minutes in wishes:
        world.age(seconds=waits / len(wishes))
        name = names[number % len(names)]
        wish: dict[str, Any] = {}
        if priority is not None:
            wish["priority"] = priority
        if minutes != "as it is":
            wish["deadline"] = (
                None if minutes is None else world.clock.now() + timedelta(minutes=float(minutes))
            )
        await world.engine.edit.edit(name, TaskChange(**wish))
        inputs[name] = replace(inputs[name], **wish)
    now = world.clock.now()
    await world.engine.maintenance.rekey_deadlines(10_000)

    assert_ordered(inputs, await drain(world, batch, len(inputs)), now)


async def test_first_come_first_served_across_lanes(world: World) -> None:
    """U1: equal priority means order of submission, also between types that age alike or not at all."""
    agent = await world.agent()
    ids = await world.submit(
        *(NewTask(f"type {n % 7}", priority_boost_per_minute=(n % 3) * 0.1) for n in range(30))
    )

    seen = []
    for limit in (1, 2, 3, 5, 8, 13):
        seen += [task.id for task in await world.claim(agent, limit)]

    assert seen == ids[: len(seen)]


async def test_a_task_keeps_its_age_through_failures(world: World) -> None:
    """R-164: age counts since it was first READY."""
    agent = await world.agent()
    old = await world.one(priority=60, priority_boost_per_minute=1)
    task = await world.take(agent)
    world.age(minutes=30)
    await world.fail(task)
    await world.engine.revive.retry(old)
    young = await world.one(priority=31, priority_boost_per_minute=1)

    assert [found.id for found in await world.claim(agent, 2)] == [old, young]
