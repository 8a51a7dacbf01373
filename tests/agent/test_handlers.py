"""Handlers: what a signature asks of a spec, and every style of function."""

import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import pytest

from lineshaft import Agent, Lineshaft, NewTask, Result, SyncTaskContext, TaskContext
from lineshaft.agent.handlers import make_handler
from lineshaft.errors import InvalidInputError, LineshaftError
from lineshaft.model.states import Status
from tests.agent.helpers import one, result

pytestmark = pytest.mark.alike_over_http


def arguments(function: Any, spec: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    handler = make_handler("t", function, concurrency=None, time_limit_sec=None)
    return handler.arguments(msgspec.json.encode(spec))


class Brief(msgspec.Struct):
    goal: str
    words: int = 100


@dataclass
class Place:
    x: float
    y: float


class Model:
    """Like a pydantic model."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def model_validate(cls, value: dict[str, str]) -> "Model":
        if set(value) != {"name"}:
            raise ValueError("name is missing")
        return cls(value["name"])

    def model_dump(self, mode: str) -> dict[str, str]:
        assert mode == "json"
        return {"name": self.name}


def test_arguments_by_name_and_type() -> None:
    def handler(
        ctx: TaskContext, prompt: str, n: int = 3, *, mode: Literal["fast", "good"] = "fast"
    ) -> None: ...

    assert arguments(handler, {"prompt": "x"}) == ((), {"prompt": "x"})
    assert arguments(handler, {"prompt": "x", "n": 1, "mode": "good"}) == (
        (),
        {"prompt": "x", "n": 1, "mode": "good"},
    )
    assert arguments(handler, {"prompt": "x", "context_refs": [], "constraints": {}}) == ((), {"prompt": "x"})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "missing required field `prompt`"),
        ({"prompt": 1}, r"Expected `str`, got `int` - at `\$\.prompt`"),
        ({"prompt": "x", "n": "3"}, r"Expected `int`, got `str` - at `\$\.n`"),
        ({"prompt": "x", "propmt": "y"}, "unknown field `propmt`"),
    ],
)
def test_a_spec_that_does_not_fit_says_where(spec: dict[str, Any], message: str) -> None:
    def handler(ctx: TaskContext, prompt: str, n: int = 3) -> None: ...

    with pytest.raises(InvalidInputError, match=message) as caught:
        arguments(handler, spec)
    assert "handler(prompt: str, n: int = 3)" in str(caught.value)


def test_structured_arguments() -> None:
    def handler(
        ctx: TaskContext,
        brief: Brief,
        places: list[Place],
        size: Annotated[int, msgspec.Meta(ge=1)],
        m: Model,
    ) -> None: ...

    _, given = arguments(
        handler, {"brief": {"goal": "g"}, "places": [{"x": 1, "y": 2}], "size": 2, "m": {"name": "n"}}
    )

    assert (given["brief"], given["places"], given["m"].name) == (Brief("g", 100), [Place(1.0, 2.0)], "n")
    with pytest.raises(InvalidInputError, match=">= 1"):
        arguments(handler, {"brief": {"goal": "g"}, "places": [], "size": 0, "m": {"name": "n"}})
    with pytest.raises(InvalidInputError, match="name is missing"):
        arguments(handler, {"brief": {"goal": "g"}, "places": [], "size": 1, "m": {}})


def test_other_signatures() -> None:
    def rest(ctx: TaskContext, a: int, **more: Any) -> None: ...

    def only_positional(ctx: TaskContext, a: int, b: int = 5, /, c: int = 6) -> None: ...

    def nothing() -> None: ...

    def no_context(a: int) -> None: ...

    assert arguments(rest, {"a": 1, "b": 2, "constraints": []}) == (
        (),
        {"a": 1, "b": 2, "constraints": []},
    )
    assert arguments(only_positional, {"a": 1, "c": 2}) == ((1,), {"c": 2})
    assert arguments(nothing, {"anything": 1}) == ((), {})
    assert arguments(no_context, {"a": 1}) == ((), {"a": 1})
    assert arguments(partial(no_context, a=2), {}) == ((), {})


def test_an_invalid_handler_is_refused_when_it_is_registered() -> None:
    def many(*names: str) -> None: ...

    def lines() -> Iterator[int]:
        yield 1

    async def slowly(n: int) -> AsyncIterator[int]:
        yield n

    class Lines:
        def __call__(self) -> Iterator[int]:
            yield 1

    agent = Agent("a")
    with pytest.raises(TypeError, match=r"takes \*names, but a spec has only named values"):
        agent.task("t")(many)
    for generator in (lines, slowly, partial(slowly, n=1), Lines()):
        with pytest.raises(TypeError, match="can't be the handler of 't': it contains a yield"):
            agent.task("t")(generator)
    with pytest.raises(ValueError, match="concurrency of handler 't' must be at least 1"):
        agent.task("t", concurrency=0)(lambda: None)
    with pytest.raises(ValueError, match="time_limit_sec"):
        agent.task("t", time_limit_sec=0)(lambda: None)
    agent.task("t")(lambda: None)
    with pytest.raises(ValueError, match="Task type 't' already has a handler"):
        agent.task("t")(lambda: None)


async def test_an_agent_without_handlers_says_so(shaft: Lineshaft) -> None:
    with pytest.raises(LineshaftError, match="no handlers"):
        await Agent("a").run(shaft)


async def test_sync_and_async_handlers(shaft: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("async")
    async def asynchronous(ctx: TaskContext, name: str) -> dict[str, str]:
        return {"hello": await ctx.step("upper", name.upper)}

    @agent.task("sync")
    def synchronous(ctx: SyncTaskContext, name: str) -> dict[str, str]:
        return {"hello": ctx.step("upper", name.upper)}

    @agent.task("bare")
    def bare() -> Model:
        return Model("m")

    class Callable_:  # noqa: N801 - the name is taken
        async def __call__(self, ctx: TaskContext) -> str:
            return ctx.title

    agent.task("object")(Callable_())

    assert await result(shaft, agent, "async", spec={"name": "ann"}) == {"hello": "ANN"}
    assert await result(shaft, agent, "sync", spec={"name": "ann"}) == {"hello": "ANN"}
    assert await result(shaft, agent, "bare") == {"name": "m"}
    assert await result(shaft, agent, "object", title="T") == "T"


async def test_a_bad_spec_fails_the_task_and_not_the_agent(shaft: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("add")
    async def add(a: int, b: int) -> int:
        return a + b

    bad = await one(shaft, agent, "add", spec={"a": 1, "b": "two"})

    assert (bad.status, bad.failure_category) == (Status.DEAD_LETTERED, "invalid_input")
    assert bad.failure_reason is not None
    assert "add(a: int, b: int): Expected `int`, got `str` - at `$.b`" in bad.failure_reason
    assert await result(shaft, agent, "add", spec={"a": 1, "b": 2}) == 3


async def test_an_output_with_artifacts_and_a_report(shaft: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("build")
    async def build(ctx: TaskContext) -> Result:
        ctx.artifact("s3://bucket/report.pdf")
        return Result({"ok": True}, artifacts=[{"path": "dist/app.whl"}], decision_report={"why": "because"})

    task = await one(shaft, agent, "build")

    assert task.output.data == {"ok": True}
    assert task.output.artifacts == ["s3://bucket/report.pdf", {"path": "dist/app.whl"}]
    assert task.output.decision_report == {"why": "because"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "output can't be stored as JSON: a value of type object has no form in JSON"),
        ("a\0b", r"must not contain the character U\+0000"),
        pytest.param("x" * (33 << 20), "Store it elsewhere", id="large"),
        ({"score": float("nan")}, "output must not contain NaN or an infinity"),
        (Place(float("inf"), 0.0), "output must not contain NaN or an infinity"),
        (Result(1, decision_report={"why": float("nan")}), "decision_report must not contain NaN"),
    ],
)
async def test_an_output_that_cannot_be_stored_is_invalid(
    shaft: Lineshaft, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lineshaft.agent.outcome.MAX_OUTPUT_BYTES", 32 << 20)
    agent = Agent("a")
    agent.task("odd")(lambda: value)

    task = await one(shaft, agent, "odd", max_attempts=1)

    assert (task.status, task.failure_category) == (Status.DEAD_LETTERED, "invalid_output")
    assert re.search(message, task.failure_reason or "")


async def test_the_context_describes_the_task(shaft: Lineshaft) -> None:
    agent = Agent("a", capabilities=["python"], models=["small", "large"])
    seen: dict[str, Any] = {}

    @agent.task("source")
    async def source() -> dict[str, int]:
        return {"n": 5}

    @agent.task("look")
    async def look(ctx: TaskContext) -> None:
        names = ("id", "type", "title", "dag_id", "parent_id", "spec", "attempt", "model", "resume", "epoch")
        seen.update({name: getattr(ctx, name) for name in names})
        seen.update(inputs=ctx.inputs, agent=ctx.agent_id, last=ctx.last_error, max=ctx.max_attempts)
        ctx.log.info("looked")

    from_ = await shaft.submit(NewTask("source"))
    refs = [f"task:{from_.id}:output"]
    task = await one(
        shaft, agent, "look", title="Look", spec={"context_refs": refs}, model_preferences=["large"]
    )

    assert task.status is Status.COMPLETED
    assert seen == {
        "id": task.id,
        "type": "look",
        "title": "Look",
        "dag_id": task.dag_id,
        "parent_id": None,
        "spec": {"context_refs": refs},
        "attempt": 1,
        "model": "large",
        "resume": False,
        "epoch": 1,
        "inputs": {refs[0]: {"n": 5}},
        "agent": "a",
        "last": None,
        "max": 3,
    }


async def test_a_system_without_threads_left_fails_the_attempt_and_nothing_else(shaft: Lineshaft) -> None:
    agent = Agent("a", max_concurrent_tasks=1)

    @agent.task("more_than_there_is")
    async def more_than_there_is() -> None:
        # More than the address space of a process, so it fails even if the kernel overcommits memory.
        threading.stack_size(1 << 47)

    @agent.task("sync")
    def sync() -> str:
        return "ran"

    @agent.task("enough")
    async def enough() -> None:
        threading.stack_size(0)

    try:
        await shaft.submit(NewTask("more_than_there_is", priority=0))
        failed = await shaft.submit(NewTask("sync", priority=1, max_attempts=1))
        await shaft.submit(NewTask("enough", priority=2))
        ran = await one(shaft, agent, "sync", priority=3)
    finally:
        threading.stack_size(0)

    letter = await shaft.get(failed)
    assert letter.status is Status.DEAD_LETTERED
    assert "can't start new thread" in letter.failure_history[0].error
    assert ran.result == "ran"
