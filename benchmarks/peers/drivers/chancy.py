"""Chancy: async tasks, 500 at a time, more fetched as soon as one has ended, woken by NOTIFY, no plugins.

What has ended is recorded once a second (its default).
"""

import asyncio
import logging

import psycopg
from chancy import Chancy, Job, Queue, Worker

from benchmarks.peers.drivers.harness import CHUNK, PROMPT, Driver, main, payload, this_board

CONCURRENCY = 500
NOOP = "benchmarks.peers.drivers.chancy.noop"
LEFT = "SELECT count(*) FROM chancy_jobs WHERE state IN ('pending', 'running', 'retrying')"
CLONE = """
INSERT INTO chancy_jobs (id, queue, func, kwargs, limits, meta, state, priority, max_attempts, scheduled_at)
SELECT gen_random_uuid(), queue, func, kwargs, limits, meta, state, priority, max_attempts, scheduled_at
FROM (SELECT * FROM chancy_jobs LIMIT 1) AS one, generate_series(1, %s)
"""


async def noop(prompt: str, n: int) -> None:
    assert prompt == PROMPT  # noqa: S101 - it arrived whole
    this_board().handled(n)


def job(n: int) -> Job:
    return Job(func=NOOP, kwargs=payload(n))


class ChancyDriver(Driver):
    def __init__(self) -> None:
        super().__init__()
        # A logger of ours: its own writes a line for each task.
        self.app = Chancy(self.dsn, no_default_plugins=True, log=logging.getLogger("bench"))

    async def setup(self) -> None:
        await self.app.migrate()
        # By this name: otherwise each worker has a queue for processes beside it.
        await self.app.declare(
            Queue("default", executor=Chancy.Executor.Async, concurrency=CONCURRENCY, eager_polling=True)
        )
        self.look = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)

    async def submit(self, n: int) -> None:
        await self.app.push(job(n))

    async def bulk(self, numbers: range) -> None:
        async for _ in self.app.push_many([job(n) for n in numbers], batch_size=CHUNK):
            pass

    async def left(self) -> int:
        cursor = await self.look.execute(LEFT)
        ((count,),) = await cursor.fetchall()
        return int(count)

    async def clone(self, copies: int) -> None:
        await self.look.execute(CLONE, [copies])
        await self.look.execute("VACUUM ANALYZE chancy_jobs")

    def work(self) -> None:
        async def run() -> None:
            async with self.app, Worker(self.app) as worker:
                await worker.wait_for_shutdown()

        asyncio.run(run())


if __name__ == "__main__":
    main(ChancyDriver())
