"""The Redis of a run, which breaks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.chaos.faults import Fault, Kind
from tests.proxy import Proxy, proxied_url
from tests.valkey import Valkey, valkey_server

_LATENCY_SEC = 2.0


@dataclass(frozen=True, slots=True)
class Redis:
    url: str
    server: Valkey
    proxy: Proxy
    #: One of its faults at a time.
    lock: asyncio.Lock

    async def hit(self, fault: Fault) -> None:
        async with self.lock:
            match fault.kind:
                case Kind.REDIS_KILL:
                    self.server.kill()
                    await asyncio.sleep(fault.seconds)
                    await asyncio.to_thread(self.server.start)
                case Kind.REDIS_RESTART:
                    self.server.kill()
                    await asyncio.to_thread(self.server.start)
                case Kind.REDIS_FREEZE:
                    self.server.freeze()
                    await asyncio.sleep(fault.seconds)
                    self.server.thaw()
                case Kind.REDIS_FLUSH:
                    await asyncio.to_thread(self.server.flush)
                case Kind.REDIS_LATENCY:
                    self.proxy.delay_sec = _LATENCY_SEC
                    await asyncio.sleep(fault.seconds)
                    self.proxy.delay_sec = 0.0
                case _:
                    raise AssertionError(fault)


@asynccontextmanager
async def breakable() -> AsyncIterator[Redis]:
    with valkey_server() as server:
        async with proxied_url(server.url) as (url, proxy):
            yield Redis(url, server, proxy, asyncio.Lock())
