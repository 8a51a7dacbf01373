"""The review log: `dlq-review-{date}.md`, one file per UTC day with every decision about a dead letter.

Several processes can append to one file: each locks it and skips entries that it already contains, so a
message that is delivered twice is written once.
"""

import asyncio
import fcntl
import os
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path

from msgspec import Struct

from lineshaft.integrations.notify import DeliveryError
from lineshaft.model.notices import Notice, Notification


class ReviewLog(Struct, frozen=True):
    folder: Path

    async def send(self, message: Notification) -> None:
        try:
            await asyncio.to_thread(append, self.folder, message)
        except OSError as error:
            raise DeliveryError(f"can't be written: {error.strerror or type(error).__name__}") from None


def append(folder: Path, message: Notification) -> None:
    """Write the decisions of a message to the files of their days."""
    folder.mkdir(parents=True, exist_ok=True)
    for notice in message.notices:
        at = notice.at.astimezone(UTC)
        day = at.date().isoformat()
        _append(folder / f"dlq-review-{day}.md", day, f"<!-- {notice.task_id} {at.isoformat()} -->", notice)


def _append(path: Path, day: str, mark: str, notice: Notice) -> None:
    with path.open("a+b") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        log.seek(0)
        known = log.read().decode(errors="replace")
        if mark in known:
            return
        # Don't continue a line that a killed process left unfinished.
        start = "" if known.endswith("\n") or not known else "\n"
        head = f"{start}\n" if known else f"# Dead letters reviewed on {day} (UTC)\n\n"
        entry = "\n".join(_lines(mark, notice))
        log.write(f"{head}{entry}\n".encode())
        log.flush()
        os.fsync(log.fileno())


def _lines(mark: str, notice: Notice) -> Iterator[str]:
    data = notice.data if isinstance(notice.data, dict) else {}
    time = notice.at.astimezone(UTC).strftime("%H:%M:%S")
    yield f"## {time} {notice.task_id}: {data.get('resolution', 'retry')}"
    yield mark
    yield ""
    yield f"- reviewer: {_one_line(data.get('reviewer') or 'none, retried manually')}"
    for name in ("note", "category", "error", "not_before", "changed", "with"):
        if (value := data.get(name)) is not None:
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"- {name.replace('_', ' ')}: {_one_line(text)}"


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
