"""DBOS: workflows without steps, on a queue that is polled every 20 ms (its default is a second).

Its fan-out is a workflow that enqueues others and waits for their results. Its chain is one workflow of
steps: a hop is a function call whose result is recorded, in one process: less than a hop through a queue.
"""

import os
import signal

import sqlalchemy
from dbos import DBOS, DBOSClient, EnqueueOptions

from benchmarks.peers.drivers.harness import CHUNK, PROMPT, Driver, main

CONCURRENCY = 100
POLL_SEC = 0.02
POOL = 20
QUEUE = "bench"
LEFT = "SELECT count(*) FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING')"
CLONE = """
INSERT INTO dbos.workflow_status
SELECT (jsonb_populate_record(one, jsonb_build_object('workflow_uuid', gen_random_uuid()))).*
FROM (SELECT workflow_status AS one FROM dbos.workflow_status LIMIT 1) AS first, generate_series(1, :copies)
"""


def options(name: str) -> EnqueueOptions:
    return {"workflow_name": name, "queue_name": QUEUE}


class DbosDriver(Driver):
    def __init__(self) -> None:
        super().__init__()
        self.url = self.dsn.replace("postgresql://", "postgresql+psycopg://", 1)

    async def setup(self) -> None:
        DBOS.migrate(self.url)
        self.client = DBOSClient(system_database_url=self.url)
        self.client.register_queue(QUEUE, worker_concurrency=CONCURRENCY, polling_interval_sec=POLL_SEC)
        self.engine = sqlalchemy.create_engine(self.url)

    async def submit(self, n: int) -> None:
        self.client.enqueue(options("noop"), PROMPT, n)

    async def bulk(self, numbers: range) -> None:
        # There is no call for many; one transaction for all saves commits.
        for first in range(numbers.start, numbers.stop, CHUNK):
            with self.engine.begin() as transaction:
                for n in range(first, min(first + CHUNK, numbers.stop)):
                    self.client.enqueue_in_transaction(transaction, options("noop"), PROMPT, n)

    async def left(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(sqlalchemy.text(LEFT)).scalar_one())

    async def clone(self, copies: int) -> None:
        with self.engine.begin() as connection:
            connection.execute(sqlalchemy.text(CLONE), {"copies": copies})
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sqlalchemy.text("VACUUM ANALYZE dbos.workflow_status"))

    async def fan(self, width: int) -> None:
        self.client.enqueue(options("fan"), width)

    async def chain(self, length: int) -> None:
        self.client.enqueue(options("chain"), length)

    def work(self) -> None:
        DBOS(
            config={
                "name": "bench",
                "system_database_url": self.url,
                "sys_db_pool_size": POOL,
                "log_level": "WARNING",
                # Each process its own: one that starts takes over what its namesake left.
                "executor_id": f"worker-{self.worker}-{os.getpid()}",
            }
        )

        @DBOS.workflow(name="noop")
        def noop(prompt: str, n: int) -> None:
            assert prompt == PROMPT  # noqa: S101 - it arrived whole
            self.board.handled(n)

        @DBOS.workflow(name="fan")
        def fan(width: int) -> None:
            leaves = [DBOS.enqueue_workflow(QUEUE, noop, PROMPT, n) for n in range(1, width + 1)]
            for leaf in leaves:
                leaf.get_result(polling_interval_sec=POLL_SEC)
            self.board.handled(0)

        @DBOS.step()
        def hop(prompt: str, n: int) -> None:
            assert prompt == PROMPT  # noqa: S101 - it arrived whole
            self.board.handled(n)

        @DBOS.workflow(name="chain")
        def chain(length: int) -> None:
            for n in range(length):
                hop(PROMPT, n)

        DBOS.launch()
        signal.pause()


if __name__ == "__main__":
    main(DbosDriver())
