"""The client can do what HTTP can do: reads, changes, agents, guards and tokens, over both transports."""

import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from lineshaft import Lineshaft, NewTask, Sources, SyncLineshaft, SyncSources
from lineshaft.errors import CycleError, InvalidInputError, InvalidTransitionError, NotFoundError
from lineshaft.model.short_ids import short_id
from lineshaft.server.app import OPERATIONS
from lineshaft.types import NewAgent, Rate, RateUnit, Scope, Status
from tests.client.helpers import engine_of, finish_all, kill_one

#: HTTP operations whose client method has another name.
NAMES = {
    "submit_task": "submit",
    "submit_batch": "submit_many",
    "list_tasks": "list",
    "get_task": "get",
    "list_task_events": "read_events",
    "list_events": "read_events",
    "explain_task": "why",
    "change_task": "change",
    "cancel_task": "cancel",
    "retry_task": "retry",
    "rerun_task": "rerun",
    "signal_task": "signal",
    "which_ended": "wait",
    "change_dag": "set_dag_budget",
    "resolve_dead_letter": "resolve",
    "resolve_dead_letters": "resolve_all",
    "search_reports": "reports",
    "decide": "approve",
    "alive": "health",
    "ready": "health",
}
#: Operations for agents, for Prometheus and for another system; those of artifacts are in `shaft.artifacts`.
ELSEWHERE = {
    *("agents", "artifacts", "claims", "work", "metrics", "monitoring", "routes", "hooks", "reservations"),
}
#: Operations that are methods of `shaft.sources`.
OF_SOURCES = {
    "list_sources": "list",
    "get_source": "get",
    "create_source": "create",
    "put_source": "put",
    "change_source": "patch",
    "delete_source": "delete",
    "fire_source": "fire",
    "list_source_firings": "firings",
    "apply_sources": "apply",
}


def client_method(operation: str) -> str:
    name = NAMES.get(operation, operation)
    return name.removeprefix("list_").removeprefix("get_") if not hasattr(Lineshaft, name) else name


def test_every_operation_of_http_has_a_method() -> None:
    missing = [
        operation.name
        for operation in OPERATIONS
        if operation.area not in {*ELSEWHERE, "sources"}
        and not hasattr(Lineshaft, client_method(operation.name))
    ]
    missing += [
        operation.name
        for operation in OPERATIONS
        if operation.area == "sources"
        and not (
            hasattr(Sources, OF_SOURCES[operation.name]) and hasattr(SyncSources, OF_SOURCES[operation.name])
        )
    ]

    assert missing == []


def test_http_needs_no_database_driver() -> None:
    """Importing and opening a client of a server imports neither the driver nor the server."""
    code = (
        "import sys; from lineshaft import Lineshaft, NewTask, SyncLineshaft; "
        "Lineshaft('https://queue.example'); SyncLineshaft('https://queue.example'); "
        "print(*{name.split('.')[0] for name in sys.modules})"
    )

    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    heavy = {"psycopg", "psycopg_pool", "psycopg_binary", "starlette", "fastapi", "jsonschema_rs", "re2"}
    assert heavy & set(loaded.stdout.split()) == set()


async def test_attempts_and_steps(shaft: Lineshaft) -> None:
    task = await shaft.submit(NewTask("sum"))
    assert (await shaft.attempts(task), await shaft.steps(task)) == ([], {})
    await kill_one(engine_of(shaft))

    (attempt,) = await shaft.attempts(task)

    assert (attempt.number, attempt.outcome, attempt.error) == (1, "failed", "no access")
    with pytest.raises(NotFoundError, match="no task task_nope"):
        await shaft.steps("task_nope")


async def test_a_task_is_changed(shaft: Lineshaft) -> None:
    task = await shaft.submit(NewTask("sum", tags=["a"]))
    deadline = datetime(2099, 1, 1, tzinfo=UTC)

    changed = await shaft.change(task, priority=7, deadline=deadline)
    assert (changed.priority, changed.deadline, changed.tags) == (7, deadline, ["a"])
    changed = await shaft.change(task, deadline=None, tags=["b", "c"])
    assert (changed.priority, changed.deadline, changed.tags) == (7, None, ["b", "c"])

    with pytest.raises(InvalidInputError, match="priority"):
        await shaft.change(task, priority=1000)
    await finish_all(engine_of(shaft))
    with pytest.raises(InvalidTransitionError):
        await shaft.change(task, priority=1)


async def test_dependencies_are_added(shaft: Lineshaft) -> None:
    first, second = await shaft.submit_many([NewTask("a"), NewTask("b")])

    task = await shaft.add_dependencies(second, [first])

    assert (task.status, task.blocked_by) == ("PENDING", [first.id])
    with pytest.raises(CycleError):
        await shaft.add_dependencies(first, [second])


async def test_dags_are_listed(shaft: Lineshaft) -> None:
    await shaft.submit(NewTask("alone"))
    one = await shaft.submit_dag("Page one", [NewTask("a", key="a")], created_by="human:ann")
    two = await shaft.submit_dag("Page two", [NewTask("a", key="a")])

    page = await shaft.dags(virtual=False, limit=1)
    rest = await shaft.dags(virtual=False, limit=1, cursor=page.next_cursor)

    assert [dag.id for dag in page.items + rest.items] == [two.id, one.id]
    assert len((await shaft.dags()).items) == 3
    assert [dag.id for dag in (await shaft.dags(q="ONE", created_by="human:ann")).items] == [one.id]
    assert (await shaft.dags(status=["failed", "completed"])).items == []


async def test_agents_are_listed_and_changed(shaft: Lineshaft) -> None:
    for name in ("a/1", "b"):
        await engine_of(shaft).fleet.register(NewAgent(id=name, budget_usd=1))

    page = await shaft.agents(limit=1)
    rest = await shaft.agents(limit=1, cursor=page.next_cursor)
    changed = await shaft.change_agent(
        "a/1", status="draining", max_concurrent_tasks=9, add_budget_usd=Decimal("0.5")
    )

    assert [agent.id for agent in page.items + rest.items] == ["a/1", "b"]
    assert (changed.status, changed.max_concurrent_tasks, changed.budget_usd) == (
        "draining",
        9,
        Decimal("1.5"),
    )
    assert await shaft.get_agent("a/1") == changed
    assert [agent.id for agent in (await shaft.agents(status="draining")).items] == ["a/1"]
    with pytest.raises(NotFoundError, match="nope"):
        await shaft.get_agent("nope")
    with pytest.raises(InvalidInputError, match="limit"):
        await shaft.agents(limit=0)


async def test_breakers_are_opened_and_reset(shaft: Lineshaft) -> None:
    opened = await shaft.open_breaker("model:a/b")

    assert (opened.key, opened.state, opened.forced) == ("model:a/b", "open", True)
    assert (await shaft.breakers()).items == [opened]
    assert (await shaft.reset_breaker("model:a/b")).state == "closed"


async def test_locks_are_listed_and_released(shaft: Lineshaft) -> None:
    task = await shaft.submit(NewTask("edit", lock_key="doc:1/2"))
    engine = engine_of(shaft)
    agent = await engine.fleet.register(NewAgent(id="a"))
    await engine.claims.claim(agent.id, agent.incarnation, start=True)

    (lock,) = (await shaft.locks()).items
    assert (lock.key, lock.holder_task_id, lock.agent_id) == ("doc:1/2", task.id, "a")
    await shaft.release_lock("doc:1/2")

    assert (await shaft.locks()).items == []
    with pytest.raises(NotFoundError, match="doc:1/2"):
        await shaft.release_lock("doc:1/2")


async def test_quotas_are_set_listed_and_deleted(shaft: Lineshaft) -> None:
    rate = Rate(Decimal(60), RateUnit.TASKS, 60)
    quota = await shaft.set_quota("customers", "customer:*", max_running=3, rate=rate, reason="a busy day")
    assert (quota.match, quota.each, quota.max_running, quota.rate) == ("customer:*", True, 3, rate)
    assert (quota.running, quota.waiting, quota.used, quota.holders) == (0, 0, Decimal(0), [])
    again = await shaft.set_quota("customers", "customer:*", each=False, max_waiting=10, weight=2)
    assert (again.each, again.max_running, again.max_waiting, again.rate, again.weight) == (
        False,
        None,
        10,
        None,
        2.0,
    )
    await shaft.set_quota("code", "type:code", max_running=1)
    first = await shaft.quotas(limit=1)
    assert [item.name for item in first.items] == ["code"]
    assert (await shaft.quotas(cursor=first.next_cursor)).items == [again]
    await shaft.delete_quota("code")
    assert [item.name for item in (await shaft.quotas()).items] == ["customers"]
    with pytest.raises(NotFoundError, match="There is no quota 'code'"):
        await shaft.delete_quota("code")


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a b"},
        {"match": "customer*"},
        {"match": "*"},
        {"match": "type:"},
        {"max_running": -1},
        {"weight": 0},
        {"rate": Rate(0, RateUnit.USD, 60)},
        {"rate": Rate(0.5, RateUnit.TASKS, 60)},
        {"rate": Rate(1, RateUnit.TASKS, 0)},
        {"rate": Rate(1, RateUnit("bytes"), 60)},
    ],
    ids=str,
)
async def test_a_wrong_quota_is_refused(shaft: Lineshaft, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        await shaft.set_quota(**({"name": "x", "match": "customer:*"} | wrong))
    assert (await shaft.quotas()).items == []


async def test_slowdowns_are_listed_and_ended(shaft: Lineshaft) -> None:
    await engine_of(shaft).slowdowns.slow_down("model:m", 60, "429")

    assert [(found.key, found.reason) for found in (await shaft.slowdowns()).items] == [("model:m", "429")]
    await shaft.end_slowdown("model:m")

    assert (await shaft.slowdowns()).items == []
    with pytest.raises(NotFoundError, match="model:m"):
        await shaft.end_slowdown("model:m")


async def test_stats_and_health(shaft: Lineshaft) -> None:
    await shaft.submit(NewTask("sum"))
    await shaft.pause("mail")

    stats, health = await shaft.stats(), await shaft.health()

    assert (stats.by_status[Status.READY], stats.paused) == (1, ["mail"])
    assert (health.status, health.database) == ("ready", "ok")


async def test_figures_for_people(shaft: Lineshaft) -> None:
    await shaft.submit(NewTask("sum"))
    await shaft.pause("sum")

    waiting, attention = await shaft.waiting(), await shaft.attention()
    costs, throughput = await shaft.costs(days=2, model="x"), await shaft.throughput()

    (reason,) = waiting.reasons
    assert (reason.code, reason.count, reason.types) == ("paused", 1, ["sum"])
    assert (attention.paused, attention.dead_letters) == (["sum"], 0)
    assert (costs.total.attempts, costs.by_type, costs.today.forecast) == (0, [], None)
    assert (costs.as_of.date() - costs.since).days == 1
    assert (len(throughput.minutes), throughput.waits.tasks) == (60, 0)
    with pytest.raises(InvalidInputError, match="days: must be a whole number from 1 to 400"):
        await shaft.costs(days=0)


async def test_tokens_are_created_and_revoked(shaft: Lineshaft) -> None:
    made = await shaft.create_token("ci", "submit")
    await shaft.create_token("ci", Scope.READ)

    assert (made.name, made.scope, made.token[:4]) == ("ci", Scope.SUBMIT, "lsh_")
    first, second = await shaft.tokens()
    assert (first.id, first.scope, second.scope) == (made.id, Scope.SUBMIT, Scope.READ)
    await shaft.revoke_token(made.id)
    assert [token.revoked_at is None for token in await shaft.tokens()] == [False, True]
    await shaft.revoke_token("ci")
    assert [token.revoked_at is None for token in await shaft.tokens()] == [False, False]


async def test_tokens_are_bound_to_agents(shaft: Lineshaft) -> None:
    made = await shaft.create_token("w", "agent", agent_id="writer", budget_usd=5)

    (listed,) = await shaft.tokens()
    assert (made.agent_id, made.budget_usd) == (listed.agent_id, listed.budget_usd) == ("writer", Decimal(5))


REFUSED: dict[str, Callable[[Lineshaft], Awaitable[Any]]] = {
    "scope": lambda shaft: shaft.create_token("ci", "everything"),
    "name": lambda shaft: shaft.create_token(" ", "read"),
    "agent_id": lambda shaft: shaft.create_token("ci", "read", agent_id="writer"),
    "budget_usd": lambda shaft: shaft.create_token("ci", "agent", budget_usd=5),
    "nope": lambda shaft: shaft.revoke_token("nope"),
    "status": lambda shaft: shaft.change_agent("a", status="asleep"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_mistakes_are_named(shaft: Lineshaft, what: str) -> None:
    with pytest.raises((InvalidInputError, NotFoundError), match=what):
        await REFUSED[what](shaft)


async def test_one_page_of_events(shaft: Lineshaft) -> None:
    task = await shaft.submit(NewTask("sum"))

    first = await shaft.read_events(task_id=task.id, limit=1)
    rest = await shaft.read_events(first.next_cursor, task_id=task.id)

    assert [event.kind for event in first.items + rest.items] == ["task.created", "task.ready"]
    assert (first.caught_up, rest.caught_up) == (False, True)


def test_without_an_event_loop(blocking: SyncLineshaft) -> None:
    task = blocking.submit(NewTask("sum"))

    assert blocking.change(task, priority=3).priority == 3
    assert (blocking.attempts(task), blocking.steps(task)) == ([], {})
    assert (blocking.agents().items, blocking.locks().items, blocking.tokens()) == ([], [], [])
    assert blocking.stats().by_status[Status.READY] == 1
    assert blocking.waiting().reasons[0].count == blocking.costs().today.hours[0].attempts + 1


async def test_ids_by_their_short_form(shaft: Lineshaft) -> None:
    task = await shaft.submit(NewTask("sum"))
    dag_id = (await task.task()).dag_id

    assert list(await shaft.find_ids(short_id(task.id), kind="task")) == [task.id]
    assert list(await shaft.find_ids(task.id[:-3])) == [task.id]
    assert list(await shaft.find_ids(short_id(task.id), kind="dag")) == [dag_id]
    assert list(await shaft.find_ids("nothing")) == []


async def test_the_last_events_and_those_since_a_time(shaft: Lineshaft) -> None:
    await shaft.submit(NewTask("sum", title="Add it up"))

    page = await shaft.read_events("last:2")
    since = await shaft.read_events("since:2026-01-01T00:00:00Z")

    assert [(event.kind, event.title) for event in page.items] == [
        ("task.ready", "Add it up"),
        ("dag.created", "Add it up"),
    ]
    assert [event.kind for event in since.items[-2:]] == ["task.ready", "dag.created"]
    with pytest.raises(InvalidInputError, match="last:N"):
        await shaft.read_events("last:none")
