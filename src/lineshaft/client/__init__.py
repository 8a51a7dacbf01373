"""The queue for programs: `Lineshaft`, and `SyncLineshaft` for those without an event loop.

`backend` is what differs between a database and a server; everything else is written against it.
"""

from lineshaft.client.blocking import SyncLineshaft
from lineshaft.client.lineshaft import NOW, Lineshaft
from lineshaft.types import Dag, Event, Task

__all__ = ["NOW", "Dag", "Event", "Lineshaft", "SyncLineshaft", "Task"]
