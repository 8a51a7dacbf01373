"""Expressions and templates: what they give, and that they always end within limits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lineshaft.errors import InvalidInputError
from lineshaft.sources import expressions
from lineshaft.sources.definition import Definition, checked
from lineshaft.sources.expressions import Budget, Expression, ExpressionError
from lineshaft.sources.template import Template, TemplateError
from lineshaft.types.sources import NewSource, SourceKind

NOW = datetime(2026, 2, 8, 9, tzinfo=UTC)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
#: Pieces of expressions, so that many of them are valid.
PIECES = st.sampled_from(
    [
        *("event", "a", "b", "@", "*", ".", "|", "||", "&&", "!", "[", "]", "[*]", "[]", "[?", "{", "}"),
        *("(", ")", ",", ":", "==", "<", "`1`", "`[1,2]`", "'x'", '"a"', "&", "[0]", "[::2]", "[@,@]"),
        *("length(", "to_string(", "join(", "map(", "sort_by(", "keys(", "merge(", "max_by(", "to_number("),
    ]
)
EXPRESSIONS = st.lists(PIECES, min_size=1, max_size=12).map("".join)


def source(**fields: Any) -> NewSource:
    given = {"name": "s", "kind": SourceKind.SCHEDULE, "every_sec": 60.0, **fields}
    return NewSource(**given)


def definition(**fields: Any) -> Definition:
    return Definition(checked(source(**fields)))


@contextmanager
def ends_soon() -> Iterator[None]:
    """By the time that this thread computes: a busy machine may pause it for long."""
    began = time.thread_time()
    try:
        yield
    finally:
        assert time.thread_time() - began < 5


def rendered(value: Any, event: Any) -> Any:
    return Template(value, "t").render({"event": event}, Budget())


def test_a_string_that_is_one_expression_takes_its_value() -> None:
    event = {"n": 3, "tags": ["a", "b"], "user": {"name": "ann"}, "none": None}

    assert rendered("${event.tags}", event) == ["a", "b"]
    assert rendered("${event.missing}", event) is None
    assert rendered({"a": ["${event.n}", 1, True, "x"]}, event) == {"a": [3, 1, True, "x"]}
    assert rendered("n=${event.n} u=${event.user} [${event.none}] ${event.tags[1]}", event) == (
        'n=3 u={"name":"ann"} [] b'
    )
    assert rendered("$${event.n} costs $5 ${'}'}${event.{x: n}.x}", event) == "${event.n} costs $5 }3"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${event.a", "column 1: ${ has no closing bracket"),
        ("x ${event.}", "${event.}: column 7: the expression is incomplete"),
        ("${event..a}", "column 7: unexpected '.'"),
        ("${}", "is empty"),
        ("${nope(event)}", "has an unknown function nope()"),
        ("${" + "a" * 1_001 + "}", "is 1001 characters long; at most 1000"),
        ("${" + "!" * 60 + "a}", "is nested more than 40 levels deep"),
        ({"a": {"b": ["${|}"]}}, "t.a.b[0]: "),
        (["${a}"] * 501, "has more than 500 expressions"),
    ],
)
def test_a_wrong_template_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(TemplateError) as refused:
        Template(value, "t")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "expression",
    [
        "|".join(["[@,@]"] * 39),
        "|".join(["to_string([@,@])"] * 30),
        "|".join(["{a:@,b:@}"] * 37) + " == @",
        "(" + "|".join(["[@,@]"] * 17) + ") == (" + "|".join(["[@,@]"] * 17) + ")",
        "|".join(["[@,@][]"] * 30),
        "|".join(["join('', [@,@])"] * 25).replace("@", "to_string(@)"),
    ],
)
def test_an_expression_that_grows_without_bound_fails_soon(expression: str) -> None:
    with ends_soon(), pytest.raises(ExpressionError, match=r"too large|too many steps"):
        Expression(expression).evaluate({"event": {"a": [1] * 100}}, Budget())


def test_functions_are_paid_by_what_they_go_through() -> None:
    """Each goes through a long list, which takes a moment; thousands of them would take minutes."""
    event = {"items": list(range(100_000)), "text": "x" * 1_000_000}
    for call in ("contains(event.items, 'x')", "sum(event.items)", "contains(event.text, 'y')"):
        template = ["${" + " || ".join([call] * 30) + "}"] * 20
        with ends_soon(), pytest.raises(TemplateError, match="too many steps"):
            rendered(template, event)
    assert rendered("${length(event.items)}", event) == 100_000
    assert rendered("${event.text == event.text}", event) is True


def test_the_time_of_a_rendering_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "MAX_CPU_SEC", 0.0)
    with pytest.raises(ExpressionError, match="takes longer than 0 s"):
        Expression("event[*].a").evaluate({"event": [{"a": 1}] * 5_000}, Budget())


@pytest.mark.parametrize(
    "expression", ["&event", "to_number('1e999')", "length(`5`)", "length(@, @)", 'avg(`["a"]`)', "abs('x')"]
)
def test_an_expression_without_a_json_value_fails(expression: str) -> None:
    with pytest.raises(ExpressionError) as failed:
        Expression(expression).evaluate({"event": {"secret": "hidden"}}, Budget())
    assert "hidden" not in str(failed.value)


@settings(max_examples=50, deadline=None)
@given(expression=EXPRESSIONS, event=JSON)
def test_whatever_is_written_ends_with_json_or_an_error(expression: str, event: Any) -> None:
    try:
        with ends_soon():
            value = Expression(expression).evaluate({"event": event}, Budget())
    except ExpressionError:
        return
    Budget().weigh(value)
    assert isinstance(value, None | str | bool | int | float | list | dict)


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="${}ab'\"`\\ .|@", max_size=30), event=JSON)
def test_any_text_is_a_template_or_refused(text: str, event: Any) -> None:
    with ends_soon(), suppress(TemplateError):
        Template({"x": text}, "t").render({"event": event}, Budget())


@settings(max_examples=60, deadline=None)
@given(value=JSON)
def test_what_an_event_contains_is_never_evaluated(value: Any) -> None:
    event = {"text": "${event.secret} {0} %s __import__('os')", "secret": "hidden", "value": value}

    assert rendered("${event.text}", event) == event["text"]
    assert rendered("<${event.text}>", event) == f"<{event['text']}>"
    assert rendered("${event.value}", event) == value


@settings(max_examples=50, deadline=None)
@given(event=st.dictionaries(st.sampled_from(["type", "priority", "tags", "x"]), JSON))
def test_a_rendering_is_a_valid_task_or_an_error_that_names_the_field(event: dict[str, Any]) -> None:
    made = definition(
        template={"task": {"type": "${event.type}", "priority": "${event.priority}", "tags": "${event.tags}"}}
    )
    work = None
    try:
        work = made.render(event, NOW).work
    except InvalidInputError as error:
        places = [place for place, _ in error.errors]
    else:
        places = []
    assert all(place.startswith("template.task") for place in places)
    if places:
        return
    assert work is not None
    assert work.task is not None
    assert (work.task.type, work.task.created_by) == (event["type"], "cron:s")


def test_conditions_and_keys() -> None:
    made = definition(
        template={"task": {"type": "review"}},
        when="event.action == 'opened' && event.n",
        idempotency="${source.name}/${event.n}",
    )

    assert made.render({"action": "closed", "n": 1}, NOW).work is None
    assert made.render({"action": "opened"}, NOW).work is None
    assert made.render({"action": "opened", "n": 0}, NOW).key == "s/0"


def test_a_goal_is_a_task_with_the_type_goal() -> None:
    made = definition(template={"goal": "Build ${event.text}", "budget_usd": 5, "tags": ["chat"]})

    task = made.render({"text": "a page"}, NOW).work.task  # type: ignore[union-attr]

    assert task is not None
    assert (task.type, task.title, task.spec, list(task.tags)) == (
        "goal",
        "Build a page",
        {"goal": "Build a page", "budget_usd": 5},
        ["chat"],
    )


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({"template": {}}, ["template"]),
        ({"template": {"task": {"type": "a"}, "goal": "b"}}, ["template"]),
        ({"template": {"task": {"typ": "a"}}}, ["template.task.typ", "template.task.type"]),
        ({"template": {"task": {"type": "a", "priority": 1000}}}, ["template.task.priority"]),
        ({"template": {"task": {"type": "a", "created_by": "human:x"}}}, ["template.task.created_by"]),
        ({"template": {"dag": {"tasks": []}}}, ["template.dag.title", "template.dag.tasks"]),
        ({"template": {"dag": {"title": "x", "tasks": [{}]}}}, ["template.dag.tasks[0].type"]),
        ({"template": {"goal": "${a"}, "when": "a["}, ["template.goal", "when"]),
        ({"template": {"goal": "a"}, "idempotency": "${"}, ["idempotency"]),
        ({"template": {"goal": "a"}, "max_open": 0}, ["max_open"]),
        ({"template": {"goal": "a"}, "cron": "* * * * *"}, ["cron"]),
        ({"template": {"goal": "a"}, "every_sec": 0.1}, ["every_sec"]),
        ({"template": {"goal": "a"}, "every_sec": None, "cron": "61 * * * *"}, ["cron"]),
        ({"template": {"goal": "a"}, "timezone": "Mars/Base"}, ["timezone"]),
        ({"template": {"goal": "a"}, "jitter_sec": -1.0}, ["jitter_sec"]),
        ({"template": {"goal": "a"}, "root": "/srv"}, ["root"]),
        ({"template": {"goal": "a"}, "name": "a b"}, ["name"]),
        ({"template": {"goal": "a"}, "name": "agent:x/fire"}, ["name"]),
        ({"template": {"goal": "a" * 300_000}}, [""]),
        ({"template": {"goal": "a\0"}}, [""]),
    ],
)
def test_an_invalid_definition_is_refused_by_field(fields: dict[str, Any], places: list[str]) -> None:
    with pytest.raises(InvalidInputError) as refused:
        checked(source(**fields))
    assert [place for place, _ in refused.value.errors] == places
