"""Runs a duty at its interval until it is stopped. A failed duty runs again after its interval."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from lineshaft import background
from lineshaft.errors import UnavailableError

Counts = Mapping[str, int]

_log = logging.getLogger("lineshaft.duties")

#: A duty that goes on failing is logged this often.
_AGAIN_AFTER_SEC = 60.0


class Duty(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def interval_sec(self) -> float: ...

    async def run_once(self) -> Counts:
        """Do all pending work; returns counts by outcome."""
        ...


@runtime_checkable
class Closing(Protocol):
    """A duty that has something to give back when it is stopped."""

    async def close(self) -> None: ...


async def _once(duty: Duty, stop: asyncio.Event) -> Counts:
    """Run a duty once; an interruptible one only until `stop` is set."""
    if not getattr(duty, "interruptible", False):
        return await duty.run_once()
    work, stopped = asyncio.ensure_future(duty.run_once()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else {}
    finally:
        await background.stop(work, stopped)


class Trouble:
    """Logs that a duty fails: at once, then at most once a minute, and when it works again.

    Some duties run every second, and an outage or a read-only database may last for hours.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._since: float | None = None
        self._logged_at = 0.0
        self._failures = 0

    def failed(self, error: Exception) -> None:
        now = self._clock()
        self._failures += 1
        if self._since is None:
            self._since = now
        elif now - self._logged_at < _AGAIN_AFTER_SEC:
            return
        self._logged_at = now
        again = f" ({self._failures} times in {now - self._since:.0f} s)" if self._failures > 1 else ""
        if isinstance(error, UnavailableError):
            _log.warning("%s can't work%s: %s", self._name, again, error)
        else:
            _log.error("%s failed%s; it tries again", self._name, again, exc_info=error)

    def over(self) -> None:
        """The duty has worked."""
        if self._since is not None:
            _log.info("%s works again, after %.0f s", self._name, self._clock() - self._since)
            self._since, self._failures = None, 0


async def run(duty: Duty, stop: asyncio.Event) -> None:
    try:
        await _run(duty, stop)
    finally:
        if isinstance(duty, Closing):
            try:
                await duty.close()
            except Exception as error:  # noqa: BLE001 - the process ends anyway
                _log.warning("%s couldn't finish: %s", duty.name, error)


async def _run(duty: Duty, stop: asyncio.Event) -> None:
    trouble = Trouble(duty.name)
    while not stop.is_set():
        try:
            counts = await _once(duty, stop)
        except Exception as error:  # noqa: BLE001 - logged; a duty must keep running
            trouble.failed(error)
        else:
            trouble.over()
            done = {outcome: count for outcome, count in counts.items() if count}
            if done:
                _log.info(
                    "%s: %s", duty.name, ", ".join(f"{count} {outcome}" for outcome, count in done.items())
                )
        try:
            await asyncio.wait_for(stop.wait(), duty.interval_sec)
        except TimeoutError:
            continue
