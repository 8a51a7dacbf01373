"""Fixtures for pytest. In a conftest.py: `pytest_plugins = ["lineshaft.testing.fixtures"]`."""

from collections.abc import Iterator

import pytest

from lineshaft.testing.databases import scratch_database, server_for_tests
from lineshaft.testing.workbench import SyncWorkbench


@pytest.fixture(scope="session")
def lineshaft_server() -> Iterator[str]:
    """The DSN of a PostgreSQL server for tests; define a fixture of this name to use another server."""
    with server_for_tests() as dsn:
        yield dsn


@pytest.fixture
def lineshaft_dsn(lineshaft_server: str) -> Iterator[str]:
    """A migrated database for this test: `Workbench(lineshaft_dsn)` or `Lineshaft(lineshaft_dsn)`."""
    with scratch_database(lineshaft_server) as dsn:
        yield dsn


@pytest.fixture
def workbench(lineshaft_dsn: str) -> Iterator[SyncWorkbench]:
    """A queue for this test, without an event loop."""
    with SyncWorkbench(lineshaft_dsn) as bench:
        yield bench
