"""Background tasks of an event loop."""

import asyncio
from typing import Any

_PAUSE_SEC = 1.0


async def stop(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks, and wait until they have ended, in whatever way.

    More than once: `asyncio.wait_for` of Python 3.11, which drivers use, loses a cancellation that meets the
    result it waits for. A task that is cancelled once would then never end.
    """
    while pending := {task for task in tasks if not task.done()}:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=_PAUSE_SEC)
    for task in tasks:
        if not task.cancelled():
            # Retrieved, or asyncio logs that it never was.
            task.exception()
