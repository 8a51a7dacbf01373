"""Two of everything at once. Where a race has a window, a third holds a row until both are there."""

import asyncio
import random
from collections.abc import Awaitable
from itertools import pairwise

import psycopg

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.errors import CycleError, LineshaftError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import NewAgent
from lineshaft.types.work import Completion, Failure, HeldTask, Presence
from tests.races.helpers import DONE, LIVE_ROW, held, race, running, status, waiting
from tests.world import Actions, ref, spawn_children


async def test_two_agents_never_get_the_same_task(engines: tuple[Engine, Engine]) -> None:
    """R-050."""
    one, two = engines
    await one.submission.submit([NewTask("code") for _ in range(100)])

    claims = await asyncio.gather(
        *(e.claims.claim(a, 1, limit=7) for _ in range(10) for e, a in ((one, "a1"), (two, "a2")))
    )

    ids = [task.id for claim in claims for task in claim.tasks]
    assert len(ids) == len(set(ids)) == 100


async def test_two_claims_of_one_agent_with_one_free_slot(engines: tuple[Engine, Engine], dsn: str) -> None:
    """R-058: slots are counted under the agent's row."""
    one, two = engines
    await one.fleet.register(NewAgent(id="narrow", max_concurrent_tasks=1))
    await one.submission.submit([NewTask("code") for _ in range(5)])

    with (
        held(dsn, "SELECT FROM lineshaft.instance WHERE agent_id = 'narrow' FOR UPDATE") as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        claims = await race(look, holder, one.claims.claim("narrow", 1), two.claims.claim("narrow", 1))

    assert sum(len(claim.tasks) for claim in claims) == 1


async def test_two_claims_never_spend_the_same_dollar(engines: tuple[Engine, Engine], dsn: str) -> None:
    """R-234, F-27: of the agent, and of the DAG."""
    one, two = engines
    await one.fleet.register(NewAgent(id="poor", max_concurrent_tasks=9, budget_usd=1.5))
    await one.submission.submit([NewTask("code", max_cost_usd=1) for _ in range(5)])
    with (
        held(dsn, "SELECT FROM lineshaft.instance WHERE agent_id = 'poor' FOR UPDATE") as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        claims = await race(
            look, holder, one.claims.claim("poor", 1, limit=3), two.claims.claim("poor", 1, limit=3)
        )
    assert sum(len(claim.tasks) for claim in claims) == 1

    dag = await one.submission.submit_dag(
        "d", [NewTask("costly", max_cost_usd=1) for _ in range(4)], budget_ceiling_usd=2.5
    )
    with (
        held(dsn, "SELECT FROM lineshaft.dag WHERE id = %s FOR UPDATE", dag.id) as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        claims = await race(
            look,
            holder,
            one.claims.claim("a1", 1, limit=2, types=["costly"]),
            two.claims.claim("a2", 1, limit=2, types=["costly"]),
        )
        row = look.execute("SELECT reserved_usd FROM lineshaft.dag WHERE id = %s", [dag.id]).fetchone()
    assert row is not None
    assert row[0] <= 2


async def test_the_last_two_parents_end_at_once(engines: tuple[Engine, Engine], dsn: str) -> None:
    """Count down, don't re-derive: the child must become READY, once, and the DAG end when it is done."""
    one, two = engines
    dag = await one.submission.submit_dag(
        "d", [NewTask("p", key="x"), NewTask("p", key="y"), NewTask("c", key="c", depends_on=["x", "y"])]
    )
    first, second = await running(one, 2)
    child = dag.tasks["c"].id
    with held(dsn, LIVE_ROW, child) as holder, psycopg.connect(dsn, autocommit=True) as look:
        await race(
            look,
            holder,
            one.work.complete([Completion(ref(first), DONE)]),
            two.work.complete([Completion(ref(second), DONE)]),
        )
        assert status(look, child) == Status.READY
        ready = "SELECT count(*) FROM lineshaft.events WHERE task_id = %s AND kind = 'task.ready'"
        assert look.execute(ready, [child]).fetchone() == (1,)


async def test_the_last_tasks_of_a_dag_end_at_once(engines: tuple[Engine, Engine], dsn: str) -> None:
    """U7, F-23: the DAG completes once, whichever task is last."""
    one, two = engines
    dag = await one.submission.submit_dag("d", [NewTask("p"), NewTask("p")])
    first, second = await running(one, 2)
    with (
        held(dsn, "SELECT FROM lineshaft.dag WHERE id = %s FOR UPDATE", dag.id) as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        await race(
            look,
            holder,
            one.work.complete([Completion(ref(first), DONE)]),
            two.work.fail([Failure(ref(second), "bad", "auth_failure")]),
        )
        kinds = "SELECT kind FROM lineshaft.events WHERE dag_id = %s AND kind LIKE 'dag.%%' ORDER BY seq, n"
        assert [row[0] for row in look.execute(kinds, [dag.id])] == [
            "dag.created",
            "dag.running",
            "dag.failed",
        ]


async def test_cancel_against_complete(engines: tuple[Engine, Engine], dsn: str) -> None:
    """One of them wins; the other gets an error, and the dependents follow the winner."""
    one, two = engines
    dag = await one.submission.submit_dag(
        "d", [NewTask("p", key="p"), NewTask("c", key="c", depends_on=["p"])]
    )
    (task,) = await running(one)
    with held(dsn, LIVE_ROW, task.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        completed, cancelled = await race(
            look,
            holder,
            one.work.complete([Completion(ref(task), DONE)]),
            two.cancel.cancel(task.id, "not needed"),
        )
        end, child = status(look, task.id), status(look, dag.tasks["c"].id)
    if end == Status.COMPLETED:
        assert isinstance(cancelled, LineshaftError)
        assert child == Status.READY
    else:
        assert isinstance(completed, list)
        assert completed[0].error.code == "stale_claim"
        assert child == Status.CANCELLED


async def test_a_heartbeat_saves_its_task_from_the_reaper(
    engines: tuple[Engine, Engine], dsn: str, clock: MovableClock
) -> None:
    """Neither waits for a locked row: the heartbeat renews nothing, and says so; the reaper skips it."""
    one, two = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    agent = Presence("a1", 1)
    report = [HeldTask(task.id, task.epoch, agent)]
    clock.advance(91)
    with held(dsn, LIVE_ROW, task.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        answers = await one.work.heartbeat([agent], report)
        assert (answers.over, answers.not_renewed) == ([], {(task.id, task.epoch)})
        assert await two.maintenance.reap(10) == {}
        holder.rollback()

        answers = await one.work.heartbeat([agent], report)
        assert (answers.over, answers.not_renewed) == ([], set())
        assert await two.maintenance.reap(10) == {}
        assert status(look, task.id) == Status.RUNNING


async def test_a_heartbeat_after_the_reaper_answers_lost(
    engines: tuple[Engine, Engine], clock: MovableClock
) -> None:
    one, two = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    clock.advance(91)
    assert await two.maintenance.reap(10) == {"heartbeat_timeout": 1}

    assert await Actions(one).heartbeat("a1", 1, [ref(task)]) == {task.id: "lost"}


async def test_a_heartbeat_and_a_completion_meet(engines: tuple[Engine, Engine], dsn: str) -> None:
    one, two = engines
    await one.submission.submit([NewTask("code")])
    (task,) = await running(one)
    with held(dsn, LIVE_ROW, task.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        completing = asyncio.ensure_future(two.work.complete([Completion(ref(task), DONE)]))
        await waiting(look, 1)
        assert await Actions(one).heartbeat("a1", 1, [ref(task)], progress=b"0.5") == {task.id: "continue"}
        holder.rollback()

        (completed,) = await completing
        assert completed.status == status(look, task.id) == Status.COMPLETED
    assert await Actions(one).heartbeat("a1", 1, [ref(task)]) == {task.id: "lost"}


async def test_a_waiter_that_arrives_as_the_lock_is_released_is_not_forgotten(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    """R-204: parked in the very moment of the release, it must come back without waiting for the promoter."""
    one, two = engines
    await one.submission.submit([NewTask("edit", lock_key="doc:1")])
    (holder_task,) = await running(one)
    await one.submission.submit([NewTask("edit", lock_key="doc:1")])
    with (
        held(dsn, "SELECT FROM lineshaft.lock WHERE key = 'doc:1' FOR UPDATE") as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        claimed, _ = await race(
            look,
            holder,
            two.claims.claim("a2", 1, start=True),
            one.work.complete([Completion(ref(holder_task), DONE)]),
        )
    later = (await two.claims.claim("a2", 1, start=True)).tasks
    assert len(claimed.tasks) + len(later) == 1


async def test_one_key_submitted_twenty_times_at_once_is_one_task(engines: tuple[Engine, Engine]) -> None:
    """U8."""
    results = await asyncio.gather(
        *(engines[i % 2].submission.submit([NewTask("code", idempotency_key="once")]) for i in range(20))
    )

    assert len({found.id for (found,) in results}) == 1
    assert sum(found.duplicate for (found,) in results) == 19


async def test_spawn_against_cancel_leaves_no_orphan(engines: tuple[Engine, Engine], dsn: str) -> None:
    """R-177: a child of a cancelled parent is cancelled, or was never made."""
    one, two = engines
    await one.submission.submit([NewTask("parent")])
    (parent,) = await running(one)
    with held(dsn, LIVE_ROW, parent.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        await race(
            look,
            holder,
            spawn_children(one, ref(parent), [NewTask("child")], wait=True),
            two.cancel.cancel(parent.id, "stop"),
        )
        rows = look.execute("SELECT status::text FROM lineshaft.tasks").fetchall()
    assert {row[0] for row in rows} == {"CANCELLED"}


async def test_an_edge_added_while_its_upstream_completes(engines: tuple[Engine, Engine], dsn: str) -> None:
    """The new dependent is never left waiting for what has ended."""
    one, two = engines
    (up,) = await one.submission.submit([NewTask("up")])
    (task,) = await running(one)
    (down,) = await one.submission.submit([NewTask("down")])
    with held(dsn, LIVE_ROW, up.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        await race(
            look,
            holder,
            one.work.complete([Completion(ref(task), DONE)]),
            two.dependencies.add(down.id, [up.id]),
        )
        assert status(look, up.id) == Status.COMPLETED
        assert status(look, down.id) == Status.READY


async def test_a_dependent_submitted_while_its_upstream_completes(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    one, two = engines
    (up,) = await one.submission.submit([NewTask("up")])
    (task,) = await running(one)
    with held(dsn, LIVE_ROW, up.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        _, submitted = await race(
            look,
            holder,
            one.work.complete([Completion(ref(task), DONE)]),
            two.submission.submit([NewTask("down", depends_on=[up.id])]),
        )
        assert isinstance(submitted, list)
        assert status(look, submitted[0].id) == Status.READY


async def test_a_task_revived_while_its_upstream_completes(engines: tuple[Engine, Engine], dsn: str) -> None:
    """What it waits for is counted while nothing of that can end."""
    one, two = engines
    dag = await one.submission.submit_dag(
        "d", [NewTask("u", key="u"), NewTask("d", key="d", depends_on=["u"])]
    )
    (up,) = await running(one)
    down = dag.tasks["d"].id
    await one.cancel.cancel(down, "for now")
    with held(dsn, LIVE_ROW, up.id) as holder, psycopg.connect(dsn, autocommit=True) as look:
        await race(
            look,
            holder,
            one.work.complete([Completion(ref(up), DONE)]),
            two.revive.retry(down),
        )
        assert status(look, up.id) == Status.COMPLETED
        assert status(look, down) == Status.READY


async def test_two_edges_that_together_close_a_cycle(engines: tuple[Engine, Engine]) -> None:
    """R-143: added at the same moment, one of them is refused."""
    one, two = engines
    names = [found.id for found in await one.submission.submit([NewTask("code") for _ in range(20)])]

    for a, b in pairwise(names):
        results = await asyncio.gather(
            one.dependencies.add(a, [b]),
            two.dependencies.add(b, [a]),
            return_exceptions=True,
        )
        assert sum(isinstance(result, CycleError) for result in results) == 1, results


async def test_registering_again_while_the_old_incarnation_claims(engines: tuple[Engine, Engine]) -> None:
    """What the old one claimed at the last moment is taken from it; no task stays without a holder."""
    one, two = engines
    await one.submission.submit([NewTask("code") for _ in range(30)])
    await asyncio.gather(
        *(one.claims.claim("a1", 1, limit=3) for _ in range(5)),
        two.fleet.register(NewAgent(id="a1", max_concurrent_tasks=100)),
        return_exceptions=True,
    )
    view = await one.fleet.read("a1")

    assert view.incarnation == 2
    assert view.current_tasks == 0


async def test_sixteen_clients_doing_everything_at_once(engines: tuple[Engine, Engine]) -> None:
    """No deadlock reaches a caller, and everything adds up at the end (the fixture checks)."""
    rng = random.Random(7)
    roots = []
    for _ in range(6):
        dag = await engines[0].submission.submit_dag(
            "d",
            [
                NewTask("t", key="a", lock_key="doc:1"),
                NewTask("t", key="b"),
                NewTask("t", key="c", depends_on=["a", "b"], max_cost_usd=0.5),
                NewTask("t", key="d", depends_on=["c"]),
            ],
            budget_ceiling_usd=1,
        )
        roots += [found.id for found in dag.tasks.values()]

    async def client(number: int) -> None:
        engine, agent = engines[number % 2], f"a{1 + number % 2}"
        dice = random.Random(rng.random())
        for _ in range(12):
            match dice.choice(["work", "work", "work", "fail", "cancel", "retry", "submit", "tick"]):
                case "work":
                    claimed = await running(engine, 2, agent)
                    await engine.work.complete([Completion(ref(task), DONE) for task in claimed])
                case "fail":
                    claimed = await running(engine, 1, agent)
                    await engine.work.fail([Failure(ref(task), "bad") for task in claimed])
                case "cancel":
                    await _allowed(engine.cancel.cancel(dice.choice(roots), "no"))
                case "retry":
                    await _allowed(engine.revive.retry(dice.choice(roots)))
                case "submit":
                    await _allowed(engine.submission.submit([NewTask("t", depends_on=[dice.choice(roots)])]))
                case "tick":
                    await engine.maintenance.promote_due(100)
                    await engine.maintenance.reap(100)

    await asyncio.gather(*(client(number) for number in range(16)))


async def _allowed(call: Awaitable[object]) -> None:
    """Refusals are fine here: a random task may be in any state."""
    try:
        await call
    except LineshaftError:
        return


async def test_an_open_transaction_of_a_caller_holds_up_no_other_submission(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    """The first task of a lane: the lane is created outside the caller's transaction."""
    one, two = engines
    for kind, isolation in (("a", None), ("b", psycopg.IsolationLevel.REPEATABLE_READ)):
        async with await psycopg.AsyncConnection.connect(dsn) as caller:
            await caller.set_isolation_level(isolation)
            await caller.execute("SELECT FROM lineshaft.lane")  # its snapshot is from before the lane
            await one.submission.submit([NewTask(f"{kind}1")], connection=caller)
            await one.submission.submit_dag("d", [NewTask(f"{kind}2", key="x")], connection=caller)
            await one.submission.submit([NewTask(f"{kind}3")] * 60, connection=caller)

            await two.submission.submit([NewTask(f"{kind}1"), NewTask(f"{kind}2")])
            await two.submission.submit([NewTask(f"{kind}3")] * 60)

    with psycopg.connect(dsn) as connection:
        found = connection.execute("SELECT count(*), count(DISTINCT lane_id) FROM lineshaft.task_live")
        assert found.fetchone() == (248, 6)
