"""OfficePlane's names for states, priorities and retries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.errors import InvalidInputError
from lineshaft.integrations.officeplane.conversion import (
    max_attempts,
    parse_priority,
    priority_word,
    state_name,
)
from lineshaft.model.priority import Tier, tier
from lineshaft.model.states import Status


def test_every_state_has_an_officeplane_name() -> None:
    """U4."""
    assert {state_name(s) for s in Status} == {
        "QUEUED",
        "RUNNING",
        "COMPLETED",
        "RETRYING",
        "CANCELLED",
        "FAILED",
    }


def test_a_task_that_timed_out_permanently_is_shown_as_timeout() -> None:
    """U4, F-46."""
    assert state_name(Status.DEAD_LETTERED, last_category="timeout") == "TIMEOUT"
    assert state_name(Status.DEAD_LETTERED, last_category="crash") == "FAILED"
    assert state_name(Status.RETRYING, last_category="timeout") == "RETRYING"


def test_a_batch_parent_is_shown_as_running_once_a_child_started() -> None:
    """R-192."""
    assert state_name(Status.PENDING) == "QUEUED"
    assert state_name(Status.PENDING, batch_started=True) == "RUNNING"
    assert state_name(Status.COMPLETED, batch_started=True) == "COMPLETED"


@pytest.mark.parametrize(
    ("word", "number", "stored"), [("CRITICAL", 4, 5), ("HIGH", 3, 20), ("NORMAL", 2, 50), ("LOW", 1, 70)]
)
def test_priorities_are_read_as_words_or_numbers(word: str, number: int, stored: int) -> None:
    """U1, R-166."""
    assert parse_priority(word.lower()) == parse_priority(number) == stored
    assert priority_word(stored) == word


@given(st.integers(0, 100))
def test_every_priority_has_the_word_of_its_tier(priority: int) -> None:
    """U1: OfficePlane has one word for low and background."""
    expected = {Tier.CRITICAL: "CRITICAL", Tier.HIGH: "HIGH", Tier.NORMAL: "NORMAL"}.get(
        tier(priority), "LOW"
    )

    assert priority_word(priority) == expected


@pytest.mark.parametrize("priority", ["URGENT", 5, 0, pytest.param(10**4000, id="long")])
def test_an_unknown_priority_is_rejected(priority: str | int) -> None:
    """U1."""
    with pytest.raises(InvalidInputError, match=r"CRITICAL, HIGH, NORMAL or LOW.{1,80}$"):
        parse_priority(priority)


@pytest.mark.parametrize(
    ("max_retries", "first_is_extra", "attempts"), [(3, True, 4), (0, True, 1), (3, False, 3), (0, False, 1)]
)
def test_max_retries_become_attempts(max_retries: int, first_is_extra: bool, attempts: int) -> None:
    """U2, F-12: the first attempt is extra or not, by a setting."""
    assert max_attempts(max_retries, first_is_extra=first_is_extra) == attempts
