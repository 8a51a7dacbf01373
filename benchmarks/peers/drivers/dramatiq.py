"""Dramatiq on Redis: 16 threads a process, its default middleware, group callbacks for the fan-out."""

import signal

import dramatiq
from dramatiq import Worker, group, pipeline
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import GroupCallbacks
from dramatiq.rate_limits.backends import RedisBackend

from benchmarks.peers.drivers.harness import PROMPT, Driver, main, payload

THREADS = 16


class DramatiqDriver(Driver):
    def __init__(self) -> None:
        super().__init__()
        self.broker = RedisBroker(url=self.redis_url)
        dramatiq.set_broker(self.broker)

        @dramatiq.actor(actor_name="noop")
        def noop(prompt: str, n: int) -> None:
            assert prompt == PROMPT  # noqa: S101 - it arrived whole
            self.board.handled(n)

        self.noop = noop

    async def setup(self) -> None:
        self._allow_groups()

    def _allow_groups(self) -> None:
        self.broker.add_middleware(GroupCallbacks(RedisBackend(url=self.redis_url)))

    async def submit(self, n: int) -> None:
        self.noop.send(**payload(n))

    async def left(self) -> int:
        return int(self.broker.do_qsize("default"))

    async def fan(self, width: int) -> None:
        members = group(self.noop.message(**payload(n)) for n in range(1, width + 1))
        members.add_completion_callback(self.noop.message(**payload(0)))
        members.run()

    async def chain(self, length: int) -> None:
        # Each message has all that come after it inside.
        hops = [self.noop.message_with_options(kwargs=payload(n), pipe_ignore=True) for n in range(length)]
        pipeline(hops).run()

    def work(self) -> None:
        Worker(self.broker, worker_threads=THREADS).start()
        signal.pause()

    def work_on_graph(self) -> None:
        self._allow_groups()
        self.work()


if __name__ == "__main__":
    main(DramatiqDriver())
