"""What a handler returns fits its return annotation, or the attempt fails as `invalid_output`."""

from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict, Field, computed_field

from lineshaft import Agent, Lineshaft, NewTask, Result, Snooze, TaskContext
from lineshaft.agent.handlers import make_handler
from lineshaft.agent.outcome import of_value
from lineshaft.model.states import Status
from tests.agent.helpers import AT_ONCE, drain

pytestmark = pytest.mark.alike_over_http


class Notes(msgspec.Struct):
    text: str
    pages: list[int] = []


@dataclass
class Place:
    x: float
    y: float


class Report(TypedDict):
    title: str


class Draft(BaseModel):
    model_config = ConfigDict(extra="forbid")
    title: str = Field(alias="Title")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def words(self) -> int:
        return len(self.title.split())


async def test_a_wrong_value_is_retried_with_the_verdict(shaft: Lineshaft) -> None:
    """Sync and async; the place in the value is named; the consumer never sees it."""
    agent = Agent("writer")
    verdicts: list[Any] = []
    consumed: list[Notes] = []

    @agent.task("make")
    async def make(ctx: TaskContext) -> Notes:
        verdicts.append(ctx.last_error and (ctx.last_error.category, ctx.last_error.error))
        return Notes("good") if len(verdicts) > 1 else {"text": "bad", "pages": [1, "two"]}  # type: ignore[return-value]

    @agent.task("plain")
    def plain() -> list[str]:
        return "text"  # type: ignore[return-value]

    @agent.task("consume")
    def consume(notes: Notes) -> None:
        consumed.append(notes)

    notes = NewTask("make", key="make", retry=AT_ONCE)
    dag = await shaft.submit_dag(
        "notes",
        [
            notes,
            NewTask("consume", key="consume", inputs={"notes": "make"}),
            NewTask("plain", key="plain", max_attempts=1),
        ],
    )
    await drain(shaft, agent)

    assert (await dag["make"].task()).status is Status.COMPLETED
    assert consumed == [Notes("good")]
    (failure,) = (await dag["make"].task()).failure_history
    assert failure.category == "invalid_output"
    assert failure.error == (
        "The handler's output doesn't fit its return type tests.agent.test_return_types.Notes: Expected "
        "`int`, got `str` - at `$.pages[1]`. Return such a value, or correct the annotation."
    )
    assert verdicts == [None, ("invalid_output", failure.error)]
    plain_task = await dag["plain"].task()
    assert (plain_task.status, plain_task.failure_category) == (Status.DEAD_LETTERED, "invalid_output")


def fault(function: Any, value: Any) -> str | None:
    handler = make_handler("t", function, concurrency=None, time_limit_sec=None)
    output = of_value(value).output
    assert output is not None
    return handler.output_fault(output)


def test_what_fits_and_what_does_not() -> None:  # noqa: C901 - many functions, all empty
    """Whatever inputs support; nothing is asked of functions without an annotation, or with Any or None."""

    def struct() -> Notes: ...  # type: ignore[empty-body]
    def optional() -> Notes | None: ...
    def wish() -> Notes | Snooze: ...  # type: ignore[empty-body]
    def place() -> Place: ...  # type: ignore[empty-body]
    def report() -> Report: ...  # type: ignore[empty-body]
    def model() -> Draft: ...  # type: ignore[empty-body]
    def models() -> list[Draft]: ...  # type: ignore[empty-body]
    def mapping() -> dict[str, tuple[int, str]]: ...  # type: ignore[empty-body]
    def anything() -> Any: ...
    def nothing() -> None: ...
    def bare(): ...  # type: ignore[no-untyped-def]  # noqa: ANN202
    def whole() -> Result: ...  # type: ignore[empty-body]
    async def later() -> Notes: ...  # type: ignore[empty-body]
    def unreadable() -> "Missing": ...  # type: ignore[name-defined]  # noqa: F821

    draft = Draft(Title="Two words")
    fitting = [
        (struct, Notes("x")),
        (struct, {"text": "x"}),
        (struct, Result(Notes("x"))),
        (later, Notes("x")),
        (optional, None),
        (optional, Notes("x")),
        (wish, Notes("x")),
        (place, Place(1, 2.5)),
        (report, {"title": "x", "more": 1}),
        (model, draft),
        (models, [draft]),
        (mapping, {"a": (1, "b")}),
        *((function, {"any": 1}) for function in (anything, nothing, bare, whole, unreadable)),
    ]
    wrong = [
        (struct, None, "Expected `object`, got `null`"),
        (struct, Notes(5), "- at `$.text`"),  # type: ignore[arg-type]
        (struct, Result("x"), "Expected `object`, got `str`"),
        (later, ["x"], "Expected `object`, got `array`"),
        (place, {"x": 1}, "missing required field `y`"),
        (report, {"title": 1}, "- at `$.title`"),
        (model, {"Title": 1}, "valid string"),
        (models, [draft, {}], "Field required"),
        (mapping, {"a": (1, 2)}, "- at `$[...][1]`"),
    ]

    assert [fault(function, value) for function, value in fitting] == [None] * len(fitting)
    for function, value, words in wrong:
        assert words in str(fault(function, value)), (function, value)
