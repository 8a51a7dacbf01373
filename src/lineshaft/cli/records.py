"""Submits records of `.loki` files, over either transport."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lineshaft.cli.connection import as_person

if TYPE_CHECKING:
    from lineshaft.client.blocking import SyncLineshaft
    from lineshaft.types import Task


def submit_record(shaft: "SyncLineshaft", record: Mapping[str, Any]) -> "Task":
    """Submit a record, with this account as the creator unless it names one."""
    return as_person(lambda creator: _submit(shaft, record, creator))


def _submit(shaft: "SyncLineshaft", record: Mapping[str, Any], creator: str | None) -> "Task":
    import msgspec  # noqa: PLC0415 - slow to import

    from lineshaft.operations import tasks  # noqa: PLC0415

    if creator is not None and not record.get("source"):
        record = {**record, "source": creator}
    raw: Any = msgspec.Raw(msgspec.json.encode(record))
    request = tasks.SubmitTask(task=raw, format="loki")
    return shaft.loop.run(shaft.shaft.backend.call(tasks.submit_task, request))
