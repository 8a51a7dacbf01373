"""What tasks cost: by day, type, model, agent and DAG."""

from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum

from msgspec import Struct, field

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import money, shown
from lineshaft.model.forecast import Forecast
from lineshaft.types.request import MAX_REASON
from lineshaft.types.work import MOST_COST

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


class DisputedCost(Struct, frozen=True, kw_only=True):
    """A task whose claims reported more than their ceilings; a person accepts or refuses the rest."""

    id: str
    title: str
    type: str
    #: The agent of the last such claim.
    agent_id: str
    #: Without what is disputed.
    cost_usd: Decimal
    disputed_usd: Decimal
    #: The first such report.
    since: datetime


class Disputed(StrEnum):
    """What a person decides on a disputed cost: it counts, or it never does."""

    ACCEPT = "accept"
    REFUSE = "refuse"


class CostCorrection(Struct, frozen=True, kw_only=True):
    """What a task has cost in the end: an amount, or what a decision on its disputed cost makes of it."""

    reason: str
    cost_usd: Decimal | float | None = None
    disputed: Disputed | None = None

    def checked_cost(self) -> Decimal | None:
        """The amount as it is stored; None: the decision tells."""
        if not 1 <= len(self.reason) <= MAX_REASON:
            fault = f"must be a text of 1 to {MAX_REASON} characters, got {len(self.reason)}"
            raise InvalidInputError(errors=[("reason", fault)])
        if (self.cost_usd is None) == (self.disputed is None):
            fault = "give this, what the task has cost, or disputed: accept or refuse"
            raise InvalidInputError(errors=[("cost_usd", fault)])
        if self.cost_usd is None:
            return None
        cost = money(self.cost_usd, "cost_usd")
        if cost > MOST_COST:
            fault = f"must be at most {MOST_COST} US dollars, got {cost}"
            raise InvalidInputError(errors=[("cost_usd", fault)])
        return cost


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
    #: What waits for a person, of all tasks and days; it is in none of the sums above.
    disputed_usd: Decimal = Decimal(0)
    #: The tasks with the most of it.
    disputed: list[DisputedCost] = field(default_factory=list)
    #: How old the figures are: more than seconds where the database accepts no writes.
    figures_age_sec: float = 0.0
