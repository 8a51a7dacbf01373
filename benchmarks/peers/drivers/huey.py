"""Huey on Redis: 4 threads a process, no results kept, no schedule looked after."""

import logging

from huey import RedisHuey
from huey.api import group

from benchmarks.peers.drivers.harness import PROMPT, Driver, main

THREADS = 4


class HueyDriver(Driver):
    def __init__(self) -> None:
        super().__init__()
        self.huey = RedisHuey("bench", results=False, url=self.redis_url)

        # What the tasks before it gave comes last.
        @self.huey.task(name="noop")
        def noop(prompt: str, n: int, *_: object) -> None:
            assert prompt == PROMPT  # noqa: S101 - it arrived whole
            self.board.handled(n)

        self.noop = noop

    async def setup(self) -> None:
        self.huey.storage.conn.ping()

    async def submit(self, n: int) -> None:
        self.noop(PROMPT, n)

    async def left(self) -> int:
        return int(self.huey.pending_count())

    async def fan(self, width: int) -> None:
        members = group([self.noop.s(PROMPT, n) for n in range(1, width + 1)])
        self.huey.enqueue(members.then(self.noop.s(PROMPT, 0)))

    async def chain(self, length: int) -> None:
        # Each task has all that come after it inside.
        first = last = self.noop.s(PROMPT, 0)
        for n in range(1, length):
            following = self.noop.s(PROMPT, n)
            last.then(following)
            last = following
        self.huey.enqueue(first)

    def work(self) -> None:
        logging.getLogger("huey").setLevel(logging.WARNING)
        self.huey.create_consumer(workers=THREADS, worker_type="thread", periodic=False).run()


if __name__ == "__main__":
    main(HueyDriver())
