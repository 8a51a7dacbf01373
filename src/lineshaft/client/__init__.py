"""The queue for programs: `Lineshaft`, and `SyncLineshaft` for those without an event loop.

`backend` is what differs between a database and a server; everything else is written against it.
"""

from lineshaft.client.blocking import SyncLineshaft
from lineshaft.client.handles import (
    DagHandle,
    DagRef,
    DagReference,
    SyncDagHandle,
    SyncTaskHandle,
    TaskHandle,
    TaskRef,
    TaskReference,
)
from lineshaft.client.lineshaft import NOW, Lineshaft
from lineshaft.client.sources import Sources, SyncSources

__all__ = [
    "NOW",
    "DagHandle",
    "DagRef",
    "DagReference",
    "Lineshaft",
    "Sources",
    "SyncDagHandle",
    "SyncLineshaft",
    "SyncSources",
    "SyncTaskHandle",
    "TaskHandle",
    "TaskRef",
    "TaskReference",
]
