"""What a day will have cost when it ends, at the rate of the last hour."""

import math
from datetime import datetime, timedelta
from decimal import Decimal

from msgspec import Struct

#: Attempts with a cost that a forecast needs.
LEAST_ATTEMPTS = 10
_CENTS = Decimal("0.01")


class Forecast(Struct, frozen=True):
    """The spend of a UTC day at its end. The last hour's rate may change, so it is a range."""

    expected_usd: Decimal
    low_usd: Decimal
    high_usd: Decimal
    #: When the daily budget is used up at this rate; None: not today, or there is none.
    budget_reached_at: datetime | None


def forecast(
    *,
    now: datetime,
    midnight: datetime,
    spent_usd: Decimal,
    reserved_usd: Decimal,
    budget_usd: Decimal | None,
    last_hour_usd: Decimal,
    last_hour_attempts: int,
    attempts: int,
) -> Forecast | None:
    """None: too few attempts with a cost today. `midnight` is the end of the day.

    The range is two standard deviations of the number of attempts in an hour, which is taken to be random.
    At its low end, reservations stay unused.
    """
    if attempts < LEAST_ATTEMPTS:
        return None
    hours = Decimal(max((midnight - now).total_seconds(), 0.0)) / 3600
    coming = last_hour_usd * hours
    spread = coming * min(Decimal(2 / math.sqrt(max(last_hour_attempts, 1))), Decimal(1))
    committed = spent_usd + reserved_usd
    reached = None
    if budget_usd is not None and committed >= budget_usd:
        reached = now
    elif budget_usd is not None and committed + coming > budget_usd:
        reached = now + timedelta(hours=float((budget_usd - committed) / last_hour_usd))
    return Forecast(
        (committed + coming).quantize(_CENTS),
        (spent_usd + coming - spread).quantize(_CENTS),
        (committed + coming + spread).quantize(_CENTS),
        reached,
    )
