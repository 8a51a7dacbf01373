"""What a handler reserves of quotas, and what it has really used."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from msgspec.structs import replace

from lineshaft.agent.lease import ClaimWrites, Lease
from lineshaft.ids import new_id
from lineshaft.types.reservations import NewReservation, Settlement, Units, remaining_in


class QuotaUse:
    """What was reserved with `ctx.quota`."""

    __slots__ = ("_settlement",)

    def __init__(self, settlement: Settlement) -> None:
        self._settlement = settlement

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.reservation}>"

    @property
    def reservation(self) -> str | None:
        """Its id; None: no quota of the key counts any of it."""
        return self._settlement.reservation

    def settle(
        self,
        *,
        requests: Decimal | float | None = None,
        tokens: Decimal | float | None = None,
        usd: Decimal | float | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> None:
        """Report what was really used, which is booked when the block ends; the last report counts.

        What isn't stated stays as it was reserved. `headers` are those of the provider's response: where its
        `x-ratelimit-remaining-*` say that less is left than the quota has, the quota has no more either.
        """
        self._settlement = replace(
            self._settlement,
            units=Units(requests, tokens, usd),
            remaining=Units() if headers is None else remaining_in(headers),
        )


class Quotas:
    """Quotas of one execution."""

    def __init__(self, lease: Lease, writes: ClaimWrites) -> None:
        self._lease = lease
        self._writes = writes

    async def acquire(self, key: str, units: Units) -> QuotaUse:
        """Wait until there is room; raises as `Lease.check` when the handler must stop."""
        new = NewReservation(self._writes.claim, key, units, new_id("acquire"))
        reservation = await self._writes.acquire(new)
        # Waiting may have taken long, and what follows costs money.
        await self._lease.hold()
        return QuotaUse(Settlement(self._writes.claim, reservation))

    async def end(self, use: QuotaUse) -> None:
        """The block that it was acquired for has ended."""
        await self.settle(use._settlement)  # noqa: SLF001 - of this module

    async def settle(self, settlement: Settlement) -> None:
        if settlement.reservation is not None and settlement.is_reported:
            await self._writes.settle(settlement)
