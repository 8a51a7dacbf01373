"""Many tasks in batches, none of which may keep the others from being moved."""

import logging
from collections.abc import Awaitable, Callable, Sequence

from lineshaft.engine.maintenance import StuckTasksError

_log = logging.getLogger("lineshaft.duties")


async def take_all(take: Callable[[int, Sequence[str]], Awaitable[int]], batch: int) -> int:
    """Call `take` with a limit, and with whom to leave out, until it takes less; gives how many are stuck.

    If a batch can't be moved, one task of it may be to blame: it is found by taking them singly.
    """
    stuck: list[str] = []
    size = batch
    while True:
        try:
            taken = await take(size, stuck)
        except StuckTasksError as error:
            _log.exception("Some tasks could not be moved; going on one by one")
            if size == 1:
                if not error.ids or len(stuck) >= batch:
                    raise
                stuck += error.ids
            size = 1
            continue
        if taken < size:
            return len(stuck)
