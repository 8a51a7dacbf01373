"""Processing of many tasks in batches, in which one faulty task doesn't block the others."""

import logging
from collections.abc import Awaitable, Callable, Sequence

from lineshaft.engine.maintenance import StuckTasksError

_log = logging.getLogger("lineshaft.duties")


async def take_all(take: Callable[[int, Sequence[str]], Awaitable[int]], batch: int) -> int:
    """Call `take` with a limit and the ids to skip until it takes fewer; returns the number of stuck tasks.

    If a batch fails, one of its tasks may be the cause: it is found by taking them one by one.
    """
    stuck: list[str] = []
    size = batch
    while True:
        try:
            taken = await take(size, stuck)
        except StuckTasksError as error:
            _log.exception("Some tasks could not be moved; continuing one by one")
            if size == 1:
                if not error.ids or len(stuck) >= batch:
                    raise
                stuck += error.ids
            size = 1
            continue
        if taken < size:
            return len(stuck)
