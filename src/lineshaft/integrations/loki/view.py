"""What the queue files of a mirrored folder contain, in memory: each record in its place, encoded.

A change costs what the files that it touches cost, and those of ended tasks have a bound: only the newest are
kept. Records that aren't tasks of Lineshaft stay where they are.
"""

import hashlib
from collections.abc import Iterable, Iterator

from msgspec import Raw

from lineshaft.integrations.loki.exporting import raw_id
from lineshaft.integrations.loki.folder import as_record
from lineshaft.integrations.loki.records import CANCELLED, COMPLETED, PENDING, QUEUES

#: Ended tasks of a kind that are kept in their file. Dead letters are all kept.
KEEP = 50
_BOUNDED = (COMPLETED, CANCELLED)


class View:
    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._records: dict[str, dict[str, bytes]] = {name: {} for name in QUEUES}
        self._place: dict[str, str] = {}
        #: Records that aren't tasks.
        self._foreign: set[str] = set()
        #: Of tasks in bounded files, oldest first.
        self._ended: dict[str, dict[str, None]] = {name: {} for name in _BOUNDED}
        #: Completed tasks that others in the folder wait for: these see only what is in the files.
        self.pinned: frozenset[str] = frozenset()
        #: Records that programs in the folder may take come first, in this order.
        self.offered: dict[str, None] = {}
        #: Files that are no longer as they were written.
        self.changed: set[str] = set()

    def place(self, name: str) -> str | None:
        """The file that has this id."""
        return self._place.get(name)

    def record(self, name: str) -> bytes | None:
        place = self._place.get(name)
        return None if place is None else self._records[place][name]

    def is_foreign(self, name: str) -> bool:
        return name in self._foreign

    def put(self, queue: str, name: str, record: bytes, *, foreign: bool = False) -> None:
        before = self._place.get(name)
        if before == queue and self._records[queue][name] == record and self.is_foreign(name) == foreign:
            return
        if before is not None and before != queue:
            self.remove(name)
        self._records[queue][name] = record
        self._place[name] = queue
        self.changed.add(queue)
        if foreign:
            self._foreign.add(name)
            return
        self._foreign.discard(name)
        if queue in _BOUNDED:
            self._ended[queue].setdefault(name)
            self._trim(queue)

    def remove(self, name: str) -> None:
        place = self._place.pop(name, None)
        if place is not None:
            del self._records[place][name]
            self._foreign.discard(name)
            self.changed.add(place)
            if place in _BOUNDED:
                self._ended[place].pop(name, None)

    def _trim(self, queue: str) -> None:
        free = [name for name in self._ended[queue] if name not in self.pinned]
        for name in free[: max(0, len(free) - self._keep)]:
            self.remove(name)

    def names(self, queue: str) -> list[str]:
        return list(self._records[queue])

    def records(self, queue: str) -> list[bytes]:
        """As they are written."""
        found = self._records[queue]
        if queue != PENDING:
            return list(found.values())
        first = [found[name] for name in self.offered if name in found]
        return first + [record for name, record in found.items() if name not in self.offered]

    def differences(self, queue: str, raws: Iterable[Raw]) -> tuple[dict[str, Raw], set[str]]:
        """Records of a file that are new or different there, by id; and those that it no longer has."""
        known = self._records[queue]
        found: dict[str, Raw] = {}
        seen: set[str] = set()
        for name, raw in _named(raws):
            seen.add(name)
            before = known.get(name)
            if before is None or (bytes(raw) != before and as_record(raw) != as_record(before)):
                found[name] = raw
        return found, known.keys() - seen


def _named(raws: Iterable[Raw]) -> Iterator[tuple[str, Raw]]:
    for raw in raws:
        yield raw_id(raw) or f"?{hashlib.sha256(bytes(raw)).hexdigest()}", raw
