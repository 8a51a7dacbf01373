"""Ticks of schedules, also in the nights when clocks change."""

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lineshaft.sources.ticks import Cron, Every, TickError, due, jitter, zone

DAY = timedelta(days=1)
START = datetime(2026, 1, 1, tzinfo=UTC)


def local_ticks(cron: str, timezone: str, day: str) -> list[str]:
    """All ticks of a local day, by wall clock with the offset."""
    start = datetime.fromisoformat(day).replace(tzinfo=zone(timezone))
    tick, end = start.astimezone(UTC) - timedelta(seconds=1), (start + DAY).astimezone(UTC)
    found = []
    while (tick := Cron(cron, timezone).after(tick)) < end:
        found.append(tick.astimezone(zone(timezone)).strftime("%H:%M%z"))
    return found


@pytest.mark.parametrize(
    ("timezone", "day", "expected"),
    [
        # 02:30 doesn't exist: the job runs at the first minute after the gap.
        ("Europe/Berlin", "2026-03-29", ["03:00+0200"]),
        ("America/New_York", "2026-03-08", ["03:00-0400"]),
        # 02:30 occurs twice: it runs the first time.
        ("Europe/Berlin", "2026-10-25", ["02:30+0200"]),
        # There it is 01:30 that occurs twice.
        ("America/New_York", "2026-11-01", ["02:30-0500"]),
        ("Europe/Berlin", "2026-06-01", ["02:30+0200"]),
    ],
)
def test_a_job_at_half_past_two_runs_once_in_every_night(
    timezone: str, day: str, expected: list[str]
) -> None:
    assert local_ticks("30 2 * * *", timezone, day) == expected


def test_a_job_in_the_repeated_hour_of_new_york_runs_the_first_time() -> None:
    assert local_ticks("30 1 * * *", "America/New_York", "2026-11-01") == ["01:30-0400"]


@pytest.mark.parametrize(
    ("timezone", "day", "hours"),
    [
        ("Europe/Berlin", "2026-03-29", 23),
        ("Europe/Berlin", "2026-10-25", 25),
        ("America/New_York", "2026-03-08", 23),
        ("America/New_York", "2026-11-01", 25),
    ],
)
def test_a_job_of_every_hour_runs_by_elapsed_time(timezone: str, day: str, hours: int) -> None:
    assert len(local_ticks("0 * * * *", timezone, day)) == hours
    assert len(local_ticks("*/15 * * * *", timezone, day)) == 4 * hours


CRONS = st.sampled_from(
    [
        "30 2 * * *",
        "*/7 * * * *",
        "0 9 * * MON",
        "15,45 1-3 * * *",
        "@hourly",
        "0 0 L * *",
        "5 2 25-31 3,10 *",
    ]
)
ZONES = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"])


@settings(max_examples=30, deadline=None)
@given(
    cron=CRONS,
    timezone=ZONES,
    start=st.integers(0, 365 * 86_400).map(lambda second: START + timedelta(seconds=second)),
)
def test_ticks_are_the_same_in_both_directions(cron: str, timezone: str, start: datetime) -> None:
    ticks = Cron(cron, timezone)
    forward = [start]
    for _ in range(20):
        forward.append(ticks.after(forward[-1]))
    assert all(one < two for one, two in pairwise(forward))

    backward = list(islice(ticks.backwards(forward[-1]), 20))

    assert backward[::-1] == forward[1:]


@settings(max_examples=50, deadline=None)
@given(seconds=st.floats(1, 1e6), passed=st.floats(0, 1e8))
def test_intervals_count_from_their_start(seconds: float, passed: float) -> None:
    since = datetime(2026, 1, 1, tzinfo=UTC)
    ticks = Every(seconds, since)
    now = since + timedelta(seconds=passed)

    following = ticks.after(now)

    assert now < following <= now + timedelta(seconds=seconds + 0.001)
    latest = next(ticks.backwards(now), None)
    assert latest is None or since < latest <= now
    assert latest is None or ticks.after(latest) == following


def test_due_ticks_are_the_latest_and_the_rest_is_counted() -> None:
    first = datetime(2026, 1, 1, tzinfo=UTC)
    ticks = Cron("* * * * *", "UTC")

    found, earlier = due(ticks, first, first + timedelta(minutes=2_000), 1_000)

    assert (len(found), earlier) == (1_000, 1_001)
    assert (found[0], found[-1]) == (first + timedelta(minutes=1_001), first + timedelta(minutes=2_000))
    assert due(ticks, first, first, 1_000) == ([first], 0)


def test_jitter_is_the_same_everywhere_and_spread() -> None:
    tick = datetime(2026, 1, 1, tzinfo=UTC)
    found = [jitter(f"s{n}", tick, 60) for n in range(200)]

    assert found == [jitter(f"s{n}", tick, 60) for n in range(200)]
    assert timedelta() <= min(found) < timedelta(seconds=6)
    assert timedelta(seconds=54) < max(found) < timedelta(seconds=60)
    assert jitter("s", tick, 0) == timedelta()


@pytest.mark.parametrize(
    ("cron", "timezone", "field", "fault"),
    [
        ("* * * *", "UTC", "cron", "five fields"),
        ("* * * * * *", "UTC", "cron", "five fields"),
        ("61 * * * *", "UTC", "cron", "field minute: '61'"),
        ("* * * * XYZ", "UTC", "cron", "field day-of-week: 'XYZ'"),
        ("0 0 30 2 *", "UTC", "cron", "field day-of-month: '30'"),
        ("*/61 * * * *", "UTC", "cron", "field minute: '*/61' has a step of more than 60; for longer"),
        ("0,10-50/90 * * * *", "UTC", "cron", "field minute: '0,10-50/90' has a step of more than 60"),
        ("0 */25 * * *", "UTC", "cron", "field hour: '*/25' has a step of more than 24"),
        ("@never", "UTC", "cron", "unknown name '@never'"),
        ("@daily", "Europe/Bonn", "timezone", "unknown time zone 'Europe/Bonn'"),
        ("@daily", "../../etc/passwd", "timezone", "unknown time zone"),
    ],
)
def test_an_invalid_schedule_names_what_is_wrong(cron: str, timezone: str, field: str, fault: str) -> None:
    with pytest.raises(TickError) as refused:
        Cron(cron, timezone)
    assert refused.value.field == field
    assert fault in refused.value.fault
