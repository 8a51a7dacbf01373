"""Lets tasks be claimed that wait for quotas: rates have room again, or a process died before it did so."""

from msgspec import Struct

from lineshaft.duties.loop import Counts
from lineshaft.engine.guards.quotas import Quotas


class QuotaKeeper(Struct, frozen=True):
    quotas: Quotas
    interval_sec: float = 1.0
    name: str = "quota keeper"

    async def run_once(self) -> Counts:
        moved = await self.quotas.look_at_due()
        return {"made claimable": moved, "slots of ended claims": await self.quotas.repair()}
