"""Uploads, references and the janitor meet at the same artifact."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from lineshaft.artifacts import content_key, open_store
from lineshaft.artifacts.store import Store
from lineshaft.clock import MovableClock
from lineshaft.engine.artifacts.references import refer
from lineshaft.engine.engine import Engine
from lineshaft.errors import InvalidTransitionError
from lineshaft.model.tasks import NewTask
from lineshaft.settings import Settings
from tests.engine.artifacts.helpers import Pausing, content, count, is_stored, put
from tests.races.helpers import blocked_by, held, waiting

LARGE = bytes(range(256)) * (9 << 12)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(Settings(artifacts=str(tmp_path)))


@pytest.fixture
async def engine(dsn: str, clock: MovableClock, store: Store) -> AsyncIterator[Engine]:
    async with Engine(dsn, clock=clock, store=store) as opened:
        yield opened


async def _clean_up(engine: Engine) -> int:
    return (await engine.artifacts.clean_up(older_than_sec=-1, limit=10))["artifacts deleted"]


@pytest.mark.parametrize("data", [b"small", LARGE], ids=["small", "large"])
async def test_an_upload_waits_while_the_janitor_deletes_and_writes_again(  # noqa: PLR0917 - fixtures
    dsn: str, engine: Engine, store: Store, clock: MovableClock, connection: psycopg.Connection, data: bytes
) -> None:
    await put(engine, data)
    slow = Pausing(store, "delete")
    async with Engine(dsn, clock=clock, store=slow) as janitor:  # type: ignore[arg-type]
        cleaning = asyncio.create_task(_clean_up(janitor))
        await slow.reached.wait()  # the row is locked, the object about to be deleted
        uploading = asyncio.create_task(put(engine, data))
        await waiting(connection, 1)
        slow.go_on.set()

        assert await cleaning == 1
        made = await uploading

    assert await content(engine, made) == data
    assert count(connection, "content") == 1


@pytest.mark.parametrize("data", [b"small", LARGE], ids=["small", "large"])
async def test_an_upload_whose_content_is_deleted_before_its_end_writes_it_again(
    dsn: str, engine: Engine, store: Store, clock: MovableClock, data: bytes
) -> None:
    """The upload relies on the existing object; then its last artifact is deleted."""
    first = await put(engine, data)
    slow = Pausing(store, "size")
    async with Engine(dsn, clock=clock, store=slow) as other:  # type: ignore[arg-type]
        uploading = asyncio.create_task(put(other, data))
        await slow.reached.wait()
        with held(dsn, "SELECT FROM lineshaft.content FOR UPDATE") as holder:
            slow.go_on.set()
            with psycopg.connect(dsn, autocommit=True) as watching:
                await blocked_by(watching, holder)
                # As the janitor does it.
                holder.execute("DELETE FROM lineshaft.artifact WHERE id = %s", [first.id])
                holder.execute("UPDATE lineshaft.content SET deleted_at = now(), stored = false")
                await store.delete([f"sha256/{first.sha256[:2]}/{first.sha256[2:]}"])
                holder.commit()
        made = await uploading

    assert made.id != first.id
    assert await content(engine, made) == data


@pytest.mark.parametrize("died", [False, True], ids=["row deleted", "row marked"])
async def test_an_upload_never_ends_in_the_row_of_a_later_one(
    dsn: str, engine: Engine, store: Store, clock: MovableClock, connection: psycopg.Connection, *, died: bool
) -> None:
    """The object that it found is deleted. A later upload, which would write it again, is killed before."""
    first = await put(engine, b"x")
    relying, killed = Pausing(store, "size", after=True), Pausing(store, "create")
    async with (
        Engine(dsn, clock=clock, store=relying) as other,  # type: ignore[arg-type]
        Engine(dsn, clock=clock, store=killed) as third,  # type: ignore[arg-type]
    ):
        uploading = asyncio.create_task(put(other, b"x"))
        await relying.reached.wait()
        if died:
            # A janitor that died between the deletion of the object and that of the row.
            connection.execute("DELETE FROM lineshaft.artifact WHERE id = %s", [first.id])
            connection.execute("UPDATE lineshaft.content SET deleted_at = now(), stored = false")
            await store.delete([content_key(first.sha256)])
        else:
            await engine.artifacts.delete(first.id)
        later = asyncio.create_task(put(third, b"x"))
        await killed.reached.wait()
        later.cancel()
        relying.go_on.set()
        made = await uploading
        await asyncio.wait({later})

    assert await content(engine, made) == b"x"


async def test_an_upload_that_meets_a_mark_takes_it_away(
    engine: Engine, store: Store, connection: psycopg.Connection
) -> None:
    """A janitor that died between its mark and the deletion."""
    first = await put(engine, b"x")
    connection.execute("DELETE FROM lineshaft.artifact WHERE id = %s", [first.id])
    connection.execute("UPDATE lineshaft.content SET deleted_at = now(), stored = false")

    made = await put(engine, b"x")
    await engine.artifacts.clean_up(older_than_sec=86_400, limit=10)

    assert await content(engine, made) == b"x"
    assert await is_stored(store, made)


async def test_a_reference_that_is_made_now_keeps_the_artifact(
    dsn: str, engine: Engine, connection: psycopg.Connection
) -> None:
    made = await put(engine, b"x")
    (task,) = await engine.submission.submit([NewTask("research")])

    async def referring(own: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
        assert await refer(own, {task.id: [made.id]}) == set()
        assert await _clean_up(engine) == 0
        deleting = asyncio.create_task(engine.artifacts.delete(made.id))
        await waiting(connection, 1)
        await own.commit()
        with pytest.raises(InvalidTransitionError, match=task.id):
            await deleting

    async with await psycopg.AsyncConnection.connect(dsn) as own:
        await referring(own)
    assert await _clean_up(engine) == 0
    assert await content(engine, made) == b"x"


async def test_a_reference_to_an_artifact_that_is_deleted_now_is_refused(
    dsn: str, engine: Engine, connection: psycopg.Connection
) -> None:
    made = await put(engine, b"x")
    with held(dsn, "DELETE FROM lineshaft.artifact WHERE id = %s", made.id) as holder:
        async with await psycopg.AsyncConnection.connect(dsn) as own:
            referring = asyncio.create_task(refer(own, {"task_1": [made.id]}))
            await blocked_by(connection, holder)
            holder.commit()

            assert await referring == {made.id}


async def test_two_janitors_delete_each_artifact_once(dsn: str, engine: Engine, store: Store) -> None:
    made = [await put(engine, bytes([n])) for n in range(20)]
    async with Engine(dsn, store=store) as other:
        counts = await asyncio.gather(*(_clean_up(one) for one in (engine, other)))

    await engine.artifacts.clean_up(older_than_sec=-1, limit=100)
    assert sum(counts) <= len(made)
    assert not any([await is_stored(store, each) for each in made])
