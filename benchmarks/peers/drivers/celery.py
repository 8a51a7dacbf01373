"""Celery on Redis: results ignored, acknowledged early (its default), 64 fetched ahead for each of 4 threads.

Processes instead of threads are no faster with one worker, and slower with two. Chords need a result backend.
"""

import redis
from celery import Celery, chain, chord

from benchmarks.peers.drivers.harness import PROMPT, Driver, main, payload

THREADS = 4


class CeleryDriver(Driver):
    def __init__(self) -> None:
        super().__init__()
        url = self.redis_url.replace("unix://", "redis+socket://", 1)
        self.app = Celery("bench", broker=url, backend=url)
        self.app.conf.update(
            task_ignore_result=True,
            worker_prefetch_multiplier=64,
            worker_hijack_root_logger=False,
            broker_connection_retry_on_startup=True,
        )

        @self.app.task(name="noop")
        def noop(prompt: str, n: int) -> None:
            assert prompt == PROMPT  # noqa: S101 - it arrived whole
            self.board.handled(n)

        # A chord counts the results of its members.
        @self.app.task(name="member", ignore_result=False)
        def member(prompt: str, n: int) -> None:
            noop(prompt, n)

        self.noop, self.member = noop, member

    async def setup(self) -> None:
        self.redis = redis.from_url(self.redis_url)
        self.producer = self.app.amqp.Producer(self.app.connection_for_write())

    async def submit(self, n: int) -> None:
        self.noop.apply_async(kwargs=payload(n))

    async def bulk(self, numbers: range) -> None:
        # There is no call for many; one producer for all saves some work.
        for n in numbers:
            self.noop.apply_async(kwargs=payload(n), producer=self.producer)

    async def left(self) -> int:
        return int(self.redis.llen("celery") + self.redis.hlen("unacked"))

    async def fan(self, width: int) -> None:
        members = [self.member.si(**payload(n)) for n in range(1, width + 1)]
        chord(members)(self.noop.si(**payload(0)))

    async def chain(self, length: int) -> None:
        chain(*(self.noop.si(**payload(n)) for n in range(length))).apply_async()

    def work(self) -> None:
        quiet = ["--loglevel=WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat"]
        name = f"--hostname=worker-{self.worker}"
        self.app.worker_main(["worker", "--pool=threads", f"--concurrency={THREADS}", name, *quiet])


if __name__ == "__main__":
    main(CeleryDriver())
