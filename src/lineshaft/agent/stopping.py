"""SIGTERM and SIGINT for all agents of one event loop: the first asks them to finish, the second to end."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

#: Called with whether to stop at once.
Stopper = Callable[[bool], None]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_stoppers: dict[asyncio.AbstractEventLoop, dict[Stopper, None]] = {}


@contextlib.contextmanager
def signals(stop: Stopper) -> Iterator[None]:
    """Signals go to `stop`, where this is possible: only the main thread can have them."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stoppers = _stoppers.setdefault(loop, {})
    if not stoppers:
        _install(loop, stoppers)
    stoppers[stop] = None
    try:
        yield
    finally:
        stoppers.pop(stop, None)
        if not stoppers:
            _stoppers.pop(loop, None)
            for number in _SIGNALS:
                with contextlib.suppress(NotImplementedError, RuntimeError):
                    loop.remove_signal_handler(number)


def _install(loop: asyncio.AbstractEventLoop, stoppers: dict[Stopper, None]) -> None:
    received = 0

    def stop_all() -> None:
        nonlocal received
        received += 1
        for stop in list(stoppers):
            stop(received > 1)

    for number in _SIGNALS:
        with contextlib.suppress(NotImplementedError):  # event loops of Windows have none
            loop.add_signal_handler(number, stop_all)
