"""The queue for programs: `Lineshaft`, and `SyncLineshaft` for those without an event loop.

`backend` is what differs between a database and a server; everything else is written against it.
"""

from lineshaft.client.artifacts import ArtifactReader as ArtifactReader
from lineshaft.client.artifacts import Artifacts as Artifacts
from lineshaft.client.blocking import SyncArtifactReader as SyncArtifactReader
from lineshaft.client.blocking import SyncArtifacts as SyncArtifacts
from lineshaft.client.blocking import SyncLineshaft as SyncLineshaft
from lineshaft.client.blocking import SyncSources as SyncSources
from lineshaft.client.handles import DagHandle as DagHandle
from lineshaft.client.handles import DagRef as DagRef
from lineshaft.client.handles import DagReference as DagReference
from lineshaft.client.handles import SyncDagHandle as SyncDagHandle
from lineshaft.client.handles import SyncTaskHandle as SyncTaskHandle
from lineshaft.client.handles import TaskHandle as TaskHandle
from lineshaft.client.handles import TaskRef as TaskRef
from lineshaft.client.handles import TaskReference as TaskReference
from lineshaft.client.lineshaft import NOW as NOW
from lineshaft.client.lineshaft import Lineshaft as Lineshaft
from lineshaft.client.sources import Sources as Sources
