"""The read model: what it shows is what is there."""

from collections.abc import AsyncIterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.read import listing
from lineshaft.engine.read.tasks import ended_above
from lineshaft.errors import NotFoundError
from lineshaft.model.priority import Tier
from lineshaft.model.retry import Strategy
from lineshaft.model.states import Status
from lineshaft.model.tasks import Gate, NewTask, OutputContract, RetrySpec
from lineshaft.types import DagFilter, TokensUsed
from lineshaft.types.work import Completion, Spent
from tests.factory import Factory
from tests.world import World, every, record_step, ref


@pytest.fixture
async def engine(dsn: str, clock: MovableClock) -> AsyncIterator[Engine]:
    async with Engine(dsn, clock=clock, max_connections=3) as opened:
        yield opened


# One task.


async def test_a_task_shows_what_was_asked(world: World, clock: MovableClock) -> None:
    deadline = clock.now() + timedelta(hours=1)
    upstream = await world.one("upstream")
    task_id = await world.one(
        title="Write it",
        spec={"goal": "x"},
        priority=40,
        deadline=deadline,
        depends_on=[upstream],
        lock_key="doc:1",
        required_capabilities=["python"],
        model_preferences=["opus"],
        fallback_models=["haiku"],
        max_cost_usd=1.5,
        max_total_cost_usd=3,
        max_duration_sec=60,
        max_attempts=5,
        retry=RetrySpec(strategy="fixed", initial_delay_sec=7),
        output=OutputContract(type="json", validation="json-schema", validation_schema={"type": "object"}),
        idempotency_key="key",
        tags=["a", "b"],
        created_by="human:me",
    )

    task = await world.engine.read.task(task_id)

    assert (task.title, task.priority, task.lock_key, task.tags) == ("Write it", 40, "doc:1", ["a", "b"])
    assert task.spec == {"goal": "x"}
    assert (task.max_cost_usd, task.max_total_cost_usd) == (Decimal("1.5"), Decimal(3))
    assert (task.required_capabilities, task.model_preferences, task.fallback_models) == (
        ["python"],
        ["opus"],
        ["haiku"],
    )
    assert (task.retry.strategy, task.retry.initial_delay_sec) == (Strategy.FIXED, 7)
    assert task.retry.max_delay_sec == 300, "what was left out is the preset's"
    assert (task.output.type, task.output.validation) == ("json", "json-schema")
    assert task.output.validation_schema == {"type": "object"}
    assert (task.status, task.depends_on, task.blocked_by) == (Status.PENDING, [upstream], [upstream])
    assert (task.idempotency_key, task.created_by, task.created_at) == ("key", "human:me", clock.now())
    assert task.effective_priority == pytest.approx(40 - 20), "one hour before the deadline it is 20"
    assert task.tier is Tier.HIGH
    assert (task.claim.agent_id, task.claim.claimed_at, task.claim.epoch) == (None, None, 0)
    assert (task.model, task.attempts) == (None, 0)
    assert task.cost_usd == 0
    assert task.dag_id == f"dag_{task_id.removeprefix('task_')}"


async def test_gates_in_order_are_shown_as_a_list(world: World) -> None:
    gates = (Gate("regex", "^a"), Gate("human"))
    task = await world.engine.read.task(await world.one(output=OutputContract(validation=gates)))

    assert [(gate.method, gate.schema) for gate in task.output.validation] == [  # type: ignore[union-attr]
        ("regex", "^a"),
        ("human", None),
    ]
    assert task.output.validation_schema is None
    assert (await world.engine.read.task(await world.one())).output.validation == "none"


async def test_age_counts_from_ready_and_deadlines_are_exact(world: World, clock: MovableClock) -> None:
    """004's formula at this instant, whether or not the promoter has re-keyed the task."""
    upstream = await world.one("upstream")
    waiting = await world.one(depends_on=[upstream])
    urgent = await world.one(deadline=clock.now() + timedelta(hours=2))
    clock.advance(3600)

    assert (await world.engine.read.task(waiting)).effective_priority == pytest.approx(50)
    assert (await world.engine.read.task(urgent)).effective_priority == pytest.approx(50 - 6 - 20)


async def test_a_running_task_shows_its_claim(world: World, clock: MovableClock) -> None:
    """R-014."""
    ann = await world.agent("ann", models_available=["opus"], heartbeat_interval_sec=12)
    await world.one(max_cost_usd=1)
    task = await world.take(ann)
    clock.advance(5)
    await world.heartbeat(
        "ann", ann.incarnation, [ref(task)], progress=b'{"percent": 10}', spent=Spent(Decimal("0.25"))
    )

    view = await world.engine.read.task(task.id)

    assert (view.claim.agent_id, view.claim.epoch) == ("ann", 1)
    assert (view.claim.claimed_at, view.claim.heartbeat_at) == (
        clock.now() - timedelta(seconds=5),
        clock.now(),
    )
    assert view.claim.heartbeat_interval_sec == 12
    assert (view.status, view.model, view.progress) == (Status.RUNNING, "opus", {"percent": 10})
    assert (view.cost_usd, view.reserved_usd) == (Decimal("0.25"), Decimal(1))
    assert view.started_at == clock.now() - timedelta(seconds=5)


async def test_a_heartbeat_interval_is_read_as_it_was_submitted(world: World) -> None:
    task_id = await world.one("code", heartbeat_interval_sec=0.3)
    await world.take(await world.agent("ann"))

    view = await world.engine.read.task(task_id)

    assert view.claim.heartbeat_interval_sec == 0.3


async def test_between_attempts_the_last_start_and_the_first_are_shown(
    world: World, clock: MovableClock
) -> None:
    """R-022: in the task and in the view for people, also after the end."""
    ann = await world.agent("ann")
    task_id = await world.one(max_attempts=3, retry=RetrySpec(strategy="immediate"))
    starts = []
    for _ in range(2):
        clock.advance(60)
        starts.append(clock.now())
        await world.engine.maintenance.promote_due(10)
        await world.fail(await world.take(ann))

    async def shown() -> set[tuple[Any, Any]]:
        view, row = await world.engine.read.task(task_id), world.task(task_id)
        return {(view.first_started_at, view.started_at), (row["first_started_at"], row["started_at"])}

    assert world.status(task_id) == "RETRYING"
    assert await shown() == {(starts[0], starts[1])}
    await world.engine.cancel.cancel(task_id, "enough")
    assert await shown() == {(starts[0], starts[1])}


async def test_times_in_the_data_of_events_end_in_z(
    world: World, clock: MovableClock, connection: psycopg.Connection
) -> None:
    """R-022."""
    ann = await world.agent("ann")
    await world.one(deadline=clock.now() + timedelta(seconds=5))
    await world.fail(await world.take(ann), "429 Too Many Requests", category="rate_limit")
    await world.engine.slowdowns.end("*")
    clock.advance(1000)
    await world.engine.maintenance.rekey_deadlines(10)
    await world.engine.fleet.mark_offline()

    found: dict[str, Any] = dict(
        connection.execute("SELECT kind, data FROM lineshaft.events ORDER BY seq").fetchall()
    )
    assert found["task.deadline_missed"] == {"deadline": "2026-02-08T09:00:05Z"}
    assert found["signal.slowdown"]["until"].endswith("Z")
    assert found["agent.offline"]["last_heartbeat"] == "2026-02-08T09:00:00Z"


async def test_a_failed_attempt_is_history_and_the_last_failure(world: World, clock: MovableClock) -> None:
    """R-015, R-018."""
    ann = await world.agent("ann")
    await world.one(retry=RetrySpec(strategy="fixed", initial_delay_sec=60, jitter=False))
    task = await world.take(ann)
    clock.advance(4)
    await world.fail(task, "boom", category="timeout", spent=Spent(Decimal("0.5")))

    view = await world.engine.read.task(task.id)

    assert (view.status, view.attempts, view.retry_at) == (
        Status.RETRYING,
        1,
        clock.now() + timedelta(seconds=60),
    )
    assert (view.failure_reason, view.failure_category) == ("boom", "timeout")
    (failure,) = view.failure_history
    assert (failure.attempt, failure.agent, failure.category, failure.error) == (1, "ann", "timeout", "boom")
    assert (failure.duration_sec, failure.cost_usd) == (4, Decimal("0.5"))
    assert (view.cost_usd, view.claim.agent_id) == (Decimal("0.5"), None)


async def test_a_rate_limit_is_the_reason_but_no_failure(world: World) -> None:
    ann = await world.agent("ann")
    await world.one()
    await world.fail(task := await world.take(ann), "slow down", category="rate_limit")

    view = await world.engine.read.task(task.id)

    assert (view.failure_category, view.failure_history, view.attempts) == ("rate_limit", [], 0)


async def test_each_end_shows_its_own_time_and_reason(world: World, clock: MovableClock) -> None:
    ann = await world.agent("ann")
    await world.one()
    done = await world.take(ann)
    clock.advance(1)
    await world.complete(done, {"answer": 42}, "0.1")
    await world.one()
    dead = await world.kill(ann)
    cancelled = await world.one()
    await world.engine.cancel.cancel(cancelled, "not needed")

    ended = await world.engine.read.task(done.id)
    assert (ended.status, ended.completed_at, ended.cancelled_at) == (Status.COMPLETED, clock.now(), None)
    assert (ended.output.data, ended.cost_usd) == ({"answer": 42}, Decimal("0.1"))
    assert ended.claim.agent_id == "ann", "who did it"
    assert (ended.effective_priority, ended.tier, ended.failure_reason) == (None, None, None)
    ended = await world.engine.read.task(dead)
    assert (ended.completed_at, ended.ended_at) == (None, clock.now())
    assert (ended.failure_reason, ended.failure_category) == ("no access", "auth_failure")
    ended = await world.engine.read.task(cancelled)
    assert (ended.cancelled_at, ended.cancel_reason) == (clock.now(), "not needed")
    assert (ended.failure_reason, ended.claim.agent_id) == (None, None)


async def test_what_is_being_validated_shows_the_output(world: World) -> None:
    ann = await world.agent("ann")
    await world.one(output=OutputContract(validation="human"))
    await world.complete(task := await world.take(ann), {"draft": 1})

    view = await world.engine.read.task(task.id)

    assert (view.status, view.output.data) == (Status.VALIDATING, {"draft": 1})
    assert (view.output.artifacts, view.completed_at) == ([], None)


async def test_dead_letters_upstream_flag_all_that_wait(world: World) -> None:
    ann = await world.agent("ann")
    tasks = [
        NewTask("a", key="a"),
        NewTask("b", key="b", depends_on=["a"]),
        NewTask("c", key="c", depends_on=["b"]),
        NewTask("d", key="d"),
        NewTask("e", key="e", depends_on=["d"]),
    ]
    dag = await world.engine.submission.submit_dag("a DAG", tasks)
    ids = {key: found.id for key, found in dag.tasks.items()}
    assert (await world.engine.read.task(ids["c"])).blocked_reason is None

    assert await world.kill(ann) == ids["a"]

    flagged = {key: (await world.engine.read.task(ids[key])).blocked_reason for key in ids}
    reason = f"Upstream {ids['a']} is DEAD_LETTERED"
    assert flagged == {"a": None, "b": reason, "c": reason, "d": None, "e": None}
    await world.engine.revive.retry(ids["a"])
    assert (await world.engine.read.task(ids["b"])).blocked_reason is None


def test_dead_letters_are_found_along_every_way() -> None:
    edges = [
        {"task_id": "t", "depends_on": "m", "status": "PENDING"},
        {"task_id": "m", "depends_on": "x", "status": "DEAD_LETTERED"},
        {"task_id": "m", "depends_on": "y", "status": "DEAD_LETTERED"},
        {"task_id": "o", "depends_on": "z", "status": "READY"},
    ]
    assert ended_above(edges, Status.DEAD_LETTERED) == {"m": ["x", "y"], "t": ["x", "y"]}


@pytest.mark.parametrize("name", ["task_none", "a\0b", "\ud800"])
async def test_what_does_not_exist_is_not_found(engine: Engine, name: str) -> None:
    reads = engine.read
    for read in (reads.task, reads.attempts, reads.steps, reads.why, reads.dag):
        with pytest.raises(NotFoundError, match="There is no"):
            await read(name)


# History.


async def test_attempts_include_the_one_that_succeeded(world: World, clock: MovableClock) -> None:
    ann = await world.agent("ann")
    await world.one(retry=RetrySpec(strategy="immediate"))
    await world.fail(task := await world.take(ann), spent=Spent(Decimal("0.2"), 10, 5))
    await world.engine.maintenance.promote_due(10)
    task = await world.take(ann)

    outcomes = [(a.number, a.outcome) for a in await world.engine.read.attempts(task.id)]
    assert outcomes == [(1, "failed"), (2, "running")]

    clock.advance(3)
    await world.engine.work.complete(
        [Completion(ref(task), output=b'"ok"', spent=Spent(Decimal("0.3"), 7, 8))]
    )
    first, second = await world.engine.read.attempts(task.id)
    assert (first.category, first.error, first.cost_usd) == ("crash", "it broke", Decimal("0.2"))
    assert (second.number, second.outcome, second.agent_id, second.cost_usd) == (
        2,
        "completed",
        "ann",
        Decimal("0.3"),
    )
    assert (second.tokens_used, second.ended_at) == (TokensUsed(7, 8), clock.now())
    assert second.output == {"data": "ok", "artifacts": None, "decision_report": None}


async def test_attempts_of_what_was_never_claimed_are_none(world: World) -> None:
    assert await world.engine.read.attempts(await world.one()) == []


async def test_steps_by_name(world: World, clock: MovableClock) -> None:
    ann = await world.agent("ann")
    await world.one()
    task = await world.take(ann)
    await record_step(world.engine, ref(task), "search", b'{"found": 3}')
    clock.advance(1)
    await record_step(world.engine, ref(task), "draft", b"null")

    steps = await world.engine.read.steps(task.id)
    assert {name: bytes(data) for name, data in steps.items()} == {
        "search": b'{"found": 3}',
        "draft": b"null",
    }


# DAGs.


async def test_a_dag_shows_its_graph_and_money(world: World) -> None:
    ann = await world.agent("ann")
    tasks = [
        NewTask("a", key="a", max_cost_usd=1),
        NewTask("b", key="b", depends_on=["a"]),
        NewTask("c", key="c", depends_on=["a"]),
        NewTask("d", key="d", depends_on=["c"], priority=0),
    ]
    submitted = await world.engine.submission.submit_dag(
        "a DAG", tasks, budget_ceiling_usd=5, created_by="human:me"
    )
    a, b, c, d = (submitted.tasks[key].id for key in "abcd")

    dag = await world.engine.read.dag(submitted.id)
    assert (dag.title, dag.status, dag.created_by, dag.virtual) == ("a DAG", "pending", "human:me", False)
    assert (dag.tasks, dag.roots, dag.leaves) == ([a, b, c, d], [a], [b, d])
    assert (dag.critical_path, dag.counts) == ([a, c, d], {"PENDING": 3, "READY": 1})

    await world.complete(await world.take(ann), spent="0.75")
    dag = await world.engine.read.dag(submitted.id)
    assert (dag.status, dag.critical_path) == ("running", [c, d])
    assert dag.counts == {"PENDING": 1, "READY": 2, "COMPLETED": 1}
    assert (dag.budget_ceiling_usd, dag.reserved_usd, dag.spent_usd) == (
        Decimal(5),
        Decimal(0),
        Decimal("0.75"),
    )
    assert dag.completed_at is None


async def test_a_dead_letter_is_still_to_be_done(world: World) -> None:
    ann = await world.agent("ann")
    tasks = [NewTask("a", key="a"), NewTask("b", key="b", depends_on=["a"])]
    submitted = await world.engine.submission.submit_dag("a DAG", tasks)
    await world.kill(ann)

    dag = await world.engine.read.dag(submitted.id)

    assert (dag.status, dag.critical_path) == ("failed", dag.tasks)
    assert dag.completed_at is not None


async def test_a_virtual_dag_is_answered_from_its_task(world: World, clock: MovableClock) -> None:
    ann = await world.agent("ann")
    task_id = await world.one(title="Alone", created_by="human:me", max_cost_usd=1)
    dag_id = (await world.engine.read.task(task_id)).dag_id

    dag = await world.engine.read.dag(dag_id)
    assert (dag.id, dag.title, dag.created_by, dag.virtual) == (dag_id, "Alone", "human:me", True)
    assert (dag.status, dag.tasks, dag.counts) == ("pending", [task_id], {"READY": 1})

    task = await world.take(ann)
    dag = await world.engine.read.dag(dag_id)
    assert (dag.status, dag.reserved_usd, dag.completed_at) == ("running", Decimal(1), None)
    clock.advance(1)
    await world.complete(task, spent="0.5")
    dag = await world.engine.read.dag(dag_id)
    assert (dag.status, dag.spent_usd, dag.completed_at) == ("completed", Decimal("0.5"), clock.now())
    assert (dag.roots, dag.leaves, dag.critical_path) == ([task_id], [task_id], [])


@pytest.mark.parametrize("scan", [20_000, 4])
async def test_dags_are_listed_with_virtual_ones_or_without(
    world: World, clock: MovableClock, scan: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "SCAN", scan)
    ann = await world.agent("ann")
    expected: list[tuple[str, bool]] = []
    for n in range(9):
        clock.advance(1)
        if n % 3:
            dag = await world.engine.submission.submit_dag(
                f"real {n}", [NewTask("a"), NewTask("b"), NewTask("c")]
            )
            expected.insert(0, (dag.id, True))
        else:
            task = await world.engine.read.task(await world.one(title=f"alone {n}", priority=0))
            expected.insert(0, (task.dag_id, False))

    async def ids(limit: int = 2, **filters: Any) -> list[str]:
        return await every(
            lambda cursor: world.engine.read.dags(DagFilter(**filters), limit=limit, cursor=cursor), limit
        )

    assert await ids() == [name for name, _ in expected]
    assert await ids(virtual=False) == [name for name, real in expected if real]
    assert await ids(q=["ALONE"], limit=1) == [name for name, real in expected if not real]
    await world.take(ann)
    alone = [name for name, real in expected if not real]
    assert await ids(status=["running"]) == [alone[-1]]
    assert await ids(status=["pending"]) == [name for name, _ in expected if name != alone[-1]]


# Guards.


async def test_locks_with_their_waiters(world: World, clock: MovableClock) -> None:
    ann = await world.agent("ann", max_concurrent_tasks=10)
    for key in ("doc:b", "doc:a"):
        await world.one(lock_key=key)
        await world.take(ann)
    for _ in range(3):
        await world.one(lock_key="doc:b")
    # One of them was found by a claim and parked, and waits all the same.
    assert (await world.engine.claims.claim("ann", ann.incarnation)).tasks == []

    first = await world.engine.read.locks(limit=1)
    (second,) = (await world.engine.read.locks(cursor=first.next_cursor)).items

    assert [(lock.key, lock.waiting, lock.agent_id) for lock in [*first.items, second]] == [
        ("doc:a", 0, "ann"),
        ("doc:b", 3, "ann"),
    ]
    assert second.expires_at == clock.now() + timedelta(seconds=600)
    assert second.token < first.items[0].token, "fencing numbers grow with each grant"


async def test_guards_as_they_are(engine: Engine, factory: Factory, clock: MovableClock) -> None:
    now = clock.now()
    factory.insert(
        "breaker", {"key": "code", "state": "open", "opened_at": now, "failures": 5, "forced": True}
    )
    factory.insert("slowdown", {"key": "model:x", "signalled_at": now, "until": now + timedelta(seconds=9)})
    factory.insert("slowdown", {"key": "model:y", "signalled_at": now, "until": now})
    factory.insert("pause", {"type": "*", "since": now})

    (breaker,) = (await engine.read.breakers()).items
    assert (breaker.key, breaker.state, breaker.failures, breaker.forced) == ("code", "open", 5, True)
    (slowdown,) = (await engine.read.slowdowns()).items
    assert (slowdown.key, slowdown.until) == ("model:x", now + timedelta(seconds=9)), "one is over"
    assert [(pause.type, pause.since) for pause in await engine.read.pauses()] == [("*", now)]
