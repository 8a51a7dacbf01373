"""Amounts of money, and the cost limits of one task.

Amounts are exact decimals of US dollars with six places, as the database stores them in numeric(14,6). They
are rounded the way PostgreSQL rounds (half away from zero). A float is read by its shortest representation,
so 0.1 is exactly 0.1.
"""

import reprlib
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

from lineshaft.errors import InvalidInputError

LARGEST_SUM = Decimal("99999999.999999")
_SIX_PLACES = Decimal("0.000001")


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


def over_task_limit(actual: Decimal, max_cost: Decimal | None) -> bool:
    """Whether an attempt cost more than it was allowed to; exactly the maximum is allowed."""
    return max_cost is not None and money(actual, "actual") > money(max_cost, "max_cost_usd")


def total_limit_reached(total_cost: Decimal, max_total_cost: Decimal | None) -> bool:
    """Whether all attempts together have used up what the task may cost, so that no other is worth trying."""
    return max_total_cost is not None and money(total_cost, "total_cost_usd") >= money(
        max_total_cost, "max_total_cost_usd"
    )
