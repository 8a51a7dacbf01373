"""The event bus: a stream of Redis with everything that happens, for programs that read Redis anyway."""

from collections.abc import Mapping, Sequence
from typing import Any

from lineshaft.integrations.redis.connection import RedisServer

#: The key of the stream.
EVENTS = "lineshaft:events"
#: About so many entries are kept.
_MOST_KEPT = 100_000
#: For a whole batch.
_WITHIN_SEC = 2.0


class EventBus:
    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._client: Any = None

    async def add(self, entries: Sequence[Mapping[str, str]]) -> None:
        """Append entries in this order. If it fails, some of them may have been appended."""
        if self._client is None:
            self._client = self._server.connect(
                "lineshaft-events", read_timeout_sec=_WITHIN_SEC, max_connections=1
            )
        async with self._server.answering(_WITHIN_SEC):
            pipeline = self._client.pipeline(transaction=False)
            for entry in entries:
                pipeline.xadd(EVENTS, dict(entry), maxlen=_MOST_KEPT, approximate=True)
            await pipeline.execute()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
