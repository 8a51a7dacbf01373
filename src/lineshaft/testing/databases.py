"""A server for tests, and a database on it for each of them."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from lineshaft.embedded import EmbeddedServer, databases
from lineshaft.engine.postgres import migrate
from lineshaft.settings import Settings

#: Tests need no data after a power cut; everything else is as in production.
_FAST = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "max_connections": "300"}


@contextmanager
def server_for_tests(home: Path | None = None) -> Iterator[str]:
    """An embedded server for tests, apart from the one for work; gives the DSN.

    It is kept between runs in `testing` of LINESHAFT_HOME, so that only the first one has to make it, and
    shared by all processes that run tests at the time.
    """
    with EmbeddedServer.start(home or Settings.load().home / "testing", options=_FAST) as server:
        yield server.dsn


@contextmanager
def scratch_database(server: str) -> Iterator[str]:
    """A migrated database of its own, while the block lasts. `server`: the DSN of any database there."""
    template = _template_name()
    databases.template(server, template, migrate.up)
    with databases.copy_of(server, template) as dsn:
        yield dsn


def _template_name() -> str:
    """By the schema: a template that an older version made is not used."""
    schema = resources.files("lineshaft.engine.postgres").joinpath("schema.sql").read_bytes()
    return f"lineshaft_template_{hashlib.sha256(schema).hexdigest()[:12]}"
