"""Short forms of ids: unique among those shown, and found again."""

import pytest

from lineshaft.ids import IdFactory, new_id
from lineshaft.model.short_ids import is_whole, matches, ranges, short_id, short_ids

ID = "task_01J8K2M3N4P5Q6R7S8T9V0W1X2"


def test_the_short_form_is_the_time_and_the_end() -> None:
    assert short_id(ID) == "J8K2M3N4-W1X2"
    assert is_whole(ID)
    assert not is_whole(ID[:-1])
    assert short_id("order-42") == "order-42", "a caller chose it"


def test_the_end_is_as_long_as_needed_to_tell_ids_apart() -> None:
    same_end = "task_01J8K2M3N4P5Q6R7S8T9VZW1X2"
    other_time = "task_01J8K2M3N5P5Q6R7S8T9V0W1X2"

    found = short_ids([ID, same_end, other_time, ID.replace("task", "dag")])

    assert found[ID] == "J8K2M3N4-0W1X2"
    assert found[same_end] == "J8K2M3N4-ZW1X2"
    assert found[other_time] == "J8K2M3N5-W1X2"
    assert found[ID.replace("task", "dag")] == "J8K2M3N4-W1X2", "of another kind"


@pytest.mark.slow("compares ten thousand ids")
def test_ten_thousand_ids_of_one_millisecond_have_different_short_forms() -> None:
    factory = IdFactory(milliseconds=lambda: 1_790_000_000_000)
    ids = [factory("task") for _ in range(10_000)]

    short = short_ids(ids)

    assert len(set(short.values())) == len(ids)
    assert max(map(len, short.values())) <= len("J8K2M3N4-V0W1X2") + 2
    for name in ids[:50]:
        assert [other for other in ids if matches("task", short[name], other)] == [name]


def test_what_means_an_id() -> None:
    for text in (
        ID,
        "J8K2M3N4-W1X2",
        "j8k2m3n4-w1x2",
        "task_J8K2M3N4-W1X2",
        "task_01J8K2",
        "J8K2M3",
        "01j8k2m3",
    ):
        assert matches("task", text, ID), text
    for text in (
        "J8K2M3N4-W1X3",
        "J8K",
        "",
        "task_01J8K3",
        "dag_01J8K2",
        "\N{SNOWMAN}\N{SNOWMAN}\N{SNOWMAN}9",
    ):
        assert not matches("task", text, ID), text


def test_a_short_form_is_looked_for_in_one_millisecond() -> None:
    (place,) = ranges("dag", "J8K2M3N4-W1X2")

    assert (place.low, place.high, place.end) == ("dag_01J8K2M3N4", "dag_01J8K2M3N5", "W1X2")


def test_new_ids_are_whole() -> None:
    assert is_whole(new_id("task"))
