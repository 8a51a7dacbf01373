"""References of tasks to artifacts: checked and recorded in the transaction that makes them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_column
from lineshaft.types.artifacts import REF_PREFIX, artifact_id

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


def referred(artifacts: bytes | None) -> list[str]:
    """The ids in a JSON list of references; other entries (paths, URLs) are the task's own business."""
    if artifacts is None:
        return []
    found: Any = msgspec.json.decode(artifacts)
    refs = found if isinstance(found, list) else [found]
    return [artifact_id(ref) for ref in refs if isinstance(ref, str) and ref.startswith(REF_PREFIX)]
