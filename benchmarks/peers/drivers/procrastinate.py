"""Procrastinate: async tasks, 20 at a time (more and fewer are slower), woken by LISTEN/NOTIFY."""

import asyncio

import psycopg
from procrastinate import App, PsycopgConnector

from benchmarks.peers.drivers.harness import CHUNK, PROMPT, Driver, main, payload

CONCURRENCY = 20
LEFT = "SELECT count(*) AS n FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
CLONE = """
INSERT INTO procrastinate_jobs (queue_name, task_name, priority, args, status)
SELECT queue_name, task_name, priority, args, status
FROM (SELECT * FROM procrastinate_jobs LIMIT 1) AS one, generate_series(1, %s)
"""


class ProcrastinateDriver(Driver):
    def __init__(self) -> None:
        super().__init__()
        self.app = App(
            connector=PsycopgConnector(conninfo=self.dsn, min_size=1, max_size=CONCURRENCY),
        )

        @self.app.task(name="noop")
        async def noop(prompt: str, n: int) -> None:
            assert prompt == PROMPT  # noqa: S101 - it arrived whole
            self.board.handled(n)

        self.noop = noop

    async def setup(self) -> None:
        await self.app.open_async()
        await self.app.schema_manager.apply_schema_async()

    async def submit(self, n: int) -> None:
        await self.noop.defer_async(**payload(n))

    async def bulk(self, numbers: range) -> None:
        for first in range(numbers.start, numbers.stop, CHUNK):
            chunk = range(first, min(first + CHUNK, numbers.stop))
            await self.noop.batch_defer_async(*(payload(n) for n in chunk))

    async def left(self) -> int:
        return int((await self.app.connector.execute_query_one_async(LEFT))["n"])

    async def clone(self, copies: int) -> None:
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
            await connection.execute("ALTER TABLE procrastinate_jobs DISABLE TRIGGER USER")
            await connection.execute(CLONE, [copies])
            await connection.execute("ALTER TABLE procrastinate_jobs ENABLE TRIGGER USER")
            await connection.execute("VACUUM ANALYZE procrastinate_jobs")

    def work(self) -> None:
        async def run() -> None:
            async with self.app.open_async():
                await self.app.run_worker_async(concurrency=CONCURRENCY, listen_notify=True)

        asyncio.run(run())


if __name__ == "__main__":
    main(ProcrastinateDriver())
