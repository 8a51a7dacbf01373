"""What all drivers share: the board on which handlers count, and the orders that a driver takes.

A driver is one file that knows one queue. It runs in that queue's own environment, so this file has nothing
but the standard library. Run as `DRIVER serve` it takes orders as lines of JSON and answers each with one;
run as `DRIVER work` it is one worker process, which works until it is killed. What it needs to know
comes from `BENCH_*`.
"""

import asyncio
import fcntl
import json
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

#: About what a prompt's description takes: with its number a task is some 300 bytes of JSON.
PROMPT = "x" * 260
#: As many tasks are submitted at once, where a queue lets one choose.
CHUNK = 1000
#: Where there is no call for many, so many calls are under way at a time.
_CALLS = 20

_STARTS = 2048
_SLOTS = 1024
_SLOT = struct.Struct("=qq")
_TIME = struct.Struct("=d")
_TIMES_AT = _SLOTS * _SLOT.size
BOARD_SIZE = _TIMES_AT + _STARTS * _TIME.size


class Board:
    """A file that all processes of a measurement have in memory: who handled how many, and when each began.

    Each thread has a slot of its own, so that none waits for another. Starts are kept for the first tasks
    only, by the clock that all processes of a machine share.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        self._memory = mmap.mmap(self._file.fileno(), BOARD_SIZE)
        self._mine = threading.local()
        os.register_at_fork(after_in_child=self._forget)

    def handled(self, n: int) -> None:
        """The first line of every handler."""
        if n < _STARTS:
            _TIME.pack_into(self._memory, _TIMES_AT + n * _TIME.size, time.monotonic())
        mine = self._mine
        if not hasattr(mine, "at"):
            mine.at, mine.pid, mine.count = self._take_slot(), os.getpid(), 0
        mine.count += 1
        _SLOT.pack_into(self._memory, mine.at, mine.pid, mine.count)

    def _forget(self) -> None:
        self._mine = threading.local()

    def _take_slot(self) -> int:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            for at in range(0, _TIMES_AT, _SLOT.size):
                if _SLOT.unpack_from(self._memory, at)[0] == 0:
                    _SLOT.pack_into(self._memory, at, os.getpid(), 0)
                    return at
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        raise RuntimeError(f"All {_SLOTS} slots of the board are taken: that many threads are not foreseen.")

    # For the process that measures.

    def counts(self) -> dict[int, int]:
        """How many tasks each process has handled."""
        found: dict[int, int] = {}
        for pid, count in _SLOT.iter_unpack(self._memory[:_TIMES_AT]):
            if pid == 0:
                break
            found[pid] = found.get(pid, 0) + count
        return found

    def started_at(self, n: int) -> float:
        """When task n began; 0: it hasn't yet."""
        value: float = _TIME.unpack_from(self._memory, _TIMES_AT + n * _TIME.size)[0]
        return value

    def forget_starts(self) -> None:
        self._memory[_TIMES_AT:] = bytes(BOARD_SIZE - _TIMES_AT)


@cache
def this_board() -> Board:
    """The board of this process; also for handlers that a queue imports by their name."""
    return Board(Path(os.environ["BENCH_BOARD"]))


def payload(n: int) -> dict[str, Any]:
    return {"prompt": PROMPT, "n": n}


async def several_at_a_time(submit: Callable[[int], Awaitable[None]], numbers: range) -> None:
    waiting = iter(numbers)

    async def calls() -> None:
        for n in waiting:
            await submit(n)

    await asyncio.gather(*(calls() for _ in range(_CALLS)))


class Driver(ABC):
    """One queue. What it can't do, it leaves out."""

    def __init__(self) -> None:
        self.board = this_board()
        #: postgresql://… and redis://…
        self.dsn = os.environ.get("BENCH_DSN", "")
        self.redis_url = os.environ.get("BENCH_REDIS", "")
        self.worker = int(os.environ.get("BENCH_WORKER", "0"))

    @abstractmethod
    async def setup(self) -> None:
        """Make what the queue needs in an empty database, and connect as a producer."""

    @abstractmethod
    async def submit(self, n: int) -> None:
        """Submit task n alone."""

    async def submit_and_wake(self, n: int) -> None:
        """Submit task n so that an idle worker takes it at once."""
        await self.submit(n)

    async def bulk(self, numbers: range) -> None:
        """Submit many in the quickest way that the queue has."""
        for n in numbers:
            await self.submit(n)

    @abstractmethod
    async def left(self) -> int:
        """How many tasks are not recorded as done."""

    async def clone(self, copies: int) -> None:
        """With SQL alone, make so many copies of waiting tasks; then tidy up as autovacuum would have."""
        raise NotImplementedError

    async def fan(self, width: int) -> None:
        """Submit tasks 1 to `width`, and task 0, which begins after all of them have ended."""
        raise NotImplementedError

    async def chain(self, length: int) -> None:
        """Submit tasks 0 to `length` − 1, each of which begins when the one before has ended."""
        raise NotImplementedError

    @abstractmethod
    def work(self) -> None:
        """Be one worker process."""

    def work_on_graph(self) -> None:
        """Be the worker for `fan` and `chain`, where that needs another one."""
        self.work()


async def _paced(driver: Driver, count: int, every_sec: float) -> list[float]:
    """Submit task after task at a leisurely pace; when each was submitted."""
    sent = []
    begin = time.monotonic()
    for n in range(count):
        await asyncio.sleep(max(begin + n * every_sec - time.monotonic(), 0))
        sent.append(time.monotonic())
        await driver.submit_and_wake(n)
    return sent


async def _one_by_one(driver: Driver, first: int, count: int) -> None:
    for n in range(first, first + count):
        await driver.submit(n)


def _orders(driver: Driver) -> dict[str, Callable[..., Awaitable[Any]]]:
    return {
        "setup": driver.setup,
        "submit": lambda first, count: _one_by_one(driver, first, count),
        "bulk": lambda first, count: driver.bulk(range(first, first + count)),
        "pace": lambda count, every_sec: _paced(driver, count, every_sec),
        "left": driver.left,
        "clone": driver.clone,
        "fan": driver.fan,
        "chain": driver.chain,
    }


async def _serve(driver: Driver) -> None:
    orders = _orders(driver)
    # Libraries may print; answers must not be mixed up with that.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *arguments = json.loads(line)
        begin = time.perf_counter()
        try:
            answer = await orders[name](*arguments)
            result = {"seconds": time.perf_counter() - begin, "answer": answer}
        except Exception:  # noqa: BLE001 - sent to the process that gave the order
            result = {"error": traceback.format_exc()}
        answers.write(json.dumps(result) + "\n")
        answers.flush()
    # The process that gave orders has gone; connections needn't be closed.
    os._exit(0)


def main(driver: Driver) -> None:
    match sys.argv[1]:
        case "serve":
            asyncio.run(_serve(driver))
        case "work":
            driver.work()
        case "work-on-graph":
            driver.work_on_graph()
        case other:
            raise SystemExit(f"A driver can 'serve', 'work' or 'work-on-graph', not {other!r}.")
