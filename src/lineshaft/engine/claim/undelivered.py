"""What was claimed for somebody who never got to know of it goes back.

Their client has left, or the database went away before all was read that belongs to the answer. Without this
such tasks would be in nobody's hands until their leases run out, which costs those that were started an
attempt.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence

from lineshaft.types.work import ClaimedTask, ClaimRef, Moved

#: Two minutes in all, while the database doesn't answer: after that their leases are mostly over.
_PAUSES_SEC = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * 23)
#: Whoever closes waits no longer than this.
_CLOSES_WITHIN_SEC = 1.0

_log = logging.getLogger(__name__)


class UndeliveredClaims:
    def __init__(self, release: Callable[[Sequence[ClaimRef]], Awaitable[list[Moved]]]) -> None:
        self._release = release
        self._going: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def release_if_undelivered(self, tasks: Sequence[ClaimedTask]) -> Iterator[None]:
        """Around what remains to be done until the tasks are in somebody's hands."""
        try:
            yield
        except BaseException:
            if tasks:
                claims = [ClaimRef(task.id, task.epoch) for task in tasks]
                going = asyncio.get_running_loop().create_task(self._hand_back(claims))
                self._going.add(going)
                going.add_done_callback(self._going.discard)
            raise

    async def _hand_back(self, claims: Sequence[ClaimRef]) -> None:
        for pause in _PAUSES_SEC:
            try:
                # What has moved on meanwhile, as its lease ran out, is left alone.
                await self._release(claims)
            except Exception as error:  # noqa: BLE001 - whatever it is, the tasks are still there
                _log.warning("Tasks that nobody was told of can't be handed back, trying again: %s", error)
                await asyncio.sleep(pause)
            else:
                return

    async def close(self) -> None:
        if not self._going:
            return
        _, late = await asyncio.wait(self._going, timeout=_CLOSES_WITHIN_SEC)
        for going in late:
            going.cancel()
        await asyncio.gather(*late, return_exceptions=True)
