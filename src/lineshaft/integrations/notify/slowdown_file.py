"""The file `SLOWDOWN`, for programs that share a `.loki` folder.

It is JSON: `wait` in seconds, with `key`, `until` and `at` for details. It contains the latest signal,
including the end of a slowdown (`wait` 0); a late signal doesn't overwrite a newer one. The file is replaced
atomically.
"""

import asyncio
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from lineshaft.integrations.notify import DeliveryError
from lineshaft.model.notices import Notification

NAME = "SLOWDOWN"


class Signal(msgspec.Struct, frozen=True):
    wait: float
    key: str
    until: datetime
    at: datetime


class SlowdownFile(Struct, frozen=True):
    folder: Path

    async def send(self, message: Notification) -> None:
        try:
            await asyncio.to_thread(write, self.folder, message)
        except OSError as error:
            raise DeliveryError(f"can't be written: {error.strerror or type(error).__name__}") from None


def write(folder: Path, message: Notification) -> None:
    signals = [msgspec.convert({**notice.data, "at": notice.at}, Signal) for notice in message.notices]
    latest = max(signals, key=lambda signal: signal.at)
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder):
        known = _read(folder / NAME)
        if known is not None and known.at > latest.at:
            return
        new = folder / f".{NAME}.new"
        new.write_bytes(msgspec.json.encode(latest) + b"\n")
        new.replace(folder / NAME)


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Lock the folder against other writers."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> Signal | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Signal)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None  # no file yet, or one of another program
