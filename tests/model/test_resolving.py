"""Many similar tasks: checked once, with the same result as one by one."""

import copy
import math
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.errors import InvalidInputError
from lineshaft.model.resolving import Resolver, all_alike
from lineshaft.model.tasks import NewTask, OutputContract, TaskRow, resolve

NOON = datetime(2026, 2, 8, 12, tzinfo=UTC)


def plain_tasks() -> st.SearchStrategy[NewTask]:
    return st.builds(
        NewTask,
        type=st.sampled_from(["a", "b"]),
        priority=st.none() | st.sampled_from([1, 50]),
        tags=st.sampled_from([(), ("t",)]),
        max_cost_usd=st.none() | st.just(0.5),
        spec=st.sampled_from(
            [
                {},
                {"n": 1},
                {"goal": "g"},
                {"action": "a"},
                {"constraints": {"max_duration_sec": 9}},
                {"context_refs": ["task:t:output"]},
                {"n": math.nan},
            ]
        ),
        preset=st.sampled_from([None, "loki", "none such"]),
    )


@given(st.lists(plain_tasks(), max_size=6))
def test_a_bulk_submission_resolves_tasks_like_single_ones(tasks: list[NewTask]) -> None:
    """The fast path for similar tasks gives the same rows and the same faults."""
    resolver = Resolver()

    def quickly(task: NewTask) -> TaskRow:
        row, spec = resolver(task, place="p")
        return msgspec.structs.replace(row, spec=spec)

    def outcome(function: Callable[[NewTask], TaskRow], task: NewTask) -> Any:
        try:
            return function(task)
        except InvalidInputError as error:
            return error.errors

    for task in tasks:
        assert outcome(quickly, task) == outcome(lambda alone: resolve(alone, place="p"), task)


BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"priority": 1}, {"priority": True}),
        (
            {"output": OutputContract(validation="json-schema", validation_schema={"const": 1})},
            {"output": OutputContract(validation="json-schema", validation_schema={"const": 1.0})},
        ),
        (
            {"run_at": datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN)},
            {"run_at": datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1)},
        ),
        ({"spec": {}}, {"spec": {"goal": "a title of its own"}}),
        ({"tags": ["a"]}, {"tags": ["b"]}),
        ({}, {"key": "k"}),
        ({}, {"id": "i"}),
        ({}, {"depends_on": ["d"]}),
        ({}, {"parent_id": ""}),
    ],
)
def test_equal_values_of_different_types_are_not_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = NewTask("t", **one), NewTask("t", **other)

    assert all_alike([first, first])
    assert not all_alike([first, second])
    assert not all_alike([second, first])


@pytest.mark.parametrize(
    "fields",
    [
        {"tags": ["a"], "max_cost_usd": Decimal("1.5"), "priority_boost_per_minute": 0.25, "title": "a" * 50},
        {"deadline": NOON, "max_attempts": 1000},
    ],
)
def test_copies_of_the_same_are_alike(fields: dict[str, Any]) -> None:
    """Each with its own spec, and with newly created fields."""
    tasks = [NewTask("t", spec={"n": n}, **copy.deepcopy(fields)) for n in range(3)]

    assert all_alike(tasks)


def test_tasks_of_a_dag_share_everything_but_ids_and_dependencies() -> None:
    resolver = Resolver()
    first, _ = resolver(NewTask("t", key="a", spec={"n": 1}))
    second, spec = resolver(NewTask("t", key="b", depends_on=["a"], spec={"n": 2}))

    assert second is first
    assert spec == b'{"n":2}'
    with pytest.raises(InvalidInputError, match="depends_on"):
        resolver(NewTask("t", key="c", depends_on=[""]))
