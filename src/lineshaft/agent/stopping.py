"""SIGTERM and SIGINT for all agents of an event loop: the first lets them finish, the second stops them."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

#: Called with whether to stop now.
Stopper = Callable[[bool], None]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Installed:
    """The handlers in one event loop, and what was there before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.stoppers: dict[Stopper, None] = {}
        self._loop = loop
        self._received = 0
        self._before: dict[signal.Signals, Any] = {}
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if _is_default(handler):
                with contextlib.suppress(NotImplementedError):  # event loops of Windows have none
                    loop.add_signal_handler(number, self._stop_all)
                    self._before[number] = handler

    def _stop_all(self) -> None:
        self._received += 1
        for stop in list(self.stoppers):
            stop(self._received > 1)

    def remove(self) -> None:
        for number, handler in self._before.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_signal_handler(number)
            signal.signal(number, handler)


_installed: dict[asyncio.AbstractEventLoop, _Installed] = {}


@contextlib.contextmanager
def signals(stop: Stopper) -> Iterator[None]:
    """Pass signals to `stop` while the block runs.

    Only in the main thread, and only signals that the program neither handles nor ignores.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    installed = _installed.get(loop)
    if installed is None:
        installed = _installed[loop] = _Installed(loop)
    installed.stoppers[stop] = None
    try:
        yield
    finally:
        installed.stoppers.pop(stop, None)
        if not installed.stoppers:
            del _installed[loop]
            installed.remove()


def _is_default(handler: Any) -> bool:
    """Whether it is the handler that Python, or `asyncio.run`, installs."""
    if handler in {signal.SIG_DFL, signal.default_int_handler}:
        return True
    owner = getattr(getattr(handler, "func", None), "__self__", None)
    return isinstance(owner, asyncio.Runner)
