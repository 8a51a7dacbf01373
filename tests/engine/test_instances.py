"""Instances: any number of processes of one agent, side by side. The agent has the budget and the status."""

from datetime import timedelta
from decimal import Decimal

import msgspec
import pytest

from lineshaft.errors import (
    BudgetExceededError,
    CapabilityMismatchError,
    InvalidInputError,
    StaleClaimError,
    SupersededError,
)
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import NewAgent
from tests.engine.guards.breaker_helpers import AGAIN
from tests.engine.instance_helpers import beats, instances, read, replica
from tests.world import World

# Registration.


async def test_replicas_of_one_agent_work_side_by_side(world: World) -> None:
    """R-083: three processes with one id each claim and complete; none ends another."""
    replicas = [await replica(world, f"pod-{n}", max_concurrent_tasks=1) for n in range(3)]
    await world.submit(*[NewTask("code")] * 4)

    held = [await world.take(each) for each in replicas]

    assert len({task.id for task in held}) == 3
    assert [await world.claim(each) for each in replicas] == [[], [], []], "slots are those of each one"
    assert [each.incarnation for each in replicas] == [1, 2, 3]
    assert all([await beats(world, each) for each in replicas])
    assert [await world.complete(task) for task in held] == [Status.COMPLETED] * 3
    assert len(await world.claim(replicas[0])) == 1


@pytest.mark.parametrize("name", ["pod-0", ""])
async def test_the_same_name_supersedes_the_process_that_had_it(world: World, name: str) -> None:
    """R-083: its work fails as a crash, its tokens are stale, it may not claim; others go on."""
    other = await replica(world, "pod-1")
    old = await replica(world, name)
    task_id = await world.one()
    task = await world.take(old)
    await world.one("other")
    undisturbed = await world.take(other)

    new = await replica(world, name)

    assert new.incarnation == 3
    assert instances(await read(world)) == {name: "active", "pod-1": "active"}
    assert world.status(task_id) == Status.RETRYING
    (failed,) = (await world.engine.read.task(task_id)).failure_history
    assert (failed.category, failed.error, failed.instance) == ("crash", "agent_restarted", name)
    with pytest.raises(StaleClaimError):
        await world.complete(task)
    with pytest.raises(SupersededError, match="Incarnation 2 of agent 'writer' has ended"):
        await world.claim(old)
    with pytest.raises(SupersededError):
        await world.engine.fleet.present("writer", old.incarnation)
    assert not await beats(world, old)
    assert await world.complete(undisturbed) is Status.COMPLETED
    assert await world.claim(new) == []


async def test_a_name_belongs_to_one_agent(world: World) -> None:
    """R-083: the same name with another id is another process."""
    one = await replica(world, "pod-0", "writer")
    two = await replica(world, "pod-0", "reader")

    assert await beats(world, one)
    assert await beats(world, two)


async def test_a_dead_predecessor_on_the_same_host_is_superseded_at_once(world: World) -> None:
    """R-083: after a restart its tasks go on without waiting for their leases."""
    task_id = await world.one(**AGAIN)
    dead = await replica(world, "h1/1", host="h1")
    await world.take(dead)

    new = await replica(world, "h1/2", host="h1", gone=("h1/1", "unknown"))

    assert instances(await read(world)) == {"h1/2": "active"}
    world.age(seconds=1)
    await world.engine.maintenance.promote_due(10)
    assert (await world.take(new)).id == task_id


@pytest.mark.parametrize(("agent_id", "host"), [("writer", "h2"), ("writer", None), ("reader", "h1")])
async def test_only_processes_of_the_same_agent_and_host_can_be_reported_as_dead(
    world: World, agent_id: str, host: str | None
) -> None:
    """R-083: no process can know about others, so such a report changes nothing."""
    alive = await replica(world, "pod-0", agent_id, host=host)
    await world.one()
    task = await world.take(alive)

    new = await replica(world, "pod-1", host="h1", gone=("pod-0",))
    assert await world.engine.fleet.siblings("writer", new.incarnation, gone=["pod-0"]) == []

    assert await beats(world, alive)
    assert await world.complete(task) is Status.COMPLETED


async def test_gone_needs_a_host(world: World) -> None:
    with pytest.raises(InvalidInputError, match="gone: needs host"):
        await replica(world, "pod-1", gone=("pod-0",))


async def test_a_sibling_reports_a_dead_process(world: World) -> None:
    """R-083: what it held fails at once, and the reporter is not affected."""
    own = await replica(world, "h1/1", host="h1")
    dead = await replica(world, "h1/2", host="h1")
    task_id = await world.one()
    await world.take(dead)
    fleet = world.engine.fleet
    assert await fleet.siblings("writer", own.incarnation) == ["h1/2"]

    assert await fleet.siblings("writer", own.incarnation, gone=["h1/2", "h1/1"]) == []

    assert world.status(task_id) == Status.RETRYING
    assert not await beats(world, dead)
    assert await beats(world, own), "no process reports itself"
    with pytest.raises(SupersededError):
        await fleet.siblings("writer", dead.incarnation, gone=["h1/1"])
    assert await beats(world, own), "a superseded process reports nothing"


async def test_each_instance_watches_the_next_few_of_its_host(world: World) -> None:
    """R-083: a ring, in which every one is watched by others; those that left or run elsewhere are not."""
    ring = [await replica(world, f"h1/{n}", host="h1") for n in range(6)]
    await replica(world, "h2/0", host="h2")
    await replica(world, "nowhere")
    fleet = world.engine.fleet
    await fleet.leave("writer", ring[5].incarnation)

    assert await fleet.siblings("writer", ring[0].incarnation) == ["h1/1", "h1/2", "h1/3"]
    assert await fleet.siblings("writer", ring[3].incarnation) == ["h1/4", "h1/0", "h1/1"]
    everyone = await fleet.siblings("writer", ring[3].incarnation, everyone=True)
    assert everyone == ["h1/4", "h1/0", "h1/1", "h1/2"]


async def test_an_idempotency_key_names_one_registration(world: World) -> None:
    """R-083: a repeated call supersedes nothing, and returns the same incarnation."""
    agent = NewAgent(id="writer", instance="pod-0")
    first = await world.engine.fleet.register(agent, key="k")
    await replica(world, "pod-1")
    await world.one()
    task = await world.take(first)

    again = await world.engine.fleet.register(agent, key="k")

    assert (first.incarnation, again.incarnation) == (1, 1)
    assert again.own.instance == "pod-0"
    assert await world.complete(task) is Status.COMPLETED


async def test_the_answer_to_a_registration_has_only_the_caller(world: World) -> None:
    """R-083: as small for the thousandth replica as for the first; its sums are of all of them."""
    first = await replica(world, "pod-0", capabilities=("vision",), types=("code",), max_concurrent_tasks=2)
    await world.one()
    await world.take(first)
    sizes, new = set(), first
    for number in range(1, 9):
        new = await replica(world, f"pod-{number}", types=("code",), max_concurrent_tasks=3, version="2")
        assert (new.incarnation, instances(new)) == (number + 1, {f"pod-{number}": "active"})
        sizes.add(len(msgspec.json.encode(msgspec.structs.replace(new, max_concurrent_tasks=0))))

    assert len(sizes) == 1
    found = await read(world)
    assert new.current_tasks == 1
    assert new.max_concurrent_tasks == 2 + 8 * 3
    shown = {name: getattr(new, name) for name in found.__struct_fields__ if name != "instances"}
    assert shown == {name: getattr(found, name) for name in shown}


# What an instance has, and what the agent shows.


async def test_each_instance_claims_by_its_own_capabilities(world: World) -> None:
    """R-083: old and new versions of a program work side by side during a deploy."""
    old = await replica(world, "old", types=("code",), version="1")
    new = await replica(world, "new", capabilities=("vision",), version="2")
    task_id = await world.one("look", required_capabilities=["vision"])

    assert await world.claim(old) == []
    with pytest.raises(CapabilityMismatchError):
        await world.engine.claims.claim_task("writer", old.incarnation, task_id)
    task = await world.take(new)

    assert task.id == task_id
    await world.fail(task)
    (attempt,) = await world.engine.read.attempts(task_id)
    assert (attempt.instance, attempt.version) == ("new", "2")


async def test_an_agent_is_the_union_and_the_sum_of_its_live_instances(world: World) -> None:
    """R-083: in other reads `incarnation` is the newest one."""
    first = await replica(
        world,
        "one",
        capabilities=("a", "b"),
        types=("x",),
        models_available=("m",),
        max_concurrent_tasks=2,
        host="h1",
        version="1",
    )
    await world.one("x")
    task = await world.take(first)
    world.age(seconds=5)
    second = await replica(
        world, "two", capabilities=("b", "c"), types=("y",), models_available=("n",), max_concurrent_tasks=5
    )

    agent = await read(world)

    assert (agent.capabilities, agent.types, agent.models_available) == (
        ["b", "c", "a"],
        ["y", "x"],
        ["n", "m"],
    )
    assert (agent.max_concurrent_tasks, agent.current_tasks) == (7, 1)
    assert (agent.incarnation, agent.version) == (second.incarnation, None)
    assert agent.last_heartbeat == world.clock.now()
    mine = agent.instances[1]
    assert (mine.instance, mine.host, mine.version, mine.task_ids) == ("one", "h1", "1", [task.id])
    assert (mine.started_at, mine.max_concurrent_tasks, mine.current_tasks) == (
        world.clock.now() - timedelta(seconds=5),
        2,
        1,
    )

    await replica(world, "three", types=None)
    assert (await read(world)).types is None, "one of them takes any type"
    await world.engine.fleet.leave("writer", second.incarnation)
    assert (await read(world)).capabilities == ["a", "b"]


async def test_draining_and_leaving_concern_one_instance(world: World) -> None:
    """R-058, R-081: the agent is active while one of its instances is."""
    one, two = await replica(world, "one"), await replica(world, "two")
    fleet = world.engine.fleet
    await world.one()

    await fleet.drain("writer", one.incarnation)

    agent = await read(world)
    assert (agent.status, instances(agent)) == ("active", {"two": "active", "one": "draining"})
    assert await world.claim(one) == []
    assert await world.complete(await world.take(two)) is Status.COMPLETED

    await fleet.leave("writer", two.incarnation)
    agent = await read(world)
    assert (agent.status, instances(agent)) == ("draining", {"two": "offline", "one": "draining"})
    await fleet.leave("writer", one.incarnation)
    assert (await read(world)).status == "offline"


async def test_slots_set_by_hand_apply_to_every_instance_until_they_are_unset(world: World) -> None:
    """R-083: present and future ones; None returns to what each declares."""
    one = await replica(world, "one", max_concurrent_tasks=2)
    await world.submit(*[NewTask("code")] * 12)
    fleet = world.engine.fleet

    assert (await fleet.patch("writer", max_concurrent_tasks=3)).max_concurrent_tasks == 3
    two = await replica(world, "two", max_concurrent_tasks=7)
    assert two.max_concurrent_tasks == 6
    assert [len(await world.claim(each, 10)) for each in (one, two)] == [3, 3]
    await fleet.patch("writer", status="active")
    assert (await read(world)).max_concurrent_tasks == 6, "another change leaves them alone"

    assert (await fleet.patch("writer", max_concurrent_tasks=None)).max_concurrent_tasks == 9
    assert [len(await world.claim(each, 10)) for each in (one, two)] == [0, 4]


async def test_each_instance_is_alive_by_its_own_heartbeat(world: World) -> None:
    """R-080: a list, `why` and the agent judge by the age of heartbeats, whether or not a duty has run."""
    silent = await replica(world, "silent", capabilities=("vision",))
    other = await replica(world, "other")
    needs_vision = await world.one("look", required_capabilities=["vision"])
    anyone = await world.one()
    world.age(seconds=60)
    assert await beats(world, other)
    world.age(seconds=31)

    agent = await read(world)

    assert (agent.status, instances(agent)) == ("active", {"other": "active", "silent": "offline"})
    assert agent.capabilities == []
    assert [
        item.id for item in (await world.engine.fleet.page(status=["active"], limit=9, cursor=None)).items
    ]
    why = await world.engine.read.why(needs_vision)
    assert "Capable, but not active: writer (offline)" in why.reasons[0].detail
    assert (await world.engine.read.why(anyone)).runnable
    assert await world.engine.fleet.mark_offline() == ["writer"]
    (event,) = world.rows("SELECT data FROM lineshaft.events WHERE kind = 'agent.offline'")
    assert event["data"]["instance"] == "silent"

    assert await beats(world, silent)
    assert instances(await read(world)) == {"other": "active", "silent": "active"}
    assert (await world.engine.read.why(needs_vision)).runnable


async def test_why_names_an_agent_once(world: World) -> None:
    """R-080: however many processes it has."""
    names = ("one", "two", "three", "four")
    replicas = [await replica(world, name, max_concurrent_tasks=1) for name in names]
    task_id = await world.one(priority=90, max_cost_usd=2)
    await world.engine.fleet.patch("writer", budget_usd=1)
    (poor,) = (await world.engine.read.why(task_id)).reasons
    assert poor.detail.count("writer") == 1
    special = await world.one(required_capabilities=["vision"])
    (incapable,) = (await world.engine.read.why(special)).reasons
    assert incapable.detail.endswith("Active: writer lacks vision.")
    await world.engine.fleet.patch("writer", budget_usd=None)
    for agent in replicas:
        await world.one()
        await world.take(agent)
    (full,) = (await world.engine.read.why(task_id)).reasons
    assert full.detail.startswith("Slots are taken: writer 4 of 4.")

    world.age(minutes=5)
    (offline,) = (await world.engine.read.why(task_id)).reasons
    assert "Capable, but not active: writer (offline)." in offline.detail


async def test_of_instances_that_are_offline_only_the_newest_are_shown(world: World) -> None:
    """R-083: a pod that restarts every minute doesn't fill the screen; what holds a task is shown."""
    holder = await replica(world, "holder")
    await world.one()
    await world.take(holder)
    for n in range(12):
        agent = await replica(world, f"pod-{n}")
        await world.engine.fleet.leave("writer", agent.incarnation)
    await world.engine.fleet.leave("writer", holder.incarnation)

    shown = instances(await read(world))

    assert list(shown) == [*(f"pod-{n}" for n in range(11, 1, -1)), "holder"]


# Money.


async def test_replicas_share_the_budget_of_their_agent(world: World) -> None:
    """R-057, R-083: a total over the life of the id; a new process doesn't refill it."""
    one = await replica(world, "one", budget_usd=1)
    two = await replica(world, "two", budget_usd=1)
    await world.submit(*[NewTask("code", max_cost_usd=0.4)] * 5)

    held = [*(await world.claim(one)), *(await world.claim(two))]

    assert len(held) == 2
    assert await world.claim(one) == await world.claim(two) == []
    agent = await read(world)
    assert (agent.reserved_usd, agent.budget_remaining_usd) == (Decimal("0.8"), Decimal("0.2"))
    await world.complete(held[0], spent="0.4")
    await world.complete(held[1], spent="0.3")
    three = await replica(world, "three", budget_usd=1)
    assert (three.spent_usd, three.budget_remaining_usd) == (Decimal("0.7"), Decimal("0.3"))
    assert await world.claim(three) == []
    waiting = world.row("SELECT id FROM lineshaft.tasks WHERE status = 'READY' LIMIT 1")["id"]
    with pytest.raises(BudgetExceededError):
        await world.engine.claims.claim_task("writer", three.incarnation, waiting)


async def test_a_budget_needs_an_id(world: World) -> None:
    """R-083: without one the money would be new with every start."""
    with pytest.raises(InvalidInputError, match="budget_usd: needs an id"):
        await world.engine.fleet.register(NewAgent(budget_usd=1))


async def test_a_differing_budget_is_a_warning_with_the_command_that_changes_it(world: World) -> None:
    """R-083: the first registration that declares one sets it."""
    assert (await replica(world, "one")).warnings == []
    assert (await replica(world, "two", budget_usd=2)).budget_usd == 2
    assert (await replica(world, "three", budget_usd=2)).warnings == []
    assert (await replica(world, "four")).warnings == []

    other = await replica(world, "five", budget_usd=2.5)

    assert other.budget_usd == 2
    (warning,) = other.warnings
    assert warning == (
        "budget_usd=2.5 is ignored: agent 'writer' has a budget of 2 USD. "
        "To change it: lineshaft agents change writer --budget USD"
    )
