"""Agents as a program of their own: `agent.main()` and `lineshaft agent MODULE:AGENT`."""

import asyncio
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lineshaft.client.lineshaft import Lineshaft
from lineshaft.errors import LineshaftError
from lineshaft.model.durations import Duration

if TYPE_CHECKING:
    from lineshaft.agent.agent import Agent

FAILED, INTERRUPTED = 1, 130

_importing: str | None = None


@contextmanager
def importing(module: str) -> Iterator[None]:
    """While a module is imported for its agents: it must not run them itself."""
    global _importing  # noqa: PLW0603 - there is one import at a time
    _importing = module
    try:
        yield
    finally:
        _importing = None


async def run_agents(
    agents: Sequence["Agent"],
    shaft: Lineshaft,
    *,
    until_idle: bool = False,
    retries_within_sec: Duration = 60.0,
    optimize: bool = False,
) -> None:
    """Run agents together. If one can't go on, the others finish their tasks, and its error is raised."""

    async def run(agent: "Agent") -> None:
        try:
            await agent.run(
                shaft, until_idle=until_idle, retries_within_sec=retries_within_sec, optimize=optimize
            )
        except LineshaftError:
            for other in agents:
                other.stop()
            raise

    results = await asyncio.gather(*map(run, agents), return_exceptions=True)
    for error in results:
        if isinstance(error, BaseException):
            raise error


def main(
    agent: "Agent", url: str | None, token: str | None, *, until_idle: bool, retries_within_sec: Duration
) -> None:
    """Run an agent and return when it has ended; raises SystemExit if it fails, after one line about why."""
    if _importing is not None:
        raise LineshaftError(
            f"agent.main() is called while {_importing!r} is imported. Call it only if the module is the "
            "program: if __name__ == '__main__': agent.main()"
        )
    if _has_event_loop():
        raise LineshaftError(
            "agent.main() starts an event loop, and there is one already. Use 'await agent.run(shaft)' in it."
        )

    async def work() -> None:
        async with Lineshaft(url, token=token) as shaft:
            # A program may go on after its tasks are done.
            await agent.run(
                shaft, until_idle=until_idle, retries_within_sec=retries_within_sec, optimize=not until_idle
            )

    try:
        asyncio.run(work())
    except LineshaftError as error:
        text = " ".join(str(error).split())
        sys.stderr.write(_wrapped(f"lineshaft: {text}") + "\n")
        raise SystemExit(FAILED) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _wrapped(line: str) -> str:
    """Between words, on a terminal."""
    if not sys.stderr.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) if width else line


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
