"""Which database to use: the configured one, else the embedded one, which is started on demand."""

from collections.abc import Iterator
from contextlib import contextmanager

from lineshaft.settings import Settings


@contextmanager
def database(settings: Settings) -> Iterator[str]:
    """The DSN of the database, valid inside the block."""
    if settings.database_url is not None:
        yield settings.database_url
    else:
        from lineshaft.embedded import EmbeddedServer  # noqa: PLC0415 - slow to import
        from lineshaft.embedded.keeper import kept_running  # noqa: PLC0415

        with EmbeddedServer.start(settings.home) as server, kept_running(server):
            yield server.dsn
