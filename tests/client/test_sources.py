"""`shaft.sources`, over both transports, and schedules that an agent declares."""

import asyncio
from datetime import timedelta

import pytest

from lineshaft import (
    Agent,
    Lineshaft,
    NewSource,
    SourceKind,
    SyncLineshaft,
)
from lineshaft.errors import AlreadyExistsError, InvalidInputError, InvalidTransitionError, NotFoundError
from lineshaft.types import Source, SourceFields, Verification
from tests.client.helpers import engine_of

WEEKLY = NewSource(
    name="weekly",
    kind=SourceKind.SCHEDULE,
    cron="0 9 * * MON",
    template={"task": {"type": "report", "spec": {"n": "${event.n}"}}},
)


async def declared(shaft: Lineshaft, number: int) -> list[Source]:
    """The sources, once there are so many: there is no signal for it."""
    async with asyncio.timeout(60):
        while len(items := (await shaft.sources.list()).items) < number:  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)
    return items


async def test_sources(shaft: Lineshaft) -> None:
    made = await shaft.sources.create(WEEKLY)
    assert (made.name, made.cron, made.is_enabled, made.timezone) == ("weekly", "0 9 * * MON", True, "UTC")
    with pytest.raises(AlreadyExistsError):
        await shaft.sources.create(WEEKLY)
    assert await shaft.sources.put(WEEKLY) == made == await shaft.sources.get("weekly")
    changed = await shaft.sources.patch("weekly", SourceFields(max_open=2), version=made.version)
    with pytest.raises(InvalidTransitionError, match=f"has version {changed.version}"):
        await shaft.sources.put(WEEKLY, version=made.version)
    with pytest.raises(InvalidTransitionError, match="repeat your change"):
        await shaft.sources.patch("weekly", SourceFields(max_open=3), version=made.version)
    made = await shaft.sources.put(WEEKLY, version=changed.version)
    assert made.max_open is None
    hook = NewSource(
        name="hook",
        kind=SourceKind.WEBHOOK,
        verify=Verification(scheme="github", secret_env="LINESHAFT_HOOK_SECRET"),
        template={"goal": "${event.x}"},
    )
    await shaft.sources.put(hook)
    page = await shaft.sources.list(limit=1)
    rest = await shaft.sources.list(limit=1, cursor=page.next_cursor)
    assert [source.name for source in page.items + rest.items] == ["hook", "weekly"]

    preview = await shaft.sources.fire("weekly", {"n": 5}, dry_run=True)
    assert preview.tasks == [{"type": "report", "spec": {"n": 5}, "created_by": "cron:weekly"}]
    fired = await shaft.sources.fire("weekly", {"n": 5})
    assert isinstance(fired.task_ids, list)
    assert (await shaft.get(fired.task_ids[0])).spec == {"n": 5}
    (firing,) = (await shaft.sources.firings("weekly")).items
    assert (firing.outcome, firing.task_ids) == ("created", fired.task_ids)

    changed = await shaft.sources.patch("weekly", SourceFields(enabled=False))
    assert (changed.is_enabled, changed.open_tasks) == (False, 1)
    with pytest.raises(InvalidInputError, match="cron: must have five fields"):
        await shaft.sources.patch("weekly", SourceFields(cron="x"))
    plan = await shaft.sources.apply([WEEKLY], origin="file:f.yaml", dry_run=True)
    assert [(each.name, each.change) for each in plan] == [("weekly", "change")] or plan[0].fields == {}
    await shaft.sources.delete("weekly")
    with pytest.raises(NotFoundError, match="no source 'weekly'"):
        await shaft.sources.get("weekly")


def test_the_blocking_twin(where: str) -> None:
    with SyncLineshaft(where) as shaft:
        shaft.sources.put(WEEKLY)
        assert [source.name for source in shaft.sources.list().items] == ["weekly"]
        assert shaft.sources.fire("weekly", {"n": 1}).outcome == "created"
        assert len(shaft.sources.firings("weekly").items) == 1
        assert not shaft.sources.patch("weekly", SourceFields(enabled=False)).is_enabled
        changes = shaft.sources.apply([], origin="file:f.yaml")
        assert list(changes) == []
        shaft.sources.delete("weekly")


async def test_an_agent_declares_its_schedules(shaft: Lineshaft) -> None:
    agent = Agent("clerk")
    done = asyncio.Event()
    seen: list[str] = []

    @agent.every("0 9 * * MON", timezone="Europe/Berlin", spec={"topic": "${literal}"}, priority=7)
    async def weekly(topic: str) -> str:
        seen.append(topic)
        done.set()
        return topic

    @agent.every(timedelta(hours=1), name="cleanup")
    @agent.task("clean")
    async def clean() -> None: ...

    assert agent.task_types == ("weekly", "clean")
    assert await weekly("x") == "x"
    seen.clear()
    done.clear()
    running = asyncio.create_task(agent.run(shaft, handle_signals=False))
    items = await declared(shaft, 2)
    assert [(source.name, source.origin) for source in items] == [
        ("agent:clerk/cleanup", "agent"),
        ("agent:clerk/weekly", "agent"),
    ]
    assert (items[0].every_sec, items[1].timezone) == (3600, "Europe/Berlin")
    fired = await shaft.sources.fire("agent:clerk/weekly")
    async with asyncio.timeout(60):
        await done.wait()
    assert seen == ["${literal}"]
    assert isinstance(fired.task_ids, list)
    task = await shaft.get(fired.task_ids[0])
    assert (task.type, task.priority, task.created_by) == ("weekly", 7, "cron:agent:clerk/weekly")
    agent.stop()
    await running


@pytest.mark.database_only("moves the tick of the schedule in the database")
async def test_without_a_server_agents_fire_schedules_themselves(shaft: Lineshaft) -> None:
    agent = Agent("alone", poll_interval_sec=0.2)
    done = asyncio.Event()

    @agent.every("@daily")
    async def daily() -> None:
        done.set()

    running = asyncio.create_task(agent.run(shaft, handle_signals=False))
    database = engine_of(shaft).database
    async with asyncio.timeout(60):
        await declared(shaft, 1)
        async with database.connection() as connection:
            await connection.execute(
                "UPDATE lineshaft.source SET next_tick = now() - interval '1 s',"
                " next_at = now() - interval '1 s'"
            )
        await done.wait()
    agent.stop()
    await running


def test_a_schedule_needs_an_agent_with_an_id() -> None:
    with pytest.raises(ValueError, match="an agent with an id"):
        Agent().every("@daily")
