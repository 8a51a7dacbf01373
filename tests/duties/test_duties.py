"""The background duties: safe on many nodes at the same time, and by the database's clock."""

import asyncio
import logging
import re
from collections.abc import Mapping
from datetime import timedelta

import psycopg
import pytest
from msgspec.structs import replace
from psycopg.conninfo import make_conninfo

from lineshaft.clock import MovableClock
from lineshaft.duties import loop
from lineshaft.duties.janitor import Janitor
from lineshaft.duties.offline_detector import OfflineDetector
from lineshaft.duties.promoter import Promoter
from lineshaft.duties.reaper import Reaper
from lineshaft.duties.scheduler import Scheduler
from lineshaft.duties.supervisor import all_duties, supervise
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed import partitions as partitions_module
from lineshaft.engine.feed.partitions import Partitions
from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.tally import Tally
from lineshaft.errors import UnavailableError
from lineshaft.model.tasks import NewTask, OutputContract
from lineshaft.settings import Settings
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimedTask, Completion, Failure
from tests.world import World, ref, without_gates


async def claimed(
    engine: Engine, *tasks: NewTask, start: bool = True, agent: str = "a1"
) -> list[ClaimedTask]:
    """Submit tasks and let an agent claim them all."""
    await engine.submission.submit(tasks)
    known = {view.id: view for view in await engine.fleet.read_all()}
    view = known.get(agent) or await engine.fleet.register(NewAgent(id=agent, max_concurrent_tasks=100))
    return (await engine.claims.claim(agent, view.incarnation, limit=100, start=start)).tasks


def statuses(connection: psycopg.Connection) -> dict[str, str]:
    return dict(connection.execute("SELECT type, status::text FROM lineshaft.tasks").fetchall())


def kinds(connection: psycopg.Connection) -> list[str]:
    return [
        row[0] for row in connection.execute("SELECT kind FROM lineshaft.events ORDER BY seq, n").fetchall()
    ]


def janitor(engine: Engine, *, keep_tasks: timedelta | None = None) -> Janitor:
    partitions, tally = Partitions(engine.database), Tally(engine.database)
    return Janitor(
        engine.maintenance,
        engine.fleet,
        partitions,
        tally,
        engine.sources,
        engine.sessions,
        keep_tasks=keep_tasks,
    )


async def closed(engine: Engine) -> None:
    """Wait until only the current generation is open. Writers of other databases count, too."""
    while await engine.maintenance.close_generations(100):
        pass


@pytest.mark.parametrize(
    ("start", "seconds", "reason"), [(False, 61, "claim_expired"), (True, 91, "heartbeat_timeout")]
)
async def test_the_reaper_takes_back_lost_tasks(
    engine: Engine,
    connection: psycopg.Connection,
    clock: MovableClock,
    *,
    start: bool,
    seconds: float,
    reason: str,
) -> None:
    """R-062, R-072, F-18, F-25, F-10: a claim never started, a heartbeat missed; both use an attempt."""
    (task,) = await claimed(engine, NewTask("code"), start=start)
    clock.advance(seconds - 2)
    assert await Reaper(engine.maintenance).run_once() == {}
    clock.advance(2)

    assert await Reaper(engine.maintenance).run_once() == {reason: 1}

    assert statuses(connection) == {"code": "RETRYING"}
    row = connection.execute("SELECT agent_id, outcome, category, error FROM lineshaft.attempt").fetchone()
    assert row == ("a1", "failed", "crash", reason)
    assert connection.execute(
        "SELECT held, reserved_usd FROM lineshaft.instance JOIN lineshaft.agent ON id = agent_id"
    ).fetchone() == (0, 0)
    # The agent that wakes up later gets an error.
    (late,) = await engine.work.complete([Completion(ref(task), b"1")])
    assert late.error is not None
    assert late.error.code == "stale_claim"
    assert "task.late_result" in kinds(connection)


async def test_a_lost_lease_is_one_line(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    """With the task, its agent, the process, and how long that has been silent."""
    agent = await world.agent("a1", instance="pod-1")
    await world.one()
    task = await world.take(agent)
    clock.advance(30)
    await world.heartbeat("a1", 1, [ref(task)])
    clock.advance(92)

    assert await Reaper(world.engine.maintenance).run_once() == {"heartbeat_timeout": 1}

    (line,) = (record for record in caplog.records if task.id in record.getMessage())
    assert line.levelname == "WARNING"
    assert line.getMessage() == (
        f"Took task {task.id} back from agent a1, instance 'pod-1': heartbeat_timeout; "
        "last heartbeat or start 92.0 s ago"
    )
    fields = {name: getattr(line, name) for name in ("task_id", "agent_id", "instance", "silent_sec")}
    assert fields == {"task_id": task.id, "agent_id": "a1", "instance": "pod-1", "silent_sec": 92.0}


class _Switched:
    """The scheduler of one database, and after some runs that of another."""

    name, interval_sec = "scheduler", 0.001

    def __init__(self, first: Engine, then: Engine, runs: int) -> None:
        self._schedulers = [Scheduler(first.schedules)] * runs + [Scheduler(then.schedules)]
        self.ended = asyncio.Event()

    async def run_once(self) -> Mapping[str, int]:
        if len(self._schedulers) > 1:
            return await self._schedulers.pop(0).run_once()
        try:
            return await self._schedulers[0].run_once()
        finally:
            self.ended.set()


async def test_a_duty_on_a_read_only_database_says_so_once(
    engine: Engine, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And when it works again, however often it has tried."""
    stop = asyncio.Event()
    read_only = make_conninfo(dsn, options="-c default_transaction_read_only=on")
    with caplog.at_level(logging.INFO, "lineshaft.duties"):
        async with Engine(read_only, max_connections=2) as standby:
            duty = _Switched(standby, engine, runs=5)
            running = asyncio.create_task(loop.run(duty, stop))
            await duty.ended.wait()
            stop.set()
            await running

    first, last = (message for message in caplog.messages if message.startswith("scheduler"))
    assert first.startswith("scheduler can't work: ")
    assert "read-only" in first
    assert re.fullmatch(r"scheduler works again, after \d+ s", last)


def test_a_duty_that_goes_on_failing_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    trouble = loop.Trouble("promoter", clock=lambda: now)
    with caplog.at_level(logging.INFO, "lineshaft.duties"):
        for _ in range(125):
            trouble.failed(UnavailableError("away"))
            now += 1
        trouble.over()
        trouble.over()
        trouble.failed(ValueError("a defect"))

    assert caplog.messages == [
        "promoter can't work: away",
        "promoter can't work (61 times in 60 s): away",
        "promoter can't work (121 times in 120 s): away",
        "promoter works again, after 125 s",
        "promoter failed; it tries again",
    ]
    assert caplog.records[-1].exc_info is not None


async def test_the_time_limit_applies_despite_heartbeats(
    world: World, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-074, F-46."""
    (task,) = await claimed(world.engine, NewTask("code", max_duration_sec=100))
    for _ in range(4):
        clock.advance(24)
        answer = await world.heartbeat("a1", 1, [ref(task)])
        assert answer == {task.id: "continue"}
    clock.advance(5)

    assert await Reaper(world.engine.maintenance).run_once() == {"execution_limit": 1}

    found = connection.execute("SELECT category, error FROM lineshaft.attempt").fetchone()
    assert found == ("timeout", "Timed out after 100 s (max_duration_sec)")


async def test_a_task_in_validation_by_its_agent_is_reaped(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-072, F-19: its agent is lost."""
    gate = OutputContract(validation="regex", validation_schema="x")
    (task,) = await claimed(engine, NewTask("code", output=gate))
    (moved,) = await without_gates(engine).complete([Completion(ref(task), b'"x"')])
    assert moved.status == "VALIDATING"
    clock.advance(91)

    assert await Reaper(engine.maintenance).run_once() == {"heartbeat_timeout": 1}
    assert statuses(connection) == {"code": "RETRYING"}


async def test_many_reapers_at_once_reap_each_task_once(
    engine: Engine, dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    await claimed(engine, *(NewTask("code") for _ in range(60)))
    clock.advance(91)
    async with Engine(dsn, clock=clock) as other:
        results = await asyncio.gather(
            *(Reaper(e.maintenance, batch=7).run_once() for e in (engine, other, engine, other))
        )

    assert sum(counts.get("heartbeat_timeout", 0) for counts in results) == 60
    assert connection.execute("SELECT count(*), max(attempts) FROM lineshaft.task_live").fetchone() == (60, 1)
    assert connection.execute("SELECT held FROM lineshaft.instance").fetchone() == (0,)


async def test_the_promoter_promotes_due_retries_and_scheduled_tasks(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-116, R-056."""
    (task,) = await claimed(engine, NewTask("failing", max_attempts=2))
    await engine.work.fail([Failure(ref(task), "boom")])
    await engine.submission.submit([NewTask("later", run_at=clock.now() + timedelta(seconds=400))])
    assert await Promoter(engine.maintenance).run_once() == {
        "promoted": 0,
        "rekeyed": 0,
        "deadlines missed": 0,
        "locks expired": 0,
        "probes freed": 0,
        "unaffordable tasks": 0,
        "money alerts": 0,
    }
    assert statuses(connection) == {"failing": "RETRYING", "later": "PENDING"}

    clock.advance(30)
    await Promoter(engine.maintenance).run_once()
    assert statuses(connection) == {"failing": "READY", "later": "PENDING"}
    clock.advance(380)
    counts = await Promoter(engine.maintenance).run_once()

    assert counts["promoted"] == 1
    assert statuses(connection) == {"failing": "READY", "later": "READY"}


async def test_run_at_does_not_override_dependencies(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """F-21: a task that waits for another never becomes READY by time alone."""
    dag = await engine.submission.submit_dag(
        "d",
        [
            NewTask("up", key="up"),
            NewTask("down", depends_on=["up"], run_at=clock.now() + timedelta(seconds=60)),
        ],
    )
    clock.advance(61)
    await Promoter(engine.maintenance).run_once()
    assert statuses(connection) == {"up": "READY", "down": "PENDING"}

    (task,) = await claimed(engine)
    assert task.id == dag.tasks["up"].id
    await engine.work.complete([Completion(ref(task))])
    assert statuses(connection) == {"up": "COMPLETED", "down": "READY"}


async def test_a_deadline_raises_the_rank_and_is_reported_when_missed(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-162, F-34."""
    await engine.submission.submit(
        [
            NewTask("plain", priority=40, priority_boost_per_minute=0.0),
            NewTask(
                "due", priority=60, priority_boost_per_minute=0.0, deadline=clock.now() + timedelta(hours=3)
            ),
        ]
    )
    view = await engine.fleet.register(NewAgent(id="a1", max_concurrent_tasks=9))
    clock.advance(2 * 3600 + 60)  # an hour before: 60 − 20 = 40 and a little less
    assert (await Promoter(engine.maintenance).run_once())["rekeyed"] == 1
    (first,) = (await engine.claims.claim("a1", view.incarnation)).tasks
    assert first.type == "due"
    assert "task.deadline_missed" not in kinds(connection)

    clock.advance(3600)
    counts = await Promoter(engine.maintenance).run_once()

    assert counts["deadlines missed"] == 1
    assert kinds(connection).count("task.deadline_missed") == 1
    clock.advance(3600)
    assert (await Promoter(engine.maintenance).run_once())["deadlines missed"] == 0


async def test_an_expired_lock_is_reported_and_its_waiters_return(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-202, F-43: the test makes the holder's row look expired."""
    await claimed(engine, NewTask("holder", lock_key="doc:1", max_duration_sec=10_000))
    await engine.submission.submit([NewTask("waiter", lock_key="doc:1")])
    assert (await engine.claims.claim("a1", 1)).tasks == []
    assert connection.execute("SELECT parked FROM lineshaft.task_live WHERE parked = 'lock'").fetchall() == [
        ("lock",)
    ]
    connection.execute(
        "UPDATE lineshaft.task_live SET lease_until = %s WHERE agent_id IS NOT NULL",
        [clock.now() + timedelta(days=1)],
    )
    clock.advance(601)

    counts = await Promoter(engine.maintenance).run_once()

    assert counts["locks expired"] == 1
    assert "lock.expired" in kinds(connection)
    (waiter,) = (await engine.claims.claim("a1", 1)).tasks
    assert waiter.type == "waiter"


async def test_a_task_parked_for_a_free_lock_is_found(engine: Engine, connection: psycopg.Connection) -> None:
    await engine.submission.submit([NewTask("waiter", lock_key="doc:1")])
    connection.execute("UPDATE lineshaft.task_live SET parked = 'lock'")
    view = await engine.fleet.register(NewAgent(id="a1"))
    assert (await engine.claims.claim("a1", view.incarnation)).tasks == []

    await Promoter(engine.maintenance).run_once()

    assert len((await engine.claims.claim("a1", view.incarnation)).tasks) == 1


async def test_generations_rotate_without_losing_tasks(
    engine: Engine, connection: psycopg.Connection
) -> None:
    """Five times as many tasks have left as remain, so the rest moves on and the old generation closes."""
    await engine.submission.submit([NewTask("code") for _ in range(30)])
    view = await engine.fleet.register(NewAgent(id="a1", max_concurrent_tasks=100))
    await engine.claims.claim("a1", view.incarnation, limit=20)
    assert not await engine.maintenance.turn_generation(49), "ten remain, only forty-nine have left"

    assert await engine.maintenance.turn_generation(50)
    await closed(engine)

    assert connection.execute("SELECT no FROM lineshaft.generation").fetchall() == [(2,)]
    assert len((await engine.claims.claim("a1", view.incarnation, limit=50)).tasks) == 10


async def test_a_submitter_that_commits_late_into_a_closing_generation_is_not_lost(
    engine: Engine, dsn: str
) -> None:
    """It read the old number before the rotation: the old generation stays open until it has ended."""
    view = await engine.fleet.register(NewAgent(id="a1", max_concurrent_tasks=100))
    async with await psycopg.AsyncConnection.connect(dsn) as submitter:
        await engine.submission.submit([NewTask("late")], connection=submitter)
        assert await engine.maintenance.turn_generation(5)
        assert await engine.maintenance.close_generations(100) == 1, "the submitter might still write into it"
        await submitter.commit()

    (late,) = (await engine.claims.claim("a1", view.incarnation)).tasks
    assert late.type == "late"
    await closed(engine)


async def test_a_task_in_a_generation_that_was_closed_long_ago_is_brought_back(
    engine: Engine, connection: psycopg.Connection
) -> None:
    """It should not exist. Every rotation searches the last generations, and the janitor all of them."""
    view = await engine.fleet.register(NewAgent(id="a1", max_concurrent_tasks=100))
    for _ in range(9):
        assert await engine.maintenance.turn_generation(5)
        await closed(engine)
    old, recent = await engine.submission.submit([NewTask("old"), NewTask("recent")])
    for task, generation in ((old, 2), (recent, 8)):
        connection.execute(
            "UPDATE lineshaft.task_live SET generation = %s WHERE id = %s", [generation, task.id]
        )

    await Promoter(engine.maintenance).run_once()
    assert [task.id for task in (await engine.claims.claim("a1", view.incarnation, limit=9)).tasks] == [
        recent.id
    ]

    await janitor(engine).run_once()
    assert [task.id for task in (await engine.claims.claim("a1", view.incarnation, limit=9)).tasks] == [
        old.id
    ]


async def test_an_old_reader_does_not_keep_a_generation_open(engine: Engine, dsn: str) -> None:
    with psycopg.connect(dsn) as reader:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT count(*) FROM lineshaft.task_live")
        assert await engine.maintenance.turn_generation(5)

        await closed(engine)


async def test_a_rotation_that_was_rolled_back_loses_no_task(
    engine: Engine, connection: psycopg.Connection
) -> None:
    """The number is raised nevertheless: tasks that become READY later must stay visible."""
    with connection.transaction(force_rollback=True):
        connection.execute(catalog.load("lineshaft.engine.maintenance")["announce_generation"])
        connection.execute(catalog.load("lineshaft.engine.maintenance")["open_generation"])
    await engine.submission.submit([NewTask("unseen")])
    view = await engine.fleet.register(NewAgent(id="a1"))

    await Promoter(engine.maintenance).run_once()

    assert len((await engine.claims.claim("a1", view.incarnation)).tasks) == 1


async def test_a_task_in_a_closed_generation_is_swept_up(
    engine: Engine, connection: psycopg.Connection
) -> None:
    await engine.submission.submit([NewTask("lost")])
    connection.execute("UPDATE lineshaft.task_live SET generation = 0")
    view = await engine.fleet.register(NewAgent(id="a1"))
    assert (await engine.claims.claim("a1", view.incarnation)).tasks == []

    await Promoter(engine.maintenance).run_once()

    assert len((await engine.claims.claim("a1", view.incarnation)).tasks) == 1


async def test_without_a_retention_the_janitor_deletes_nothing(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-250, R-131."""
    done, dead = await claimed(engine, NewTask("done"), NewTask("dead", max_attempts=1))
    await engine.work.complete([Completion(ref(done))])
    await engine.work.fail([Failure(ref(dead), "boom")])
    clock.advance(86_400 * 400)

    counts = await janitor(engine).run_once()
    assert counts["event partitions created"] > 0
    assert statuses(connection) == {"done": "COMPLETED", "dead": "DEAD_LETTERED"}

    kept = janitor(engine, keep_tasks=timedelta(days=30))
    assert (await kept.run_once())["finished tasks deleted"] == 1
    assert statuses(connection) == {"dead": "DEAD_LETTERED"}


async def test_the_janitor_deletes_all_old_events_that_have_no_partition(
    engine: Engine,
    connection: psycopg.Connection,
    clock: MovableClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one batch an hour: more may arrive than that."""
    monkeypatch.setattr(partitions_module, "_DELETE_MOST", 2)
    (duty,) = (d for d in all_duties(engine, Settings(keep_events_days=30)) if isinstance(d, Janitor))
    duty = replace(duty, partitions=Partitions(engine.database, move_most=2))
    for days in (100, 100, 100, 100, 100, 1):
        connection.execute(
            "INSERT INTO lineshaft.event (at, kinds) VALUES (%s, '{alert}')",
            [clock.now() - timedelta(days=days)],
        )

    await duty.run_once()

    assert kinds(connection) == ["alert"]


async def test_events_without_a_partition_are_reported(
    engine: Engine,
    connection: psycopg.Connection,
    clock: MovableClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As after a large import before the first `up`."""
    for _ in range(3):
        connection.execute("INSERT INTO lineshaft.event (at, kinds) VALUES (%s, '{alert}')", [clock.now()])
    (duty,) = (d for d in all_duties(engine, Settings()) if isinstance(d, Janitor))
    duty = replace(duty, partitions=Partitions(engine.database, move_most=2))

    await duty.run_once()

    (reported,) = (line for line in caplog.messages if "partition" in line)
    assert f" event_{clock.now():%Y%m}." in reported


async def test_dependencies_of_live_tasks_are_kept(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    (up,) = await claimed(engine, NewTask("up"))
    await engine.submission.submit(
        [NewTask("down", depends_on=[up.id], run_at=clock.now() + timedelta(days=999))]
    )
    await engine.work.complete([Completion(ref(up))])
    clock.advance(86_400 * 400)

    await janitor(engine, keep_tasks=timedelta(days=1)).run_once()

    assert statuses(connection) == {"up": "COMPLETED", "down": "PENDING"}


async def test_dependencies_of_dead_letters_and_late_cancellations_are_kept(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """Without them a retry would silently run without its input."""
    ups = await claimed(
        engine, NewTask("for the dead"), NewTask("for the cancelled"), NewTask("for the done")
    )
    await engine.work.complete([Completion(ref(up), b'"input"') for up in ups])
    uses = {up.type: {"context_refs": [f"task:{up.id}:output"]} for up in ups}
    dead, done = await claimed(
        engine,
        NewTask("dead", max_attempts=1, spec=uses["for the dead"]),
        NewTask("done", spec=uses["for the done"]),
    )
    await engine.work.fail([Failure(ref(dead), "boom")])
    await engine.work.complete([Completion(ref(done))])
    clock.advance(86_400 * 31)
    (cancelled,) = await engine.submission.submit([NewTask("cancelled", spec=uses["for the cancelled"])])
    await engine.cancel.cancel(cancelled.id, "not now")
    daily = janitor(engine, keep_tasks=timedelta(days=30))

    await daily.run_once()

    assert statuses(connection) == {
        "for the dead": "COMPLETED",
        "dead": "DEAD_LETTERED",
        "for the cancelled": "COMPLETED",
        "cancelled": "CANCELLED",
    }
    await engine.revive.retry(dead.id)
    # The janitor has forgotten the agent, too.
    agent = await engine.fleet.register(NewAgent(id="a1"))
    claim = await engine.claims.claim("a1", agent.incarnation)
    assert claim.inputs == {ups[0].id: b'"input"'}
    # The cancelled task is deleted at its time, and its input with it.
    clock.advance(86_400 * 31)
    await daily.run_once()
    assert set(statuses(connection)) == {"for the dead", "dead"}


async def test_silent_agents_are_marked_offline_once(
    world: World, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-080."""
    await world.engine.fleet.register(NewAgent(id="silent"))
    await world.engine.fleet.register(NewAgent(id="lively"))
    clock.advance(60)
    await world.heartbeat("lively", 1)
    clock.advance(31)

    assert await OfflineDetector(world.engine.fleet).run_once() == {"agents offline": 1}
    assert await OfflineDetector(world.engine.fleet).run_once() == {"agents offline": 0}
    assert [a.status for a in await world.engine.fleet.read_all()] == ["active", "offline"]
    assert kinds(connection).count("agent.offline") == 1
    # After a heartbeat it is active again.
    await world.heartbeat("silent", 1)
    assert (await world.engine.fleet.read("silent")).status == "active"


async def test_a_failed_duty_runs_again_until_the_loop_is_stopped() -> None:
    stop = asyncio.Event()

    class Flaky:
        name = "flaky"
        interval_sec = 0.05
        calls = 0

        async def run_once(self) -> Mapping[str, int]:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("first time")
            stop.set()
            return {"done": 1}

    duty = Flaky()
    await asyncio.wait_for(loop.run(duty, stop), 60)

    assert duty.calls == 2


async def test_all_duties_run_concurrently_until_stopped(engine: Engine) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(supervise(all_duties(engine, Settings()), stop))
    stop.set()

    await asyncio.wait_for(running, 60)


async def test_dags_without_budget_do_not_hide_others(engine: Engine, connection: psycopg.Connection) -> None:
    """The promoter finds tasks that are affordable again among many that aren't."""
    view = await engine.fleet.register(NewAgent(id="a1", max_concurrent_tasks=100))
    costly = [NewTask("a", key="w", max_cost_usd=2), NewTask("b", key="z", depends_on=["w"])]
    dags = [await engine.submission.submit_dag("d", costly, budget_ceiling_usd=1) for _ in range(2)]
    assert (await engine.claims.claim("a1", view.incarnation, limit=5)).tasks == []
    # The state after a claim parked the task while the budget was raised.
    later = max(dags, key=lambda dag: dag.id)
    connection.execute("UPDATE lineshaft.dag SET budget_ceiling_usd = 5 WHERE id = %s", [later.id])

    await Promoter(engine.maintenance, batch=1).run_once()

    (task,) = (await engine.claims.claim("a1", view.incarnation, limit=5)).tasks
    assert task.id == later.tasks["w"].id


async def test_a_task_that_cannot_be_reaped_does_not_block_others(
    engine: Engine, clock: MovableClock, connection: psycopg.Connection
) -> None:
    view = await engine.fleet.register(NewAgent(id="a1", max_concurrent_tasks=100))
    bad, good = await engine.submission.submit([NewTask("a"), NewTask("a")])
    await engine.claims.claim("a1", view.incarnation, limit=5, start=True)
    connection.execute("UPDATE lineshaft.task SET retry = '17' WHERE id = %s", [bad.id])
    connection.execute(
        "UPDATE lineshaft.task_live SET lease_until = lease_until - interval '1 second' WHERE id = %s",
        [bad.id],
    )
    clock.advance(10_000)

    counts = await Reaper(engine.maintenance).run_once()

    assert counts == {"stuck": 1, "heartbeat_timeout": 1}
    assert (await engine.read.task(good.id)).status == "RETRYING"


async def test_a_task_that_cannot_be_promoted_does_not_block_others(
    engine: Engine, clock: MovableClock, connection: psycopg.Connection
) -> None:
    """A batch that can't end: its DAG has fewer tasks than have ended. No known way leads to this state."""
    batch, later = await engine.submission.submit(
        [
            NewTask("batch", children=[NewTask("step")]),
            NewTask("later", run_at=clock.now() + timedelta(hours=1)),
        ]
    )
    connection.execute(
        "UPDATE lineshaft.task_live SET blocked = 0, due_at = %s WHERE id = %s", [clock.now(), batch.id]
    )
    connection.execute("UPDATE lineshaft.dag SET total = 0")
    clock.advance(10_000)

    counts = await Promoter(engine.maintenance).run_once()

    assert (counts["stuck"], counts["promoted"]) == (1, 1)
    assert (await engine.read.task(later.id)).status == "READY"
