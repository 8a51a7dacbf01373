"""Threads for synchronous handlers and steps. They end with the process, whatever they are doing.

The standard library's pool waits for its threads at exit: a hanging handler would keep the process alive.
"""

import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Job = tuple["Future[Any]", Callable[[], Any]]


class Threads:
    """As many threads as are needed at the same time; idle ones are reused."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0

    def submit(self, function: Callable[[], Any]) -> "Future[Any]":
        """Run it with the caller's context variables; raises RuntimeError if no thread can be started."""
        future: Future[Any] = Future()
        context = contextvars.copy_context()
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                name = f"{self._name} {self._count + 1}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._count += 1
        self._jobs.put((future, lambda: context.run(function)))
        return future

    def close(self) -> None:
        """Let threads end when they have nothing left to do."""
        with self._lock:
            for _ in range(self._count):
                self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
                    future.set_exception(error)
            # A waiting thread must not keep these objects alive.
            del job, future, function
            with self._lock:
                self._idle += 1
