"""What tasks cost: by day, type, model, agent and DAG."""

from datetime import date, datetime
from decimal import Decimal

from msgspec import Struct

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import shown
from lineshaft.model.forecast import Forecast

DEFAULT_DAYS = 7
#: Costs are kept for this long.
MOST_DAYS = 400


def check_days(days: int) -> None:
    if not 1 <= days <= MOST_DAYS:
        fault = f"must be a whole number from 1 to {MOST_DAYS}, got {shown(days)}"
        raise InvalidInputError(errors=[("days", fault)])


class CostFigures(Struct, frozen=True, kw_only=True):
    """Attempts that ended, with their whole cost."""

    attempts: int
    failed: int
    #: Attempts after a failed one of the same task.
    retries: int
    #: Attempts that used tokens and reported no cost: what they cost is unknown.
    unpriced: int
    tokens_input: int
    tokens_output: int
    cost_usd: Decimal
    failed_cost_usd: Decimal
    retry_cost_usd: Decimal


class CostLine(CostFigures, frozen=True, kw_only=True):
    #: The type, model or agent; empty: none; `*`: all that a list has no room for.
    key: str


class DayCosts(CostFigures, frozen=True, kw_only=True):
    """One UTC day.

    `spent_usd` is what was booked on the day, also for attempts that have not ended; `cost_usd` is the cost
    of attempts that ended on it.
    """

    day: date
    #: None: only some tasks are asked for, and money is booked for all together.
    spent_usd: Decimal | None


class DagCosts(Struct, frozen=True, kw_only=True):
    id: str
    title: str
    status: str
    created_at: datetime
    spent_usd: Decimal
    budget_ceiling_usd: Decimal | None


class HourCosts(Struct, frozen=True):
    """Attempts that ended within an hour of the day and had a cost."""

    at: datetime
    cost_usd: Decimal
    attempts: int


class TodayCosts(Struct, frozen=True, kw_only=True):
    """The current UTC day, of all tasks."""

    day: date
    spent_usd: Decimal
    #: What running attempts may still spend of the daily budget.
    reserved_usd: Decimal
    daily_budget_usd: Decimal | None
    #: Every hour of the day until now.
    hours: list[HourCosts]
    last_hour_usd: Decimal
    #: None: fewer than ten attempts had a cost today.
    forecast: Forecast | None


class Costs(Struct, frozen=True, kw_only=True):
    as_of: datetime
    since: date
    today: TodayCosts
    total: CostFigures
    #: Oldest first, without days on which nothing was spent and no attempt ended.
    by_day: list[DayCosts]
    #: Each list: the most expensive first.
    by_type: list[CostLine]
    by_model: list[CostLine]
    by_agent: list[CostLine]
    #: DAGs of more than one task that were created within these days.
    by_dag: list[DagCosts]
    #: All such DAGs were compared; otherwise only the newest.
    by_dag_exact: bool
