"""Which database: the one that is configured, else the embedded one, started when somebody needs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from lineshaft.embedded import EmbeddedServer
from lineshaft.embedded.keeper import kept_running
from lineshaft.settings import Settings


@contextmanager
def database(settings: Settings) -> Iterator[str]:
    """The DSN of the database, good for as long as the block lasts."""
    if settings.database_url is not None:
        yield settings.database_url
    else:
        with EmbeddedServer.start(settings.home) as server, kept_running(server):
            yield server.dsn
