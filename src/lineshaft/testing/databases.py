"""A PostgreSQL server for tests, and a database for each test."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from lineshaft.embedded import EmbeddedServer, databases
from lineshaft.engine.postgres import migrate
from lineshaft.settings import Settings

#: Test data need not survive a power failure; everything else is as in production.
_FAST = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "max_connections": "300"}


@contextmanager
def server_for_tests(home: Path | None = None) -> Iterator[str]:
    """Start an embedded server for tests, separate from the one for work; yields the DSN.

    It is kept between runs in `testing` of LINESHAFT_HOME, so that only the first run creates it, and shared
    by all processes that run tests at the same time.
    """
    with EmbeddedServer.start(home or Settings.load().home / "testing", options=_FAST) as server:
        yield server.dsn


@contextmanager
def scratch_database(server: str) -> Iterator[str]:
    """Create a migrated database while the block runs. `server`: the DSN of any database on the server."""
    template = _template_name()
    databases.template(server, template, migrate.up)
    with databases.copy_of(server, template) as dsn:
        yield dsn


def _template_name() -> str:
    """Depends on the schema: a template of another version is not used."""
    schema = resources.files("lineshaft.engine.postgres").joinpath("schema.sql").read_bytes()
    return f"lineshaft_template_{hashlib.sha256(schema).hexdigest()[:12]}"
