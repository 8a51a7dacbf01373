"""What needs a person."""

from datetime import datetime
from decimal import Decimal

from msgspec import Struct

#: Counts and lists end here: this many means this many or more.
MOST = 1_000


class Attention(Struct, frozen=True, kw_only=True):
    """What needs a person, and what holds work back. Counts end at 1,000."""

    as_of: datetime
    #: Dead letters without a decision.
    dead_letters: int
    #: Outputs and tasks that wait for a person.
    approvals: int
    #: Keys of breakers that are open or half-open.
    open_breakers: list[str]
    #: Keys of slowdowns in force.
    slowdowns: list[str]
    #: Types that are paused; `*` is every type.
    paused: list[str]
    daily_budget_usd: Decimal | None
    spent_today_usd: Decimal
    #: What running attempts may still spend of the daily budget.
    reserved_usd: Decimal
    agents_active: int
    agents_draining: int
    #: Agents all of whose processes left or fell silent within a day.
    agents_offline: int
    #: DAGs with tasks that their budget doesn't allow.
    dags_over_budget: int
    #: Tasks with a disputed cost.
    disputed_tasks: int = 0
    #: Those of `agents_offline` with a process that fell silent without having left.
    agents_lost: int = 0
