"""The client, over a database and over HTTP: submit, read, wait, operate, follow events."""

import asyncio
from pathlib import Path

import psycopg
import pytest

from lineshaft import Dag, Lineshaft, NewTask, Task
from lineshaft.errors import DatabaseError, InvalidInputError, InvalidTransitionError, NotFoundError
from lineshaft.model.states import Status
from lineshaft.settings import Settings
from tests.client.helpers import engine_of, finish_all, kill_one


async def test_submit_and_read(shaft: Lineshaft) -> None:
    submitted = await shaft.submit(
        NewTask("research", spec={"prompt": "competitors"}, tags=["web"], idempotency_key="k")
    )

    task = await shaft.get(submitted)

    assert (task.type, task.status, task.spec) == ("research", Status.READY, {"prompt": "competitors"})
    again = await shaft.submit(
        NewTask("research", spec={"prompt": "competitors"}, tags=["web"], idempotency_key="k")
    )
    assert (again.id, again.duplicate) == (submitted.id, True)
    assert [found.id for found in (await shaft.list(type="research", tag=["web"])).items] == [submitted.id]
    assert (await shaft.list(status=Status.COMPLETED)).items == []
    assert (await shaft.why(submitted)).reasons[0].code == "no_capable_agent"


async def test_many_at_once_all_or_none(shaft: Lineshaft) -> None:
    submitted = await shaft.submit_many([NewTask("mail", spec={"n": n}) for n in range(200)])

    assert len({task.id for task in submitted}) == 200
    with pytest.raises(InvalidInputError, match=r"tasks\[1\]\.priority"):
        await shaft.submit_many([NewTask("other"), NewTask("other", priority=101)])
    assert (await shaft.list(type="other")).items == []


async def test_waiting_for_a_dag(shaft: Lineshaft) -> None:
    dag = await shaft.submit_dag(
        "Landing page",
        [NewTask("design", key="design"), NewTask("code", key="code", depends_on=["design"])],
        budget_ceiling_usd=5,
    )
    waiting = asyncio.create_task(shaft.wait(dag, 30))

    assert await finish_all(engine_of(shaft)) == 2

    ended = await waiting
    assert isinstance(ended, Dag)
    assert (ended.status, ended.counts) == ("completed", {"COMPLETED": 2})
    assert (await shaft.get_dag(dag)).title == "Landing page"


async def test_waiting_for_a_task_returns_its_result(shaft: Lineshaft) -> None:
    submitted = await shaft.submit(NewTask("sum"))
    waiting = [asyncio.create_task(shaft.wait(name, 30)) for name in (submitted.id, submitted.id)]

    await finish_all(engine_of(shaft), {"sum": 3})

    for task in await asyncio.gather(*waiting):
        assert isinstance(task, Task)
        assert (task.status, task.result) == (Status.COMPLETED, {"sum": 3})


async def test_waiting_for_the_dag_of_a_standalone_task(shaft: Lineshaft) -> None:
    submitted = await shaft.submit(NewTask("sum"))
    dag_id = (await shaft.get(submitted)).dag_id
    await finish_all(engine_of(shaft))

    ended = await shaft.wait(dag_id, 30)

    assert isinstance(ended, Dag)
    assert ended.status == "completed"


async def test_waiting_ends_with_a_dead_letter(shaft: Lineshaft) -> None:
    submitted = await shaft.submit(NewTask("sum"))
    await kill_one(engine_of(shaft))

    task = await shaft.wait(submitted, 30)

    assert (task.status, task.failure_category, task.result) == (
        Status.DEAD_LETTERED,
        "auth_failure",
        None,
    )


async def test_waiting_ends_after_the_timeout(shaft: Lineshaft) -> None:
    submitted = await shaft.submit(NewTask("sum"))

    with pytest.raises(TimeoutError, match=rf"{submitted.id} has not ended after \d+\.\d s"):
        await shaft.wait(submitted, 0.05)

    dag = await shaft.submit_dag("Sums", [NewTask("sum", key="one")])
    with pytest.raises(TimeoutError, match=rf"'lineshaft dag show {dag.id}'"):
        await dag.wait(0.05)


async def test_waiting_for_an_unknown_id_is_an_error(shaft: Lineshaft) -> None:
    submitted = await shaft.submit(NewTask("sum"))
    other = asyncio.create_task(shaft.wait(submitted, 30))

    with pytest.raises(NotFoundError, match="no task or DAG task_nope"):
        await shaft.wait("task_nope", 30)

    await finish_all(engine_of(shaft))
    assert (await other).status is Status.COMPLETED


async def test_waiting_for_more_tasks_than_one_request_may_name(shaft: Lineshaft) -> None:
    first, last = await shaft.submit_many([NewTask("sum"), NewTask("sum")])
    others = [f"task_nope{n}" for n in range(10_000)]

    found = await shaft._watch._states([first.id, *others, last.id])

    assert found == {first.id: "open", last.id: "open"} | dict.fromkeys(others, "unknown")


async def test_cancel_and_retry(shaft: Lineshaft) -> None:
    submitted = await shaft.submit(NewTask("sum"))

    cancelled = await shaft.cancel(submitted, "not needed")
    assert (cancelled.status, cancelled.cancel_reason) == (Status.CANCELLED, "not needed")
    assert (await shaft.retry(submitted)).status is Status.READY
    await finish_all(engine_of(shaft))
    with pytest.raises(InvalidTransitionError):
        await shaft.cancel(submitted)


async def test_events_are_followed_from_now(shaft: Lineshaft) -> None:
    before = await shaft.submit(NewTask("sum"))
    kinds: list[str] = []

    async def follow() -> None:
        async for event in shaft.events(kinds=["task.created", "task.completed"]):
            assert event.task_id != before.id or event.kind == "task.completed"
            kinds.append(event.kind)
            if kinds == ["task.created"]:
                await finish_all(engine_of(shaft))
            if "task.completed" in kinds:
                return

    following = asyncio.create_task(follow())
    # The first read determines the place in the feed; later events are delivered.
    while not kinds:
        await shaft.submit(NewTask("sum"))
        await asyncio.wait({following}, timeout=0.05)
        if kinds or following.done():
            break
    await asyncio.wait_for(following, 30)

    assert "task.completed" in kinds


async def test_events_so_far_and_from_a_cursor(shaft: Lineshaft) -> None:
    submitted = await shaft.submit(NewTask("sum"))
    await finish_all(engine_of(shaft))

    events = [event async for event in shaft.events(None, task_id=submitted.id, follow=False)]

    assert [event.kind for event in events] == [
        *("task.created", "task.ready", "task.claimed", "task.started", "task.validating", "task.completed"),
    ]
    rest = shaft.events(events[2].cursor, task_id=submitted.id, follow=False)
    assert [event.kind async for event in rest] == ["task.started", "task.validating", "task.completed"]


async def test_events_of_a_standalone_task_s_dag_are_its_task_s(shaft: Lineshaft) -> None:
    submitted = await shaft.submit(NewTask("sum"))
    dag_id = (await shaft.get(submitted)).dag_id

    events = [event async for event in shaft.events(None, dag_id=dag_id, follow=False)]

    assert [event.kind for event in events] == ["task.created", "task.ready", "dag.created"]


async def test_a_database_that_is_not_migrated_is_refused_with_the_command(empty_dsn: str) -> None:
    with pytest.raises(
        DatabaseError, match=r"migration 0001 schema is not applied\. Run 'lineshaft migrate up'"
    ):
        async with Lineshaft(empty_dsn):
            pass


async def test_a_newer_schema_that_breaks_this_version_is_refused(
    dsn: str, connection: psycopg.Connection
) -> None:
    connection.execute(
        "INSERT INTO lineshaft.migration (version, name, checksum, applied_at, breaks_older) "
        "VALUES (99, 'x', 'y', now(), true)"
    )

    with pytest.raises(DatabaseError, match=r"migration 0099.*Upgrade Lineshaft"):
        async with Lineshaft(dsn):
            pass


@pytest.mark.slow("starts a database server")
async def test_the_embedded_database_starts_automatically(tmp_path: Path) -> None:
    async with Lineshaft(settings=Settings(home=tmp_path / "home")) as shaft:
        submitted = await shaft.submit(NewTask("sum"))
        assert (await shaft.get(submitted)).status is Status.READY


async def test_using_it_before_open_is_an_error(dsn: str) -> None:
    with pytest.raises(DatabaseError, match="not open"):
        await Lineshaft(dsn).get("task_x")
