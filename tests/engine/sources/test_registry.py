"""The registry: create, replace, change, delete, list and apply sources."""

import asyncio

import pytest

from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.actor import acting_as
from lineshaft.engine.sources.firing import Occasion
from lineshaft.errors import AlreadyExistsError, InvalidInputError, InvalidTransitionError, NotFoundError
from lineshaft.types.sources import SourceFields
from tests.engine.sources.helpers import column, put, schedule, webhook
from tests.world import World


def kinds(world: World) -> list[str]:
    return column(world, "SELECT kinds[1] FROM lineshaft.event WHERE kinds[1] LIKE 'source%%' ORDER BY seq")


async def test_a_source_is_created_read_changed_and_deleted(world: World) -> None:
    sources = world.engine.sources

    with acting_as("ann"):
        made = await sources.create(schedule(cron="0 9 * * MON", timezone="Europe/Berlin"))
    assert (made.cron, made.timezone, made.catch_up, made.is_enabled) == (
        "0 9 * * MON",
        "Europe/Berlin",
        "one",
        True,
    )
    # It is Sunday; Monday's nine o'clock in Berlin is eight in UTC.
    assert str(made.next_at) == "2026-02-09 08:00:00+00:00"
    with pytest.raises(AlreadyExistsError, match="source 's' already"):
        await sources.create(schedule())

    paused = await sources.patch("s", SourceFields(enabled=False))
    assert (paused.is_enabled, paused.next_at) == (False, None)
    changed = await sources.patch("s", SourceFields(enabled=True, cron=None, every_sec=90.0))
    assert (changed.is_enabled, changed.every_sec) == (True, 90)
    with pytest.raises(InvalidInputError, match="timezone: unknown time zone"):
        await sources.patch("s", SourceFields(timezone="Mars/Base"))
    assert await sources.get("s") == changed

    await sources.delete("s")
    with pytest.raises(NotFoundError, match="no source 's'"):
        await sources.get("s")
    with pytest.raises(NotFoundError):
        await sources.delete("s")
    assert kinds(world) == ["source.created", "source.changed", "source.changed", "source.deleted"]
    (data,) = column(world, "SELECT data FROM lineshaft.event WHERE 'source.created' = ANY (kinds)")
    assert data == {"source": "s", "kind": "schedule", "actor": "ann"}


async def test_replacing_a_source_keeps_its_age_and_its_pause(world: World) -> None:
    sources = world.engine.sources
    first, made = await sources.put(schedule())
    world.clock.advance(30)
    await sources.patch("s", SourceFields(enabled=False))

    second, made_again = await sources.put(schedule(max_open=3))
    third, _ = await sources.put(schedule(max_open=3))
    fourth, _ = await sources.put(schedule(max_open=3, enabled=True))

    assert (made, made_again) == (True, False)
    assert (second.created_at, second.max_open, second.is_enabled) == (first.created_at, 3, False)
    assert third == second
    assert (fourth.is_enabled, fourth.next_at) == (True, first.next_at)
    assert kinds(world) == ["source.created"] + ["source.changed"] * 3


async def test_a_change_of_a_version_that_is_gone_is_refused(world: World) -> None:
    sources = world.engine.sources
    first = await sources.create(schedule())
    await sources.put(schedule(), version=first.version)
    assert (await sources.get("s")).version == first.version, "nothing was changed"
    paused = await sources.patch("s", SourceFields(enabled=False), version=first.version)
    with pytest.raises(InvalidTransitionError, match="Source 's' was changed at 2026-02-08 09:00:00 UTC"):
        await sources.put(schedule(max_open=3), version=first.version)
    await sources.delete("s")
    # One that is created again is another one, and replacing a version creates nothing.
    with pytest.raises(NotFoundError):
        await sources.put(schedule(), version=paused.version)
    again = await sources.create(schedule())
    assert again.version > paused.version


async def test_sources_are_listed_by_name(engine: Engine) -> None:
    for name in ("b", "a", "c"):
        await put(engine, schedule(name))
    await put(engine, webhook("hook"))

    page = await engine.sources.find(limit=2)
    rest = await engine.sources.find(limit=2, cursor=page.next_cursor)

    assert [source.name for source in page.items + rest.items] == ["a", "b", "c", "hook"]
    assert rest.next_cursor is None
    assert [source.name for source in (await engine.sources.find(kind="webhook")).items] == ["hook"]
    with pytest.raises(InvalidInputError, match="kind: must be one of"):
        await engine.sources.find(kind="nope")


async def test_firings_are_listed_newest_first(engine: Engine) -> None:
    await put(engine, webhook(when="event.go"))
    for go in (True, False, True):
        await engine.firings.fire("w", _occasion(go))

    page = await engine.sources.firings("w", limit=2)
    rest = await engine.sources.firings("w", limit=2, cursor=page.next_cursor)

    assert [firing.outcome for firing in page.items + rest.items] == ["created", "filtered", "created"]
    with pytest.raises(NotFoundError):
        await engine.sources.firings("nope")


async def test_a_file_is_applied_with_its_differences(world: World) -> None:
    sources = world.engine.sources
    await put(world.engine, schedule("by-hand"))
    await sources.apply([schedule("other")], origin="file:other.yaml")

    first = await sources.apply([schedule("a"), schedule("b")], origin="file:f.yaml")
    same = await sources.apply([schedule("a"), schedule("b")], origin="file:f.yaml")
    plan = await sources.apply([schedule("a", max_open=2)], origin="file:f.yaml", dry_run=True)
    before = await sources.get("b")
    done = await sources.apply([schedule("a", max_open=2)], origin="file:f.yaml")

    assert [(each.name, each.change) for each in first] == [("a", "create"), ("b", "create")]
    assert {each.change for each in same} == {"unchanged"}
    assert [(each.name, each.change, dict(each.fields)) for each in plan] == [
        ("a", "change", {"max_open": (None, 2)}),
        ("b", "remove", {}),
    ]
    assert before.origin == "file:f.yaml"
    assert done == plan
    assert [source.name for source in (await sources.find()).items] == ["a", "by-hand", "other"]


async def test_what_a_person_changed_survives_an_unchanged_file(world: World) -> None:
    sources = world.engine.sources
    await sources.apply([schedule("a")], origin="file:f")
    await sources.patch("a", SourceFields(enabled=False, max_open=9))

    (change,) = await sources.apply([schedule("a")], origin="file:f")
    assert change.change == "unchanged"
    assert (await sources.get("a")).max_open == 9
    await sources.apply([schedule("a", every_sec=120.0)], origin="file:f")

    found = await sources.get("a")
    assert (found.every_sec, found.max_open, found.is_enabled) == (120, None, False), "the pause survives"


async def test_a_file_with_a_fault_changes_nothing(engine: Engine) -> None:
    with pytest.raises(InvalidInputError, match=r"sources\[1\]\.cron: must have five fields"):
        await engine.sources.apply([schedule("a"), schedule("b", cron="x")], origin="file:f")
    with pytest.raises(InvalidInputError, match=r"sources\[1\]\.name: 'a' is used twice"):
        await engine.sources.apply([schedule("a", cron="x"), schedule("a")], origin="file:f")
    with pytest.raises(InvalidInputError, match=r"sources\[1\]\.name: 'a' is used twice"):
        await engine.sources.apply([schedule("a"), schedule("a")], origin="file:f")
    assert (await engine.sources.find()).items == []


async def test_two_servers_apply_the_same_file_at_once(world: World, dsn: str) -> None:
    async with Engine(dsn) as other:
        files = [schedule(f"s{n}") for n in range(10)]
        both = await asyncio.gather(
            world.engine.sources.apply(files, origin="file:f"), other.sources.apply(files, origin="file:f")
        )

    assert sorted({each.change for each in one} == {"create"} for one in both) == [False, True]
    assert kinds(world) == ["source.created"] * 10


async def test_an_agent_applies_its_schedule(engine: Engine) -> None:
    await engine.sources.put(schedule("agent:a/daily"), origin="agent")
    await engine.sources.patch("agent:a/daily", SourceFields(every_sec=300.0))

    again, _ = await engine.sources.put(schedule("agent:a/daily"), origin="agent")
    assert (again.origin, again.every_sec) == ("agent", 300), "unchanged in the program, so a person's stays"


def _occasion(go: bool) -> Occasion:
    return Occasion({"go": go})


async def test_a_source_that_a_newer_version_has_stored_still_fires(world: World) -> None:
    await put(world.engine, webhook())
    world.connection.execute(
        "UPDATE lineshaft.source SET definition = definition || '{\"made_up_later\": 1}'"
    )

    assert (await world.engine.firings.fire("w", Occasion({}, []))).outcome == "created"
    assert (await world.engine.sources.get("w")).name == "w"
