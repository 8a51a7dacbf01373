"""Delivers notifications: collects events for a destination, and sends them until they have arrived.

Each destination has its own deliverer, so that one that is down or hangs doesn't delay the others. A failed
delivery is repeated for half a day, with growing delays.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from lineshaft.duties.loop import Counts
from lineshaft.engine.feed.outbox import LEASE_SEC, Outbox, TakenMessage
from lineshaft.integrations.notify import DeliveryError, Destination

_log = logging.getLogger("lineshaft.duties")

#: Messages that are sent one after another under one lease ...
_BATCH = 5
#: ... each within this time, regardless of the sender's own limit.
_SEND_SEC = LEASE_SEC / (_BATCH + 1)
_FIRST_WAIT_SEC, _LONGEST_WAIT_SEC = 5.0, 3_600.0
_TRIES = 20
#: Batches per run, so that a duty stops soon after it is asked to.
_BATCHES = 4
_KEEP_SEC = 7 * 86_400.0


class Deliverer(Struct, frozen=True):
    outbox: Outbox
    destination: Destination
    interval_sec: float = 2.0
    uniform: Callable[[], float] = random.random

    @property
    def name(self) -> str:
        return f"deliverer to {self.destination.name}"

    async def run_once(self) -> Counts:
        to = self.destination
        counts: Counter[str] = Counter()
        collected = await self.outbox.collect(to.name, to.kinds, sources=to.sources)
        counts["collected"] += collected.noted
        if collected.missed:
            _log.warning(
                "Notifications for %s: events were deleted before they were read. Sending the others.",
                to.name,
            )
        for _ in range(_BATCHES):
            parcels = await self.outbox.take(to.name, to.throttle, most=_BATCH)
            for parcel in parcels:
                counts[await self._send(to, parcel)] += 1
            if len(parcels) < _BATCH:
                break
        counts["deleted"] += await self.outbox.forget(_KEEP_SEC, 1_000)
        return counts

    async def _send(self, to: Destination, parcel: TakenMessage) -> str:
        error = await _try(to, parcel)
        if error is None:
            await self.outbox.delivered(parcel)
            return "delivered"
        again = self._wait(parcel.tries)
        await self.outbox.failed(parcel, error, again_in_sec=again)
        outcome = "giving up" if again is None else f"retrying in {again:.0f} s"
        _log.warning(
            "Notification %s for %s was not delivered, %s: %s", parcel.message.id, to.name, outcome, error
        )
        return "given up" if again is None else "not delivered"

    def _wait(self, tries: int) -> float | None:
        """The delay before the next try: doubled each time, up to an hour, with jitter; None: give up."""
        if tries >= _TRIES:
            return None
        wait = min(_FIRST_WAIT_SEC * 2.0 ** (tries - 1), _LONGEST_WAIT_SEC)
        return float(wait * (0.75 + 0.5 * self.uniform()))


async def _try(to: Destination, parcel: TakenMessage) -> str | None:
    """Send a message; returns the cause of a failure, or None."""
    try:
        async with asyncio.timeout(_SEND_SEC):
            await to.sender.send(parcel.message)
    except DeliveryError as error:
        return str(error)
    except TimeoutError:
        return f"timed out after {_SEND_SEC:g} s"
    except Exception as error:  # noqa: BLE001 - a faulty sender must not stop the others
        # Without its text, which may contain the URL.
        return f"the sender failed with {type(error).__name__}"
    return None
