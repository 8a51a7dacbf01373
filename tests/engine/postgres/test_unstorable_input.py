"""Hostile input, to everything that takes a text or a sum: a clear error, and nothing has changed."""

import contextlib
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from psycopg import sql

from lineshaft.checks.verdict import Verdict
from lineshaft.engine.feed.events import Events
from lineshaft.engine.submit.surface import SurfaceTask
from lineshaft.engine.tokens import Tokens
from lineshaft.errors import InvalidInputError, LineshaftError, NotFoundError
from lineshaft.model.fields import MAX_SPEC_BYTES
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.tasks import Gate, NewTask, OutputContract, RetrySpec
from lineshaft.types import ApprovalDecision, DagFilter, DeadLetterFilter, NewAgent, Page, TaskFilter
from lineshaft.types.work import ClaimedTask, Completion, Failure, Spent
from tests.world import Actions, World, ref

UNSTORABLE = [pytest.param("a\0b", id="NUL"), pytest.param("a\ud800b", id="half a character")]
#: Odd, but all of it characters: beyond the basic plane, right to left, combining, invisible, quotes.
ODD = "🦊 שלום e\u0301 \u200b \u2028 '\"\\%_{}$1;--\n\t\x7f"

Call = Callable[[World, str], Awaitable[object]]


def table(world: World, name: str) -> list[tuple[Any, ...]]:
    query = sql.SQL("SELECT t.*::text FROM lineshaft.{} AS t ORDER BY 1").format(sql.Identifier(name))
    return world.connection.execute(query).fetchall()


def everything(world: World) -> dict[str, Any]:
    """Including values that are not part of a task."""
    others = ("agent", "breaker", "slowdown", "pause", "token", "event", "lane", "review")
    return world.everything() | {name: table(world, name) for name in others}


def submitting(**given: Callable[[str], Any]) -> Call:
    """A task with one field made of the text."""
    ((name, made),) = given.items()
    return lambda world, text: world.submit(NewTask(**({"type": "code"} | {name: made(text)})))


def plain(text: str) -> str:
    return text


def registering(name: str, made: Callable[[str], Any]) -> Call:
    def register(world: World, text: str) -> Awaitable[object]:
        fields_: dict[str, Any] = {name: made(text)}
        return world.engine.fleet.register(NewAgent(**fields_))

    return register


TEXTS: dict[str, Call] = {
    **{
        name: submitting(**{name: plain})
        for name in ("type", "id", "title", "lock_key", "idempotency_key", "preset")
    },
    **{
        name: submitting(**{name: lambda text: [text]})
        for name in ("tags", "required_capabilities", "model_preferences", "fallback_models", "depends_on")
    },
    "created_by": submitting(created_by=lambda text: f"human:{text}"),
    "parent_id": submitting(parent_id=plain),
    "dag_id": submitting(dag_id=plain),
    "spec": submitting(spec=lambda text: {"prompt": [text]}),
    "a key of a spec": submitting(spec=lambda text: {text: 1}),
    "context_refs": submitting(spec=lambda text: {"context_refs": [f"task:{text}:output"]}),
    "output.type": submitting(output=lambda text: OutputContract(type=text)),
    "a gate's method": submitting(output=lambda text: OutputContract(validation=text)),
    "a pattern": submitting(
        output=lambda text: OutputContract(validation="regex", validation_schema=f"({text}")
    ),
    "a JSON Schema": submitting(
        output=lambda text: OutputContract(validation=(Gate("json-schema", {"const": text}),))
    ),
    "a command": submitting(
        output=lambda text: OutputContract(validation="test-pass", validation_schema={"command": text})
    ),
    "retry_on": submitting(retry=lambda text: RetrySpec(retry_on=(text,))),
    "children": submitting(children=lambda text: [NewTask(text)]),
    "the title of a DAG": lambda world, text: world.engine.submission.submit_dag(text, [NewTask("x")]),
    "the key of a task in a DAG": lambda world, text: world.dag(NewTask("x", key=text)),
    "who made a DAG": lambda world, text: world.engine.submission.submit_dag(
        "x", [NewTask("x")], created_by=f"human:{text}"
    ),
    "the key of a DAG": lambda world, text: world.engine.submission.submit_dag(
        "x", [NewTask("x")], idempotency_key=text
    ),
    **{f"an agent's {name}": registering(name, plain) for name in ("id", "type")},
    **{
        f"an agent's {name}": registering(name, lambda text: (text,))
        for name in ("capabilities", "types", "models_available")
    },
    "an agent to change": lambda world, text: world.engine.fleet.patch(text, add_budget_usd=1),
    "an agent's status": lambda world, text: world.engine.fleet.patch("ann", status=text),
    "who claims": lambda world, text: world.engine.claims.claim(text, 1),
    "types to claim": lambda world, text: world.engine.claims.claim("ann", 1, types=[text]),
    "a task to claim": lambda world, text: world.engine.claims.claim_task("ann", 1, text),
    "who beats": lambda world, text: world.heartbeat(text, 1),
    "a task to cancel": lambda world, text: world.engine.cancel.cancel(text, "x"),
    "a DAG to cancel": lambda world, text: world.engine.cancel.cancel_dag(text, "x"),
    "a task to retry": lambda world, text: world.engine.revive.retry(text),
    "a type to pause": lambda world, text: world.engine.pauses.pause(text),
    "a DAG's ceiling": lambda world, text: world.engine.budgets.set_dag_budget(text, 1),
    "a breaker to open": lambda world, text: world.engine.breakers.open(text),
    "a breaker to reset": lambda world, text: world.engine.breakers.reset(text),
    "a model to slow down": lambda world, text: world.engine.slowdowns.slow_down(f"model:{text}", 1),
    "a slowdown to end": lambda world, text: world.engine.slowdowns.end(text),
    "a lock to release": lambda world, text: world.engine.locks.release(text),
    "a dead letter": lambda world, text: world.engine.dead_letters.resolve(text, decided()),
    "a reviewer": lambda world, text: world.engine.dead_letters.resolve("x", decided(reviewer=text)),
    "a note": lambda world, text: world.engine.dead_letters.resolve("x", decided(note=text)),
    "a resolution": lambda world, text: world.engine.dead_letters.resolve("x", decided(resolution=text)),
    "a new spec": lambda world, text: world.engine.dead_letters.resolve(
        "dead", decided(resolution="modify_and_retry", spec={"a": text})
    ),
    "what waits for a person": lambda world, text: world.engine.approvals.decide(
        text, ApprovalDecision(approve=True, reviewer="ann")
    ),
    "a token's name": lambda world, text: Tokens(world.engine.database).create(text, "read"),
    "a token's scope": lambda world, text: Tokens(world.engine.database).create("x", text),
    "a task to look at": lambda world, text: world.engine.read.task(text),
    "a DAG to look at": lambda world, text: world.engine.read.dag(text),
    "why": lambda world, text: world.engine.read.why(text),
    "steps to look at": lambda world, text: world.engine.read.steps(text),
    "a breaker to look at": lambda world, text: world.engine.read.breaker(text),
    "a cursor": lambda world, text: world.engine.read.tasks(cursor=text),
    "an order": lambda world, text: world.engine.read.tasks(order=text),
    "where to go on in the events": lambda world, text: Events(world.engine.database).read(text, limit=1),
    "reports to search for": lambda world, text: world.engine.reports.search(text),
}


def decided(**fields_: Any) -> ResolutionRequest:
    return ResolutionRequest(**({"resolution": "cancel", "reviewer": "ann"} | fields_))


async def dead_letter(world: World) -> None:
    """`ann` is there, and a task `dead` lies on the dead_letters."""
    await world.one(id="dead", max_attempts=1)
    await world.fail(await world.take(await world.agent("ann")))


@pytest.mark.parametrize("text", UNSTORABLE)
async def test_texts_that_can_not_be_stored(world: World, text: str) -> None:
    """NUL and halves of characters, in every string that there is: never an error of the driver's."""
    await dead_letter(world)
    before = everything(world)

    for name, call in TEXTS.items():
        with pytest.raises(LineshaftError) as caught:
            await call(world, text)
        assert isinstance(caught.value, InvalidInputError | NotFoundError), name
        str(caught.value).encode()  # it must be printable and serialisable
        assert everything(world) == before, name


@pytest.mark.parametrize("text", UNSTORABLE)
async def test_filters_that_can_not_be_stored(world: World, text: str) -> None:
    """They find nothing, or are refused by name."""
    read, dead_letters = world.engine.read, world.engine.dead_letters
    looks: list[tuple[type[Any], Callable[[Any], Awaitable[Page[Any]]]]] = [
        (TaskFilter, read.tasks),
        (DagFilter, read.dags),
        (DeadLetterFilter, dead_letters.find),
    ]
    for kind, look in looks:
        for field in msgspec.structs.fields(kind):
            if "str" not in str(field.type) or "bool" in str(field.type):
                continue
            given: Any = text if "Sequence" not in str(field.type) else [text]
            with contextlib.suppress(InvalidInputError):
                page = await look(kind(**{field.name: given}))
                assert page.items == [], field.name


async def test_texts_that_people_and_programs_write_are_mended(world: World) -> None:
    """What a broken program said must not get lost for one character."""
    agent = await world.agent()
    await world.one(max_attempts=1)
    task = await world.take(agent)

    await world.fail(task, "a\0b\ud800c")

    assert world.end(task.id)["reason"] == "a\N{REPLACEMENT CHARACTER}b?c"


async def test_odd_characters_come_back_as_they_were(world: World) -> None:
    """In every string: nothing is escaped twice, taken for SQL, a pattern or a format."""
    name = ODD.replace("\n", "").replace("\t", "")
    agent = await world.agent("ann", capabilities=[name], models_available=[name])
    spec = {ODD: [ODD]}
    dag = await world.engine.submission.submit_dag(
        name,
        [
            NewTask(
                name,
                key=name,
                title=name,
                spec=spec,
                tags=[name],
                created_by=f"human:{name}",
                lock_key=name,
                required_capabilities=[name],
                model_preferences=[name],
                idempotency_key=name,
            )
        ],
    )
    task = await world.take(agent)
    assert (task.type, task.title, task.model, task.lock_key) == (name, name, name, name)
    assert await world.complete(task, {ODD: ODD}) == "COMPLETED"

    (found,) = (await world.engine.read.tasks(TaskFilter(tag=[name], type=[name], q=[name]))).items
    assert found.id == dag.tasks[name].id
    row = world.task(found.id)
    assert (row["spec"], world.end(found.id)["output"]) == (spec, {ODD: ODD})
    assert (row["created_by"], row["idempotency_key"]) == (f"human:{name}", name)


# Too much.


@pytest.mark.parametrize("where", ["spec", "surface", "schema"])
async def test_ten_megabytes(world: World, where: str) -> None:
    """Refused with the number, and what to do instead."""
    huge = {"text": "x" * 10_000_000}
    assert MAX_SPEC_BYTES < 10_000_000
    task = {
        "spec": NewTask("code", spec=huge),
        "surface": SurfaceTask("code", surface=huge),
        "schema": NewTask(
            "code", output=OutputContract(validation="json-schema", validation_schema={"const": huge})
        ),
    }[where]
    before = everything(world)

    with pytest.raises(
        InvalidInputError, match=rf"must be at most {MAX_SPEC_BYTES} bytes of JSON, got 100000"
    ):
        await world.submit(NewTask("fine"), task)

    assert everything(world) == before


# Sums.

SUMS = [
    pytest.param(value, id=str(value))
    for value in (float("nan"), float("inf"), -1, Decimal("NaN"), Decimal("-0.000001"), 10**12, "much", True)
]


async def held(world: World) -> ClaimedTask:
    await world.one()
    return await world.take(await world.agent("ann"))


@pytest.mark.parametrize("usd", SUMS)
async def test_sums_that_are_none(world: World, usd: Any) -> None:
    """NaN, negative and endless costs, wherever money is named."""
    task = await held(world)
    dag_id = world.task(task.id)["dag_id"]
    engine = world.engine
    before = everything(world)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "max_cost_usd": lambda: world.one(max_cost_usd=usd),
        "max_total_cost_usd": lambda: world.one(max_total_cost_usd=usd),
        "in a spec": lambda: world.one(spec={"constraints": {"max_cost_usd": usd}}),
        "a ceiling": lambda: engine.submission.submit_dag("x", [NewTask("x")], budget_ceiling_usd=usd),
        "another ceiling": lambda: engine.budgets.set_dag_budget(dag_id, usd),
        "more of it": lambda: engine.budgets.add_dag_budget(dag_id, usd),
        "an agent's budget": lambda: world.agent(budget_usd=usd),
        "more budget": lambda: engine.fleet.patch("ann", add_budget_usd=usd),
        "an output": lambda: engine.work.complete([Completion(ref(task), b"1", spent=Spent(usd))]),
        "a failure": lambda: engine.work.fail([Failure(ref(task), "x", spent=Spent(usd))]),
        "a heartbeat": lambda: Actions(engine).heartbeat("ann", 1, [ref(task)], spent=Spent(usd)),
        "a verdict": lambda: _verdict(usd),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidInputError):
            await call()
        assert everything(world) == before, name


async def _verdict(usd: Any) -> None:
    Verdict(passed=True, cost_usd=usd)
