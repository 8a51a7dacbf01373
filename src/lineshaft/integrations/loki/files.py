"""The queue files of a mirrored folder: what programs have changed in them, and writing what they should be.

A file is compared by its signature, so looking costs nothing while programs leave it alone.
"""

import logging
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from lineshaft.integrations.loki.folder import (
    Folder,
    QueueFile,
    Signature,
    UnreadableFileError,
    write_object,
)
from lineshaft.integrations.loki.importing import PRECEDENCE
from lineshaft.integrations.loki.records import DEAD_LETTER, IN_PROGRESS, PENDING, QUEUES
from lineshaft.integrations.loki.view import View
from lineshaft.types import Task

_log = logging.getLogger("lineshaft.loki")


class Files:
    def __init__(self, folder: Folder, view: View, *, failed: bool) -> None:
        """`failed`: dead letters are written to `failed.json` too."""
        self._folder = folder
        self._view = view
        self._failed = failed
        #: Each file as it was last read or written.
        self._seen: dict[str, Signature | None] = dict.fromkeys(QUEUES)
        self._wrappers: dict[str, Mapping[str, Any] | None] = dict.fromkeys(QUEUES)
        #: Must be read again, whatever they look like.
        self._unsettled: set[str] = set()
        self._unreadable: dict[str, str] = {}
        self._running: dict[str, tuple[datetime, bytes]] = {}
        self._blocked: dict[str, dict[str, str]] = {}
        self._others: dict[str, bytes] = {}

    def note(self, task: Task, queue: str, record: bytes) -> None:
        """For `current-task.json` and `blocked.json`."""
        self.forget(task.id)
        if queue == IN_PROGRESS and task.started_at is not None:
            self._running[task.id] = (task.started_at, record)
        if queue == PENDING and task.blocked_reason is not None:
            self._blocked[task.id] = {"id": task.id, "title": task.title, "reason": task.blocked_reason}

    def forget(self, task_id: str) -> None:
        self._running.pop(task_id, None)
        self._blocked.pop(task_id, None)

    def look(self) -> dict[str, QueueFile]:
        """Read the files that programs have changed."""
        stale = [name for name in QUEUES if name in self._unsettled or self._is_new(name)]
        if not stale:
            return {}
        with self._folder.locked():
            return {name: file for name in stale if (file := self._read(name)) is not None}

    def look_again(self, names: Iterable[str]) -> None:
        """What was read there has not been carried out."""
        self._unsettled.update(names)

    def _read(self, name: str) -> QueueFile | None:
        try:
            file = self._folder.read(name)
        except UnreadableFileError as error:
            if self._unreadable.get(name) != str(error):
                _log.warning("%s", error)
            self._unreadable[name] = str(error)
            self._seen[name] = self._folder.signature(name)
            return None
        if self._unreadable.pop(name, None) is not None:
            # What it should be was not written in the meantime.
            self._view.changed.add(name)
        self._seen[name], self._wrappers[name] = file.signature, file.wrapper
        (self._unsettled.discard if file.settled else self._unsettled.add)(name)
        return file

    def _is_new(self, name: str) -> bool:
        return self._seen[name] != self._folder.signature(name)

    def write(self) -> bool:
        """Replace the files that are no longer right; False: a program has changed one since it was read."""
        changed = self._view.changed
        if changed:
            with self._folder.locked():
                if any(self._is_new(name) for name in QUEUES):
                    return False
                # First where a task goes to: a process that is killed leaves it in two files, not in none.
                for name in PRECEDENCE:
                    if name in changed and name not in self._unreadable:
                        records = self._view.records(name)
                        self._seen[name] = self._folder.write(name, records, self._wrappers[name])
                        self._unsettled.discard(name)
                if self._failed and DEAD_LETTER in changed:
                    self._folder.write("failed", self._view.records(DEAD_LETTER), None)
            changed.clear()
        newest = max(self._running.values(), default=None, key=lambda found: found[0])
        self._write_other("current-task", b"{}" if newest is None else newest[1])
        self._write_other("blocked", msgspec.json.encode(list(self._blocked.values())))
        return True

    def _write_other(self, name: str, content: bytes) -> None:
        if self._others.get(name) != content:
            write_object(self._folder.queue(name), msgspec.Raw(content))
            self._others[name] = content
