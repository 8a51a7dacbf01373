"""Taskiq on Redis streams: 100 tasks at a time, 100 fetched ahead, acknowledged when done (its default).

No results are kept. There is no call for many: 20 are sent at a time.
"""

import asyncio

import redis.asyncio
from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker

from benchmarks.peers.drivers.harness import PROMPT, Driver, main, payload, several_at_a_time

CONCURRENCY = 100
PREFETCH = 100


class TaskiqDriver(Driver):
    def __init__(self) -> None:
        super().__init__()
        self.broker = RedisStreamBroker(self.redis_url)

        @self.broker.task(task_name="noop")
        async def noop(prompt: str, n: int) -> None:
            assert prompt == PROMPT  # noqa: S101 - it arrived whole
            self.board.handled(n)

        self.noop = noop

    async def setup(self) -> None:
        # Makes the group of consumers, which is given only what comes after it.
        await self.broker.startup()
        self.redis = redis.asyncio.from_url(self.redis_url)

    async def submit(self, n: int) -> None:
        await self.noop.kiq(**payload(n))

    async def bulk(self, numbers: range) -> None:
        await several_at_a_time(self.submit, numbers)

    async def left(self) -> int:
        # What no worker has fetched (known since Redis 7), and what is not acknowledged.
        (group,) = await self.redis.xinfo_groups(self.broker.queue_name)
        return int(group["lag"] + group["pending"])

    def work(self) -> None:
        asyncio.run(
            run_receiver_task(
                self.broker, max_async_tasks=CONCURRENCY, max_prefetch=PREFETCH, run_startup=True
            )
        )


if __name__ == "__main__":
    main(TaskiqDriver())
