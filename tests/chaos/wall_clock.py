"""A wall clock that others can set, for one process: what a step of the system's clock does to a program.

How time passes is left alone, as the kernel does too. (libfaketime would do without help of the program, but
the one that Debian has breaks sleeping in Python.)
"""

import datetime as dt
import sys
import time
from pathlib import Path
from typing import Any


class _Alike(type):
    """Real instants are instants too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, dt.datetime)


def install(path: Path) -> None:
    """From now on this process's clock is off by the seconds in the file. All of lineshaft is imported."""
    real_time, real_time_ns = time.time, time.time_ns

    def offset() -> int:
        return int(path.read_text() or 0)

    class Jumping(dt.datetime, metaclass=_Alike):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return dt.datetime.now(tz) + dt.timedelta(seconds=offset())

    time.time = lambda: real_time() + offset()
    time.time_ns = lambda: real_time_ns() + offset() * 1_000_000_000
    for name, module in list(sys.modules.items()):
        if name.startswith("lineshaft") and getattr(module, "datetime", None) is dt.datetime:
            module.datetime = Jumping  # type: ignore[attr-defined]  # it has one
