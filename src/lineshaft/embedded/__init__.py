"""A real PostgreSQL for one machine that starts automatically, without installation or configuration.

    with EmbeddedServer.start(Path(".lineshaft")) as server:
        connection = psycopg.connect(server.dsn)

Any number of processes can do this with the same directory; they share one server, which stops within about
two seconds after the last of them has ended, even if it was killed. The data is kept.

The home directory contains `postgres/` (the data), `postgres.log`, `pgpass` (the password, in libpq's format)
and the lock files. `watcher` explains how starting and stopping exclude each other.
"""

from lineshaft.embedded.binaries import Binaries, find_binaries
from lineshaft.embedded.doctor import Description, describe
from lineshaft.embedded.server import EmbeddedServer

__all__ = ["Binaries", "Description", "EmbeddedServer", "describe", "find_binaries"]
