"""The queue for programs: `Lineshaft`, and `SyncLineshaft` for those without an event loop.

`backend` is what differs between a database and a server; everything else is written against it.
"""

from lineshaft.client.artifacts import ArtifactReader, Artifacts
from lineshaft.client.blocking import SyncArtifactReader, SyncArtifacts, SyncLineshaft
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
    "ArtifactReader",
    "Artifacts",
    "DagHandle",
    "DagRef",
    "DagReference",
    "Lineshaft",
    "Sources",
    "SyncArtifactReader",
    "SyncArtifacts",
    "SyncDagHandle",
    "SyncLineshaft",
    "SyncSources",
    "SyncTaskHandle",
    "TaskHandle",
    "TaskRef",
    "TaskReference",
]
