"""Reports agents that stopped sending heartbeats. The reaper takes back their tasks."""

from msgspec import Struct

from lineshaft.duties.loop import Counts
from lineshaft.engine.agents import Fleet


class OfflineDetector(Struct, frozen=True):
    fleet: Fleet
    interval_sec: float = 15.0
    name: str = "offline detector"

    async def run_once(self) -> Counts:
        return {"agents offline": len(await self.fleet.mark_offline())}
