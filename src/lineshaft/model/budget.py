"""Amounts of money, and the cost limits of one task.

Amounts are exact decimals of US dollars with six places, as the database stores them in numeric(14,6). They
are rounded the way PostgreSQL rounds (half away from zero). A float is read by its shortest representation,
so 0.1 is exactly 0.1.
"""

import reprlib
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

from lineshaft.errors import InvalidInputError

LARGEST_AMOUNT = Decimal("99999999.999999")
_SIX_PLACES = Decimal("0.000001")


def shown(value: object) -> str:
    """A rejected value, shortened for a message."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number of thousands of digits"


def money(value: Decimal | str | float, name: str = "amount") -> Decimal:
    """The amount as it is stored; `name` is the field named in the error."""
    try:
        if isinstance(value, bool):
            raise TypeError  # noqa: TRY301 (bool is an int, but not an amount)
        amount = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
        if not amount.is_finite() or not 0 <= amount <= LARGEST_AMOUNT:
            raise InvalidOperation  # noqa: TRY301 (one message for every invalid amount)
    except (InvalidOperation, TypeError, ValueError):
        fault = f"must be an amount in US dollars from 0 to {LARGEST_AMOUNT}, got {shown(value)}"
        raise InvalidInputError(errors=[(name, fault)]) from None
    return abs(amount.quantize(_SIX_PLACES, rounding=ROUND_HALF_UP))


def over_task_limit(actual: Decimal, max_cost: Decimal | None) -> bool:
    """Whether an attempt cost more than its maximum; exactly the maximum is allowed."""
    return max_cost is not None and money(actual, "actual") > money(max_cost, "max_cost_usd")


def attempt_limit(
    max_cost: Decimal | None, max_total_cost: Decimal | None, cost: Decimal = Decimal(0)
) -> Decimal | None:
    """What an attempt may cost after earlier ones have cost so much; None: no limit (attempt_limit_1)."""
    left = None if max_total_cost is None else max(max_total_cost - cost, Decimal(0))
    return min((limit for limit in (max_cost, left) if limit is not None), default=None)


def over_total_limit(total_cost: Decimal, max_total_cost: Decimal | None) -> bool:
    """Whether all attempts together cost more than they may; exactly the limit is allowed."""
    return max_total_cost is not None and money(total_cost, "total_cost_usd") > money(
        max_total_cost, "max_total_cost_usd"
    )


def total_limit_reached(total_cost: Decimal, max_total_cost: Decimal | None) -> bool:
    """Whether all attempts together have used up the task's total, so that another would exceed it."""
    return max_total_cost is not None and money(total_cost, "total_cost_usd") >= money(
        max_total_cost, "max_total_cost_usd"
    )
