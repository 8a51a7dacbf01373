"""Effective priority, tiers, ranks and re-keying."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.errors import InvalidInputError
from lineshaft.model.priority import (
    REKEY_STEP,
    PriorityInputs,
    Tier,
    check_priority,
    critical_path_boost,
    deadline_boost,
    effective_priority,
    minutes,
    rank,
    rekey_at,
    tier,
)

NOW = datetime(2026, 2, 8, 9, 0, tzinfo=UTC)
instants = st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@st.composite
def tasks(draw: st.DrawFn, *, with_deadline: bool) -> PriorityInputs:
    return PriorityInputs(
        priority=draw(st.integers(0, 100)),
        boost_per_minute=draw(st.sampled_from([0.0, 0.1, 0.5, 2.0])),
        ready_at=NOW - timedelta(seconds=draw(st.integers(0, 500_000))),
        deadline=NOW + timedelta(seconds=draw(st.integers(-10_000, 100_000))) if with_deadline else None,
        downstream_length=draw(st.integers(0, 20)),
    )


def claim_order(mix: list[PriorityInputs], keyed_at: datetime, now: datetime) -> list[PriorityInputs]:
    """The order of a claim: lanes by rank, merged by the effective priority of their heads."""
    lanes: dict[float, list[tuple[float, int]]] = {}
    for i, task in enumerate(mix):
        lanes.setdefault(task.boost_per_minute, []).append((rank(task, keyed_at), i))
    for lane in lanes.values():
        lane.sort(reverse=True)
    taken = []
    while any(lanes.values()):
        heads = [(lane[-1][0] - boost * minutes(now), boost) for boost, lane in lanes.items() if lane]
        taken.append(mix[lanes[min(heads)[1]].pop()[1]])
    return taken


@given(st.lists(tasks(with_deadline=False), max_size=30), st.integers(0, 100_000))
def test_lanes_and_ranks_give_exactly_the_order_of_the_formula(mix: list[PriorityInputs], later: int) -> None:
    """R-160: also for claims long after the ranks were written."""
    now = NOW + timedelta(seconds=later)

    values = [effective_priority(task, now) for task in claim_order(mix, NOW, now)]

    # Nine decimals: both sides add the same numbers in a different order.
    assert all(a <= b + 1e-9 for a, b in pairwise(values))


@given(st.lists(tasks(with_deadline=True), max_size=30))
def test_with_deadlines_the_order_is_exact_to_half_a_point(mix: list[PriorityInputs]) -> None:
    """Each task was keyed at a different time and isn't due for re-keying."""
    now = NOW + timedelta(seconds=50)
    keyed = [task for task in mix if (rekey_at(task.deadline, NOW) or now) >= now]

    values = [effective_priority(task, now) for task in claim_order(keyed, NOW, now)]

    assert all(a <= b + REKEY_STEP + 1e-9 for a, b in pairwise(values))


@given(tasks(with_deadline=True), instants)
def test_between_rekeyings_the_boost_is_never_off_by_more_than_the_step(
    task: PriorityInputs, now: datetime
) -> None:
    due = rekey_at(task.deadline, now)

    if due is None:
        assert task.deadline is not None
        assert now >= task.deadline
    else:
        assert due > now
        grown = deadline_boost(task.deadline, due) - deadline_boost(task.deadline, now)
        assert 0 <= grown <= REKEY_STEP + 0.01


def test_rekeying_a_deadline_ends() -> None:
    """From three days before the deadline in at most 81 steps: 40 points in halves, and the end."""
    deadline = NOW + timedelta(days=3)
    moments = [NOW]
    while (due := rekey_at(deadline, moments[-1])) is not None:
        moments.append(due)

    assert moments[-1] == deadline
    assert 75 <= len(moments) <= 82


@pytest.mark.parametrize(
    ("hours_left", "boost"), [(2, 10.0), (1, 20.0), (0.5, 28.284271), (0, 40.0), (-5, 40.0)]
)
def test_deadline_boost_doubles_every_hour_and_stops_at_the_deadline(hours_left: float, boost: float) -> None:
    """R-162, F-34."""
    assert deadline_boost(NOW + timedelta(hours=hours_left), NOW) == pytest.approx(boost)
    assert deadline_boost(None, NOW) == 0


def test_no_starvation() -> None:
    """R-164, F-33: priority 90 at 0.1 a minute is 60.0 (low) after 300 minutes, then normal."""
    task = PriorityInputs(priority=90, boost_per_minute=0.1, ready_at=NOW)

    after_300 = effective_priority(task, NOW + timedelta(minutes=300))
    assert after_300 == pytest.approx(60.0)
    assert tier(round(after_300, 9)) is Tier.LOW
    assert tier(effective_priority(task, NOW + timedelta(minutes=301))) is Tier.NORMAL


@pytest.mark.parametrize(
    ("effective", "name"),
    [
        (-3, "critical"),
        (0, "critical"),
        (9.99, "critical"),
        (10, "high"),
        (29.5, "high"),
        (30, "normal"),
        (59.5, "normal"),
        (60, "low"),
        (79.9, "low"),
        (80, "background"),
        (100, "background"),
    ],
)
def test_tiers_are_half_open(effective: float, name: str) -> None:
    """R-161."""
    assert tier(effective) == name


def test_critical_path_boost_is_capped_and_a_lone_task_has_none() -> None:
    """R-163."""
    assert [critical_path_boost(n) for n in (0, 1, 10, 11, 10_000)] == [0, 1, 10, 10, 10]


@pytest.mark.parametrize("bad", [-1, 101, 49.5, True])
def test_a_priority_out_of_range_is_rejected(bad: float) -> None:
    """U1."""
    with pytest.raises(InvalidInputError, match=r"priority: must be a whole number from 0.*got"):
        check_priority(bad)
