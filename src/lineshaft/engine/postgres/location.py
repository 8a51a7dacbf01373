"""Which database to use: the configured one, else the embedded one, which is started on demand."""

from collections.abc import Iterator
from contextlib import contextmanager

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

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


def place_of(settings: Settings) -> str:
    """Where the database is, for people; without secrets."""
    if settings.database_url is None:
        return f"the embedded database in {settings.home}"
    try:
        parts = conninfo_to_dict(settings.database_url)
    except ProgrammingError:
        return "a database"
    name = parts.get("dbname") or "default"
    return f"database {name} on {parts.get('host') or parts.get('hostaddr') or 'this machine'}"
