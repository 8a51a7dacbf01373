"""The order of a parallel run."""

from collections.abc import Sequence

import pytest

from tests.order import slow_first


def in_order(tests: Sequence[str], workers: int) -> list[str]:
    """A test is named after its module; those of an upper case are slow."""
    return slow_first(tests, workers, is_slow=lambda test: test.isupper(), module=lambda test: test[0])


def test_each_share_begins_with_slow_tests_and_slow_tests_of_a_module_stay_together() -> None:
    tests = ["a1", "A2", "a3", "B1", "b2", "B3", "c1", "C2", "c3", "c4"]

    assert in_order(tests, 2) == ["B1", "B3", "a1", "a3", "b2", "A2", "C2", "c1", "c3", "c4"]


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("tests", [[], ["a1"], ["A1", "A2", "A3", "B1"], ["a1", "B1", "a2", "b2", "C1"]])
def test_no_test_is_lost(tests: list[str], workers: int) -> None:
    assert sorted(in_order(tests, workers)) == sorted(tests)
