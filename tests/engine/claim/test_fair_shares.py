"""Fair shares: the next task comes from the fair_key with the fewest running tasks per weight."""

import asyncio
import random
from datetime import timedelta
from typing import Any

import pytest

from lineshaft.duties.quota_keeper import QuotaKeeper
from lineshaft.model.admission import LockKey
from lineshaft.model.parts import ForEach
from lineshaft.model.priority import TIER_ENDS
from lineshaft.operations.quotas import SetQuota
from lineshaft.types import NewTask
from tests.world import World


def task(fair_key: str, type_: str = "code", **fields: Any) -> NewTask:
    return NewTask(type_, quota_keys=[fair_key], fair_key=fair_key, **fields)


async def weigh(world: World, match: str, weight: float) -> None:
    await world.engine.quotas.set(SetQuota(name=match.replace(":", "-"), match=match, weight=weight))


def parked(world: World) -> dict[str, tuple[str | None, str | None]]:
    return {
        row["id"]: (row["parked"], row["parked_key"])
        for row in world.rows("SELECT id, parked, parked_key FROM lineshaft.task_live WHERE status = 'READY'")
    }


async def test_keys_take_turns(world: World) -> None:
    a = await world.submit(*(task("customer:a") for _ in range(5)))
    b = await world.submit(task("customer:b"), task("customer:b"))
    agent = await world.agent()

    order = [(await world.claim(agent))[0].id for _ in range(7)]

    assert order == [a[0], b[0], a[1], b[1], *a[2:]]
    assert await world.claim(agent) == []


async def test_a_batch_is_what_single_claims_would_be(world: World) -> None:
    a = await world.submit(*(task("customer:a") for _ in range(5)))
    b = await world.submit(task("customer:b"), task("customer:b"))
    agent = await world.agent()

    assert {each.id for each in await world.claim(agent, 4)} == {a[0], b[0], a[1], b[1]}
    assert [each.id for each in await world.claim(agent, 4)] == a[2:]


async def test_weights_share(world: World) -> None:
    await weigh(world, "customer:b", 3)
    await world.submit(*(task("customer:a") for _ in range(20)), *(task("customer:b") for _ in range(20)))
    agent = await world.agent()

    ids = {each.id for each in await world.claim(agent, 12)}

    keys = [
        row["key"]
        for row in world.rows("SELECT id, admission ->> 'fair' AS key FROM lineshaft.task")
        if row["id"] in ids
    ]
    assert (keys.count("customer:a"), keys.count("customer:b")) == (3, 9)


async def test_a_better_tier_goes_first(world: World) -> None:
    low = await world.submit(task("customer:a", priority=50))
    high = await world.submit(*(task("customer:b", priority=20) for _ in range(3)))
    agent = await world.agent()

    assert [(await world.claim(agent))[0].id for _ in range(4)] == [*high, *low]


async def test_other_tasks_compete_by_priority(world: World) -> None:
    fair = await world.submit(task("customer:a", priority=40), task("customer:a", priority=40))
    better = await world.submit(NewTask("code", priority=35))
    worse = await world.submit(NewTask("code", priority=45))
    agent = await world.agent()

    assert [each.id for each in await world.claim(agent, 3)] == [*better, *fair]
    assert [each.id for each in await world.claim(agent, 3)] == worse


@pytest.mark.parametrize("ending", ["release", "fail", "complete", "expire"])
async def test_the_end_of_a_claim_counts_at_once(world: World, ending: str) -> None:
    a = await world.submit(*(task("customer:a") for _ in range(3)))
    agent = await world.agent()
    (first,) = await world.claim(agent)
    b = await world.submit(task("customer:b"), task("customer:b"))
    if ending == "release":
        await world.release(first)
    elif ending == "fail":
        await world.fail(first)
    elif ending == "complete":
        await world.complete(first)
    else:
        world.age(seconds=10_000)
        await world.engine.maintenance.reap(100)
        agent = await world.agent()

    # Both keys hold nothing: the oldest task goes first.
    (second,) = await world.claim(agent)
    assert second.id == (first.id if ending == "release" else a[1])
    (third,) = await world.claim(agent)
    assert third.id == b[0]


async def test_ready_tasks_wait_for_their_turn_wherever_they_come_from(world: World) -> None:
    dag = await world.dag(
        NewTask("first", key="first"),
        *(task("customer:a", key=f"next{n}", depends_on=["first"]) for n in range(3)),
    )
    agent = await world.agent()
    await world.complete(await world.take(agent, types=["first"]))
    b = await world.one("code", quota_keys=["customer:b"], fair_key="customer:b")
    (one,) = await world.claim(agent)
    (two,) = await world.claim(agent)
    assert one.id in {each.id for each in dag.tasks.values()}
    assert two.id == b
    assert {state for state, _ in parked(world).values()} == {"fair"}


async def test_a_key_with_100_000_waiting_tasks_delays_no_other(world: World) -> None:
    n = 2_000
    await world.submit(*(task("customer:big") for _ in range(n)))
    agent = await world.agent()
    await world.claim(agent, 10)
    small = await world.one("code", quota_keys=["customer:small"], fair_key="customer:small")

    assert (await world.take(agent)).id == small


async def test_claims_at_once_count_each_other(world: World) -> None:
    """Eight claims at once: no key gets a second turn while another has none."""
    await world.submit(*(task("customer:big") for _ in range(20)))
    await world.submit(*(task(f"customer:{n}") for n in range(7)))
    agents = [await world.agent() for _ in range(8)]

    claims = await asyncio.gather(*(world.claim(agent) for agent in agents))

    ids = [each.id for claim in claims for each in claim]
    held = "SELECT DISTINCT admission ->> 'fair' AS key FROM lineshaft.task WHERE id = ANY (%s)"
    assert len(ids) == len(world.rows(held, ids)) == 8


async def test_a_full_quota_of_a_key_stops_no_other(world: World) -> None:
    await world.engine.quotas.set(SetQuota(name="q", match="customer:*", max_running=1))
    a = await world.submit(*(task("customer:a", priority=10) for _ in range(30)))
    b = await world.submit(*(task("customer:b") for _ in range(2)))
    agent = await world.agent()

    first = await world.claim(agent, 10)

    assert {each.id for each in first} == {a[0], b[0]}
    await world.complete(next(each for each in first if each.id == a[0]))
    assert [each.id for each in await world.claim(agent, 10)] == [a[1]]


async def test_a_paused_type_stops_no_other(world: World) -> None:
    await world.submit(*(task("customer:a", "slow", priority=10) for _ in range(3)))
    other = await world.submit(task("customer:b"))
    await world.engine.pauses.pause("slow")

    assert [each.id for each in await world.claim(await world.agent(), 2)] == other


async def test_claims_look_at_turns_while_there_are_tasks_with_a_fair_key(world: World) -> None:
    bit = "SELECT quota_kinds & 64 AS bit FROM lineshaft.limits"
    assert world.row(bit)["bit"] == 0
    await world.submit(task("customer:a"))
    await QuotaKeeper(world.engine.quotas).run_once()
    assert world.row(bit)["bit"] == 64
    await world.complete(await world.take())
    await QuotaKeeper(world.engine.quotas).run_once()
    assert world.row(bit)["bit"] == 0


class Model:
    """The rule itself, over plain lists."""

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[str, float, int]] = {}
        self.held: dict[str, str] = {}
        self.weights: dict[str, float] = {}

    def next(self) -> str:
        def place(item: tuple[str, tuple[str, float, int]]) -> tuple[int, float, float, int]:
            _, (key, priority, no) = item
            tier = sum(priority >= end for end, _ in TIER_ENDS)
            running = sum(each == key for each in self.held.values())
            return tier, running / self.weights.get(key, 1), priority, no

        return min(self.waiting.items(), key=place)[0]


@pytest.mark.parametrize("seed", range(12))
async def test_order_against_the_rule(world: World, seed: int) -> None:
    chance = random.Random(seed)
    model = Model()
    keys = [f"customer:{n}" for n in range(chance.choice([2, 5, 60]))]
    for key in chance.sample(keys, len(keys) // 3):
        model.weights[key] = chance.choice([0.5, 2, 3])
        await weigh(world, key, model.weights[key])
    agent = await world.agent()
    held: dict[str, Any] = {}
    no = 0
    for _ in range(60):
        act = chance.random()
        if act < 0.35 or not model.waiting:
            new = [
                (chance.choice(keys), chance.choice([5, 20, 40, 41, 42, 70, 90]))
                for _ in range(chance.choice([1, 3, 60]))
            ]
            ids = await world.submit(
                *(
                    task(key, chance.choice(["code", "text"]), priority=priority, priority_boost_per_minute=0)
                    for key, priority in new
                )
            )
            for id_, (key, priority) in zip(ids, new, strict=True):
                no += 1
                model.waiting[id_] = key, priority, no
        elif act < 0.8:
            n = chance.choice([1, 1, 1, 4])
            expected = []
            for _ in range(min(n, len(model.waiting), 100 - len(held))):
                id_ = model.next()
                expected.append(id_)
                model.held[id_] = model.waiting.pop(id_)[0]
            claimed = await world.claim(agent, n)
            assert {each.id for each in claimed} == set(expected)
            held |= {each.id: each for each in claimed}
        elif act < 0.9 and held:
            id_ = chance.choice(list(held))
            await world.complete(held.pop(id_))
            del model.held[id_]
        elif model.waiting:
            id_ = chance.choice(list(model.waiting))
            await world.engine.cancel.cancel(id_, "no more")
            del model.waiting[id_]
            if chance.random() < 0.5:
                await QuotaKeeper(world.engine.quotas).run_once()


async def test_children_of_a_list_take_turns_with_others(world: World) -> None:
    await world.dag(
        NewTask("scan", key="scan"),
        task("customer:a", "review", key="review", for_each=ForEach("scan.files")),
    )
    agent = await world.agent()
    await world.complete(await world.take(agent, types=["scan"]), {"files": [1, 2, 3]})
    await world.submit(task("customer:b"))

    assert {state for state, _ in parked(world).values()} == {"fair"}
    types = [(await world.take(agent)).type for _ in range(4)]
    assert types == ["review", "code", "review", "review"]


async def send(world: World, fair_key: str | None, **fields: Any) -> str:
    if fair_key is not None:
        fields |= {"quota_keys": [fair_key], "fair_key": fair_key}
    new = NewTask("code", idempotency_key="k", on_conflict="replace_waiting", **fields)
    (submitted,) = await world.engine.submission.submit([new])
    return submitted.id


async def test_a_replacement_may_have_another_key_or_none(world: World) -> None:
    id_ = await send(world, None)
    assert parked(world) == {id_: (None, None)}

    await send(world, "customer:a", spec={"n": 1})
    assert parked(world) == {id_: ("fair", None)}

    # What was behind it isn't hidden any more once it has left its key.
    others = await world.submit(*(task("customer:a", priority=60) for _ in range(2)))
    await world.submit(task("customer:c", priority=5))
    agent = await world.agent()
    await world.take(agent)
    assert parked(world)[others[0]] == ("fair", "customer:a")
    await send(world, "customer:b", spec={"n": 2})
    assert parked(world)[others[0]] == ("fair", None)
    await send(world, None, spec={"n": 3})
    assert parked(world)[id_] == (None, None)
    assert {each.id for each in await world.claim(agent, 2)} == {id_, others[0]}


@pytest.mark.parametrize("locks", [{"lock_key": "b"}, {"lock_keys": ["a", "b"]}])
async def test_tasks_that_wait_for_a_lock_stop_no_other_of_their_key(
    world: World, locks: dict[str, Any]
) -> None:
    """The next one comes as soon as the lock is free, in its turn."""
    waiting = await world.submit(*(task("customer:a", **locks) for _ in range(60)))
    free = await world.submit(task("customer:a"))
    agent = await world.agent()

    first = await world.take(agent)
    assert first.id == waiting[0]
    assert [each.id for each in await world.claim(agent, 3)] == free
    assert await world.claim(agent) == []
    assert {state for state, _ in parked(world).values()} == {"lock"}

    await world.complete(first)
    assert (await world.take(agent)).id in waiting


async def test_readers_of_a_lock_take_turns(world: World) -> None:
    shared = [LockKey("a", shared=True)]
    await world.submit(*(task("customer:a", lock_keys=shared) for _ in range(3)))
    writer = await world.submit(task("customer:a", lock_keys=["a"]))
    b = await world.submit(*(task("customer:b", lock_keys=shared) for _ in range(2)))
    agent = await world.agent()

    claimed = await world.claim(agent, 4)

    assert {each.id for each in claimed} >= set(b)
    rest = [claimed]
    while tasks := await world.claim(agent, 4):
        rest.append(tasks)
    for each in [each for tasks in rest for each in tasks]:
        await world.complete(each)
    await world.finish_all()
    assert world.statuses(writer) == ["COMPLETED"]


async def test_an_agent_whose_accounts_are_closed_makes_no_turns(world: World) -> None:
    ids = await world.submit(task("customer:a"))
    closed = await world.agent(accounts=("team-1",))
    opened = await world.agent(accounts=("team-2",))
    world.rows(
        "INSERT INTO lineshaft.slowdown (key, until, signalled_at)"
        " VALUES ('account:team-1', %s, %s) RETURNING key",
        world.clock.now() + timedelta(hours=1),
        world.clock.now(),
    )

    claim = await world.claims(closed)
    assert (claim.tasks, claim.leaves_some) == ([], True)
    (claimed,) = await world.claim(opened)
    assert (claimed.id, claimed.account) == (ids[0], "team-2")
