"""SAQ on Redis: 20 tasks at a time, no results kept.

There is no call for many: 20 are sent at a time. A worker that starts may take its own first tasks for
lost ones; then they run twice.
"""

import asyncio
from typing import Any

from saq import Worker
from saq.queue.redis import RedisQueue

from benchmarks.peers.drivers.harness import PROMPT, Driver, main, payload, several_at_a_time

CONCURRENCY = 20
#: Seconds for which a result is kept: not at all.
TTL = -1


class SaqDriver(Driver):
    def __init__(self) -> None:
        super().__init__()
        self.queue = RedisQueue.from_url(self.redis_url)

    async def setup(self) -> None:
        await self.queue.connect()

    async def submit(self, n: int) -> None:
        await self.queue.enqueue("noop", ttl=TTL, **payload(n))

    async def bulk(self, numbers: range) -> None:
        await several_at_a_time(self.submit, numbers)

    async def left(self) -> int:
        return int(await self.queue.count("incomplete"))

    def work(self) -> None:
        async def noop(_: dict[str, Any], *, prompt: str, n: int) -> None:
            assert prompt == PROMPT  # noqa: S101 - it arrived whole
            self.board.handled(n)

        async def run() -> None:
            await self.queue.connect()
            await Worker(self.queue, [("noop", noop)], concurrency=CONCURRENCY).start()

        asyncio.run(run())


if __name__ == "__main__":
    main(SaqDriver())
