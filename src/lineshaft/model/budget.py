"""Money: what may be spent, what is promised, what was spent.

Sums are exact decimals of US dollars with six places, as the database keeps them in numeric(14,6), and are
rounded the way PostgreSQL rounds (half away from zero). A float is taken by its shortest text, so 0.1 is 0.1.

A claim reserves the task's `max_cost_usd` in the agent's ledger and in the DAG's: without that, two claims
made at the same time would both find the same last dollar. The end of the attempt, good or bad, settles: the
reservation goes, the actual cost is booked. An exit that cost nothing releases. Hence:

- spent + reserved never exceeds the total, except by what an attempt cost beyond its reservation. Such a cost
  is real and is booked; the ledger is overdrawn then, and nothing can be reserved until it is topped up.
- A task without `max_cost_usd` reserves nothing, so it passes wherever the ledger is not overdrawn; its
  actual cost is booked like any other.
- A ledger without a total is unlimited, and counts nevertheless.
"""

import reprlib
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from enum import StrEnum

from lineshaft.errors import BudgetExceededError, InvalidInputError

LARGEST_SUM = Decimal("99999999.999999")
_SIX_PLACES = Decimal("0.000001")
_NOTHING = Decimal("0.000000")


def shown(value: object) -> str:
    """A refused value for a message: shortened, whatever it is."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number of thousands of digits"


def money(value: Decimal | str | float, name: str = "amount") -> Decimal:
    """A sum as it is stored; `name` says in the message whose value was refused."""
    try:
        if isinstance(value, bool):
            raise TypeError  # noqa: TRY301 (a truth value is an int, but no sum)
        amount = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
        if not amount.is_finite() or not 0 <= amount <= LARGEST_SUM:
            raise InvalidOperation  # noqa: TRY301 (one message for all that is no sum)
    except (InvalidOperation, TypeError, ValueError):
        fault = f"must be a sum in US dollars from 0 to {LARGEST_SUM}, got {shown(value)}"
        raise InvalidInputError(errors=[(name, fault)]) from None
    return abs(amount.quantize(_SIX_PLACES, rounding=ROUND_HALF_UP))


@dataclass(frozen=True, slots=True)
class Ledger:
    """An agent's or a DAG's account. Every operation gives a new one."""

    total: Decimal | None = None
    spent: Decimal = _NOTHING
    reserved: Decimal = _NOTHING

    def __post_init__(self) -> None:
        if self.total is not None:
            object.__setattr__(self, "total", money(self.total, "total"))
        object.__setattr__(self, "spent", money(self.spent, "spent"))
        object.__setattr__(self, "reserved", money(self.reserved, "reserved"))

    @property
    def remaining(self) -> Decimal | None:
        """What can still be reserved; below zero when overdrawn, None when unlimited."""
        return None if self.total is None else self.total - self.spent - self.reserved

    def can_reserve(self, amount: Decimal | None) -> bool:
        """Whether this much is left; None is a task that names no maximum."""
        return self.remaining is None or _estimate(amount) <= self.remaining

    def reserve(self, amount: Decimal | None) -> "Ledger":
        if not self.can_reserve(amount):
            raise BudgetExceededError(
                f"Can't reserve {_estimate(amount)} USD: {self.remaining} USD of {self.total} USD are left "
                f"({self.spent} spent, {self.reserved} reserved). Top up the budget or lower max_cost_usd."
            )
        return replace(self, reserved=self.reserved + _estimate(amount))

    def settle(self, reserved: Decimal | None, actual: Decimal) -> "Ledger":
        """Give back a reservation and book what was really spent, be it less or more."""
        amount = _estimate(reserved)
        if amount > self.reserved:
            raise ValueError(f"Can't give back {amount} USD: only {self.reserved} USD are reserved.")
        return replace(self, reserved=self.reserved - amount, spent=self.spent + money(actual, "actual"))

    def release(self, reserved: Decimal | None) -> "Ledger":
        """Give back a reservation of which nothing was spent."""
        return self.settle(reserved, _NOTHING)

    def top_up(self, amount: Decimal) -> "Ledger":
        """Add to the total; what is unlimited stays so."""
        added = money(amount)
        return self if self.total is None else replace(self, total=self.total + added)


def _estimate(max_cost: Decimal | None) -> Decimal:
    return _NOTHING if max_cost is None else money(max_cost, "max_cost_usd")


class Purse(StrEnum):
    AGENT = "agent"
    DAG = "dag"


def shortage(max_cost: Decimal | None, *, agent: Ledger, dag: Ledger) -> Purse | None:
    """Whose money is too short for a claim; None: it is affordable."""
    if not agent.can_reserve(max_cost):
        return Purse.AGENT
    if not dag.can_reserve(max_cost):
        return Purse.DAG
    return None


def over_task_limit(actual: Decimal, max_cost: Decimal | None) -> bool:
    """Whether an attempt cost more than it was allowed to; exactly the maximum is allowed."""
    return max_cost is not None and money(actual, "actual") > money(max_cost, "max_cost_usd")


def total_limit_reached(total_cost: Decimal, max_total_cost: Decimal | None) -> bool:
    """Whether all attempts together have used up what the task may cost, so that no other is worth trying."""
    return max_total_cost is not None and money(total_cost, "total_cost_usd") >= money(
        max_total_cost, "max_total_cost_usd"
    )
