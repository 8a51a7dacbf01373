"""Limits of the whole installation, which every process obeys."""

from decimal import Decimal
from typing import Literal

from msgspec import Struct

VelocityAction = Literal["stop", "pause"]


class Limits(Struct, frozen=True, kw_only=True):
    """None: no limit."""

    #: What all tasks together may cost in a UTC day.
    daily_budget_usd: Decimal | None
    #: More than this within `velocity_window_sec` is too fast.
    velocity_usd: Decimal | None
    velocity_window_sec: float
    #: stop: running attempts are released too; pause: only claims stop.
    velocity_action: VelocityAction
    #: What a task without `max_cost_usd` reserves where there is a budget. It doesn't limit the task.
    default_max_cost_usd: Decimal | None
    #: The least share of its reservation that a crashed attempt is taken to have cost, 0 to 1.
    crash_cost_fraction: Decimal
    #: Since midnight UTC.
    spent_today_usd: Decimal
    #: What running attempts may still spend, of the daily budget.
    reserved_usd: Decimal
