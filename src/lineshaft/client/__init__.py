"""The queue for programs: `Lineshaft`, and `SyncLineshaft` for those without an event loop.

`backend` is what differs between a database and a server; everything else is written against it.
"""

from lineshaft.client.blocking import SyncLineshaft
from lineshaft.client.handles import DagHandle, SyncDagHandle, SyncTaskHandle, TaskHandle
from lineshaft.client.lineshaft import NOW, Lineshaft

__all__ = [
    "NOW",
    "DagHandle",
    "Lineshaft",
    "SyncDagHandle",
    "SyncLineshaft",
    "SyncTaskHandle",
    "TaskHandle",
]
