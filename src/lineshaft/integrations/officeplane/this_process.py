"""What this process uses of its machine."""

import os
import time
from pathlib import Path

from msgspec import Struct

_STATM = Path("/proc/self/statm")
#: CPU is measured between two calls, at least so far apart.
_CPU_EVERY_SEC = 1.0


class System(Struct, frozen=True, rename="camel"):
    """The server that answers."""

    #: Seconds since its start.
    uptime: float
    memory_usage_mb: float
    #: Of one processor, since it was last asked.
    cpu_percent: float


class ThisProcess:
    def __init__(self) -> None:
        self._started = self._measured = time.monotonic()
        self._used = time.process_time()
        self._percent = 0.0

    def now(self) -> System:
        now, used = time.monotonic(), time.process_time()
        if (passed := now - self._measured) >= _CPU_EVERY_SEC:
            self._percent = 100 * (used - self._used) / passed
            self._measured, self._used = now, used
        return System(
            round(now - self._started, 3), round(_memory_bytes() / 2**20, 1), round(self._percent, 1)
        )


def _memory_bytes() -> int:
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
