"""Reports that this server runs. Each server does, also one without the other duties."""

from msgspec import Struct

from lineshaft.duties.loop import Counts
from lineshaft.engine.guards.servers import ThisServer


class ServerPresence(Struct, frozen=True):
    server: ThisServer
    interval_sec: float = 30.0
    name: str = "presence"

    async def run_once(self) -> Counts:
        await self.server.report()
        return {}
