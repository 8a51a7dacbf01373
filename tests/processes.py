"""Whether a process that nobody waits for is still there."""

import asyncio
import os
from pathlib import Path


async def gone(pid: int) -> None:
    """Until there is no such process, or only its remains that nobody has collected."""
    while _lives(pid):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
