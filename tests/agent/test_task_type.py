"""Task types: `@agent.task` returns a reference that is still the function and builds tasks for it."""

import inspect
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from lineshaft import Agent, Fail, NewTask, Result, RetrySpec, Snooze, SyncTaskContext, TaskContext
from lineshaft.agent.handlers import return_decoder
from lineshaft.agent.task_type import TaskFunction, TaskType
from lineshaft.model.tasks import TaskDefaults, TaskOptions
from lineshaft.types.typed_task import decoder_of


@dataclass
class Notes:
    about: str
    at: datetime | None = None


class Model:
    """Like a pydantic model."""

    def __init__(self, name: str) -> None:
        self.name = name

    def model_dump(self, *, mode: str) -> dict[str, str]:
        assert mode == "json"
        return {"name": self.name}


agent = Agent("a")


@agent.task(
    "research", max_cost_usd=0.5, max_duration_sec=timedelta(minutes=2), retry=RetrySpec(jitter=False)
)
async def research(ctx: TaskContext, prompt: str, depth: int = 1) -> Notes:  # noqa: ARG001 - only its signature matters
    """Look around."""
    return Notes(prompt * depth)


@agent.task("count")
def count(ctx: SyncTaskContext, /, numbers: list[int]) -> int:  # noqa: ARG001 - as above
    return sum(numbers)


@agent.task("anything")
def anything(first: Any, /, **rest: Any) -> None: ...


async def test_it_is_still_the_function() -> None:
    assert isinstance(research, TaskFunction)
    assert isinstance(research, TaskType)
    assert (research.name, research.__name__, research.__doc__) == ("research", "research", "Look around.")
    assert list(inspect.signature(research).parameters) == ["ctx", "prompt", "depth"]
    context: Any = None
    assert await research(context, "x", depth=2) == Notes("xx")
    assert count(context, [1, 2]) == 3
    assert repr(research) == "<TaskFunction 'research'>"


def test_new_builds_a_task_with_the_defaults_of_the_decorator() -> None:
    task = research.new(prompt="competitors")

    assert isinstance(task, NewTask)
    assert (task.type, task.spec) == ("research", {"prompt": "competitors"})
    assert (task.max_cost_usd, task.max_duration_sec, task.retry) == (0.5, 120.0, RetrySpec(jitter=False))
    assert research.new("competitors", 2).spec == {"prompt": "competitors", "depth": 2}
    assert anything.new(1, b=2, c=3).spec == {"first": 1, "b": 2, "c": 3}


def test_values_become_json() -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    spec = anything.new(Notes("x", moment), model=Model("m"), struct=RetrySpec(jitter=True)).spec

    assert spec == {
        "first": {"about": "x", "at": "2026-01-02T00:00:00Z"},
        "model": {"name": "m"},
        "struct": {"jitter": True},
    }


def test_wrong_arguments_are_refused_at_once() -> None:
    untyped: Any = research
    with pytest.raises(
        TypeError, match="type 'research' can't be built: missing a required argument: 'prompt'"
    ):
        untyped.new()
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'promt'"):
        untyped.new(prompt="x", promt="y")
    unchecked: Any = {"max_cots_usd": 1}
    with pytest.raises(TypeError, match="max_cots_usd"):
        agent.task("other", **unchecked)(lambda: None)
    assert "other" not in agent.task_types


def test_with_options_returns_a_copy() -> None:
    task = research.new(prompt="x")
    changed = task.with_options(
        key="r", depends_on=["a"], priority=10, max_cost_usd=None, max_duration_sec=timedelta(seconds=5)
    )

    assert (task.key, task.depends_on, task.priority, task.max_cost_usd) == (None, (), None, 0.5)
    assert (changed.key, changed.depends_on, changed.priority) == ("r", ["a"], 10)
    assert (changed.max_cost_usd, changed.max_duration_sec, changed.spec) == (None, 5.0, {"prompt": "x"})
    assert decoder_of(changed) is decoder_of(task) is not None
    assert NewTask("t").with_options(tags=["a"]) == NewTask("t", tags=["a"])
    assert msgspec.json.decode(msgspec.json.encode(changed), type=NewTask).key == "r"


def test_options_are_the_fields_of_a_task() -> None:
    assert {*TaskOptions.__annotations__} == {*NewTask.__struct_fields__} - {"type", "spec"}
    assert {*TaskDefaults.__annotations__} < {*TaskOptions.__annotations__}


def test_outputs_are_decoded_to_the_return_type() -> None:
    decode = decoder_of(research.new("x"))
    assert decode is not None
    assert decode(b'{"about": "x", "at": "2026-01-02T00:00:00Z"}') == Notes(
        "x", datetime(2026, 1, 2, tzinfo=UTC)
    )


def test_wishes_are_not_part_of_an_output() -> None:
    def wishing() -> Notes | Snooze | Fail:
        raise NotImplementedError

    def optional() -> Notes | None:
        raise NotImplementedError

    def whole() -> Result:
        raise NotImplementedError

    def either() -> Notes | Result:
        raise NotImplementedError

    def nothing() -> Snooze | Fail:
        raise NotImplementedError

    def unknown() -> "Missing": ...  # type: ignore[name-defined]  # noqa: F821 - an annotation that can't be read

    def decoded(function: Any, json: bytes) -> Any:
        decode = return_decoder(function)
        return decode and decode(json)

    assert decoded(wishing, b'{"about": "x"}') == Notes("x")
    assert decoded(optional, b"null") is None
    assert decoded(nothing, b"null") is None
    for function in (whole, either, unknown, lambda: 1):
        assert return_decoder(function) is None


def test_one_function_may_serve_several_types_and_agents() -> None:
    other = Agent("b")

    @other.task("first")
    @other.task("second", priority=3)
    def double(n: int) -> int:
        return 2 * n

    assert double(2) == 4
    assert double.new(n=1).type == "first"
    assert set(other.task_types) == {"first", "second"}
    assert all(handler.arguments(b'{"n": 1}') == ((), {"n": 1}) for handler in other._handlers.values())
