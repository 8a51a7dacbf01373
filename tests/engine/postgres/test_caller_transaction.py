"""Submitting inside the caller's own transaction."""

import pytest
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from lineshaft.errors import (
    AlreadyExistsError,
    DependencyNotFoundError,
)
from lineshaft.model.tasks import NewTask
from tests.world import World


async def test_submission_is_part_of_the_callers_transaction(dsn: str, world: World) -> None:
    """R-038: with the caller's commit it exists, after a rollback it never did."""
    submission = world.engine.submission
    async with await AsyncConnection.connect(dsn) as caller:
        await submission.submit([NewTask("rolled back", idempotency_key="k")], connection=caller)
        await submission.submit_dag("a DAG", [NewTask("rolled back")], connection=caller)
        await submission.submit([NewTask("rolled back")] * 60, connection=caller)
        await caller.rollback()
    assert world.rows("SELECT * FROM lineshaft.task") == []

    async with await AsyncConnection.connect(dsn) as caller:
        await caller.execute("CREATE TABLE public.mine (id text)")
        (found,) = await submission.submit([NewTask("rolled back")], connection=caller)
        await caller.execute("INSERT INTO public.mine VALUES (%s)", [found.id])
        assert world.rows("SELECT * FROM lineshaft.task") == []

    assert world.row("SELECT id FROM public.mine")["id"] == found.id
    assert world.status(found.id) == "READY"
    # Lanes are created outside the transaction, so the one in the cache exists.
    assert [task.id for task in await world.claim(await world.agent())] == [found.id]


async def test_a_refused_submission_leaves_the_callers_transaction_as_it_was(dsn: str, world: World) -> None:
    """U8, R-142: nothing of it stays, not even the key, and the caller can go on."""
    submission = world.engine.submission
    await world.one(id="taken")
    async with await AsyncConnection.connect(dsn) as caller:
        for tasks in (
            [NewTask("code", idempotency_key="k", depends_on=["nope"])],
            [NewTask("code", idempotency_key="k", id="taken")],
            [NewTask("code", idempotency_key="k", id="taken"), *[NewTask("code")] * 60],
        ):
            with pytest.raises((DependencyNotFoundError, AlreadyExistsError)):
                await submission.submit(tasks, connection=caller)
        await caller.execute("CREATE TABLE public.mine (id text)")

    assert world.rows("SELECT * FROM public.mine") == []
    assert world.rows("SELECT * FROM lineshaft.task_key") == []
    (found,) = await submission.submit([NewTask("code", idempotency_key="k")])
    assert not found.duplicate


async def test_the_callers_connection_is_left_as_it_was(dsn: str, world: World) -> None:
    """Submitting on a connection changes nothing about how it answers its owner."""
    async with await AsyncConnection.connect(dsn, row_factory=dict_row, autocommit=True) as caller:
        await world.one(idempotency_key="k")
        (found,) = await world.engine.submission.submit(
            [NewTask("code", idempotency_key="k"), NewTask("other", depends_on=[])][:1], connection=caller
        )
        cursor = await caller.execute("SELECT '{\"a\": 1}'::jsonb AS data")
        assert await cursor.fetchone() == {"data": {"a": 1}}
        assert caller.prepare_threshold == 5

    assert found.duplicate
