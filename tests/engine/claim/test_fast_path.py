"""The fast path has the same effects as the full statements."""

import asyncio
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from lineshaft.engine.claim.fast_path import FastPath
from lineshaft.engine.engine import Engine
from lineshaft.engine.postgres import catalog
from lineshaft.errors import UnavailableError
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import ClaimedTask, Completion, Spent
from tests.invariants import check_invariants
from tests.races.helpers import held, waiting
from tests.world import Actions, World, ref

TASK = NewTask(
    "code", spec={"prompt": "x"}, model_preferences=("m2", "m1"), max_cost_usd=Decimal(1), priority=70
)
COMPLETION: dict[str, Any] = {
    "output": b'{"ok": true}',
    "artifacts": b'["a"]',
    "decision_report": b'{"why": "w"}',
    "output_type": "markdown",
    "spent": Spent(Decimal("0.25"), 10, 20),
}
#: Columns that differ between two tasks, whichever statement moved them.
OWN = {"id", "task_id", "submission_no", "seq", "xid", "rank"}


def rows_of(dsn: str, task_id: str) -> dict[str, list[dict[str, Any]]]:
    with psycopg.connect(dsn, row_factory=dict_row) as connection:
        found = {
            table: connection.execute(
                f"SELECT * FROM lineshaft.{table} WHERE {column} = %s".encode(), [task_id]
            ).fetchall()
            for table, column in (("task_live", "id"), ("task_end", "id"), ("event", "task_id"))
        }
    return {
        table: [{name: value for name, value in row.items() if name not in OWN} for row in rows]
        for table, rows in found.items()
    }


def as_seen(task: ClaimedTask) -> dict[str, Any]:
    return {
        name: getattr(task, name) for name in ClaimedTask.__struct_fields__ if name not in {"id", "dag_id"}
    }


@pytest.mark.parametrize("start", [True, False])
async def test_a_claim(world: World, dsn: str, start: bool) -> None:
    """The first is claimed on the fast path, as one of several; the second by its id, which never uses it."""
    await world.agent("ann", models_available=["m1"])
    (first,) = await world.engine.submission.submit([TASK])
    (short,) = (await world.engine.claims.claim("ann", 1, limit=2, start=start)).tasks
    (second,) = await world.engine.submission.submit([TASK])
    (long,) = (await world.engine.claims.claim_task("ann", 1, second.id, start=start)).tasks

    assert (short.id, long.id) == (first.id, second.id)
    assert as_seen(short) == as_seen(long)
    assert rows_of(dsn, short.id) == rows_of(dsn, long.id)


async def test_a_completion(world: World, dsn: str) -> None:
    await world.agent("ann", models_available=["m1"], max_concurrent_tasks=2)
    await world.engine.submission.submit([TASK, TASK])
    short, long = (await world.engine.claims.claim("ann", 1, limit=2, start=True)).tasks
    with psycopg.connect(dsn) as connection:
        # As if something waited for it.
        connection.execute("UPDATE lineshaft.task_live SET awaited = true WHERE id = %s", [long.id])

    answers = await world.engine.work.complete(
        [Completion(ref(task), **COMPLETION) for task in (short, long)]
    )

    assert [answer.unwrap() for answer in answers] == [Status.COMPLETED] * 2
    assert rows_of(dsn, short.id) == rows_of(dsn, long.id)
    check_invariants(dsn)


async def test_the_order_is_that_of_the_long_way(world: World) -> None:
    """Tasks of several lanes and ranks; then the same with one that must be weighed."""
    await world.agent("ann", max_concurrent_tasks=100)
    kinds = [NewTask(f"t{n % 3}", priority=n * 37 % 100) for n in range(30)]

    async def order(*extra: NewTask) -> list[tuple[str, int]]:
        await world.engine.submission.submit([*kinds, *extra])
        tasks = (await world.engine.claims.claim("ann", 1, limit=31, start=True)).tasks
        await world.engine.work.complete([Completion(ref(task)) for task in tasks])
        views = [await world.engine.read.task(task.id) for task in tasks if task.lock_key is None]
        return [(view.type, view.priority) for view in views]

    simple = await order()
    assert len(simple) == 30
    assert await order(NewTask("locked", lock_key="doc:1", priority=50)) == simple


async def test_a_dag_with_a_ceiling_is_weighed(world: World, dsn: str) -> None:
    """R-233: one that is overdrawn gets nothing, also from a process that has not weighed anything yet."""
    await world.agent("ann", max_concurrent_tasks=10)
    await world.engine.submission.submit_dag(
        "d", [NewTask("code", key="a"), NewTask("code", key="b")], budget_ceiling_usd=1
    )
    (task,) = (await world.engine.claims.claim("ann", 1, start=True)).tasks
    await world.engine.work.complete([Completion(ref(task), spent=Spent(Decimal(2)))])
    async with Engine(dsn) as other:
        assert (await other.claims.claim("ann", 1, limit=10)).tasks == []


async def test_a_lease_begins_when_the_claim_is_had(dsn: str) -> None:
    """A claim that waits for its agent's row must not hand out a lease that is half over."""
    async with Engine(dsn) as engine:
        await Actions(engine).agent("ann", heartbeat_interval_sec=1.0)
        await engine.submission.submit([NewTask("code")])
        with psycopg.connect(dsn) as holder, psycopg.connect(dsn, autocommit=True) as look:
            holder.execute("SELECT FROM lineshaft.instance FOR UPDATE")
            claiming = asyncio.ensure_future(engine.claims.claim("ann", 1, start=True))
            await waiting(look, 1)
            ((released_at,),) = look.execute("SELECT clock_timestamp()").fetchall()
            holder.rollback()
            await claiming
            ((begins,),) = look.execute(
                "SELECT lease_until - interval '3 seconds' FROM lineshaft.task_live"
            ).fetchall()
        assert begins >= released_at


def test_the_fast_path_is_skipped_longer_but_not_forever() -> None:
    """Something to weigh closes the fast path for a while, not forever."""

    def skips() -> int:
        fast_path.tried("ann", worked=False)
        tries = 0
        while not fast_path.is_open("ann"):
            tries += 1
        return tries

    fast_path = FastPath()
    assert fast_path.is_open("ann")
    lengths = [skips() for _ in range(12)]
    assert lengths[0] < 100
    assert lengths[1] == 2 * lengths[0]
    assert lengths[-1] == lengths[-2] < 10_000
    assert fast_path.is_open("bob")
    fast_path.tried("ann", worked=True)
    assert fast_path.is_open("ann")
    assert skips() == lengths[0]


@pytest.mark.parametrize("way", ["claim_fast", "claim_tasks"])
async def test_a_claim_is_never_older_than_what_made_it_possible(dsn: str, way: str) -> None:
    """By the clock, too: its transaction may have begun before the task was READY."""
    async with Engine(dsn) as engine:
        await Actions(engine).agent("ann")
        dag = await engine.submission.submit_dag(
            "d", [NewTask("code", key="a"), NewTask("code", key="b", depends_on=["a"])]
        )
        (first,) = (await engine.claims.claim("ann", 1, start=True)).tasks
        statement = catalog.load(
            f"lineshaft.engine.claim.{'fast_path' if way == 'claim_fast' else 'claims'}"
        )[way]
        parameters = {
            "agent_id": "ann",
            "incarnation": 1,
            "limit": 1,
            "types": None,
            "start": True,
            "task_id": None,
            "lock_ttl": 60,
            "probing": None,
            "follows": None,
            "follows_epoch": None,
            "ahead": 0,
            "passed_over": [],
            "turns": False,
            "idle_lanes": [],
            "daily_budget": None,
            "now": None,
        }
        async with (
            await psycopg.AsyncConnection.connect(dsn) as early,
            early.transaction(),
        ):
            await early.execute("SELECT now()")
            await engine.work.complete([Completion(ref(first))])
            await early.execute(statement, parameters)
        upstream = await engine.read.task(first.id)
        downstream = await engine.read.task(dag.tasks["b"].id)

    assert upstream.completed_at is not None
    assert downstream.started_at is not None
    assert upstream.completed_at < downstream.started_at


async def test_a_claim_of_many_that_finds_nothing_locks_nothing(world: World, dsn: str) -> None:
    await world.agent("ann", max_concurrent_tasks=10)
    with held(dsn, "SELECT FROM lineshaft.instance FOR UPDATE"):
        assert (await world.engine.claims.claim("ann", 1, limit=10, start=True)).tasks == []


@pytest.mark.parametrize("limit", [1, 10])
async def test_a_claim_on_a_server_that_became_a_standby_fails_though_there_is_nothing_to_claim(
    world: World, dsn: str, limit: int
) -> None:
    """Otherwise the agent would stay there, where nothing ever comes, and not look for the primary."""
    await world.agent("ann", max_concurrent_tasks=10)
    async with Engine(make_conninfo(dsn, options="-c default_transaction_read_only=on")) as engine:
        with pytest.raises(UnavailableError):
            await engine.claims.claim("ann", 1, limit=limit, start=True)
