"""SIGTERM and SIGINT for all agents of an event loop: the first lets them finish, the second stops them.

The event loop handles signals. While a handler blocks it, a thread notices them: Python writes the number of
each signal to a socket at once, whatever the main thread is doing.
"""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from lineshaft.agent.stopping import StopRequest

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Watch:
    """Reports signals from a thread, and passes them on to the event loop."""

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._reader, self._writer = socket.socketpair()
        os.set_blocking(self._writer.fileno(), False)
        self._event_loop_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="lineshaft signals", daemon=True).start()

    def _run(self) -> None:
        with self._reader:
            while numbers := self._reader.recv(64):
                # The program may have closed the event loop, or filled its socket.
                with contextlib.suppress(OSError):
                    os.write(self._event_loop_fd, numbers)
                for number in numbers:
                    self._on_signal(number)

    def close(self) -> None:
        current = signal.set_wakeup_fd(self._event_loop_fd)
        if current != self._writer.fileno():
            # The program has set another one since.
            signal.set_wakeup_fd(current)
        self._writer.close()


class _Installed:
    """The handlers in one event loop, and what was there before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.members: dict[StopRequest, None] = {}
        self._loop = loop
        self._received = 0
        self._noticed = 0
        self._before: dict[signal.Signals, Any] = {}
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if _is_default(handler):
                with contextlib.suppress(NotImplementedError):  # event loops of Windows have none
                    loop.add_signal_handler(number, self._stop_all, number)
                    self._before[number] = handler
        # The event loop has set its descriptor before.
        self._watch = _Watch(self._notice) if self._before else None

    def _stop_all(self, number: signal.Signals) -> None:
        self._received += 1
        for member in list(self.members):
            member.stop(now=self._received > 1, because=number)

    def _notice(self, number: int) -> None:
        # The thread calls it.
        if number in self._before:
            self._noticed += 1
            for member in list(self.members):
                member.expect_stop(now=self._noticed > 1)

    def remove(self) -> None:
        if self._watch is not None:
            self._watch.close()
        for number, handler in self._before.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_signal_handler(number)
            signal.signal(number, handler)


_installed: dict[asyncio.AbstractEventLoop, _Installed] = {}


@contextlib.contextmanager
def signals(stop: StopRequest) -> Iterator[None]:
    """Make signals requests to stop while the block runs.

    Only in the main thread, and only signals that the program neither handles nor ignores.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    installed = _installed.get(loop)
    if installed is None:
        installed = _installed[loop] = _Installed(loop)
    installed.members[stop] = None
    try:
        yield
    finally:
        installed.members.pop(stop, None)
        if not installed.members:
            del _installed[loop]
            installed.remove()


def _is_default(handler: Any) -> bool:
    """Whether it is the handler that Python, or `asyncio.run`, installs."""
    if handler in {signal.SIG_DFL, signal.default_int_handler}:
        return True
    owner = getattr(getattr(handler, "func", None), "__self__", None)
    return isinstance(owner, asyncio.Runner)
