"""File sources: added, modified and deleted files fire once, also after a restart; links are refused."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lineshaft.duties import file_watcher
from lineshaft.duties.file_watcher import FileWatcher
from lineshaft.engine.engine import Engine
from lineshaft.errors import InvalidInputError
from lineshaft.sources.files import FolderError, allowed_root
from lineshaft.types.sources import NewSource, SourceFields
from tests.engine.sources.helpers import column, outcomes, put
from tests.world import World

TEMPLATE = {"task": {"type": "${event.change}", "spec": {"path": "${event.path}", "size": "${event.size}"}}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = Path(os.path.realpath(tmp_path)) / "inbox"
    made.mkdir()
    return made


def source(root: Path, **fields: Any) -> NewSource:
    given = {
        "name": "f",
        "kind": "files",
        "root": str(root),
        "patterns": ["**/*.csv"],
        "on": ["added", "modified", "deleted"],
        "debounce_ms": 0,
        "template": TEMPLATE,
    }
    return msgspec.convert({**given, **fields}, NewSource)


def made(world: World) -> list[str]:
    query = "SELECT type || ' ' || (spec->>'path') FROM lineshaft.task ORDER BY created_at, 1"
    return column(world, query)


async def look(world: World, root: Path, watcher: str = "server") -> dict[str, int]:
    counts, _, _ = await FileWatcher(world.engine.file_sources, [str(root)], watcher).look()
    return dict(counts)


async def test_changes_fire_once_per_path_and_content(world: World, root: Path) -> None:
    """R-223."""
    await put(world.engine, source(root))
    (root / "a.csv").write_text("1")
    (root / "deep").mkdir()
    (root / "deep" / "b.csv").write_text("1")
    (root / "c.txt").write_text("1")

    assert await look(world, root) == {"files created": 2}
    # A new watcher, as after a restart: what was seen is in the database.
    assert await look(world, root) == {}
    (root / "a.csv").write_text("2")
    (root / "deep" / "b.csv").unlink()
    assert await look(world, root) == {"files created": 2}
    (root / "a.csv").touch()
    assert await look(world, root) == {}, "the same content"
    (root / "a.csv").write_text("1")
    assert await look(world, root) == {"files duplicate": 1}, "once per path and content"

    assert sorted(made(world)) == ["added a.csv", "added deep/b.csv", "deleted deep/b.csv", "modified a.csv"]


async def test_what_changes_before_a_watcher_notices_the_source_fires(
    world: World, root: Path, dsn: str
) -> None:
    """What was there when the source was stored is recorded with it."""
    for name in ("same", "changed", "gone"):
        (root / f"{name}.csv").write_text("1")
    async with Engine(dsn, clock=world.clock, source_folders=[str(root)]) as engine:
        await put(engine, source(root))
        (root / "changed.csv").write_text("22")
        (root / "gone.csv").unlink()
        (root / "new.csv").write_text("1")

        assert await look(world, root) == {"files created": 4}
        assert sorted(made(world)) == [
            "added new.csv",
            "added same.csv",
            "deleted gone.csv",
            "modified changed.csv",
        ]
        assert await look(world, root) == {}

        # Another root is recorded as well.
        deep = root / "deep"
        deep.mkdir()
        (deep / "a.csv").write_text("1")
        await engine.sources.patch("f", SourceFields(root=str(deep), on=["deleted"]))
        (deep / "a.csv").unlink()
        await look(world, root)
        assert "deleted a.csv" in made(world)


async def test_a_root_that_is_not_watched_is_refused_where_folders_are_known(
    world: World, root: Path, dsn: str
) -> None:
    (root.parent / "link").symlink_to(root)
    async with Engine(dsn, clock=world.clock, source_folders=[]) as without:
        for folder, fault in ((str(root), "LINESHAFT_SOURCE_FOLDERS"), ("relative", "absolute")):
            with pytest.raises(InvalidInputError, match=fault):
                await without.sources.create(source(Path(folder)))
            with pytest.raises(InvalidInputError, match=fault):
                await without.sources.apply([source(Path(folder))], origin="file:a")
        assert await without.sources.apply([source(root)], origin="file:a", check_roots=False)
        assert "no process watches" in ((await without.sources.get("f")).fault or "")
        await without.sources.patch("f", SourceFields(enabled=False))
        await without.sources.delete("f")
        # A watcher on another machine has been there.
        await look(world, root, watcher="elsewhere")
        await without.sources.create(source(root, name="other"))
        assert (await without.sources.get("other")).fault is None
        world.clock.advance(3600)
        assert "no watcher has looked since" in ((await without.sources.get("other")).fault or "")
    async with Engine(dsn, clock=world.clock, source_folders=[str(root.parent)]) as engine:
        for name, fault in (("link", "symbolic link"), ("missing", "not a folder")):
            with pytest.raises(InvalidInputError, match=fault):
                await engine.sources.create(source(root.parent / name))
        await engine.sources.create(source(root))
    await asyncio.to_thread(root.rmdir)
    await look(world, root.parent)
    assert "is not a folder" in ((await world.engine.sources.get("f")).fault or "")


async def test_two_watchers_of_one_name_fire_once(world: World, root: Path) -> None:
    await put(world.engine, source(root))
    for n in range(10):
        (root / f"{n}.csv").write_text(str(n))

    await asyncio.gather(look(world, root), look(world, root))

    assert len(made(world)) == 10
    assert set(await outcomes(world.engine, "f")) == {"created"}


async def test_a_file_that_still_changes_is_left_until_it_is_settled(world: World, root: Path) -> None:
    await put(world.engine, source(root, debounce_ms=3_600_000))
    (root / "a.csv").write_text("1")
    watcher = FileWatcher(world.engine.file_sources, [str(root)])

    counts, roots, settling_sec = await watcher.look()
    assert (dict(counts), roots, settling_sec) == ({}, [root], 3600)
    os.utime(root / "a.csv", (0, 0))
    counts, _, settling_sec = await watcher.look()
    assert (dict(counts), settling_sec) == ({"files created": 1}, None)


async def test_only_the_changes_that_are_wanted_fire(world: World, root: Path) -> None:
    await put(world.engine, source(root, on=["modified"]))
    (root / "a.csv").write_text("1")
    assert await look(world, root) == {}
    (root / "a.csv").write_text("2")
    assert await look(world, root) == {"files created": 1}


async def test_links_are_not_followed(world: World, root: Path) -> None:
    secret = root.parent / "secret.csv"
    secret.write_text("hidden")
    (root / "link.csv").symlink_to(secret)
    (root / "folder").symlink_to(root.parent)
    await put(world.engine, source(root))

    assert await look(world, root) == {}


async def test_a_folder_that_isnt_allowed_is_not_watched(
    world: World, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "a.csv").write_text("1")
    link = root.parent / "link"
    link.symlink_to(root)
    await put(world.engine, source(root))
    watcher = FileWatcher(world.engine.file_sources, [str(root.parent / "other")])

    for _ in range(2):
        counts, roots, _ = await watcher.look()
        assert (dict(counts), roots) == ({}, [])
    assert caplog.text.count("is not in a folder of LINESHAFT_SOURCE_FOLDERS") == 1
    for bad, reason in (
        (str(link), "symbolic link"),
        ("inbox", "absolute path"),
        (f"{root}/../..", "not in"),
    ):
        with pytest.raises(FolderError, match=reason):
            allowed_root(bad, [str(root)])


class NotingLooks(FileWatcher, frozen=True):
    has_looked: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    async def look(self) -> Any:
        looked = await super().look()
        self.has_looked.set()
        return looked


async def test_a_change_wakes_the_watcher(world: World, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watcher, "_LOOK_AGAIN_SEC", 3600)
    await put(world.engine, source(root))
    watcher = NotingLooks(world.engine.file_sources, [str(root)])
    waiting = asyncio.create_task(watcher.run_once())
    await watcher.has_looked.wait()
    (root / "a.csv").write_text("1")

    async with asyncio.timeout(60):
        assert dict(await waiting) == {}

    assert await look(world, root) == {"files created": 1}


@pytest.mark.slow("starts a process")
async def test_the_command_watches_until_it_is_stopped(world: World, dsn: str, root: Path) -> None:
    await put(world.engine, source(root))
    (root / "before.csv").write_text("1")
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lineshaft.cli.main", "watch", "--folder", str(root), "--name", "elsewhere"),
        env=os.environ | {"LINESHAFT_DATABASE_URL": dsn},
    )
    async with asyncio.timeout(60):
        while "added before.csv" not in made(world):  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.05)
        (root / "later.csv").write_text("1")
        while "added later.csv" not in made(world):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
        command.terminate()
        assert await command.wait() == 0
    assert column(world, "SELECT DISTINCT watcher FROM lineshaft.file_seen") == ["elsewhere"]
