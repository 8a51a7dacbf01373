"""arq: 200 tasks at a time, polled every 10 ms (its default is 500), no results kept.

There is no call for many: 20 are sent at a time.
"""

from typing import Any

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func

from benchmarks.peers.drivers.harness import PROMPT, Driver, main, payload, several_at_a_time

CONCURRENCY = 200
POLL_SEC = 0.01


class ArqDriver(Driver):
    async def setup(self) -> None:
        self.pool = await create_pool(RedisSettings.from_dsn(self.redis_url))

    async def submit(self, n: int) -> None:
        await self.pool.enqueue_job("noop", **payload(n))

    async def bulk(self, numbers: range) -> None:
        await several_at_a_time(self.submit, numbers)

    async def left(self) -> int:
        # A task leaves the queue when it is done, not when it is begun.
        return int(await self.pool.zcard(self.pool.default_queue_name))

    def work(self) -> None:
        async def noop(_: dict[str, Any], prompt: str, n: int) -> None:
            assert prompt == PROMPT  # noqa: S101 - it arrived whole
            self.board.handled(n)

        Worker(
            [func(noop, name="noop")],
            redis_settings=RedisSettings.from_dsn(self.redis_url),
            max_jobs=CONCURRENCY,
            poll_delay=POLL_SEC,
            keep_result=0,
        ).run()


if __name__ == "__main__":
    main(ArqDriver())
