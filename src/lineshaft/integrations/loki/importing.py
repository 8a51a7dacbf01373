"""Which records of a folder become tasks, and in which order. Nothing is written."""

from collections.abc import Collection, Mapping

from msgspec import Raw, Struct, field

from lineshaft.errors import InvalidInputError
from lineshaft.integrations.loki.folder import Folder, UnreadableFileError, as_record
from lineshaft.integrations.loki.records import (
    CANCELLED,
    COMPLETED,
    DEAD_LETTER,
    IN_PROGRESS,
    PENDING,
    Record,
    current,
    dependencies_of,
    id_of,
    key_of,
)

#: An id in two files counts where it comes first: ended before live, failed before completed.
PRECEDENCE = (DEAD_LETTER, CANCELLED, COMPLETED, IN_PROGRESS, PENDING)


class Plan(Struct, frozen=True):
    #: In an order in which each comes after those that it depends on.
    records: list[Record] = field(default_factory=list)
    #: Idempotency keys of records that are left out, because another one of the folder has them.
    duplicates: list[str] = field(default_factory=list)
    #: What is left out and why, by id or file.
    left_out: list[tuple[str, str]] = field(default_factory=list)
    #: Who works on records in progress: they must stop, since others start them again.
    workers: list[str] = field(default_factory=list)


def plan(folder: Folder) -> Plan:
    """Waiting records and those in progress become tasks; history and dead letters stay in the folder."""
    result = Plan()
    by_queue = _read(folder, result)
    completed = by_queue[COMPLETED]
    keys = {key for key in map(_key, completed.values()) if key is not None}
    live: dict[str, Record] = {}
    for queue in (IN_PROGRESS, PENDING):
        for name, record in by_queue[queue].items():
            key = _key(record)
            if key is not None and key in keys:
                result.duplicates.append(key)
                continue
            if key is not None:
                keys.add(key)
            if queue == IN_PROGRESS and record.get("claimedBy"):
                result.workers.append(str(record["claimedBy"]))
            live[name] = without_completed(record, completed)
    result.left_out.extend(
        (name, "it is a dead letter: move it back to pending.json to retry it")
        for name in by_queue[DEAD_LETTER]
    )
    placed = order(live)
    result.records.extend(live[name] for name in placed)
    result.left_out.extend((name, "its dependencies are a cycle") for name in live if name not in set(placed))
    return result


def _read(folder: Folder, result: Plan) -> Mapping[str, dict[str, Record]]:
    seen: set[str] = set()
    found: dict[str, dict[str, Record]] = {}
    for queue in PRECEDENCE:
        found[queue] = {}
        try:
            raws: list[Raw] = folder.read(queue).records
        except UnreadableFileError as error:
            result.left_out.append((f"{queue}.json", str(error)))
            continue
        for number, raw in enumerate(raws):
            given = as_record(raw)
            if given is None:
                result.left_out.append((f"{queue}.json[{number}]", "it isn't a record that can be read"))
                continue
            record = current(given)
            name = id_of(record) or f"{queue}.json[{number}]"
            if name not in seen:
                seen.add(name)
                found[queue][name] = record
    return found


def _key(record: Record) -> str | None:
    try:
        return key_of(record)
    except InvalidInputError:
        return None  # it is refused later, with the reason


def without_completed(record: Record, completed: Collection[str]) -> Record:
    """Without dependencies that the folder says are completed: they may not be tasks."""
    names = dependencies_of(record)
    if names is None:
        return record  # it is refused later, with the reason
    return record | {"dependencies": [name for name in names if name not in completed]}


def order(live: Mapping[str, Record]) -> list[str]:
    """The records, each after those that it depends on; without those whose dependencies are a cycle."""
    waiting, placed = dict(live), dict[str, None]()
    while True:
        ready = [
            name
            for name, record in waiting.items()
            if all(other in placed or other not in live for other in dependencies_of(record) or ())
        ]
        if not ready:
            return list(placed)
        for name in ready:
            del waiting[name]
        placed.update(dict.fromkeys(ready))
