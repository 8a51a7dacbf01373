"""A process whose store is not the database's writes nothing."""

import asyncio
from pathlib import Path

import pytest

from lineshaft.artifacts import open_store
from lineshaft.artifacts.store import ID_KEY
from lineshaft.engine.engine import Engine
from lineshaft.errors import SettingsError
from lineshaft.settings import Settings
from tests.conftest import TEMPLATE, NewDatabase
from tests.engine.artifacts.helpers import content, put


def _engine(dsn: str, folder: Path) -> Engine:
    return Engine(dsn, store=open_store(Settings(artifacts=str(folder))))


async def test_another_store_is_refused_before_anything_is_written(dsn: str, tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    async with _engine(dsn, own) as right, _engine(dsn, other) as wrong:
        made = await put(right, b"x")

        with pytest.raises(
            SettingsError, match="has no id; the database belongs to the store store_"
        ) as refused:
            await put(wrong, b"y")
        assert str(own) in str(refused.value)
        assert str(other) in str(refused.value)
        with pytest.raises(SettingsError):
            await content(wrong, made)
        with pytest.raises(SettingsError):
            await wrong.artifacts.delete(made.id)
        with pytest.raises(SettingsError):
            await wrong.artifacts.clean_up(older_than_sec=0, limit=10)
    assert not other.exists()


async def test_the_store_of_another_database_is_refused(
    dsn: str, new_database: NewDatabase, tmp_path: Path
) -> None:
    async with _engine(dsn, tmp_path) as first:
        await put(first, b"x")
    with new_database(TEMPLATE) as other:
        async with _engine(other, tmp_path) as second:
            with pytest.raises(SettingsError, match="belongs to another database"):
                await put(second, b"y")


async def test_a_process_that_died_while_it_introduced_the_store_blocks_nothing(
    dsn: str, tmp_path: Path
) -> None:
    (tmp_path / ID_KEY).write_text("store_early\n")

    async with _engine(dsn, tmp_path) as engine:
        made = await put(engine, b"x")
        assert await content(engine, made) == b"x"
    assert (tmp_path / ID_KEY).read_text() == "store_early\n"


async def test_of_two_stores_that_are_introduced_at_once_one_wins(dsn: str, tmp_path: Path) -> None:
    async with _engine(dsn, tmp_path / "a") as one, _engine(dsn, tmp_path / "b") as two:
        results = await asyncio.gather(put(one, b"x"), put(two, b"y"), return_exceptions=True)

    assert [isinstance(result, SettingsError) for result in results].count(True) == 1, results


async def test_processes_that_share_a_store_introduce_it_once(dsn: str, tmp_path: Path) -> None:
    async with _engine(dsn, tmp_path) as one, _engine(dsn, tmp_path) as two:
        made = await asyncio.gather(put(one, b"x"), put(two, b"y"))

        assert await content(two, made[0]) == b"x"
        assert await content(one, made[1]) == b"y"


async def test_without_a_store_the_error_says_so(dsn: str) -> None:
    async with Engine(dsn) as engine:
        with pytest.raises(SettingsError, match="no artifact store"):
            await put(engine, b"x")
