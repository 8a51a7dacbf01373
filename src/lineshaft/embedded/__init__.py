"""A real PostgreSQL that starts by itself, for one machine: nothing to install, nothing to configure.

    with EmbeddedServer.start(Path(".lineshaft")) as server:
        connection = psycopg.connect(server.dsn)

Any number of processes may do so with the same directory; they share one server, which stops within about two
seconds after the last of them has ended, even if it was killed. The data stays.

In the home directory: `postgres/` (the data), `postgres.log`, `pgpass` (the password, in libpq's format) and
the lock files. `watcher` explains how starting and stopping are kept apart.
"""

from lineshaft.embedded.binaries import Binaries, find_binaries
from lineshaft.embedded.doctor import Description, describe
from lineshaft.embedded.server import EmbeddedServer

__all__ = ["Binaries", "Description", "EmbeddedServer", "describe", "find_binaries"]
