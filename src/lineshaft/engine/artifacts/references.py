"""References of tasks to artifacts: checked and recorded in the transaction that makes them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows
from lineshaft.types.artifacts import REF_PREFIX, artifact_id
from lineshaft.types.data_refs import data_ref_in
from lineshaft.types.work import Completion

_SQL = catalog.load(__name__)


async def refer(connection: Connection, wanted: Mapping[str, Iterable[str]]) -> set[str]:
    """Record which artifacts each task refers to; returns the ids of unknown ones.

    The artifacts are kept from then on. If some are unknown, the caller must roll back.
    """
    pairs = sorted({(task_id, each) for task_id, ids in wanted.items() for each in ids})
    if not pairs:
        return set()
    ids = [each for _, each in pairs]
    parameters = {"task_ids": [task_id for task_id, _ in pairs], "artifact_ids": ids}
    return set(ids) - set(await fetch_column(connection, _SQL["refer"], parameters))


def unknown_artifacts(ids: Sequence[str]) -> str:
    shown = ", ".join(repr(REF_PREFIX + each[:100]) for each in ids[:3])
    return f"unknown artifact {shown}{' and others' if len(ids) > 3 else ''}; it may have been deleted"  # noqa: PLR2004


def referred_data(data: bytes | None) -> list[str]:
    """The id of the artifact that data refers to, if it is a reference."""
    found = data_ref_in(data)
    return [] if found is None else [found.artifact_id]


async def refer_data(database: Database, task_ids: Sequence[str], data: Sequence[bytes]) -> list[str | None]:
    """Keep the artifacts that data of tasks refers to; the fault of each that refers to an unknown one.

    In a transaction of its own: a reference that is not used afterwards only keeps an artifact for longer.
    """
    wanted: dict[str, list[str]] = {}
    ids = [referred_data(each) for each in data]
    for task_id, found in zip(task_ids, ids, strict=True):
        wanted.setdefault(task_id, []).extend(found)
    if not any(ids):
        return [None] * len(data)
    unknown = await database.run(lambda own: refer(own, wanted))
    return [unknown_artifacts(found) if unknown.intersection(found) else None for found in ids]


async def with_sizes(database: Database, items: Sequence[Completion]) -> Sequence[Completion]:
    """Completions whose data is a reference without a size get it."""
    refs = {n: found for n, item in enumerate(items) if (found := data_ref_in(item.output)) is not None}
    unsized = {n: found for n, found in refs.items() if found.size is None}
    if not unsized:
        return items
    ids = [found.artifact_id for found in unsized.values()]
    async with database.connection() as connection:
        sizes = await fetch_rows(connection, _Sized, _SQL["sizes"], {"ids": ids})
    known = {row.id: row.size for row in sizes}
    changed = list(items)
    for n, found in unsized.items():
        sized = replace(found, size=known.get(found.artifact_id))
        changed[n] = replace(items[n], output=sized.json)
    return changed


class _Sized(NamedTuple):
    id: str
    size: int


def referred(artifacts: bytes | None) -> list[str]:
    """The ids in a JSON list of references; other entries (paths, URLs) are the task's own business."""
    if artifacts is None:
        return []
    found: Any = msgspec.json.decode(artifacts)
    refs = found if isinstance(found, list) else [found]
    return [artifact_id(ref) for ref in refs if isinstance(ref, str) and ref.startswith(REF_PREFIX)]
