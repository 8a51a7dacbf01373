"""Reservations: what a handler may use of the rates of a key, before it uses it."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from msgspec import Struct

from lineshaft.model.budget import shown
from lineshaft.model.retry import raise_faults
from lineshaft.types.work import ClaimRef, check_step_name

#: The longest wait of one call.
MAX_ACQUIRE_WAIT_SEC = 60.0
_MOST_UNITS = 10**12


class Units(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much of the rates of a key; null: not stated."""

    requests: Decimal | float | None = None
    tokens: Decimal | float | None = None
    usd: Decimal | float | None = None

    def check(self, place: str = "units") -> None:
        amounts = {name: getattr(self, name) for name in self.__struct_fields__}
        raise_faults(
            {f"{place}.{name}": _fault(amount) for name, amount in amounts.items() if amount is not None}
        )

    @property
    def stated(self) -> Mapping[str, str]:
        """Those that are stated, as exact numbers."""
        amounts = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: str(amount) for name, amount in amounts.items() if amount is not None}


def _fault(amount: Any) -> str | None:
    is_number = isinstance(amount, int | float | Decimal) and not isinstance(amount, bool)
    if is_number and 0 <= amount <= _MOST_UNITS:
        return None
    return f"must be a number from 0 to {_MOST_UNITS}, got {shown(amount)}"


class NewReservation(Struct, frozen=True):
    claim: ClaimRef
    key: str
    units: Units = Units()
    #: A repeated call with this key returns the same reservation.
    idempotency_key: str | None = None

    def __post_init__(self) -> None:
        check_step_name("key", self.key)
        if self.idempotency_key is not None:
            check_step_name("idempotency_key", self.idempotency_key)
        self.units.check()


class Settlement(Struct, frozen=True):
    claim: ClaimRef
    #: None: no quota counts what was acquired.
    reservation: str | None
    #: What was used; what isn't stated stays as it was reserved.
    units: Units = Units()
    #: What the provider has left; the quota has no more than that from now on.
    remaining: Units = Units()

    def __post_init__(self) -> None:
        if self.reservation is not None:
            check_step_name("reservation", self.reservation)
        self.units.check()
        self.remaining.check("remaining")

    @property
    def is_reported(self) -> bool:
        """Whether it states anything; otherwise what was reserved stays booked."""
        return bool(self.units.stated or self.remaining.stated)


class Reservation(Struct, frozen=True):
    #: Null: no quota of the key counts any of the units.
    reservation: str | None


#: What providers call what is left, and the unit.
_REMAINING = {
    "x-ratelimit-remaining-requests": "requests",
    "x-ratelimit-remaining-tokens": "tokens",
    "anthropic-ratelimit-requests-remaining": "requests",
    "anthropic-ratelimit-tokens-remaining": "tokens",
}


def remaining_in(headers: Mapping[str, Any]) -> Units:
    """What a provider has left, from the headers of its response; others are ignored."""
    left: dict[str, Decimal] = {}
    for name, value in headers.items():
        unit = _REMAINING.get(str(name).lower())
        text = str(value).strip()
        if unit is not None and text.isascii() and text.isdigit() and _fault(Decimal(text)) is None:
            left[unit] = min(Decimal(text), left.get(unit, Decimal(text)))
    return Units(**left)
