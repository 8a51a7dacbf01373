"""What quotas match, and which numbers they may have."""

from decimal import Decimal
from typing import Any, Protocol

from lineshaft.model.admission import BUILT_IN_KINDS
from lineshaft.model.budget import shown
from lineshaft.model.fields import CHECKS, text_fault
from lineshaft.model.open_enum import OpenEnum
from lineshaft.model.retry import fault_in, number_fault, raise_faults

_MOST_TASKS = 1_000_000_000
_MOST_AMOUNT = 10**12
_SHORTEST_WINDOW_SEC, _LONGEST_WINDOW_SEC = 0.1, 365 * 86_400.0
_LEAST_WEIGHT, _MOST_WEIGHT = 0.001, 1_000_000.0
_SIX_PLACES = Decimal("0.000001")


class RateUnit(OpenEnum):
    #: Gates claims; the others gate what handlers acquire.
    TASKS = "tasks"
    REQUESTS = "requests"
    TOKENS = "tokens"
    USD = "usd"


class RateFields(Protocol):
    @property
    def amount(self) -> Decimal | float: ...
    @property
    def unit(self) -> str: ...
    @property
    def per_sec(self) -> float: ...


class QuotaFields(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def match(self) -> str: ...
    @property
    def each(self) -> bool: ...
    @property
    def max_running(self) -> int | None: ...
    @property
    def max_waiting(self) -> int | None: ...
    @property
    def rate(self) -> RateFields | None: ...
    @property
    def weight(self) -> float: ...


def check_quota(quota: QuotaFields) -> None:
    """Raise one error with all faults of a quota."""
    faults = {
        "name": CHECKS["id"](quota.name),
        "match": _match_fault(quota.match),
        "weight": number_fault(quota.weight, _LEAST_WEIGHT, _MOST_WEIGHT),
    }
    for name in ("max_running", "max_waiting"):
        if (value := getattr(quota, name)) is not None:
            faults[name] = number_fault(value, 0, _MOST_TASKS, whole=True)
    if quota.rate is not None:
        faults["rate.per_sec"] = number_fault(quota.rate.per_sec, _SHORTEST_WINDOW_SEC, _LONGEST_WINDOW_SEC)
        faults["rate.amount"] = _amount_fault(quota.rate)
        ok = quota.rate.unit in set(RateUnit)
        faults["rate.unit"] = fault_in(quota.rate.unit, f"must be one of {', '.join(RateUnit)}", ok=ok)
    raise_faults(faults)


def rate_amount(rate: RateFields) -> Decimal:
    """As it is stored."""
    return Decimal(str(rate.amount)).quantize(_SIX_PLACES)


def _match_fault(match: Any) -> str | None:
    if fault := text_fault(match):
        return fault
    if "*" in match and (match.count("*") > 1 or not match.endswith(":*") or match == ":*"):
        return f"must be a key, or a prefix with ':*' at its end, such as 'customer:*', got {shown(match)}"
    if match in BUILT_IN_KINDS:
        return f"must name what comes after {match!r}, or be '{match}*', got {shown(match)}"
    return None


def _amount_fault(rate: RateFields) -> str | None:
    try:
        amount = rate_amount(rate)
    except ArithmeticError:
        amount = Decimal(-1)
    if not 0 < amount <= _MOST_AMOUNT:
        return f"must be an amount above 0, up to {_MOST_AMOUNT}, got {shown(rate.amount)}"
    if rate.unit == RateUnit.TASKS and amount < 1:
        return f"must be at least 1 task, got {shown(rate.amount)}; max_running 0 stops claims"
    return None
