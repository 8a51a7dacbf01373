"""The limit on cost velocity: how much passes before everything stops, without any duty that samples."""

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.live import velocity
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import AgentInfo, CostCorrection
from lineshaft.types.work import ClaimedTask, Failure, HeldTask, NewCheckpoint, NewStep, Presence
from tests.engine.guards.spending_helpers import AT_ONCE, key, late_heartbeat, report
from tests.races.helpers import held, passes_or_waits, waiting
from tests.world import World, cost, ref

LIMIT = Decimal(5)
#: What is spent between two looks, at most: of what is booked, and of each running attempt.
STEP = LIMIT / 1000


def bound(report_usd: str, running: int) -> Decimal:
    """docs/guard-rails.md has it."""
    return LIMIT + STEP * (1 + running) + Decimal(report_usd) * running


def total(world: World) -> Decimal:
    """Everything that was reported."""
    live = world.row("SELECT coalesce(sum(cost_usd + attempt_cost_usd), 0) AS usd FROM lineshaft.task_live")
    ended = world.row("SELECT coalesce(sum(cost_usd), 0) AS usd FROM lineshaft.task_end")
    return Decimal(live["usd"] + ended["usd"])


def samples(world: World) -> int:
    return int(world.row("SELECT count(*) AS n FROM lineshaft.spend_sample")["n"])


def stopped(world: World) -> list[str]:
    return [row["reason"] for row in world.rows("SELECT reason FROM lineshaft.pause WHERE type = '*'")]


async def working(
    world: World, n: int, *, action: str = "stop", daily: int | None = None, own: int | None = None
) -> tuple[AgentInfo, list[ClaimedTask]]:
    """Running attempts, and more tasks; `daily` with reservations of `own` for each."""
    agent = await world.agent()
    await world.engine.limits.patch(
        {
            "velocity_usd": LIMIT,
            "velocity_window_sec": 60,
            "velocity_action": action,
            "daily_budget_usd": daily,
        }
    )
    await world.submit(*(NewTask("code", max_cost_usd=own) for _ in range(2 * n)))
    tasks = await world.claim(agent, n)
    assert len(tasks) == n
    return agent, tasks


@pytest.mark.parametrize(("daily", "own"), [(None, None), (100_000, 100)], ids=["booked", "reserved"])
@pytest.mark.parametrize("action", ["stop", "pause"])
async def test_right_after_it_is_set_no_more_passes_than_the_bound(
    world: World, action: str, daily: int | None, own: int | None
) -> None:
    """Twenty attempts report half a dollar each, four times a second; what was spent before doesn't count."""
    agent = await world.agent()
    await world.one("before")
    await world.complete(await world.take(agent, types=["before"]), spent="50")
    agent, tasks = await working(world, 20, action=action, daily=daily, own=own)
    before = total(world)
    running = list(tasks)
    for number in range(1, 40):
        for task in list(running):
            if await report(world, agent, task, str(Decimal("0.5") * number)) == "velocity":
                running.remove(task)
        world.clock.advance(0.25)
        if stopped(world):
            break

    assert total(world) - before <= bound("0.5", len(tasks))
    (reason,) = stopped(world)
    assert reason.startswith("5.5 USD were spent within a minute, more than 5 USD")
    assert await world.claim(agent) == []
    answers = [await report(world, agent, task) for task in tasks]
    assert answers == ["velocity" if action == "stop" else None] * 20


async def test_the_report_that_exceeds_it_is_told(world: World) -> None:
    """By its own answer, also within a reservation; the others by their next."""
    agent, (first, second) = await working(world, 2, daily=1_000, own=100)

    assert await report(world, agent, first, "4") is None
    assert await report(world, agent, second, "1.5") == "velocity"
    assert await report(world, agent, first) == "velocity"


async def _report(world: World, agent: AgentInfo, task: ClaimedTask) -> None:
    await report(world, agent, task, "6")


async def _complete(world: World, _: AgentInfo, task: ClaimedTask) -> None:
    await world.complete(task, spent="6")


async def _complete_several(world: World, agent: AgentInfo, task: ClaimedTask) -> None:
    (other,) = await world.claim(agent)
    items = [world.completion(task, spent="3"), world.completion(other, spent="3")]
    await world.engine.work.complete(items)


async def _complete_and_claim(world: World, _: AgentInfo, task: ClaimedTask) -> None:
    await world.engine.work.complete_and_claim(world.completion(task, spent="6"))


async def _fail(world: World, _: AgentInfo, task: ClaimedTask) -> None:
    await world.engine.work.fail([Failure(ref(task), "it broke", spent=cost("6"))])


async def _step(world: World, _: AgentInfo, task: ClaimedTask) -> None:
    await world.engine.work.record_steps([NewStep(ref(task), "one", b"1", spent=cost("6"))])


async def _checkpoint(world: World, _: AgentInfo, task: ClaimedTask) -> None:
    await world.engine.work.save_checkpoints([NewCheckpoint(ref(task), b"1", spent=cost("6"))])


async def _late(world: World, agent: AgentInfo, task: ClaimedTask) -> None:
    await world.release(task)
    await late_heartbeat(world, agent, task, cost("6"))


Way = Callable[[World, AgentInfo, ClaimedTask], Awaitable[None]]


@pytest.mark.parametrize(
    "way", [_report, _complete, _complete_several, _complete_and_claim, _fail, _step, _checkpoint, _late]
)
@pytest.mark.parametrize("own", [None, 6])
async def test_whoever_books_it_looks(world: World, way: Way, own: int | None) -> None:
    """One call of any kind; an hour after the limit was set, and nobody sampled since."""
    agent, (task,) = await working(world, 1, daily=1_000 if own else None, own=own)
    world.clock.advance(10)

    await way(world, agent, task)

    assert len(stopped(world)) == 1
    assert await world.claim(agent) == []


async def test_an_idle_hour_doesnt_hide_what_comes_then(world: World) -> None:
    agent, (task,) = await working(world, 1)
    world.age(hours=1)
    await world.heartbeat(agent.id, agent.incarnation, [ref(task)])

    assert await report(world, agent, task, "6") == "velocity"


async def test_after_a_resume_it_begins_anew(world: World) -> None:
    """With an exact figure: what was reported until then doesn't count, what comes then does."""
    agent, (first, second) = await working(world, 2, daily=1_000, own=100)
    assert await report(world, agent, first, "7") == "velocity"
    await world.engine.pauses.resume()
    assert await report(world, agent, first) is None

    assert await report(world, agent, second, "5") is None
    assert await report(world, agent, first, "7.01") == "velocity"


async def test_in_no_window_more_passes(world: World) -> None:
    """Also in one that begins between two samples."""
    agent, (task,) = await working(world, 1)
    watch = world.engine.budgets.watch
    world.clock.advance(58)
    assert await report(world, agent, task, "4") is None
    world.clock.advance(4)
    await watch()
    world.clock.advance(40)
    await watch()

    assert await report(world, agent, task, "8") == "velocity"


async def test_small_reports_within_a_reservation_write_nothing_more(world: World) -> None:
    """Neither do small bookings, until they add up."""
    agent, (task,) = await working(world, 1, daily=1_000, own=100)
    world.clock.advance(1)
    await report(world, agent, task, "1")
    before = samples(world)
    for amount in ("1.001", "1.002", "1.003", "1.004"):
        world.clock.advance(1)
        await report(world, agent, task, amount)
    assert samples(world) == before
    world.clock.advance(1)
    await report(world, agent, task, "1.005")
    assert samples(world) == before + 1

    for _ in range(4):
        world.clock.advance(1)
        await world.one("free")
        await world.complete(await world.take(agent, types=["free"]), spent="0.002")
    assert samples(world) == before + 2, "the third made 0.006"


async def test_without_the_limit_nothing_is_sampled(world: World) -> None:
    """Set again, it begins anew."""
    agent, (first, second) = await working(world, 2)
    await world.engine.limits.patch({"velocity_usd": None})

    assert await report(world, agent, first, "9") is None
    assert (samples(world), stopped(world)) == (0, [])
    await world.engine.limits.patch({"velocity_usd": LIMIT})
    assert await report(world, agent, second, "5") is None
    assert await report(world, agent, second, "5.01") == "velocity"


async def test_where_a_person_paused_claims_running_attempts_stop_too(world: World) -> None:
    agent, (task,) = await working(world, 1)
    await world.engine.pauses.pause(reason="a look around")

    assert await report(world, agent, task, "6") == "velocity"

    (reason,) = stopped(world)
    assert reason.endswith("until it is resumed; paused before: a look around")
    alerts = world.rows("SELECT data FROM lineshaft.events WHERE kind = 'alert'")
    assert [alert["data"]["key"] for alert in alerts] == ["cost_velocity"]


@pytest.mark.parametrize("action", ["stop", "pause"])
async def test_two_servers_and_many_reports_at_once(
    world: World, dsn: str, connection: psycopg.Connection, clock: MovableClock, action: str
) -> None:
    """Each running attempt sends one report at a time, and stops when it is told."""
    agent, tasks = await working(world, 12, action=action)
    async with Engine(dsn, clock=clock) as second:
        worlds = [world, World(second, connection, clock)]

        async def spend(number: int, task: ClaimedTask) -> None:
            presence = Presence(agent.id, agent.incarnation)
            for reported in range(1, 11):
                held = HeldTask(*key(task), presence, None, cost(str(Decimal("0.4") * reported)))
                answers = await worlds[number % 2].engine.work.heartbeat([presence], [held])
                if answers.over or stopped(world):
                    return

        await asyncio.gather(*(spend(number, task) for number, task in enumerate(tasks)))

    assert total(world) <= bound("0.4", len(tasks))
    assert len(stopped(world)) == 1
    alerts = world.rows("SELECT data FROM lineshaft.events WHERE kind = 'alert'")
    assert len(alerts) == 1


async def test_a_correction_hides_nothing_of_what_is_spent_then(world: World) -> None:
    """It takes money off the day, but not off the window."""
    _, (first, second) = await working(world, 2)
    world.clock.advance(1)
    await world.complete(first, spent="4")
    await world.engine.corrections.correct(first.id, CostCorrection(cost_usd=0, reason="the bill says so"))
    world.clock.advance(1)

    await world.complete(second, spent="1.5")

    assert len(stopped(world)) == 1


async def test_short_tasks_that_report_at_their_end(world: World) -> None:
    """None of them is above a threshold by itself."""
    agent, _ = await working(world, 1)
    await world.submit(*(NewTask("short", retry=AT_ONCE) for _ in range(100)))
    done = 0
    while tasks := await world.claim(agent, types=["short"]):
        await world.complete(tasks[0], spent="0.1")
        world.clock.advance(0.1)
        done += 1

    assert Decimal(done) / 10 <= LIMIT + STEP + Decimal("0.1")


async def test_no_task_follows_a_completion_that_stops_everything(world: World) -> None:
    """The next one is claimed in the completion's own transaction, before anybody looks at the velocity."""
    _, (task,) = await working(world, 1)

    moved, claim = await world.engine.work.complete_and_claim(world.completion(task, spent="6"))

    assert moved.status is Status.COMPLETED
    assert claim.tasks == []
    assert world.rows("SELECT id FROM lineshaft.tasks WHERE status IN ('CLAIMED', 'RUNNING')") == []
    _, repeated = await world.engine.work.complete_and_claim(world.completion(task, spent="6"))
    assert repeated.tasks == []


async def test_who_looks_while_another_process_stops_everything_is_told(
    world: World, dsn: str, clock: MovableClock
) -> None:
    """That process has seen all that was spent, so there is nothing new to see; but nothing is paused yet."""
    _, (task,) = await working(world, 1)
    await world.complete(task, spent="0.001")
    world.connection.execute("UPDATE lineshaft.spend SET spent_usd = 6")

    async def look(engine: Engine) -> bool:
        return await engine.database.run_alone(
            lambda connection: velocity.look_if_due(connection, engine.database.now)
        )

    async with Engine(dsn, clock=clock) as another:
        with held(dsn, "LOCK TABLE lineshaft.pause IN SHARE MODE"):
            stops = asyncio.create_task(look(another))
            await waiting(world.connection, 1)
            looks = asyncio.create_task(look(world.engine))
            await passes_or_waits(world.connection, looks, 2)
        assert all(await asyncio.gather(stops, looks))


async def test_agents_that_complete_and_claim_at_once(world: World, dsn: str, clock: MovableClock) -> None:
    """After the limit is passed, no slot reports more than the attempt that it has then."""
    _, tasks = await working(world, 12)
    await world.submit(*(NewTask("code") for _ in range(100)))
    async with Engine(dsn, clock=clock) as second:
        engines = [world.engine, second]

        async def work(number: int, task: ClaimedTask) -> None:
            following = [task]
            while following:
                completion = world.completion(following[0], spent="0.2")
                _, claim = await engines[number % 2].work.complete_and_claim(completion)
                following = claim.tasks

        await asyncio.gather(*(work(number, task) for number, task in enumerate(tasks)))

    assert LIMIT < total(world) <= bound("0.2", len(tasks))
