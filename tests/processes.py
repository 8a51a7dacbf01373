"""The end of a process that is not a child of this one."""

import asyncio
import os
from pathlib import Path


async def gone(pid: int) -> None:
    """Wait until there is no such process, or only a zombie."""
    while _lives(pid):  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
