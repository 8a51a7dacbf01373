from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.model.forecast import Forecast, forecast

MIDNIGHT = datetime(2026, 3, 2, tzinfo=UTC)


def at_six(**changes: Any) -> Forecast | None:
    """At 18:00 a hundred attempts have cost 30 USD, 5 of them in the last hour; 2 USD are reserved."""
    given: dict[str, Any] = {
        "now": MIDNIGHT - timedelta(hours=6),
        "midnight": MIDNIGHT,
        "spent_usd": Decimal(30),
        "reserved_usd": Decimal(2),
        "budget_usd": None,
        "last_hour_usd": Decimal(5),
        "last_hour_attempts": 100,
        "attempts": 100,
    }
    return forecast(**given | changes)


def test_spent_and_reserved_and_the_last_hours_rate() -> None:
    found = at_six()

    assert found == Forecast(Decimal("62.00"), Decimal("54.00"), Decimal("68.00"), None)


def test_no_forecast_from_fewer_than_ten_attempts() -> None:
    assert at_six(attempts=9) is None
    assert at_six(attempts=10, last_hour_attempts=0, last_hour_usd=Decimal(0)) == Forecast(
        Decimal("32.00"), Decimal("30.00"), Decimal("32.00"), None
    )


def test_few_attempts_in_the_last_hour_make_the_range_wide() -> None:
    found = at_six(last_hour_attempts=1)

    assert found is not None
    assert (found.low_usd, found.high_usd) == (Decimal("30.00"), Decimal("92.00"))


@pytest.mark.parametrize(
    ("budget", "hours"), [(Decimal(62), None), (Decimal(52), 4), (Decimal(32), 0), (Decimal(1), 0)]
)
def test_when_the_budget_is_used_up(budget: Decimal, hours: int | None) -> None:
    found = at_six(budget_usd=budget)

    assert found is not None
    expected = None if hours is None else MIDNIGHT - timedelta(hours=6) + timedelta(hours=hours)
    assert found.budget_reached_at == expected


def test_at_the_end_of_the_day_nothing_more_comes() -> None:
    found = at_six(now=MIDNIGHT)

    assert found is not None
    assert (found.low_usd, found.expected_usd) == (Decimal("30.00"), Decimal("32.00"))
