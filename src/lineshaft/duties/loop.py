"""Runs a duty at its interval until it is stopped. A failed duty runs again after its interval."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from lineshaft.errors import UnavailableError

Counts = Mapping[str, int]

_log = logging.getLogger("lineshaft.duties")


class Duty(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def interval_sec(self) -> float: ...

    async def run_once(self) -> Counts:
        """Do all pending work; returns counts by outcome."""
        ...


async def _once(duty: Duty, stop: asyncio.Event) -> Counts:
    """Run a duty once; an interruptible one only until `stop` is set."""
    if not getattr(duty, "interruptible", False):
        return await duty.run_once()
    work, stopped = asyncio.ensure_future(duty.run_once()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else {}
    finally:
        for task in (work, stopped):
            task.cancel()
        await asyncio.gather(work, stopped, return_exceptions=True)


async def run(duty: Duty, stop: asyncio.Event) -> None:
    while not stop.is_set():
        try:
            counts = await _once(duty, stop)
        except UnavailableError as error:
            _log.warning("%s: %s", duty.name, error)
        except Exception:  # noqa: BLE001 - logged with its traceback; a duty must keep running
            _log.exception("%s failed; retrying in %s s", duty.name, duty.interval_sec)
        else:
            done = {outcome: count for outcome, count in counts.items() if count}
            if done:
                _log.info(
                    "%s: %s", duty.name, ", ".join(f"{count} {outcome}" for outcome, count in done.items())
                )
        try:
            await asyncio.wait_for(stop.wait(), duty.interval_sec)
        except TimeoutError:
            continue
