"""Processes killed and stopped in each phase: no task lost, no recorded step run again, one outcome."""

import signal
from decimal import Decimal
from pathlib import Path

import psycopg
import pytest

from lineshaft import ForEach, Lineshaft, NewTask
from lineshaft.model.admission import LockKey
from lineshaft.model.states import Status
from tests.agent.agent_process import agent_process
from tests.agent.agent_program import Points, make_agent
from tests.agent.helpers import AT_ONCE, at_work, attempts, ended, engine_of, kinds, lose_claim

SLOW = pytest.mark.slow("starts a process for each case")
RECORDED_BEFORE = {
    "claimed": [],
    "in a step": [],
    "between steps": ["first"],
    "in another step": ["first"],
    "completing": ["first", "second"],
}


async def submit(shaft: Lineshaft) -> str:
    return (await shaft.submit(NewTask("work", retry=AT_ONCE, max_attempts=2))).id


@pytest.mark.slow("starts and kills agents")
@pytest.mark.parametrize(
    "point",
    [
        "in another step",
        *(pytest.param(point, marks=SLOW) for point in RECORDED_BEFORE if point != "in another step"),
    ],
)
async def test_killed(
    shaft: Lineshaft, where: str, tmp_path: Path, connection: psycopg.Connection, point: str
) -> None:
    """SIGKILL in each phase; the next agent continues after the last recorded step."""
    log = tmp_path / "log"
    task_id = await submit(shaft)
    async with agent_process(where, log, "--wait-at", point) as process:
        await process.reaches(point)
        assert list(await engine_of(shaft).read.steps(task_id)) == RECORDED_BEFORE[point]
        await process.kill()
    await lose_claim(shaft, connection, task_id)

    second = make_agent("second", Points(log), interval=60, grace=5)
    async with at_work(second, shaft=shaft):
        task = await ended(shaft, task_id)

    assert (task.status, task.result) == (Status.COMPLETED, {"sum": 3, "by": "second"})
    reached = log.read_text().splitlines()
    for name, inside in (("first", "in a step"), ("second", "in another step")):
        assert reached.count(inside) == (1 if name in RECORDED_BEFORE[point] else 1 + (point == inside))
    assert task.cost_usd == Decimal(3)
    history = [(past.outcome, past.error) for past in await attempts(shaft, task_id)]
    assert history == [("failed", "heartbeat_timeout"), ("completed", None)]


@pytest.mark.slow("starts and kills an agent")
async def test_all_locks_of_a_killed_holder_are_free(
    shaft: Lineshaft, where: str, tmp_path: Path, connection: psycopg.Connection
) -> None:
    log = tmp_path / "log"
    locks: list[str | LockKey] = ["a", "b", LockKey("c", shared=True)]
    held = await shaft.submit(NewTask("work", lock_keys=locks, max_attempts=1))
    waits = await shaft.submit(NewTask("work", lock_keys=["c", "a"]))
    async with agent_process(where, log, "--wait-at", "in a step") as process:
        await process.reaches("in a step")
        assert [lock.holder_task_id for lock in (await shaft.locks()).items] == [held.id] * 3
        await process.kill()
    await lose_claim(shaft, connection, held.id)

    assert (await shaft.locks()).items == []
    async with at_work(make_agent("second", Points(log), interval=60, grace=5), shaft=shaft):
        assert (await ended(shaft, waits.id)).status is Status.COMPLETED


@pytest.mark.slow("starts and kills an agent")
async def test_killed_while_the_outcome_is_being_written(
    shaft: Lineshaft, where: str, dsn: str, tmp_path: Path, connection: psycopg.Connection
) -> None:
    """Whether it was written or not, it is recorded once."""
    log = tmp_path / "log"
    task_id = await submit(shaft)
    go = tmp_path / "go"
    async with agent_process(where, log, "--wait-at", "completing", "--wait-for", str(go)) as process:
        await process.reaches("completing")
        with connection.transaction():
            connection.execute("SELECT FROM lineshaft.task_live WHERE id = %s FOR UPDATE", [task_id])
            go.touch()
            waiting = (
                "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                " AND application_name = 'lineshaft' AND datname = current_database()"
            )
            with psycopg.connect(dsn, autocommit=True) as observer:
                while observer.execute(waiting.encode()).fetchone() is None:
                    pass
            await process.kill()
    await lose_claim(shaft, connection, task_id)

    second = make_agent("second", Points(log), interval=60, grace=5)
    async with at_work(second, shaft=shaft):
        task = await ended(shaft, task_id)

    assert (task.status, task.result["sum"], task.cost_usd) == (Status.COMPLETED, 3, Decimal(3))
    assert (await kinds(shaft, task_id)).count("task.completed") == 1
    assert log.read_text().splitlines().count("in a step") == 1


@pytest.mark.slow("starts and kills an agent")
async def test_killed_while_a_list_is_expanded(
    shaft: Lineshaft, dsn: str, tmp_path: Path, connection: psycopg.Connection
) -> None:
    """Its children are made with the completion of the task that returned the list, or not at all."""
    log, go = tmp_path / "log", tmp_path / "go"
    dag = await shaft.submit_dag(
        "A list",
        [
            NewTask("scan", key="scan", retry=AT_ONCE, max_attempts=2),
            NewTask("review", key="review", for_each=ForEach("scan")),
        ],
    )
    # On the database, where the killed process is the one that expands.
    async with agent_process(dsn, log, "--wait-at", "completing", "--wait-for", str(go)) as process:
        await process.reaches("completing")
        with connection.transaction():
            # The completion reads tasks; only the expansion inserts some.
            connection.execute("LOCK TABLE lineshaft.task IN SHARE ROW EXCLUSIVE MODE")
            go.touch()
            expanding = (
                "FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                " AND query LIKE '%jsonb_array_elements%'"
            )
            with psycopg.connect(dsn, autocommit=True) as observer:
                while observer.execute(f"SELECT {expanding}".encode()).fetchone() is None:
                    pass
                await process.kill()
                # PostgreSQL notices once it has the lock: with this, before.
                observer.execute(f"SELECT pg_terminate_backend(pid) {expanding}".encode())
    assert (await shaft.get_dag(dag)).counts == {"RUNNING": 1, "PENDING": 1}
    await lose_claim(shaft, connection, dag["scan"].id)

    second = make_agent("second", Points(log), interval=60, grace=5)
    async with at_work(second, shaft=shaft):
        task = await ended(shaft, dag["review"].id)

    assert (task.status, task.result) == (Status.COMPLETED, ["0: a", "1: b", "2: c"])
    assert (await shaft.get_dag(dag)).counts == {"COMPLETED": 5}


@pytest.mark.slow("starts and stops an agent")
async def test_stopped_past_its_lease_a_zombie_writes_nothing(
    shaft: Lineshaft, where: str, tmp_path: Path, connection: psycopg.Connection
) -> None:
    """R-100: SIGSTOP, another does the work, SIGCONT: the output of the zombie is refused but logged."""
    log, go = tmp_path / "log", tmp_path / "go"
    task_id = await submit(shaft)
    async with agent_process(where, log, "--wait-at", "completing", "--wait-for", str(go)) as process:
        await process.reaches("completing")
        process.send(signal.SIGSTOP)
        await lose_claim(shaft, connection, task_id)

        second = make_agent("second", Points(log), interval=60, grace=5)
        async with at_work(second, shaft=shaft):
            task = await ended(shaft, task_id)
        go.touch()
        process.send(signal.SIGCONT)

        async for event in shaft.events(None, task_id=task_id, kinds=["task.late_result"]):
            assert event.data == {"output": {"sum": 3, "by": "first"}}
            break

    assert task.result == {"sum": 3, "by": "second"}
    assert (await shaft.get(task_id)).result == {"sum": 3, "by": "second"}


@SLOW
@pytest.mark.parametrize("point", ["in a step", "between steps"])
async def test_stopped_past_its_lease_a_zombie_goes_no_further(
    shaft: Lineshaft, where: str, tmp_path: Path, connection: psycopg.Connection, point: str
) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    task_id = await submit(shaft)
    async with agent_process(where, log, "--wait-at", point, "--wait-for", str(go)) as process:
        await process.reaches(point)
        process.send(signal.SIGSTOP)
        await lose_claim(shaft, connection, task_id)

        second = make_agent("second", Points(log), interval=60, grace=5)
        async with at_work(second, shaft=shaft):
            task = await ended(shaft, task_id)
        go.touch()
        process.send(signal.SIGCONT)
        process.send(signal.SIGTERM)
        assert await process.ends() == 0

    assert task.result == {"sum": 3, "by": "second"}
    steps = {"first": b"1", "second": b"2"}
    found = await engine_of(shaft).read.steps(task_id)
    assert {name: bytes(data) for name, data in found.items()} == steps
    # The zombie reached "completing" in neither case: its next write failed.
    assert log.read_text().splitlines().count("completing") == 1
    # What the zombie has spent is gone, and booked once it is known.
    assert (await shaft.get(task_id)).cost_usd > task.cost_usd


@pytest.mark.slow("starts agents")
async def test_an_agent_that_registers_again_gets_its_task_again(
    shaft: Lineshaft, where: str, tmp_path: Path
) -> None:
    """The same id registers again: its claims fail at once, without waiting for the lease."""
    log = tmp_path / "log"
    task_id = await submit(shaft)
    async with agent_process(where, log, "--wait-at", "between steps") as process:
        await process.reaches("between steps")
        await process.kill()

    again = make_agent("first", Points(log), interval=60, grace=5)
    async with at_work(again, shaft=shaft):
        task = await ended(shaft, task_id)

    assert task.result == {"sum": 3, "by": "first"}
    assert [past.error for past in await attempts(shaft, task_id)] == ["agent_restarted", None]
    assert log.read_text().splitlines().count("in a step") == 1
