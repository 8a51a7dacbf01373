"""Instances: any number of processes of one agent, side by side. The agent has the budget and the status."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from lineshaft.duties.janitor import Janitor
from lineshaft.duties.supervisor import all_duties
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.read.metrics import Tally
from lineshaft.errors import (
    BudgetExceededError,
    CapabilityMismatchError,
    InvalidInputError,
    InvalidTransitionError,
    NotFoundError,
    StaleClaimError,
    SupersededError,
)
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.settings import Settings
from lineshaft.types import AgentInfo, NewAgent, RegisteredAgent
from lineshaft.types.work import Presence
from tests.engine.guards.breaker_helpers import AGAIN, POLICY, state
from tests.world import World, ref


@pytest.fixture
def rules() -> Rules:
    """Breakers that open after two failures."""
    return Rules(POLICY)


async def replica(world: World, name: str, agent_id: str = "writer", **fields: Any) -> RegisteredAgent:
    return await world.engine.fleet.register(NewAgent(id=agent_id, instance=name, **fields))


async def read(world: World, agent_id: str = "writer") -> AgentInfo:
    return await world.engine.fleet.read(agent_id)


def instances(agent: AgentInfo) -> dict[str, str]:
    """The status of each instance, the newest first."""
    return {each.instance: each.status for each in agent.instances}


async def beats(world: World, agent: AgentInfo) -> bool:
    """Whether a heartbeat finds the instance."""
    instance = Presence(agent.id, agent.incarnation)
    return instance in (await world.engine.work.heartbeat([instance], [])).agents


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


# Deleting and forgetting.


async def test_an_agent_with_a_live_instance_can_not_be_deleted(world: World) -> None:
    """R-083: the error names one of them."""
    one, two = await replica(world, "one"), await replica(world, "two")
    fleet = world.engine.fleet
    await fleet.leave("writer", two.incarnation)
    with pytest.raises(InvalidTransitionError, match="1 of its instances are alive, among them 'one'"):
        await fleet.delete("writer")
    assert await beats(world, one)
    with pytest.raises(NotFoundError):
        await fleet.delete("reader")


async def test_a_deleted_agent_keeps_its_budget_and_its_spend(world: World) -> None:
    """R-083: registering again goes on from there; what a silent process still held fails."""
    one = await replica(world, "one", budget_usd=3)
    await world.submit(*[NewTask("code", max_cost_usd=1)] * 2)
    done, held = await world.claim(one, 2)
    await world.complete(done, spent="1")
    world.age(seconds=91)
    fleet = world.engine.fleet

    await fleet.delete("writer")

    with pytest.raises(NotFoundError):
        await read(world)
    assert await fleet.read_all() == []
    with pytest.raises(NotFoundError):
        await fleet.delete("writer")
    with pytest.raises(NotFoundError):
        await fleet.patch("writer", budget_usd=100)
    assert world.status(held.id) == Status.RETRYING
    with pytest.raises(SupersededError):
        await world.claim(one)

    again = await replica(world, "one", budget_usd=100)

    assert again.incarnation == 2, "no incarnation is used twice"
    assert (again.budget_usd, again.spent_usd, again.reserved_usd) == (Decimal(3), Decimal(1), Decimal(0))
    assert len(again.warnings) == 1


def janitor(world: World, **settings: Any) -> Janitor:
    (duty,) = (d for d in all_duties(world.engine, Settings(**settings)) if isinstance(d, Janitor))
    return duty


async def test_the_janitor_deletes_instances_that_were_silent_for_a_day(world: World) -> None:
    """R-080: not those that hold a task, nor those that live."""
    silent, holding, living = [await replica(world, name) for name in ("silent", "holding", "living")]
    await world.one()
    await world.take(holding)
    world.age(hours=24)
    await janitor(world).run_once()
    assert len((await read(world)).instances) == 3
    world.age(seconds=1)
    assert await beats(world, living)

    counts = await janitor(world).run_once()

    assert counts["instances and agents deleted"] == 1
    assert list(instances(await read(world))) == ["living", "holding"]
    assert not await beats(world, silent)


async def test_the_janitor_forgets_agents_that_were_not_used_for_long(world: World) -> None:
    """R-083: unless there is a budget or spend, which must not be new when the id returns."""
    for name in ("unused", "budgeted", "spender", "living"):
        agent = await world.agent(name, budget_usd=1 if name == "budgeted" else None)
        await world.one(name)
        task = await world.take(agent, types=[name])
        await world.complete(task, spent="0.5" if name == "spender" else None)
    world.age(days=29)
    await janitor(world).run_once()
    assert len(await world.engine.fleet.read_all()) == 4
    world.age(days=1, seconds=1)
    await world.agent("living")

    await janitor(world).run_once()

    kept = {agent.id: len(agent.instances) for agent in await world.engine.fleet.read_all()}
    assert kept == {"budgeted": 0, "living": 1, "spender": 0}
    with pytest.raises(NotFoundError):
        await world.engine.fleet.read("unused")


async def test_agents_are_kept_for_as_long_as_the_setting_says(world: World) -> None:
    await replica(world, "one")
    world.age(days=3)
    await janitor(world, keep_agents_days=4).run_once()
    assert [agent.id for agent in await world.engine.fleet.read_all()] == ["writer"]

    await janitor(world, keep_agents_days=2).run_once()

    assert await world.engine.fleet.read_all() == []


async def test_metrics_have_no_labels_of_agents_that_are_gone(world: World) -> None:
    """R-083: what they counted is kept in sums without the label."""
    for name in ("writer", "living"):
        agent = await world.agent(name, models_available=("m",))
        await world.submit(NewTask(name), NewTask(name), NewTask(name))
        done, failed, _ = await world.claim(agent, 3, types=[name])
        await world.complete(done, spent="0.5")
        await world.fail(failed)
    world.age(minutes=5)
    await world.engine.maintenance.reap(10)
    await world.engine.fleet.mark_offline()
    tally = Tally(world.engine.database)
    await tally.count()
    before = await tally.totals()
    assert before.completed_by == {"writer": 1, "living": 1}
    assert set(before.heartbeats_missed) == {"writer", "living"}

    await world.engine.fleet.delete("writer")

    after = await tally.totals()
    assert after.completed_by == {"": 1, "living": 1}
    assert after.failed_by == {"": 2, "living": 2}
    assert after.heartbeats_missed == {"": 1, "living": 1}
    assert after.cost_usd == {
        ("writer", "", "m"): Decimal("0.5"),
        ("living", "living", "m"): Decimal("0.5"),
    }
    assert (after.completed, after.failed) == (before.completed, before.failed)


# Lost processes.


async def test_a_lost_instance_counts_once_for_the_breaker_of_each_type(world: World) -> None:
    """F-4: a process that is killed with eight tasks must not stop the type for everyone."""
    lost = await replica(world, "lost", max_concurrent_tasks=20)
    await world.submit(*[NewTask("code", **AGAIN)] * 8, *[NewTask("text", **AGAIN)] * 3)
    assert len(await world.claim(lost, 20)) == 11

    await replica(world, "lost")

    assert await state(world) == ("closed", 1)
    assert await state(world, "text") == ("closed", 1)


@pytest.mark.parametrize("how", ["heartbeat_timeout", "claim_expired"])
async def test_a_lost_instance_counts_once_however_its_leases_expire(world: World, how: str) -> None:
    """F-4: also when the reaper needs several rounds; two lost processes are two."""
    started = how == "heartbeat_timeout"
    lost = await replica(world, "lost", max_concurrent_tasks=20)
    await world.submit(*[NewTask("code", **AGAIN)] * 8)
    assert len(await world.claim(lost, 4, start=started)) == 4
    world.age(seconds=91)
    for _ in range(4):
        assert await world.engine.maintenance.reap(1) == {how: 1}
    assert await state(world) == ("closed", 1)

    other = await replica(world, "other")
    assert len(await world.claim(other, 1)) == 1
    await replica(world, "other")

    assert await state(world) == ("open", 2)


async def test_a_lost_instance_uses_an_attempt_of_each_task(world: World) -> None:
    """R-083: a task may be what killed it."""
    ids = await world.submit(*[NewTask("code", **AGAIN | {"max_attempts": 2})] * 2)
    for _ in range(2):
        agent = await replica(world, "pod")
        assert len(await world.claim(agent, 5)) == 2
        await replica(world, "pod")
        await world.engine.maintenance.promote_due(10)
        await world.engine.breakers.reset("code")

    assert world.statuses(ids) == [Status.DEAD_LETTERED] * 2
    letter = await world.engine.dead_letters.get(ids[0])
    assert [(entry.agent, entry.instance, entry.error) for entry in letter.failure_history] == [
        ("writer", "pod", "agent_restarted")
    ] * 2


async def test_a_poison_pill_is_a_task_that_fails_with_several_instances(world: World) -> None:
    """R-136: replicas of one agent are as good as agents; three failures of one process prove nothing."""
    task_id = await world.one(**AGAIN)
    other_id = await world.one("other", **AGAIN)
    replicas = [await replica(world, name) for name in ("one", "two")]
    for n in range(3):
        for type_, agent in (("code", replicas[n % 2]), ("other", replicas[0])):
            task = await world.take(agent, types=[type_])
            await world.fail(task)
            await world.engine.breakers.reset(type_)
        await world.engine.maintenance.promote_due(10)

    assert world.statuses([task_id, other_id]) == [Status.DEAD_LETTERED, Status.READY]
    letter = await world.engine.dead_letters.get(task_id)
    assert letter.poison_pill
    assert [entry.instance for entry in letter.failure_history] == ["one", "two", "one"]


async def test_a_task_names_the_instance_that_holds_it(world: World) -> None:
    """R-083: in its claim and in its attempts; an ended claim's token is stale for every call."""
    agent = await replica(world, "pod-0")
    task_id = await world.one()
    task = await world.take(agent)
    claim = (await world.engine.read.task(task_id)).claim
    assert claim is not None
    assert claim.instance == "pod-0"
    (attempt,) = await world.engine.read.attempts(task_id)
    assert attempt.instance == "pod-0"

    await replica(world, "pod-0")

    for call in (world.complete, world.fail, world.release):
        with pytest.raises(StaleClaimError):
            await call(task)
    answers = await world.heartbeat("writer", 2, [ref(task)])
    assert answers == {task_id: "lost"}
