"""Dead letters: what they contain, and how they are found."""

from datetime import timedelta
from decimal import Decimal

import pytest

from lineshaft.duties.janitor import Janitor
from lineshaft.engine.feed.partitions import Partitions
from lineshaft.engine.read.tally import Tally
from lineshaft.errors import InvalidInputError, NotFoundError
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import DeadLetterFilter
from tests.world import World, cost


def decision(resolution: str, **fields: object) -> ResolutionRequest:
    return ResolutionRequest(**{"resolution": resolution, "reviewer": "ann", **fields})  # type: ignore[arg-type]


async def dead(world: World, type_: str = "code", error: str = "it broke", **fields: object) -> str:
    """A task that failed permanently at its first attempt."""
    task_id = await world.one(type_, max_attempts=1, **fields)
    task = await world.take(types=[type_])
    assert (task.id, await world.fail(task, error)) == (task_id, Status.DEAD_LETTERED)
    return task_id


async def ids(world: World, **filters: object) -> list[str]:
    page = await world.engine.dead_letters.find(DeadLetterFilter(**filters))  # type: ignore[arg-type]
    return [letter.task_id for letter in page.items]


async def test_an_entry_has_the_whole_history_and_what_it_cost(world: World) -> None:
    """R-110, R-111, R-130, U5: 0.12 + 0.31 + 0.08 = 0.51, to the cent."""
    one, two = await world.agent("coder_01"), await world.agent("coder_02")
    task_id = await world.one(spec={"prompt": "x"}, max_attempts=3)
    for agent, error, spent, seconds in (
        (one, "LLM returned invalid JSON", "0.12", 45),
        (two, "Test suite failed: 3 failures", "0.31", 120),
        (two, "Timeout after 300s", "0.08", 299),
    ):
        world.age(hours=1)
        await world.engine.maintenance.promote_due(10)
        task = await world.take(agent)
        world.age(seconds=seconds)
        await world.fail(task, error, spent=cost(spent))

    letter = await world.engine.dead_letters.get(task_id)

    assert [(f.attempt, f.agent, f.error, f.duration_sec, f.cost_usd) for f in letter.failure_history] == [
        (1, "coder_01", "LLM returned invalid JSON", 45, Decimal("0.12")),
        (2, "coder_02", "Test suite failed: 3 failures", 120, Decimal("0.31")),
        (3, "coder_02", "Timeout after 300s", 299, Decimal("0.08")),
    ]
    assert letter.total_cost_usd == Decimal("0.51")
    assert (letter.dag_id, letter.dead_lettered_at) == (world.task(task_id)["dag_id"], world.clock.now())
    assert (letter.reviewed, letter.resolution, letter.reviews) == (False, None, [])
    assert (letter.status, letter.error, letter.pattern) == (
        "DEAD_LETTERED",
        "Timeout after 300s",
        "Timeout after <n>s",
    )
    assert letter.spec == {"prompt": "x"}
    assert world.kinds(task_id)[-2:] == ["task.failed", "task.dead_lettered"]


async def test_each_retry_has_an_event_with_its_number_and_delay(world: World) -> None:
    """R-120: the first after 10 s, the second after 20."""
    task_id = await world.one(max_attempts=3)
    agent = await world.agent()
    for _ in range(2):
        world.age(hours=1)
        await world.engine.maintenance.promote_due(10)
        await world.fail(await world.take(agent), uniform=lambda: 0.5)

    query = (
        "SELECT data FROM lineshaft.events WHERE task_id = %s AND kind = 'task.retry_scheduled' ORDER BY seq"
    )
    failures = [row["data"] for row in world.rows(query, task_id)]

    assert [(data["attempt"], data["delay_sec"]) for data in failures] == [(1, 10), (2, 20)]


async def test_a_poison_pill_skips_the_attempts_that_are_left(world: World) -> None:
    """R-136, F-26: three failures, two agents; seven more attempts would only burn money."""
    task_id = await world.one(max_attempts=10)
    one, other = await world.agent(), await world.agent()
    statuses = []
    for agent in (one, other, other):
        world.age(hours=1)
        await world.engine.maintenance.promote_due(10)
        statuses.append(await world.fail(await world.take(agent)))

    assert statuses == ["RETRYING", "RETRYING", "DEAD_LETTERED"]
    letter = await world.engine.dead_letters.get(task_id)
    assert (letter.poison_pill, len(letter.failure_history)) == (True, 3)
    assert await ids(world, poison_pill=True) == [task_id]
    assert await ids(world, poison_pill=False) == []


async def test_one_agent_alone_makes_no_poison_pill(world: World) -> None:
    """R-136, F-26: it may be the agent."""
    task_id = await world.one(max_attempts=3)
    agent = await world.agent()
    for _ in range(3):
        world.age(hours=1)
        await world.engine.maintenance.promote_due(10)
        await world.fail(await world.take(agent))

    assert not (await world.engine.dead_letters.get(task_id)).poison_pill


async def test_filters(world: World) -> None:
    """R-137: any of several, all at once; percent signs are meant as they are."""
    json = await dead(world, "code", "invalid JSON at 7")
    world.age(seconds=1)
    full = await dead(world, "mail", "disk 100% full")
    world.age(seconds=1)
    denied = await world.one("code")
    await world.kill(await world.agent())

    assert await ids(world) == [denied, full, json]
    assert await ids(world, type=["code"]) == [denied, json]
    assert await ids(world, category=["auth_failure"]) == [denied]
    assert await ids(world, error_contains="Json") == [json]
    assert await ids(world, error_contains="100%") == [full]
    assert await ids(world, error_contains="1%f") == []
    assert await ids(world, pattern=["invalid JSON at <n>"]) == [json]
    assert await ids(world, task_ids=[json, full], type=["mail", "code"], category=["crash"]) == [full, json]
    await world.engine.dead_letters.resolve(full, decision("escalate"))
    assert await ids(world, reviewed=False) == [denied, json]
    assert await ids(world, reviewed=True) == [full]
    assert await ids(world, resolution=["escalate", "retry"]) == [full]
    assert await ids(world, dag_id=[world.task(json)["dag_id"]]) == [json]


@pytest.mark.parametrize(
    "filters",
    [{"type": ["\0"]}, {"error_contains": "\0"}, {"task_ids": ["\ud800"]}, {"resolution": ["forget"]}],
)
async def test_filters_that_make_no_sense_are_refused(world: World, filters: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(filters))):
        await ids(world, **filters)


async def test_pages_miss_and_double_nothing(world: World) -> None:
    """Though all failed at the same instant."""
    agent = await world.agent()
    expected = await world.submit(*(NewTask("code", max_attempts=1) for _ in range(7)))
    for task in await world.claim(agent, 7):
        await world.fail(task)

    found: list[str] = []
    cursor = None
    while True:
        page = await world.engine.dead_letters.find(limit=3, cursor=cursor)
        found += [letter.task_id for letter in page.items]
        if page.next_cursor is None:
            break
        cursor = page.next_cursor

    assert found == sorted(expected, reverse=True)
    with pytest.raises(InvalidInputError, match="cursor"):
        await world.engine.dead_letters.find(cursor="x")
    with pytest.raises(InvalidInputError, match="limit"):
        await world.engine.dead_letters.find(limit=0)


async def test_a_task_that_never_failed_permanently_has_no_dead_letter(world: World) -> None:
    task_id = await world.one()
    for name in (task_id, "task_nobody", "\0"):
        with pytest.raises(NotFoundError, match="no dead letter"):
            await world.engine.dead_letters.get(name)


async def test_like_errors_are_grouped(world: World) -> None:
    """R-137: one decision for ten thousand letters."""
    alike = []
    for n in range(3):
        world.age(seconds=1)
        alike.append(await dead(world, "code", f"timeout after {n} s on /srv/x{n}/y"))
    other = await dead(world, "mail", "no such mailbox")

    large, small = await world.engine.dead_letters.groups()

    assert (large.pattern, large.count, large.types) == ("timeout after <n> s on <path>", 3, ["code"])
    assert (large.task_ids, large.example) == (alike[::-1], "timeout after 2 s on /srv/x2/y")
    assert large.last_at - large.first_at == timedelta(seconds=2)
    assert (small.task_ids, small.categories) == ([other], ["crash"])
    assert [g.count for g in await world.engine.dead_letters.groups(types=["mail"])] == [1]
    result = await world.engine.dead_letters.resolve_all(
        DeadLetterFilter(pattern=[large.pattern]), decision("retry")
    )
    assert len(result.resolved) == 3
    assert [g.pattern for g in await world.engine.dead_letters.groups()] == ["no such mailbox"]


async def test_each_time_a_task_dies_is_an_entry_of_its_own(world: World) -> None:
    """R-133: the history goes on, with the number of the revival."""
    agent = await world.agent()
    task_id = await world.one(max_attempts=1)
    await world.fail(await world.take(agent), "first")
    await world.engine.revive.retry(task_id)
    world.age(seconds=1)
    await world.fail(await world.take(agent), "second")

    page = await world.engine.dead_letters.find()

    assert [(letter.revival, letter.error, letter.reviewed) for letter in page.items] == [
        (1, "second", False),
        (0, "first", True),
    ]
    assert [[f.error for f in letter.failure_history] for letter in page.items] == [
        ["first", "second"],
        ["first"],
    ]
    assert [(f.revival, f.attempt) for f in page.items[0].failure_history] == [(0, 1), (1, 1)]


async def test_a_batch_can_die_more_than_once(world: World) -> None:
    """R-193: a batch is never claimed, so its epoch is always the same."""
    agent = await world.agent()
    batch = await world.one("batch", children=[NewTask("one", max_attempts=1)])
    for _ in range(2):
        await world.fail(await world.take(agent))
        assert world.status(batch) == "DEAD_LETTERED"
        await world.engine.dead_letters.resolve(batch, decision("retry"))

    deaths = (await world.engine.dead_letters.find(DeadLetterFilter(task_ids=[batch]))).items
    assert [(letter.revival, letter.category) for letter in deaths] == [(1, "dependency"), (0, "dependency")]


async def test_retention_leaves_what_was_ever_dead(world: World) -> None:
    """R-131, U5: whatever was decided about it."""
    agent = await world.agent()
    kept = [await dead(world) for _ in range(3)]
    dead_letters = world.engine.dead_letters
    await dead_letters.resolve(kept[0], decision("cancel"))
    await dead_letters.resolve(kept[1], decision("delete"))
    gone = await world.one()
    await world.complete(await world.take(agent))
    world.age(days=400)

    partitions, tally = Partitions(world.engine.database), Tally(world.engine.database)
    engine = world.engine
    await Janitor(
        engine.maintenance,
        engine.fleet,
        partitions,
        tally,
        engine.sources,
        engine.sessions,
        keep_tasks=timedelta(days=1),
    ).run_once()

    assert world.rows("SELECT id FROM lineshaft.task WHERE id = %s", gone) == []
    assert set(kept) == set(await ids(world, hidden=True))
    assert all(letter.failure_history for letter in (await dead_letters.find()).items)
