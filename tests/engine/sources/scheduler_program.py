"""A scheduler that stops in the middle of a tick and waits to be killed: DSN WINDOW."""

import asyncio
import sys
from typing import Any

from lineshaft.engine.engine import Engine
from lineshaft.engine.sources import firing, schedules

Window = tuple[Any, str, bool]
#: By name: the class, the method, and whether it stops before or after it.
WINDOWS: dict[str, Window] = {
    "before the rendering": (firing.Firings, "fire_in", True),
    "after the submission": (firing.Firings, "_submit", False),
    "before the next tick is set": (schedules.Schedules, "_move", True),
    "before the commit": (schedules.Schedules, "_move", False),
}


def stop_at(window: str) -> None:
    owner, name, before = WINDOWS[window]
    original = getattr(owner, name)

    async def stopping(*args: Any, **options: Any) -> Any:
        if before:
            await _wait_for_the_end()
        await original(*args, **options)
        await _wait_for_the_end()

    setattr(owner, name, stopping)


async def _wait_for_the_end() -> None:
    sys.stdout.write("stopped\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def main(dsn: str, window: str) -> None:
    stop_at(window)
    async with Engine(dsn) as engine:
        await engine.schedules.fire_due()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
