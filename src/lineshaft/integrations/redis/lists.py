"""Wake-ups in Redis: a list for each lane, from which each wake-up is popped by one process.

A wake-up says only that there may be work in a lane. Lists are short and expire soon: who begins to wait has
looked for work before, so an old wake-up says nothing new.
"""

import random
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lineshaft.integrations.redis.connection import RedisServer

#: The longest list, and how long it is kept after the last push.
_MOST_KEPT = 64
_KEPT_MS = 5_000


class Popped(NamedTuple):
    lane: int
    #: How many processes had it before and couldn't use it.
    passed: int


class WakeupLists:
    """One per process."""

    def __init__(self, server: RedisServer, database: str) -> None:
        """`database` is the same for all processes of a database, and for no other."""
        self._server = server
        self._prefix = f"lineshaft:{database}:"
        #: A list of this process's own, which ends its `pop`.
        self._own = f"{self._prefix}process:{secrets.token_hex(8)}"
        self._client = server.connect("lineshaft-wakeups", max_connections=4)
        self._popping: Any = None

    async def close(self) -> None:
        await self._client.aclose()
        if self._popping is not None:
            await self._popping.aclose()

    async def push(self, wakes: Mapping[int, int], *, passed: int = 0) -> None:
        """So many wake-ups for each lane."""
        async with self._server.answering():
            pipeline = self._client.pipeline(transaction=False)
            for lane, number in wakes.items():
                key = self._key(lane)
                pipeline.lpush(key, *[str(passed)] * min(number, _MOST_KEPT))
                pipeline.ltrim(key, 0, _MOST_KEPT - 1)
                pipeline.pexpire(key, _KEPT_MS)
            await pipeline.execute()

    async def pop(self, lanes: Sequence[int], wait_sec: float) -> Popped | None:
        """The next wake-up for one of these lanes; None: there was none, or `interrupt` was called."""
        # In another order each time: the first list that has a wake-up is taken.
        keys = [self._key(lane) for lane in random.sample(lanes, len(lanes))]
        limit_sec = wait_sec + self._server.timeout_sec
        async with self._server.answering(limit_sec):
            if self._popping is None:
                self._popping = self._server.connect(
                    "lineshaft-waits", read_timeout_sec=limit_sec, max_connections=1
                )
            found = await self._popping.brpop([*keys, self._own], wait_sec)
        if found is None or found[0].decode() == self._own:
            return None
        return Popped(int(found[0].rpartition(b":")[2]), int(found[1]))

    async def interrupt(self) -> None:
        """End the `pop` that waits, so that it begins again with other lanes."""
        async with self._server.answering():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.lpush(self._own, "")
            pipeline.ltrim(self._own, 0, 0)
            pipeline.pexpire(self._own, _KEPT_MS)
            await pipeline.execute()

    async def lead(self, for_sec: float) -> bool:
        """Whether this process looks for forgotten work. It writes, so a server that is read-only fails."""
        async with self._server.answering():
            key = f"{self._prefix}leader"
            return bool(await self._client.set(key, self._own, nx=True, px=round(for_sec * 1_000)))

    def _key(self, lane: int) -> str:
        return f"{self._prefix}lane:{lane}"
