"""Decision reports, found again by words."""

from typing import Any

import msgspec
import pytest

from lineshaft.errors import InvalidInputError
from lineshaft.types.work import Completion
from tests.world import World, only, ref


async def reported(world: World, type_: str, **report: Any) -> str:
    """A completed task with a report."""
    task_id = await world.one(type_)
    task = await world.take(await world.agent(), types=[type_])
    item = Completion(ref(task), b"1", decision_report=msgspec.json.encode(report))
    only(await world.engine.work.complete([item])).unwrap()
    world.age(minutes=1)
    return task_id


async def found(world: World, query: str = "", **filters: Any) -> list[str]:
    return [report.task_id for report in (await world.engine.reports.search(query, **filters)).items]


async def test_reports_are_found_by_their_words(world: World) -> None:
    """R-093: stored, searchable."""
    cache = await reported(
        world, "perf", why="The page was slow", what="A cache in Redis", tradeoffs="stale data"
    )
    index = await reported(
        world, "perf", why="Slow queries", what=["an index"], tradeoffs={"disk": "more of it"}
    )
    naming = await reported(world, "style", why="Übersicht", what="renamed", tradeoffs="churn")
    await world.one("no report")
    await world.complete(await world.take(await world.agent(), types=["no report"]))

    assert await found(world, "slow") == [index, cache]
    assert await found(world, "SLOW page") == [cache]
    assert await found(world, '"cache in redis"') == [cache]
    assert await found(world, "redis or disk") == [cache]
    assert await found(world, "slow -redis") == [index]
    assert await found(world, "Übersicht") == [naming]
    assert await found(world, "nowhere") == []
    assert await found(world) == [naming, index, cache]
    assert await found(world, type_="style") == [naming]
    assert await found(world, dag_id=world.task(index)["dag_id"]) == [index]


async def test_what_is_shown_of_a_report(world: World) -> None:
    task_id = await reported(world, "perf", why="so", what="this", tradeoffs="none")

    (report,) = (await world.engine.reports.search("so")).items

    assert (report.task_id, report.type, report.agent_id is not None) == (task_id, "perf", True)
    assert report.decision_report == {"why": "so", "what": "this", "tradeoffs": "none"}


@pytest.mark.parametrize("query", ["", "same"])
async def test_page_by_page(world: World, query: str) -> None:
    ids = [await reported(world, "x", why="same", what=f"{n}", tradeoffs="none") for n in range(5)]
    listed: list[str] = []
    cursor = None
    for _ in range(3):
        page = await world.engine.reports.search(query, limit=2, cursor=cursor)
        listed += [report.task_id for report in page.items]
        cursor = page.next_cursor

    assert (listed, cursor) == (ids[::-1], None)


@pytest.mark.parametrize("query", ["' or 1=1 --", ":*", "&|!()", "<->", '"', "%_\\", "x" * 10_000])
async def test_queries_that_mean_harm_find_nothing(world: World, query: str) -> None:
    """Hostile input."""
    await reported(world, "perf", why="so", what="this", tradeoffs="none")

    assert await found(world, query) == []


async def test_texts_that_no_database_holds(world: World) -> None:
    """Hostile input: NUL and halves of characters."""
    for query in ("a\0b", "\ud800"):
        with pytest.raises(InvalidInputError, match="q: "):
            await found(world, query)


async def test_reports_with_words_of_any_length(world: World) -> None:
    """What can't be indexed is stored all the same."""
    task_id = await reported(world, "perf", why="w" * 60_000, what="findme", tradeoffs="none")

    assert await found(world, "findme") == [task_id]
