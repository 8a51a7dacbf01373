"""DAGs, pauses and dead letters from Python: the same over a database and over HTTP."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from lineshaft import Agent, Lineshaft, NewTask, RetrySpec, SyncLineshaft
from lineshaft.client.database_backend import DatabaseBackend
from lineshaft.errors import (
    AlreadyReviewedError,
    DependentsRunningError,
    InvalidInputError,
    InvalidTransitionError,
    NotFoundError,
)
from lineshaft.model.reviews import Resolution
from lineshaft.model.states import Status
from lineshaft.types import NewAgent
from tests.client.helpers import engine_of, finish_all, kill_one
from tests.world import Actions


async def dead(shaft: Lineshaft, **fields: object) -> str:
    await shaft.submit(NewTask("sum", spec=fields))
    return await kill_one(engine_of(shaft))


async def test_a_dag_with_a_key_is_created_once(shaft: Lineshaft) -> None:
    tasks = [NewTask("design", key="design"), NewTask("code", key="code", depends_on=["design"])]

    first = await shaft.submit_dag("Page", tasks, idempotency_key="page 1")
    again = await shaft.submit_dag("Page", tasks, idempotency_key="page 1")

    assert (first.duplicate, again.duplicate) == (False, True)
    assert again.id == first.id
    assert {key: task.id for key, task in again.tasks.items()} == {
        key: task.id for key, task in first.tasks.items()
    }
    assert len((await shaft.list()).items) == 2


async def test_a_known_key_in_a_dag_refers_to_the_existing_task(shaft: Lineshaft) -> None:
    existing = await shaft.submit(NewTask("design", idempotency_key="d"))

    dag = await shaft.submit_dag(
        "Page", [NewTask("design", key="a", idempotency_key="d"), NewTask("code", key="b", depends_on=["a"])]
    )

    assert (dag.tasks["a"].id, dag.tasks["a"].duplicate) == (existing.id, True)
    assert not dag.tasks["b"].duplicate
    assert (await shaft.get(dag.tasks["b"])).depends_on == [existing.id]


async def test_a_dag_of_existing_tasks_is_the_dag_of_the_first(shaft: Lineshaft) -> None:
    existing = await shaft.submit(NewTask("design", idempotency_key="d"))

    dag = await shaft.submit_dag("Page", [NewTask("design", idempotency_key="d")])

    assert dag.id == (await shaft.get(existing)).dag_id
    assert (await shaft.get_dag(dag)).tasks == [existing.id]


async def test_a_dag_is_cancelled(shaft: Lineshaft) -> None:
    dag = await shaft.submit_dag("Page", [NewTask("a", key="a"), NewTask("b", key="b", depends_on=["a"])])

    cancelled = await shaft.cancel_dag(dag, "the customer left")

    assert (cancelled.status, cancelled.counts) == ("cancelled", {"CANCELLED": 2})
    assert (await shaft.get(dag.tasks["a"])).cancel_reason == "the customer left"
    with pytest.raises(NotFoundError, match="no DAG dag_nope"):
        await shaft.cancel_dag("dag_nope")


async def test_more_money_for_a_dag(shaft: Lineshaft) -> None:
    """R-234: tasks that it can afford then are available at once."""
    dag = await shaft.submit_dag("Page", [NewTask("a", max_cost_usd=2)], budget_ceiling_usd=1)
    agent = Agent("a")
    agent.task("a")(lambda: None)
    await agent.run(shaft, until_idle=True, handle_signals=False)
    assert (await shaft.get_dag(dag)).status == "pending"

    assert (await shaft.add_dag_budget(dag, Decimal("1.5"))).budget_ceiling_usd == Decimal("2.5")
    await agent.run(shaft, until_idle=True, handle_signals=False)

    assert (await shaft.get_dag(dag)).status == "completed"
    assert (await shaft.set_dag_budget(dag, 7)).budget_ceiling_usd == 7
    assert (await shaft.set_dag_budget(dag, None)).budget_ceiling_usd is None
    with pytest.raises(InvalidInputError, match="budget_ceiling_usd"):
        await shaft.set_dag_budget(dag, -1)
    with pytest.raises(NotFoundError, match="no DAG dag_nope"):
        await shaft.add_dag_budget("dag_nope", 1)


async def test_nothing_is_claimed_while_it_is_paused(shaft: Lineshaft) -> None:
    await shaft.submit_many([NewTask("sum"), NewTask("mail")])

    await shaft.pause("sum")
    assert await finish_all(engine_of(shaft)) == 1
    await shaft.resume("sum")
    await shaft.resume("sum")  # changes nothing
    assert await finish_all(engine_of(shaft)) == 1

    await shaft.pause()
    await shaft.submit(NewTask("sum"))
    assert await finish_all(engine_of(shaft)) == 0
    await shaft.resume()
    assert await finish_all(engine_of(shaft)) == 1


async def test_dead_letters_are_listed_shown_and_grouped(shaft: Lineshaft) -> None:
    one, two = await dead(shaft, n=1), await dead(shaft, n=2)

    page = await shaft.dead_letters(reviewed=False, type="sum", category=["auth_failure"], limit=1)
    rest = await shaft.dead_letters(reviewed=False, limit=1, cursor=page.next_cursor)
    shown = await shaft.get_dead_letter(one)

    assert [letter.task_id for letter in page.items + rest.items] == [two, one]
    assert (shown.spec, shown.error, shown.status) == ({"n": 1}, "no access", Status.DEAD_LETTERED)
    assert [failure.error for failure in shown.failure_history] == ["no access"]
    (group,) = await shaft.dead_letter_groups()
    assert (group.count, set(group.task_ids), group.example) == (2, {one, two}, "no access")
    assert (await shaft.dead_letters(poison_pill=True)).items == []
    with pytest.raises(NotFoundError, match="no dead letter of a task 'task_nope'"):
        await shaft.get_dead_letter("task_nope")


async def test_dead_letters_are_found_by_pattern_and_resolution_even_if_deleted(shaft: Lineshaft) -> None:
    one, two = await dead(shaft, n=1), await dead(shaft, n=2)
    await shaft.resolve(one, Resolution.DELETE, reviewer="ann")

    async def found(**filters: Any) -> list[str]:
        return [letter.task_id for letter in (await shaft.dead_letters(**filters)).items]

    assert await found(pattern="no access") == [two]
    assert await found(pattern="no access", hidden=True) == [two, one]
    assert await found(resolution="delete", hidden=True) == [one]
    done = await shaft.resolve_all(Resolution.CANCEL, reviewer="ann", pattern="something else")
    assert done.resolved == []
    done = await shaft.resolve_all(Resolution.CANCEL, reviewer="ann", pattern="no access")
    assert done.resolved == [two]


async def test_a_dead_letter_is_changed_and_retried(shaft: Lineshaft) -> None:
    task_id = await dead(shaft, n=1)

    task = await shaft.resolve(
        task_id, Resolution.MODIFY_AND_RETRY, reviewer="ann", note="one more", spec={"n": 2, "m": 1.5}
    )

    assert (task.status, task.spec, task.attempts) == (Status.READY, {"n": 2, "m": 1.5}, 0)
    letter = await shaft.get_dead_letter(task_id)
    (review,) = letter.reviews
    assert (review.resolution, review.reviewer, review.note) == (
        Resolution.MODIFY_AND_RETRY,
        "ann",
        "one more",
    )
    assert review.spec_before == {"n": 1}
    assert letter.reviewed


async def test_a_retry_may_wait(shaft: Lineshaft) -> None:
    task_id = await dead(shaft)

    later = datetime.now(UTC) + timedelta(hours=1)
    task = await shaft.resolve(task_id, Resolution.RETRY, reviewer="ann", not_before=later)

    assert task.status is Status.PENDING
    assert await finish_all(engine_of(shaft)) == 0


async def test_the_second_decision_is_an_error(shaft: Lineshaft) -> None:
    task_id = await dead(shaft)
    await shaft.resolve(task_id, Resolution.CANCEL, reviewer="ann")

    with pytest.raises(AlreadyReviewedError, match="ann decided cancel") as refused:
        await shaft.resolve(task_id, Resolution.RETRY, reviewer="bob")

    assert (refused.value.resolution, refused.value.reviewer) == ("cancel", "ann")


async def test_an_invalid_decision_is_refused(shaft: Lineshaft) -> None:
    task_id = await dead(shaft)
    untyped: Any = "forget"

    with pytest.raises(InvalidInputError) as refused:
        await shaft.resolve(task_id, untyped, reviewer=" ")

    assert [place for place, _ in refused.value.errors] == ["resolution", "reviewer"]
    assert (await shaft.get(task_id)).status is Status.DEAD_LETTERED


async def test_many_are_resolved_at_once(shaft: Lineshaft) -> None:
    ids = [await dead(shaft, n=n) for n in range(3)]

    done = await shaft.resolve_all(
        Resolution.RETRY, reviewer="ann", error_contains="no ACCESS", tasks=ids[:2]
    )

    assert (set(done.resolved), done.refused, done.more) == (set(ids[:2]), [], False)
    assert [(await shaft.get(task_id)).status for task_id in ids] == ["READY", "READY", "DEAD_LETTERED"]
    assert (await shaft.resolve_all(Resolution.CANCEL, reviewer="ann", category="timeout")).resolved == []


async def test_a_retry_by_hand_may_wait(shaft: Lineshaft) -> None:
    task_id = await dead(shaft)

    assert (await shaft.retry(task_id, delay=timedelta(hours=1))).status is Status.PENDING


def test_without_an_event_loop(blocking: SyncLineshaft) -> None:
    dag = blocking.submit_dag("Page", [NewTask("a", key="a")], idempotency_key="k")
    blocking.pause("a")
    blocking.resume("a")
    task_id = blocking.loop.run(kill_one(engine_of(blocking.shaft)))

    assert [letter.task_id for letter in blocking.dead_letters().items] == [task_id]
    assert blocking.get_dead_letter(task_id).dag_id == dag.id
    assert len(blocking.dead_letter_groups()) == 1
    assert blocking.resolve(task_id, Resolution.RETRY, reviewer="ann").status is Status.READY
    assert blocking.resolve_all(Resolution.CANCEL, reviewer="ann").resolved == []
    assert blocking.cancel_dag(dag).status == "cancelled"


async def test_by_filter(shaft: Lineshaft) -> None:
    """Over both transports."""
    tasks = [await shaft.submit(NewTask("crawl", tags=["t"])) for _ in range(2)]
    ids = {task.id for task in tasks}

    assert set((await shaft.cancel_matching(tag="t", dry_run=True)).ids) == ids
    assert (await shaft.cancel_matching("outdated", tag="t")).count == 2
    assert (await shaft.get(tasks[0])).cancel_reason == "outdated"
    assert set((await shaft.retry_matching(type=["crawl"], status="CANCELLED")).ids) == ids
    with pytest.raises(InvalidInputError, match="filter"):
        await shaft.retry_matching()


async def test_limits_are_changed(shaft: Lineshaft) -> None:
    task = await shaft.submit(NewTask("x", max_cost_usd=1))

    changed = await shaft.change(
        task, max_cost_usd=None, max_total_cost_usd=3, max_attempts=2, max_duration_sec=timedelta(minutes=1)
    )

    assert (changed.max_cost_usd, changed.max_total_cost_usd) == (None, Decimal(3))
    assert (changed.max_attempts, changed.max_duration_sec) == (2, 60)


async def test_what_is_done_by_hand_has_its_actor_and_its_reason(shaft: Lineshaft) -> None:
    """Over HTTP the actor is the token; on a database, the name that the client was opened with, if any."""
    await shaft.change_limits(daily_budget_usd=5)
    if isinstance(shaft.backend, DatabaseBackend):
        shaft.backend.actor = "ann"
    await shaft.change_limits(daily_budget_usd=6, reason="a busy day")
    await shaft.pause("x", reason="deploying")
    await shaft.resume("x")
    task = await shaft.submit(NewTask("x"))
    await task.cancel("not needed")

    kinds = ["limits.changed", "queue.paused", "queue.resumed", "task.cancelled"]
    events = [each async for each in shaft.events(None, kinds=kinds, follow=False)]
    on_the_database = isinstance(shaft.backend, DatabaseBackend)
    name = "ann" if on_the_database else "this machine"
    assert [(each.kind, each.data.get("actor"), each.data.get("reason")) for each in events] == [
        ("limits.changed", None if on_the_database else name, None),
        ("limits.changed", name, "a busy day"),
        ("queue.paused", name, "deploying"),
        ("queue.resumed", name, None),
        ("task.cancelled", name, "not needed"),
    ]


async def test_the_actor_is_for_a_database() -> None:
    assert isinstance(Lineshaft("postgresql://somewhere/db", actor="ann").backend, DatabaseBackend)
    with pytest.raises(InvalidInputError, match="actor: can't be used with the URL of a server"):
        Lineshaft("http://127.0.0.1:1", actor="ann")


async def test_defaults_of_a_type(shaft: Lineshaft) -> None:
    """Declared by an agent, seen by everybody, and decided by a person."""
    agent = Agent("payer", version="1")

    @agent.task(
        "pay", max_cost_usd=0.2, max_attempts=2, retry=RetrySpec(retry_on=("timeout",)), max_duration_sec=9
    )
    async def pay(amount: float) -> bool:
        """Pays."""
        return amount > 0

    waiting = await shaft.submit(NewTask("pay", spec={"amount": 1}))
    await agent.run(shaft, until_idle=True, handle_signals=False)
    assert (await waiting.result(timeout=60)) is True

    info = await shaft.get_type("pay")
    assert (info.defaults.max_cost_usd, info.defaults.max_attempts) == (Decimal("0.2"), 2)
    assert info.defaults.retry == {"retry_on": ["timeout"]}
    assert info.defaults.description == "Pays."
    assert info.defaults.parameters_schema is not None
    assert "amount" in str(info.defaults.parameters_schema)
    assert info.defaults.result_schema == {"type": "boolean"}
    assert set(info.origins.values()) == {"agent:payer"}
    assert (await shaft.types()).items == [info]
    after = await shaft.get(await shaft.submit(NewTask("pay", spec={"amount": 1})))
    before = await shaft.get(waiting)
    for task in (before, after):
        assert (task.max_cost_usd, task.max_attempts, task.max_duration_sec) == (Decimal("0.2"), 2, 9.0)
        assert task.retry.retry_on == ("timeout",)

    info = await shaft.set_type("pay", max_cost_usd=3, max_duration_sec=timedelta(minutes=1), reason="a test")
    assert (info.defaults.max_cost_usd, info.defaults.max_duration_sec) == (Decimal(3), 60.0)
    assert info.origins["max_cost_usd"] == "hand"
    assert (await shaft.get(after)).max_cost_usd == 3
    assert (await shaft.set_type("pay", max_cost_usd=None)).origins["max_cost_usd"] == "agent:payer"
    with pytest.raises(NotFoundError, match="no task type 'none'"):
        await shaft.get_type("none")
    with pytest.raises(InvalidInputError, match="max_attempts"):
        await shaft.set_type("pay", max_attempts=0)


async def test_a_cost_is_corrected_and_a_dispute_decided(shaft: Lineshaft) -> None:
    engine = engine_of(shaft)
    actions = Actions(engine)
    agent = await actions.agent("worker")
    task = await shaft.submit(NewTask("sum"))
    await actions.complete(await actions.take(agent), spent="1000000")

    before = await shaft.get(task)
    assert (before.cost_usd, before.disputed_usd) == (Decimal(10), Decimal(999_990))
    costs = await shaft.costs()
    assert [(one.id, one.disputed_usd) for one in costs.disputed] == [(task.id, Decimal(999_990))]
    assert (costs.disputed_usd, (await shaft.attention()).disputed_tasks) == (Decimal(999_990), 1)

    corrected = await shaft.correct_cost(task, 0.31, reason="cents, not dollars")
    assert (corrected.cost_usd, corrected.disputed_usd) == (Decimal("0.31"), Decimal(0))
    assert (await shaft.correct_cost(task, disputed="accept", reason="again")).cost_usd == Decimal("0.31")
    assert (await shaft.costs()).disputed == []
    assert (await shaft.get_agent("worker")).spent_usd == Decimal("0.31")

    for amount, disputed, reason in (
        (-1, None, "negative"),
        (1_000_001, None, "huge"),
        (None, None, "nothing"),
        (1, "accept", "both"),
        (1, None, ""),
    ):
        with pytest.raises(InvalidInputError):
            await shaft.correct_cost(task, amount, disputed=disputed, reason=reason)  # type: ignore[arg-type]  # of the table above
    with pytest.raises(NotFoundError):
        await shaft.correct_cost("task_unknown", 1, reason="no such task")


async def test_a_completed_task_is_run_again(shaft: Lineshaft) -> None:
    """With what depends on it; its completed attempt is kept."""
    first = await shaft.submit(NewTask("a"))
    second = await shaft.submit(NewTask("b", depends_on=[first.id]))
    await finish_all(engine_of(shaft))

    again = await shaft.rerun(first, downstream=True, reason="fixed")

    assert (again.status, (await shaft.get(second)).status) == (Status.READY, Status.PENDING)
    (attempt,) = await shaft.attempts(first)
    assert attempt.outcome == "completed"
    engine = engine_of(shaft)
    await finish_all(engine)
    third = await shaft.submit(NewTask("c", depends_on=[second.id]))
    await engine.fleet.register(NewAgent(id="holder"))
    await engine.claims.claim("holder", 1, start=True)
    with pytest.raises(DependentsRunningError, match=third.id) as refused:
        await shaft.rerun(second)
    assert refused.value.code == "dependents_running"
    await shaft.rerun(second, cancel_running=True, forget_steps=False)
    assert (await shaft.get(third)).status is Status.PENDING
    with pytest.raises(InvalidTransitionError):
        await shaft.rerun(second)
