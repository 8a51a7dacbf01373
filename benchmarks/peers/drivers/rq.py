"""RQ: tasks run in the worker's own process (its default forks for each).

Results are kept (its default): without them it isn't faster.
"""

import redis
from rq import Queue, SimpleWorker

from benchmarks.peers.drivers.harness import CHUNK, PROMPT, Driver, main, payload, this_board

NOOP = "benchmarks.peers.drivers.rq.noop"


def noop(prompt: str, n: int) -> None:
    assert prompt == PROMPT  # noqa: S101 - it arrived whole
    this_board().handled(n)


class RqDriver(Driver):
    def __init__(self) -> None:
        super().__init__()
        self.redis = redis.from_url(self.redis_url)
        self.queue = Queue(connection=self.redis)

    async def setup(self) -> None:
        self.redis.ping()

    async def submit(self, n: int) -> None:
        self.queue.enqueue(NOOP, kwargs=payload(n))

    async def bulk(self, numbers: range) -> None:
        for first in range(numbers.start, numbers.stop, CHUNK):
            chunk = range(first, min(first + CHUNK, numbers.stop))
            self.queue.enqueue_many([Queue.prepare_data(NOOP, kwargs=payload(n)) for n in chunk])

    async def left(self) -> int:
        with self.redis.pipeline() as together:
            together.llen(self.queue.key)
            together.llen(self.queue.intermediate_queue_key)
            together.zcard(self.queue.started_job_registry.key)
            return sum(together.execute())

    async def fan(self, width: int) -> None:
        members = [Queue.prepare_data(NOOP, kwargs=payload(n)) for n in range(1, width + 1)]
        self.queue.enqueue(NOOP, kwargs=payload(0), depends_on=self.queue.enqueue_many(members))

    async def chain(self, length: int) -> None:
        before = None
        for n in range(length):
            before = self.queue.enqueue(NOOP, kwargs=payload(n), depends_on=before)

    def work(self) -> None:
        SimpleWorker([self.queue], connection=self.redis).work(logging_level="WARNING")


if __name__ == "__main__":
    main(RqDriver())
