"""Notifications: every event of a configured kind arrives once, through crashes and outages."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace
from psycopg.types.json import Jsonb

from lineshaft.clock import MovableClock
from lineshaft.duties.deliverer import Deliverer
from lineshaft.duties.offline_detector import OfflineDetector
from lineshaft.duties.supervisor import all_duties, supervise
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed import outbox as outbox_module
from lineshaft.engine.feed.outbox import Outbox, Throttle
from lineshaft.engine.sources.firing import Occasion
from lineshaft.integrations.notify import DeliveryError, Destination, Sender
from lineshaft.integrations.notify.review_log import ReviewLog
from lineshaft.integrations.notify.webhook import Webhook
from lineshaft.model.notices import DEFAULT_KINDS, NoticeKind, Notification
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.tasks import NewTask
from lineshaft.settings import Settings
from tests.engine.sources.helpers import webhook
from tests.integrations.receiver import receiving
from tests.world import World

FREELY = Throttle(most=None)


@dataclass
class Mailbox:
    """A destination of the test: stores messages, and fails as often as configured."""

    got: list[Notification] = field(default_factory=list)
    refusals: list[Exception] = field(default_factory=list)

    async def send(self, message: Notification) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.got.append(message)

    @property
    def texts(self) -> list[str]:
        return [line for message in self.got for line in message.text.splitlines()]


def destination(
    sender: Sender,
    name: str = "ops",
    kinds: Iterable[NoticeKind] = DEFAULT_KINDS,
    throttle: Throttle = FREELY,
) -> Destination:
    return Destination(name, sender, frozenset(kinds), throttle)


def deliverer(engine: Engine, to: Destination) -> Deliverer:
    return Deliverer(Outbox(engine.database), to, uniform=lambda: 0.5)


@asynccontextmanager
async def begun(engine: Engine, to: Destination) -> AsyncIterator[Deliverer]:
    """A deliverer for events from now on."""
    duty = deliverer(engine, to)
    await duty.run_once()
    yield duty


def happen(connection: psycopg.Connection, clock: MovableClock, kind: str, **values: Any) -> None:
    connection.execute(
        "INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, data)"
        " VALUES (%s, %s, %s, %s, %s, %s)",
        [
            clock.now(),
            [kind],
            *(values.get(name) for name in ("task_id", "dag_id", "agent_id")),
            Jsonb(values.get("data")),
        ],
    )


def alerts(connection: psycopg.Connection, clock: MovableClock, *texts: str) -> None:
    for text in texts:
        happen(connection, clock, "alert", data={"message": text})


async def test_the_notices_of_a_fleet(
    world: World, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-111, R-135, R-136: all of it from the event log."""
    box = Mailbox()
    async with begun(world.engine, destination(box)) as duty:
        one, two = await world.agent("one"), await world.agent("two")
        dag = await world.engine.submission.submit_dag(
            "d", [NewTask("a", key="a"), NewTask("b", depends_on=["a"])]
        )
        await world.kill(one)
        poison = await world.one("poison", max_attempts=10)
        for agent in (one, two, two):
            clock.advance(3_600)
            await world.engine.maintenance.promote_due(10)
            await world.fail(await world.take(agent))
        happen(connection, clock, "breaker.opened", data={"key": "code"})
        happen(connection, clock, "budget.blocked", dag_id="dag_x")
        happen(connection, clock, "approval.waiting", task_id="task_x")
        alerts(connection, clock, "look")
        clock.advance(600)
        await OfflineDetector(world.engine.fleet).run_once()

        counts = await duty.run_once()

    kinds = [message.kind.value for message in box.got]
    assert kinds == [
        *("dead_letter", "dag_failed", "poison_pill", "breaker_opened", "budget_blocked", "approval_waiting"),
        *("alert", "agent_offline", "agent_offline"),
    ]
    assert box.got[0].notices[0].task_id == dag.tasks["a"].id
    assert box.got[2].notices[0].task_id == poison
    assert counts["delivered"] == counts["collected"] == 9
    assert (await duty.run_once())["delivered"] == 0


async def test_end_to_end_by_a_signed_webhook(world: World) -> None:
    """R-135: from a failed task to a request that a server got."""
    with receiving() as receiver:
        hook = Webhook(receiver.url, b"0123456789abcdef")
        async with begun(world.engine, destination(hook)) as duty:
            await world.one()
            task_id = await world.kill(await world.agent("ann"))
            receiver.answers = [500]
            assert (await duty.run_once())["not delivered"] == 1
            world.engine.database._clock.advance(60)  # type: ignore[attr-defined]
            assert (await duty.run_once())["delivered"] == 1

    first, second = receiver.got
    assert (first.json["notices"][0]["task_id"], first.json["kind"]) == (task_id, "dead_letter")
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body


@pytest.mark.slow("many nodes")
async def test_many_nodes_send_each_notice_once(
    engine: Engine, dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """None is lost or repeated while new events arrive."""
    box = Mailbox()
    async with begun(engine, destination(box)), Engine(dsn, clock=clock) as other:
        nodes = [deliverer(each, destination(box)) for each in (engine, other, engine, other)]
        expected = []
        for n in range(20):
            texts = [f"{n}.{m}" for m in range(5)]
            expected += texts
            alerts(connection, clock, *texts)
            await asyncio.gather(*(node.run_once() for node in nodes))
        while any((await nodes[0].run_once()).values()):
            pass

    assert sorted(box.texts) == sorted(expected)


async def test_an_event_that_commits_late_is_delivered(
    engine: Engine, dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """Numbers are assigned before the commit, so a later one may become visible first."""
    box = Mailbox()
    async with begun(engine, destination(box)) as duty:
        with psycopg.connect(dsn) as slow:
            alerts(slow, clock, "late")
            alerts(connection, clock, "early")
            await duty.run_once()
            assert box.texts == ["early"]
            slow.commit()
        await duty.run_once()

    assert box.texts == ["early", "late"]


async def test_a_new_destination_gets_only_new_events(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    alerts(connection, clock, "old")
    box = Mailbox()
    async with begun(engine, destination(box)) as duty:
        alerts(connection, clock, "new")
        await duty.run_once()

    assert box.texts == ["new"]


async def test_another_node_takes_over_a_message_of_a_dead_one(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """After the lease, with the same id; a late result of the dead node doesn't count."""
    box = Mailbox()
    async with begun(engine, destination(box)) as duty:
        alerts(connection, clock, "x")
        outbox = Outbox(engine.database)
        await outbox.collect("ops", DEFAULT_KINDS)
        (lost,) = await outbox.take("ops", FREELY, most=5)
        clock.advance(59)
        assert (await duty.run_once())["delivered"] == 0
        clock.advance(2)
        box.refusals.append(DeliveryError("answered 500"))
        assert (await duty.run_once())["not delivered"] == 1
        await outbox.delivered(lost)
        clock.advance(60)
        assert (await duty.run_once())["delivered"] == 1

    assert [message.id for message in box.got] == [lost.message.id]


async def test_retries_have_growing_delays(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    box = Mailbox(refusals=[DeliveryError("answered 500")] * 3)
    async with begun(engine, destination(box)) as duty:
        alerts(connection, clock, "x")
        await duty.run_once()
        waits = []
        while not box.texts:
            row = connection.execute(
                "SELECT due_at, last_error FROM lineshaft.notification WHERE done_at IS NULL"
            ).fetchone()
            assert row is not None
            assert row[1] == "answered 500"
            wait = (row[0] - clock.now()).total_seconds()
            waits.append(wait)
            clock.advance(wait - 1)
            assert (await duty.run_once())["not delivered"] == 0
            clock.advance(1)
            await duty.run_once()

    assert waits == [5, 10, 20]
    assert box.texts == ["x"]


def with_patience(to: Destination) -> Destination:
    """Longer than the test waits."""
    assert isinstance(to.sender, Webhook)
    return replace(to, sender=dataclasses.replace(to.sender, timeout_sec=600))


async def test_a_destination_that_hangs_does_not_delay_others(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock, tmp_path: Path
) -> None:
    hangs, delivered = asyncio.Event(), asyncio.Semaphore(0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/hanging" in await reader.readline():
            hangs.set()
            await reader.read()  # until the other one gives up
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            delivered.release()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        path = tmp_path / "notifications.yaml"
        hook = "{name: %s, type: webhook, url: '%s/%s', secret: 0123456789abcdef}"
        hooks = ",".join(hook % (name, url, name) for name in ("hanging", "fine"))
        path.write_text(f"destinations: [{hooks}]")
        duties = [
            replace(duty, interval_sec=0.01, destination=with_patience(duty.destination))
            for duty in all_duties(engine, Settings(notifications=path))
            if isinstance(duty, Deliverer)
        ]
        for duty in duties:
            await duty.run_once()
        alerts(connection, clock, "first")
        running = asyncio.create_task(supervise(duties, asyncio.Event()))
        try:
            async with asyncio.timeout(60):
                await hangs.wait()
                await delivered.acquire()
                alerts(connection, clock, "second")
                await delivered.acquire()
        finally:
            running.cancel()
            await asyncio.wait({running})


@pytest.mark.slow("hundreds of attempts")
async def test_after_half_a_day_a_message_is_given_up(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The row keeps the cause for a week."""
    box = Mailbox(refusals=[DeliveryError("answered 410")] * 20)
    async with begun(engine, destination(box)) as duty:
        alerts(connection, clock, "x")
        began = clock.now()
        while box.refusals:
            await duty.run_once()
            clock.advance(60)
        took = clock.now() - began
        assert "giving up: answered 410" in caplog.text
        row = connection.execute("SELECT given_up, tries, last_error FROM lineshaft.notification").fetchone()
        assert row == (True, 20, "answered 410")
        alerts(connection, clock, "y")
        await duty.run_once()
        assert box.texts == ["y"]
        clock.advance(8 * 86_400)
        assert (await duty.run_once())["deleted"] == 2

    assert 8 < took.total_seconds() / 3_600 < 16


async def test_too_many_notices_of_a_kind_are_combined(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """At most three messages of a kind per minute; no notice is dropped, and no other kind is delayed."""
    box = Mailbox()
    async with begun(engine, destination(box, throttle=Throttle(3, 60))) as duty:
        alerts(connection, clock, *(f"a{n}" for n in range(8)))
        await duty.run_once()
        assert [message.count for message in box.got] == [1, 1, 6]
        alerts(connection, clock, *(f"b{n}" for n in range(4)))
        happen(connection, clock, "dag.failed", dag_id="d")
        clock.advance(30)
        await duty.run_once()
        assert [message.kind for message in box.got[3:]] == ["dag_failed"]
        clock.advance(31)
        await duty.run_once()

    assert [message.count for message in box.got[4:]] == [1, 1, 2]
    texts = sorted(text for text in box.texts if not text.startswith("DAG"))
    assert texts == [*(f"a{n}" for n in range(8)), *(f"b{n}" for n in range(4))]


async def test_a_failed_digest_is_sent_again_unchanged(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock
) -> None:
    box = Mailbox(refusals=[DeliveryError("answered 500")])
    async with begun(engine, destination(box, throttle=Throttle(1, 60))) as duty:
        alerts(connection, clock, "a", "b")
        await duty.run_once()
        alerts(connection, clock, "c")
        clock.advance(10)
        await duty.run_once()
        assert box.texts == ["a", "b"]
        clock.advance(60)
        await duty.run_once()

    assert [message.text for message in box.got] == ["a\nb", "c"]


async def test_the_outbox_is_bounded(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A destination that is down for long doesn't fill the outbox, and misses nothing."""
    monkeypatch.setattr(outbox_module, "MAX_WAITING", 4)
    monkeypatch.setattr(outbox_module, "_PAGE", 3)
    box = Mailbox(refusals=[DeliveryError("answered 500")] * 6)
    async with begun(engine, destination(box)) as duty:
        alerts(connection, clock, *map(str, range(20)))
        assert (await duty.run_once())["collected"] == 6
        assert (await duty.run_once())["collected"] == 0
        for _ in range(20):
            clock.advance(60)
            await duty.run_once()

    assert sorted(box.texts, key=int) == [str(n) for n in range(20)]


async def test_events_deleted_before_they_were_read(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    box = Mailbox()
    async with begun(engine, destination(box)) as duty:
        connection.execute("SELECT pg_current_xact_id()")
        connection.execute(
            "INSERT INTO lineshaft.event_horizon (xid, at) VALUES (pg_current_xact_id(), %s)", [clock.now()]
        )
        alerts(connection, clock, "after")
        await duty.run_once()

    assert box.texts == ["after"]
    assert "deleted before they were read" in caplog.text


async def test_a_failing_sender_reveals_no_secret(
    engine: Engine, connection: psycopg.Connection, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in logs, the database or events."""
    caplog.set_level(logging.DEBUG)
    box = Mailbox(refusals=[ValueError("https://x.example/s3cret")])
    hook = Webhook("http://127.0.0.1:1/s3cret?key=s3cret", b"s3cret-s3cret-s3cret")
    async with begun(engine, destination(box)) as one, begun(engine, destination(hook, "hook")) as other:
        alerts(connection, clock, "x")
        for duty in (one, other):
            assert (await duty.run_once())["not delivered"] == 1

    rows = connection.execute("SELECT to_jsonb(n)::text FROM lineshaft.notification AS n").fetchall()
    events = connection.execute("SELECT to_jsonb(e)::text FROM lineshaft.event AS e").fetchall()
    assert "the sender failed with ValueError" in caplog.text
    assert "s3cret" not in caplog.text + repr(rows) + repr(events) + repr([one, other])


async def test_decisions_reach_the_review_log(world: World, clock: MovableClock, tmp_path: Path) -> None:
    """R-134: every decision by any interface, and manual retries."""
    log = destination(ReviewLog(tmp_path), "desk", [NoticeKind.REVIEW])
    async with begun(world.engine, log) as duty:
        agent = await world.agent("ann")
        decisions = {"retry": "back", "cancel": "old", "escalate": "ask"}
        for resolution, note in decisions.items():
            await world.one(resolution)
            task_id = await world.kill(agent)
            await world.engine.dead_letters.resolve(
                task_id, ResolutionRequest(resolution=resolution, reviewer="ann", note=note)
            )
            if resolution == "retry":
                await world.engine.cancel.cancel(task_id, "enough")
        await world.one("hand")
        await world.engine.revive.retry(await world.kill(agent))
        await duty.run_once()
        await duty.run_once()

    text = (tmp_path / f"dlq-review-{clock.now().date()}.md").read_text()
    assert [line.split(": ")[1] for line in text.splitlines() if line.startswith("## ")] == [
        *decisions,
        "retry",
    ]
    assert "- note: ask\n- category: auth_failure\n- error: no access\n" in text
    assert "none, retried manually" in text


async def test_the_supervisor_reads_the_operators_file(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "notifications.yaml"
    path.write_text("destinations: [{name: desk, type: review-log, folder: logs}]")

    names = {duty.name for duty in all_duties(engine, Settings(notifications=path))}

    assert names - {duty.name for duty in all_duties(engine, Settings())} == {"deliverer to desk"}


async def test_work_of_some_sources_that_has_ended(world: World) -> None:
    """Each outcome once; work of other sources, and work without a source, is left out."""
    engine = world.engine
    box = Mailbox()
    ended = {NoticeKind(f"{what}_{how}") for what in ("task", "dag") for how in ("completed", "cancelled")}
    to = replace(destination(box, kinds=ended | {NoticeKind.DEAD_LETTER}), sources=frozenset({"mine", "m2"}))
    dag = {"title": "Both", "tasks": [{"type": "a", "key": "a"}, {"type": "b", "depends_on": ["a"]}]}
    await engine.sources.put(webhook("mine", template={"task": {"type": "x", "title": "${event.text}"}}))
    await engine.sources.put(webhook("m2", template={"dag": dag}))
    await engine.sources.put(webhook("other"))
    agent = await world.agent()

    async def ask(name: str, text: str = "") -> str:
        fired = await engine.firings.fire(name, Occasion({"text": text}))
        return str(fired.dag_id or fired.task_ids[0])  # type: ignore[index]

    async with begun(engine, to) as duty:
        done = await ask("mine", "Build a page")
        await world.complete(await world.take(agent))
        await ask("other")
        await world.complete(await world.take(agent))
        await world.one()
        await world.complete(await world.take(agent))
        both = await ask("m2")
        for _ in range(2):
            await world.complete(await world.take(agent))
        stopped = await ask("mine", "Stop it")
        await engine.cancel.cancel(stopped, "not needed")
        gone = await ask("m2")
        await engine.cancel.cancel_dag(gone, "not needed")
        lost = await ask("mine", "Fail")
        await world.kill(agent)
        await duty.run_once()
        assert (await duty.run_once())["collected"] == 0

    found = [(str(m.kind), m.notices[0].task_id or m.notices[0].dag_id) for m in box.got]
    assert [each for each in found if each[0].startswith("dag")] == [
        ("dag_completed", both),
        ("dag_cancelled", gone),
    ]
    assert [each for each in found if each[1] in {done, stopped, lost}] == [
        ("task_completed", done),
        ("task_cancelled", stopped),
        ("dead_letter", lost),
    ]
    # With the two tasks of each DAG.
    assert len(found) == 5 + 4, found
    assert box.got[0].text == (
        f"Task {done} (x: Build a page) was completed. To see its output: lineshaft task show {done}"
    )
    texts = dict(zip(found, box.texts, strict=True))
    assert texts["dag_completed", both].endswith(f"To see its tasks: lineshaft dag show {both}")
    assert texts["task_cancelled", stopped].endswith("was cancelled: not needed")
