"""Accounts: which one a claim chooses, what closes one, and who hears of it."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest

from lineshaft.duties.promoter import Promoter
from lineshaft.errors import InvalidInputError, NotClaimableError
from lineshaft.model.breaker import BreakerConfig, BreakerPolicy
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import AgentInfo
from lineshaft.types.work import ClaimedTask, Completion, Failure, Presence
from tests.world import World, ref

TWO = ("team-1", "team-2")
WINDOW = timedelta(hours=5)


async def coder(world: World, agent_id: str = "ann", **fields: Any) -> AgentInfo:
    return await world.agent(agent_id, **{"accounts": TWO, **fields})


async def close(world: World, task: ClaimedTask, wait: timedelta = WINDOW, **details: Any) -> datetime:
    """Its provider says that the window of its account is used up."""
    until = world.clock.now() + wait
    assert await world.fail(
        task, "usage limit reached", category="rate_limit", retry_at=until, **details
    ) in {
        Status.RETRYING,
        Status.DEAD_LETTERED,
    }
    await world.engine.slowdowns.report_outages()
    return until


def slowed(world: World) -> dict[str, datetime]:
    rows = world.rows("SELECT key, until FROM lineshaft.slowdown WHERE until > %s", world.clock.now())
    return {row["key"]: row["until"] for row in rows}


def alerts(world: World) -> list[tuple[str, Mapping[str, Any]]]:
    rows = world.rows(
        "SELECT kinds, data FROM lineshaft.event WHERE kinds[1] LIKE 'accounts.%%' ORDER BY seq"
    )
    assert all(row["kinds"][1] == "alert" for row in rows)
    return [(row["kinds"][0], row["data"]) for row in rows]


# Which account.


async def test_without_accounts_there_is_none(world: World) -> None:
    await world.one()

    assert (await world.take()).account is None


async def test_the_account_that_is_idle_longest_is_chosen(world: World) -> None:
    agent = await coder(world)
    chosen = []
    for _ in range(3):
        await world.one()
        task = await world.take(agent)
        chosen.append(task.account)
        await world.complete(task)
        world.age(seconds=1)
    assert chosen == ["team-1", "team-2", "team-1"]

    await world.submit(*[NewTask("code") for _ in range(3)])
    busy = await world.take(agent)
    world.age(seconds=1)
    assert (busy.account, (await world.take(agent)).account) == ("team-2", "team-1")


async def test_an_account_with_running_tasks_is_not_idle(world: World) -> None:
    agent = await coder(world)
    await world.submit(*[NewTask("code") for _ in range(3)])
    first = await world.claim(agent)
    world.age(seconds=1)
    (second,) = await world.claim(agent)
    await world.complete(second)

    (third,) = await world.claim(agent)

    assert [first[0].account, second.account, third.account] == ["team-1", "team-2", "team-2"]


async def test_one_claim_of_many_takes_accounts_in_turn(world: World) -> None:
    agent = await coder(world)
    await world.submit(*[NewTask("code") for _ in range(4)])
    await world.dag(*[NewTask("code", key=f"t{n}") for n in range(3)])

    tasks = await world.claim(agent, 9)

    singles = [task.account for task in tasks if task.live_dag_id is None]
    assert sorted(filter(None, singles)) == ["team-1", "team-1", "team-2", "team-2"]
    assert len({task.account for task in tasks if task.live_dag_id is not None}) == 1


async def test_tasks_of_a_dag_stay_with_its_account(world: World) -> None:
    """For prompt caches; by turns they would change."""
    agent = await coder(world)
    await world.dag(*[NewTask("code", key=f"t{n}", depends_on=[f"t{n - 1}"] if n else []) for n in range(4)])
    accounts = []
    for _ in range(4):
        task = await world.take(agent)
        accounts.append(task.account)
        await world.complete(task)
        world.age(seconds=1)

    assert accounts == ["team-1"] * 4
    assert [row["account"] for row in world.rows("SELECT account FROM lineshaft.dag")] == ["team-1"]


async def test_children_stay_with_the_account_of_their_parent(world: World) -> None:
    from tests.world import spawn_children  # noqa: PLC0415

    agent = await coder(world)
    await world.one()
    await world.complete(await world.take(agent))
    await world.one()
    parent = await world.take(agent)
    await spawn_children(world.engine, ref(parent), [NewTask("code"), NewTask("code")], wait=True)

    children = [task.account for task in await world.claim(agent, 5)]

    assert (parent.account, children) == ("team-2", ["team-2"] * 2)


async def test_a_task_returns_to_the_account_of_its_last_attempt(world: World) -> None:
    agent = await coder(world)
    await world.one()
    task = await world.take(agent)
    other = await world.one()
    await world.take(agent)
    for _ in range(2):
        await world.release(task)
        task = await world.take(agent)
        assert task.account == "team-1"
    await world.fail(task, category="timeout")
    world.age(hours=1)
    await Promoter(world.engine.maintenance).run_once()
    tasks = {task.id: task for task in await world.claim(agent, 2)}
    assert tasks[task.id].account == "team-1"
    assert other in tasks or world.live(other)["account"] == "team-2"


async def test_it_is_recorded_with_every_attempt(world: World) -> None:
    """How it ended makes no difference, nor which statement completed it."""
    agent = await coder(world, accounts=("team-1",))
    plain = await world.agent("plain")
    task_id = await world.one()
    await world.release(await world.take(agent))
    assert (world.live(task_id)["account"], world.live(task_id)["last_account"]) == (None, "team-1")
    await world.release(await world.take(plain))
    await world.fail(await world.take(agent), category="timeout", account="team-9")
    await world.engine.revive.retry(task_id)
    task = await world.take(agent)
    (moved, _) = await world.engine.work.complete_and_claim(Completion(ref(task), output=b"1"))
    assert moved.status is Status.COMPLETED

    past = await world.engine.read.attempts(task_id)

    assert [(each.outcome, each.account) for each in past] == [
        ("released", "team-1"),
        ("released", None),
        ("failed", "team-9"),
        ("completed", "team-1"),
    ]
    await world.engine.rerun.rerun(task_id)
    assert (await world.engine.read.attempts(task_id))[-1].account == "team-1"
    assert world.live(task_id)["last_account"] == "team-1"


# Windows.


async def test_a_window_parks_the_task_and_closes_its_account(world: World) -> None:
    """No attempt, and no rate limit counted."""
    agent = await coder(world, accounts=("team-1",), models_available=("opus",))
    task_id = await world.one()
    until = await close(world, await world.take(agent))

    live = world.live(task_id)
    assert (live["attempts"], live["rate_limits"], live["long_waits"], live["due_at"]) == (0, 0, 1, until)
    assert slowed(world) == {"account:team-1": until}


async def test_a_task_goes_on_with_another_account_at_once(world: World) -> None:
    """As all others do; once that is closed too, it waits until the first opens."""
    agent = await coder(world, models_available=("opus",))
    task_id = await world.one()
    until = await close(world, await world.take(agent))
    assert slowed(world) == {"account:team-1": until}
    task = await world.take(agent)
    assert (task.id, task.account) == (task_id, "team-2")
    await close(world, task, timedelta(days=2))
    live = world.live(task_id)
    assert (live["attempts"], live["rate_limits"], live["long_waits"], live["due_at"]) == (0, 0, 2, until)

    await world.engine.slowdowns.end("account:team-2")
    await world.submit(*[NewTask("code") for _ in range(3)])
    tasks = await world.claim(agent, 3)
    assert [task.account for task in tasks] == ["team-2"] * 3
    claim = await world.claims(agent)
    assert claim.slowdown_until is None


async def test_without_an_open_account_nothing_is_claimed_until_one_opens(world: World) -> None:
    agent = await coder(world)
    other = await world.agent("other")
    first, second = await world.one(), await world.one()
    tasks = await world.claim(agent, 2)
    earlier = await close(world, tasks[0], timedelta(hours=2))
    await close(world, tasks[1])
    waiting = await world.one()

    claim = await world.claims(agent, 3)
    assert (claim.tasks, claim.slowdown_until, claim.leaves_some) == ([], earlier, True)
    with pytest.raises(NotClaimableError, match="All accounts are closed of ann"):
        await world.engine.claims.claim_task(agent.id, agent.incarnation, waiting)
    heartbeat = await world.engine.work.heartbeat([Presence(agent.id, agent.incarnation)], [])
    assert list(heartbeat.slowdowns.values()) == [earlier]

    # It isn't why others don't claim.
    assert (await world.engine.read.why(waiting)).runnable
    await world.engine.fleet.patch(other.id, status="offline")
    why = await world.engine.read.why(waiting)
    (reason,) = why.reasons
    assert (reason.code, reason.until) == ("account_closed", earlier)
    assert "ann (team-1, team-2). The first opens at 2026-02-08T11:00:00Z." in reason.detail

    world.age(hours=2)
    await Promoter(world.engine.maintenance).run_once()
    tasks = await world.claim(agent, 9)
    assert {task.id: task.account for task in tasks} == dict.fromkeys((first, second, waiting), "team-1")
    assert {world.live(name)["attempts"] for name in (first, second, waiting)} == {0}


async def test_tasks_that_run_on_an_account_that_closes_go_on(world: World) -> None:
    agent = await coder(world)
    await world.submit(*[NewTask("code") for _ in range(3)])
    goes_on, closes = (await world.claim(agent, 3))[::2]
    assert (goes_on.account, closes.account) == ("team-1", "team-1")
    await close(world, closes)

    await world.heartbeat(agent.id, agent.incarnation, [ref(goes_on)])
    assert await world.complete(goes_on) is Status.COMPLETED


async def test_an_account_that_the_agent_does_not_offer_is_no_reason_to_hurry(world: World) -> None:
    """It would meet the same limit again, as fast as it can."""
    agent = await coder(world)
    task_id = await world.one()
    until = await close(world, await world.take(agent), account="team-9")

    assert world.live(task_id)["due_at"] == until


@pytest.mark.parametrize(
    ("models", "account", "key"),
    [
        (("opus",), "team-1", "account:team-1"),
        ((), "team-7", "account:team-7"),
        (("opus", "haiku"), None, "model:opus"),
        ((), None, "agent:ann"),
    ],
)
async def test_whom_a_window_slows(
    world: World, models: tuple[str, ...], account: str | None, key: str
) -> None:
    """The account, else the model, else only the agent: never everyone."""
    agent = await world.agent("ann", models_available=models)
    await world.one()
    task = await world.take(agent)

    until = await close(world, task, account=account)

    assert slowed(world) == {key: until}
    await world.one()
    assert bool(await world.claim(agent)) is key.startswith("account:")
    other = await world.agent("other", models_available=("opus",))
    await world.one()
    assert bool(await world.claim(other)) is (key != "model:opus")


async def test_only_the_agent_waits(world: World) -> None:
    """On every way of claiming; `why` says so."""
    agent = await world.agent("ann")
    await world.one()
    until = await close(world, await world.take(agent))
    task_id = await world.one()

    claim = await world.claims(agent)
    assert (claim.tasks, claim.slowdown_until) == ([], until)
    assert await world.claim(agent, 3) == []
    (reason,) = (await world.engine.read.why(task_id)).reasons
    assert (reason.code, reason.until) == ("slowdown", None)
    assert "ann until 2026-02-08T14:00:00Z" in reason.detail
    assert (await world.take(await world.agent("bob"))).id == task_id


async def test_all_processes_of_the_agent_wait(world: World) -> None:
    """Also one with models, which nobody has slowed down."""
    agent = await world.agent("ann", instance="one")
    other = await world.agent("ann", instance="two", models_available=("opus",))
    await world.submit(NewTask("code"), NewTask("code"))
    await close(world, (await world.claim(agent))[0])

    assert await world.claim(other) == []
    assert await world.claim(other, 2) == []


@pytest.mark.parametrize("wait_sec", [30, 3_600])
async def test_up_to_an_hour_for_half_the_time(world: World, wait_sec: int) -> None:
    """An account in place of the model; and everyone, where nothing is known."""
    agent, plain = await coder(world), await world.agent("plain")
    half = world.clock.now() + timedelta(seconds=wait_sec / 2)
    await world.one()
    await close(world, await world.take(agent), timedelta(seconds=wait_sec))
    await world.one()
    await close(world, await world.take(plain), timedelta(seconds=wait_sec))

    assert slowed(world) == {"account:team-1": half, "*": half}


async def test_a_window_is_not_shortened_by_a_rate_limit_of_seconds(world: World) -> None:
    """Of a task that still runs on it; people end it."""
    agent = await coder(world, accounts=("team-1",))
    await world.submit(NewTask("code"), NewTask("code"))
    first, second = await world.claim(agent, 2)
    until = await close(world, first)
    world.age(seconds=5)
    await world.fail(second, "429", retry_after_sec=20)

    assert slowed(world) == {"account:team-1": until}
    await world.engine.slowdowns.end("account:team-1")
    assert slowed(world) == {}


async def test_the_longest_wait_is_a_setting_of_eight_days(world: World) -> None:
    agent = await coder(world)
    await world.one()
    await close(world, await world.take(agent), timedelta(days=30))

    assert slowed(world) == {"account:team-1": world.clock.now() + timedelta(days=8)}


async def test_an_instant_that_has_passed_is_no_wait(world: World) -> None:
    agent = await coder(world, accounts=("team-1",))
    task_id = await world.one()
    await close(world, await world.take(agent), timedelta(hours=-1))

    assert (world.waits(task_id), slowed(world)) == (0, {})
    assert world.live(task_id)["rate_limits"] == 1


@pytest.mark.parametrize(
    "fields",
    [{"retry_at": datetime(2030, 1, 1)}, {"account": ""}, {"account": "a\nb"}],  # noqa: DTZ001
)
async def test_failures_that_make_no_sense(world: World, fields: dict[str, Any]) -> None:
    await world.one()
    task = await world.take()

    with pytest.raises(InvalidInputError, match="must be"):
        Failure(ref(task), "429", **fields)


async def test_accounts_that_make_no_sense(world: World) -> None:
    with pytest.raises(InvalidInputError, match="printable"):
        await world.agent("ann", accounts=("team\x07",))


# Breakers.


async def test_a_breaker_of_an_account(world: World) -> None:
    """It closes the account; its probe is a task with that account, and decides."""
    overrides = {"account:team-1": BreakerConfig(failure_threshold=2, half_open_after_sec=60)}
    await world.engine.limits.apply(
        {"breakers": _document(BreakerPolicy(BreakerConfig(failure_threshold=99), overrides))}, server=None
    )
    agent = await coder(world)
    await world.submit(*[NewTask("code", max_attempts=9) for _ in range(2)])
    for task in await world.claim(agent, 9):
        await world.fail(task, "no such login", category="timeout", account="team-1")
    assert [item.key for item in (await world.engine.read.breakers()).items if item.state != "closed"] == [
        "account:team-1"
    ]
    await world.submit(*[NewTask("code") for _ in range(2)])
    assert {task.account for task in await world.claim(agent, 9)} == {"team-2"}

    world.age(seconds=61)
    await Promoter(world.engine.maintenance).run_once()
    await world.submit(*[NewTask("code") for _ in range(3)])
    # The first claim notices that there may be a probe.
    claimed = [task for _ in range(2) for task in await world.claim(agent)]
    (probe,) = [task for task in claimed if task.account == "team-1"]
    assert world.row("SELECT probe_task_id AS id FROM lineshaft.breaker WHERE key LIKE 'account:%%'") == {
        "id": probe.id
    }
    await world.complete(probe)
    assert world.row("SELECT state::text AS state FROM lineshaft.breaker WHERE key LIKE 'account:%%'") == {
        "state": "closed"
    }


def _document(policy: BreakerPolicy) -> bytes:
    import msgspec  # noqa: PLC0415

    from lineshaft.model.breaker import document_of  # noqa: PLC0415

    return msgspec.json.encode(document_of(policy))


# Who hears of it.


async def test_people_hear_once_that_all_are_closed_and_once_that_work_goes_on(world: World) -> None:
    agent = await coder(world)
    await world.submit(*[NewTask("code") for _ in range(4)])
    tasks = await world.claim(agent, 4)
    await close(world, tasks[0])
    assert alerts(world) == []
    until = await close(world, tasks[1], timedelta(hours=3))
    for task in tasks[2:]:
        await close(world, task)
    await Promoter(world.engine.maintenance).run_once()

    (closed,) = alerts(world)
    assert closed[0] == "accounts.closed"
    assert closed[1]["accounts"] == ["team-1", "team-2"]
    assert (
        "All accounts of agent ann are closed (team-1, team-2). The first opens at 2026"
        in closed[1]["message"]
    )
    assert datetime.fromisoformat(closed[1]["until"]) == until

    # Tasks that ran on the accounts said later that it takes longer.
    world.age(hours=4)
    await world.heartbeat(agent.id, agent.incarnation)
    await Promoter(world.engine.maintenance).run_once()
    assert len(alerts(world)) == 1
    world.age(hours=1)
    await world.heartbeat(agent.id, agent.incarnation)
    for _ in range(2):
        await Promoter(world.engine.maintenance).run_once()

    _, opened = alerts(world)
    assert opened[0] == "accounts.opened"
    assert opened[1]["message"] == (
        "Agent ann goes on with team-1, team-2: not all accounts are closed any more."
    )


async def test_an_account_that_a_person_opens_is_reported_too(world: World) -> None:
    agent = await coder(world, accounts=("team-1",))
    await world.one()
    await close(world, await world.take(agent))
    await world.engine.slowdowns.end("account:team-1", reason="a bigger plan")
    await Promoter(world.engine.maintenance).run_once()

    assert [kind for kind, _ in alerts(world)] == ["accounts.closed", "accounts.opened"]


async def test_agents_show_their_accounts(world: World) -> None:
    agent = await coder(world)
    await world.one()
    until = await close(world, await world.take(agent))

    found = await world.engine.fleet.read(agent.id)

    assert [(each.name, each.open, each.until) for each in found.accounts] == [
        ("team-1", False, until),
        ("team-2", True, None),
    ]
