"""Over a database and over HTTP: equal results, and the same errors with the same messages."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
import pytest

from lineshaft import Gate, Lineshaft, NewTask, OutputContract, Resolution, RetrySpec
from lineshaft.errors import LineshaftError
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimRef, Completion
from tests.client.helpers import engine_beside, engine_of, finish_all, kill_one
from tests.http_server import ServerThread


class Both(NamedTuple):
    database: Lineshaft
    http: Lineshaft


@pytest.fixture
async def both(dsn: str, server_thread: ServerThread) -> AsyncIterator[Both]:
    async with AsyncExitStack() as opened:
        url = opened.enter_context(server_thread.serving(dsn))
        found = Both(
            await opened.enter_async_context(Lineshaft(dsn, max_connections=3)),
            await opened.enter_async_context(Lineshaft(url, max_connections=3)),
        )
        await opened.enter_async_context(engine_beside(found.database, dsn))
        yield found


def timeless(value: Any) -> Any:
    """Without fields that depend on the time of the call."""
    if hasattr(value, "effective_priority"):
        return msgspec.structs.replace(value, effective_priority=None, tier=None)
    return value


SPEC = {
    "prompt": 'naïve ⚙ 𝄞 \u2028 \\u0000 "quoted"',
    "numbers": [0.1, 1e300, -0.0, 2**53 + 1, 12345678901234567890123, 1.0],
    "nested": {"": [None, True, {}]},
    "url": "a/b?c#d",
}


async def a_history(shaft: Lineshaft) -> None:
    """One of everything."""
    engine = engine_of(shaft)
    await shaft.submit(NewTask("sum", spec=SPEC, max_cost_usd=Decimal("0.123456"), tags=["ä b&c=d"]))
    await finish_all(engine, SPEC)
    await shaft.submit(NewTask("sum", spec={"n": 1}))
    killed = await kill_one(engine)
    await shaft.resolve(killed, Resolution.MODIFY_AND_RETRY, reviewer="ann", note="n", spec={"n": 2})
    await kill_one(engine)
    await shaft.submit(NewTask("sum", spec={"n": 3}))
    await kill_one(engine)
    agent = await engine.fleet.register(NewAgent(id="writer", budget_usd=Decimal("12345678.123456")))
    await shaft.submit(
        NewTask("write", preset="loki", output=OutputContract(validation=(Gate("human"), Gate("regex", "x"))))
    )
    (task,) = (await engine.claims.claim(agent.id, agent.incarnation, start=True)).tasks
    report = msgspec.json.encode({"why": "asked", "what": "a page", "tradeoffs": "none"})
    await engine.work.complete(
        [
            Completion(
                ClaimRef(task.id, task.epoch), output=b'"x"', artifacts=b"[1.50]", decision_report=report
            )
        ]
    )
    await shaft.submit(
        NewTask(
            "later",
            run_at=datetime(2099, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
            deadline=datetime(2100, 1, 1, tzinfo=UTC),
            retry=RetrySpec(strategy="fixed", initial_delay_sec=1.5),
            created_by="human:ann",
            idempotency_key="k",
        )
    )
    await shaft.submit_dag(
        "Page", [NewTask("a", key="a"), NewTask("b", key="b", depends_on=["a"])], budget_ceiling_usd=0.1
    )


async def test_results_are_equal(both: Both) -> None:
    await a_history(both.database)

    async def same(ask: Callable[[Lineshaft], Awaitable[Any]]) -> Any:
        one, other = [await ask(shaft) for shaft in both]
        if hasattr(one, "items") and hasattr(one, "next_cursor"):
            assert other.next_cursor == one.next_cursor
            assert [timeless(item) for item in other.items] == [timeless(item) for item in one.items]
        assert type(other) is type(one)
        return one

    tasks = await same(lambda shaft: shaft.list(order="created_at"))
    assert len(tasks.items) == 7
    for task in tasks.items:
        one, other = [timeless(await shaft.get(task.id)) for shaft in both]
        assert other == one
        # To the last digit: sums, times and JSON.
        assert repr(other).replace("datetime.timezone.utc", "UTC") == repr(one).replace(
            "zoneinfo.ZoneInfo(key='UTC')", "UTC"
        ).replace("datetime.timezone.utc", "UTC")
        assert await both.http.why(task.id) == await both.database.why(task.id)
        assert await both.http.get_dag(task.dag_id) == await both.database.get_dag(task.dag_id)
    await same(lambda shaft: shaft.list(limit=2))
    await same(lambda shaft: shaft.list(tag="ä b&c=d", type=["sum", "write"], q="SUM"))
    assert (await same(lambda shaft: shaft.dead_letters())).items
    await same(lambda shaft: shaft.dead_letters(reviewed=True, error_contains="NO"))
    assert await both.http.dead_letter_groups() == await both.database.dead_letter_groups()
    await same(lambda shaft: shaft.reports())
    one, other = [[e async for e in shaft.events(None, follow=False)] for shaft in both]
    # A cursor contains the time of the call; but each client can continue from a cursor of the other.
    assert [msgspec.structs.replace(event, cursor="") for event in other] == [
        msgspec.structs.replace(event, cursor="") for event in one
    ]
    assert len(one) > 30
    rest = [event async for event in both.database.events(other[-3].cursor, follow=False)]
    assert [event.kind for event in rest] == [event.kind for event in one[-2:]]


async def test_approvals_are_equal(both: Both) -> None:
    await a_history(both.database)
    contract = OutputContract(validation="json-schema", validation_schema={"type": "number"})
    await both.database.submit(NewTask("ask", required_capabilities=["human"], output=contract))

    one, other = [(await shaft.approvals()).items for shaft in both]

    assert [approval.kind for approval in one] == ["gate", "task"]
    for here, there in zip(one, other, strict=True):
        assert timeless(there.task) == timeless(here.task)
        assert (there.kind, there.schema, there.since) == (here.kind, here.schema, here.since)


async def _completed(shaft: Lineshaft) -> str:
    task = await shaft.submit(NewTask("done"))
    await finish_all(engine_of(shaft))
    return task.id


CALLS: dict[str, Callable[[Lineshaft, str], Awaitable[Any]]] = {
    "no such task": lambda shaft, _: shaft.get("task_nope"),
    "a name for a path": lambda shaft, _: shaft.get("x?y=%00&z#é "),
    "no such DAG": lambda shaft, _: shaft.get_dag("dag_nope"),
    "no such thing to explain": lambda shaft, _: shaft.why("task_nope"),
    "a state that doesn't allow it": lambda shaft, done: shaft.cancel(done),
    "nothing to retry": lambda shaft, done: shaft.retry(done),
    "nothing to decide": lambda shaft, done: shaft.approve(done, reviewer="ann"),
    "no reviewer": lambda shaft, done: shaft.approve(done, reviewer=" "),
    "no dead letter": lambda shaft, done: shaft.resolve(done, Resolution.RETRY, reviewer="ann"),
    "no such status": lambda shaft, _: shaft.list(status="REDY"),
    "no such order": lambda shaft, _: shaft.list(order="size"),
    "too many at once": lambda shaft, _: shaft.list(limit=501),
    "no cursor": lambda shaft, _: shaft.list(cursor="nonsense"),
    "no cursor of events": lambda shaft, _: anext(shaft.events("nonsense")),
    "several faults": lambda shaft, _: shaft.submit(NewTask("x", priority=101, title="", max_attempts=0)),
    "a fault in one of many": lambda shaft, _: shaft.submit_many([NewTask("x"), NewTask("x", tags=[""])]),
    "a fault in a child": lambda shaft, _: shaft.submit(NewTask("x", children=[NewTask("y", priority=-1)])),
    "not JSON": lambda shaft, _: shaft.submit(NewTask("x", spec={"a": float("nan")})),
    "what can't be stored": lambda shaft, _: shaft.submit(NewTask("x", spec={"a": "\0"})),
    "not a text": lambda shaft, _: shaft.submit(NewTask(7)),  # type: ignore[arg-type]
    "a time without a zone": lambda shaft, _: shaft.submit(NewTask("x", run_at=datetime(2099, 1, 1))),  # noqa: DTZ001
    "no such gate": lambda shaft, _: shaft.submit(NewTask("x", output=OutputContract(validation="magic"))),
    "a gate that makes no sense": lambda shaft, _: shaft.submit(
        NewTask("x", output=OutputContract(validation="regex", validation_schema="("))
    ),
    "no such dependency": lambda shaft, _: shaft.submit(NewTask("x", depends_on=["task_nope"])),
    "a cycle": lambda shaft, _: shaft.submit_dag(
        "x", [NewTask("x", key="a", depends_on=["b"]), NewTask("x", key="b", depends_on=["a"])]
    ),
    "a DAG of nothing": lambda shaft, _: shaft.submit_dag("x", []),
    "a DAG without a title": lambda shaft, _: shaft.submit_dag("", [NewTask("x")]),
    "no sum of money": lambda shaft, _: shaft.submit_dag("x", [NewTask("x")], budget_ceiling_usd=-1),
    "a key used twice": lambda shaft, _: shaft.submit_dag("x", [NewTask("x", key="a")] * 2),
    "an id that is taken": lambda shaft, done: shaft.submit(NewTask("x", id=done)),
    "a pause of nothing": lambda shaft, _: shaft.pause(""),
    "too many tasks": lambda shaft, _: shaft.submit_many([NewTask("x")] * 10_001),
}


async def test_errors_are_the_same(both: Both) -> None:
    done = await _completed(both.database)
    for what, call in CALLS.items():
        refusals = []
        for shaft in both:
            with pytest.raises(LineshaftError) as refused:
                await call(shaft, done)
            refusals.append(refused.value)
        one, other = refusals
        assert type(other) is type(one), what
        assert str(other) == str(one), what
        assert vars(other) == vars(one), what
    assert len((await both.http.list()).items) == 1
