"""Limits of the whole installation, which every process obeys."""

from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

from msgspec import Struct

VelocityAction = Literal["stop", "pause"]
#: What a new installation has.
DEFAULT_JUDGE_MAX_COST = Decimal("0.05")

#: The setting that each limit may come from.
SETTINGS = {
    "daily_budget_usd": "LINESHAFT_DAILY_BUDGET_USD",
    "velocity_usd": "LINESHAFT_COST_VELOCITY_USD",
    "velocity_window_sec": "LINESHAFT_COST_VELOCITY_MINUTES",
    "velocity_action": "LINESHAFT_COST_VELOCITY_ACTION",
    "default_max_cost_usd": "LINESHAFT_DEFAULT_MAX_COST_USD",
    "crash_cost_fraction": "LINESHAFT_CRASH_COST_FRACTION",
    "judge_max_cost_usd": "LINESHAFT_JUDGE_MAX_COST_USD",
    "breakers": "LINESHAFT_CIRCUIT_BREAKERS",
}


class ServerLimits(Struct, frozen=True, kw_only=True):
    """What the settings of a running server say."""

    #: Its host and port.
    name: str
    version: str
    started_at: datetime
    #: By name; a limit that its settings don't have is missing.
    limits: dict[str, Any]


class Limits(Struct, frozen=True, kw_only=True):
    """None: no limit."""

    #: What all tasks together may cost in a UTC day.
    daily_budget_usd: Decimal | None
    #: More than this within `velocity_window_sec` is too fast.
    velocity_usd: Decimal | None
    velocity_window_sec: float
    #: stop: running attempts are released too; pause: only claims stop.
    velocity_action: str
    #: What a task without `max_cost_usd` reserves; None: nothing. It doesn't limit the task.
    default_max_cost_usd: Decimal | None
    #: The least share of its reservation that a crashed attempt is taken to have cost, 0 to 1.
    crash_cost_fraction: Decimal
    #: What a run of a gate that costs money reserves.
    judge_max_cost_usd: Decimal = DEFAULT_JUDGE_MAX_COST
    #: Since midnight UTC.
    spent_today_usd: Decimal
    #: What running attempts may still spend, of the daily budget.
    reserved_usd: Decimal
    #: Limits that a person has set: the settings of servers don't change them.
    by_hand: list[str] = []
    #: Running servers, the one that started last first.
    servers: list[ServerLimits] = []

    @property
    def disagreements(self) -> dict[str, list[tuple[str, Any]]]:
        """Limits for which running servers have different settings, each with servers and what they say."""
        said = {
            name: [(server.name, server.limits[name]) for server in self.servers if name in server.limits]
            for name in SETTINGS
        }
        return {name: pairs for name, pairs in said.items() if any(pair[1] != pairs[0][1] for pair in pairs)}
