"""Writes tasks into the files of a folder, beside the records that are there already."""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Raw

from lineshaft.errors import InvalidInputError
from lineshaft.integrations.loki.folder import Folder
from lineshaft.integrations.loki.records import QUEUES, Record, id_of


def export(folder: Folder, records: Mapping[str, Iterable[Record]]) -> dict[str, int]:
    """Replace the records of these tasks, by file; the others stay. Returns how many each file has now.

    A file that can't be read stops the export before anything is written.
    """
    folder.create()
    with folder.locked():
        files = {name: folder.read(name) for name in QUEUES}
        encoded = {name: [msgspec.json.encode(record) for record in records.get(name, ())] for name in QUEUES}
        own = {id_of(record) for some in records.values() for record in some}
        counts = {}
        for name, file in files.items():
            others: list[bytes | Raw] = [raw for raw in file.records if raw_id(raw) not in own]
            listed = [*others, *encoded[name]]
            folder.write(name, listed, file.wrapper)
            counts[name] = len(listed)
    return counts


class _Named(msgspec.Struct):
    id: str | None = None
    task_id: str | None = None


_named = msgspec.json.Decoder(_Named)


def raw_id(raw: Raw) -> str | None:
    """The id of an encoded record; None: it has none, or isn't a record."""
    try:
        found = _named.decode(raw)
    except (msgspec.MsgspecError, InvalidInputError):
        return None
    return found.id or found.task_id
