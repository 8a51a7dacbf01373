"""The file `SLOWDOWN`, for programs that look for it as document 000 has it (R-214, R-218).

It is JSON: `wait` in seconds, and `key`, `until` and `at` for those who want to know more. The latest signal
is in it, also one that a person ended (`wait` 0); one that comes late doesn't overwrite a newer one. It
appears as a whole: whoever reads it finds the old or the new one.
"""

import asyncio
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from lineshaft.integrations.notify import DeliveryError
from lineshaft.model.notices import Message

NAME = "SLOWDOWN"


class Signal(msgspec.Struct, frozen=True):
    wait: float
    key: str
    until: datetime
    at: datetime


@dataclass(frozen=True, slots=True)
class SlowdownFile:
    folder: Path

    async def send(self, message: Message) -> None:
        try:
            await asyncio.to_thread(write, self.folder, message)
        except OSError as error:
            raise DeliveryError(f"can't be written: {error.strerror or type(error).__name__}") from None


def write(folder: Path, message: Message) -> None:
    signals = [msgspec.convert({**notice.data, "at": notice.at}, Signal) for notice in message.notices]
    latest = max(signals, key=lambda signal: signal.at)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        known = _read(folder / NAME)
        if known is not None and known.at > latest.at:
            return
        new = folder / f".{NAME}.new"
        new.write_bytes(msgspec.json.encode(latest) + b"\n")
        new.replace(folder / NAME)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time writes here."""
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
        return None  # none yet, or one that somebody else wrote
