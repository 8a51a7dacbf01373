"""PgQueuer: one asyncpg connection, batches of 1,000, its default durability ("durable")."""

import asyncio
import json
from datetime import timedelta

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from benchmarks.peers.drivers.harness import CHUNK, PROMPT, Driver, main, payload

#: Its default is 10.
BATCH = 1000
CLONE = """
INSERT INTO pgqueuer (priority, entrypoint, status, execute_after, payload)
SELECT priority, entrypoint, status, execute_after, payload
FROM (SELECT * FROM pgqueuer LIMIT 1) AS one, generate_series(1, $1::int)
"""


def encoded(n: int) -> bytes:
    return json.dumps(payload(n)).encode()


class PgQueuerDriver(Driver):
    async def setup(self) -> None:
        self.connection = await asyncpg.connect(self.dsn)
        self.queries = Queries.from_asyncpg_connection(self.connection)
        await self.queries.install()

    async def submit(self, n: int) -> None:
        await self.queries.enqueue("noop", encoded(n))

    async def bulk(self, numbers: range) -> None:
        for first in range(numbers.start, numbers.stop, CHUNK):
            chunk = [encoded(n) for n in range(first, min(first + CHUNK, numbers.stop))]
            await self.queries.enqueue(["noop"] * len(chunk), chunk, [0] * len(chunk))

    async def left(self) -> int:
        return int(await self.connection.fetchval("SELECT count(*) FROM pgqueuer"))

    async def clone(self, copies: int) -> None:
        await self.connection.execute("ALTER TABLE pgqueuer DISABLE TRIGGER USER")
        await self.connection.execute(CLONE, copies)
        await self.connection.execute("ALTER TABLE pgqueuer ENABLE TRIGGER USER")
        await self.connection.execute("VACUUM ANALYZE")

    def work(self) -> None:
        async def run() -> None:
            queue = PgQueuer.from_asyncpg_connection(await asyncpg.connect(self.dsn))

            @queue.entrypoint("noop")
            async def noop(job: Job) -> None:
                task = json.loads(job.payload or b"")
                assert task["prompt"] == PROMPT  # noqa: S101 - it arrived whole
                self.board.handled(task["n"])

            await queue.run(dequeue_timeout=timedelta(seconds=30), batch_size=BATCH)

        asyncio.run(run())


if __name__ == "__main__":
    main(PgQueuerDriver())
