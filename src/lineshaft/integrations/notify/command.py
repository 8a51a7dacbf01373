"""A command of the operator's, with the message as JSON on its standard input."""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import Process
from dataclasses import dataclass, field
from subprocess import DEVNULL, PIPE

import msgspec

from lineshaft.integrations.notify import DeliveryError
from lineshaft.model.notices import Notification


@dataclass(frozen=True, slots=True)
class NotifyCommand:
    argv: tuple[str, ...] = field(repr=False)
    timeout_sec: float = 10.0

    async def send(self, message: Notification) -> None:
        try:
            process = await self._started()
        except OSError as error:
            raise DeliveryError(f"can't be started: {error.strerror or type(error).__name__}") from None
        try:
            async with asyncio.timeout(self.timeout_sec):
                await process.communicate(msgspec.json.encode(message))
        except TimeoutError:
            raise DeliveryError(f"did not finish within {self.timeout_sec:g} s") from None
        finally:
            if process.returncode is None:
                _kill(process)
                await process.wait()
        if process.returncode != 0:
            raise DeliveryError(f"ended with exit code {process.returncode}")

    async def _started(self) -> Process:
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *self.argv, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
            )
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The process may be running already, and may have started others.
            with contextlib.suppress(OSError):
                process = await starting
                _kill(process)
                await process.wait()
            raise


def _kill(process: Process) -> None:
    """Kill the process group: a script may be waiting for curl."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
