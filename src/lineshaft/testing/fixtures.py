"""The plugin for pytest: fixtures that do nothing until a test asks for one.

pytest loads it in every project where Lineshaft is installed, so it imports the rest when it is needed.
"""

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lineshaft.testing import InlineBench, SyncWorkbench, Workbench


@pytest.fixture(scope="session")
def lineshaft_server() -> Iterator[str]:
    """The DSN of a PostgreSQL server for tests; define a fixture of this name to use another server."""
    from lineshaft.testing import server_for_tests  # noqa: PLC0415 - see above

    with server_for_tests() as dsn:
        yield dsn


@pytest.fixture
def lineshaft_dsn(lineshaft_server: str) -> Iterator[str]:
    """A migrated database for this test: `Workbench(lineshaft_dsn)` or `Lineshaft(lineshaft_dsn)`."""
    from lineshaft.testing import scratch_database  # noqa: PLC0415

    with scratch_database(lineshaft_server) as dsn:
        yield dsn


@pytest.fixture
def workbench(lineshaft_dsn: str) -> "Iterator[SyncWorkbench]":
    """A queue for this test, without an event loop."""
    from lineshaft.testing import SyncWorkbench  # noqa: PLC0415

    with SyncWorkbench(lineshaft_dsn) as bench:
        yield bench


@pytest.fixture
def inline_bench() -> "InlineBench":
    """Runs handlers without a database."""
    from lineshaft.testing import InlineBench  # noqa: PLC0415

    return InlineBench()


async def _async_workbench(lineshaft_dsn: str) -> "AsyncIterator[Workbench]":
    """A queue for this test, in its event loop."""
    from lineshaft.testing import Workbench  # noqa: PLC0415

    async with Workbench(lineshaft_dsn) as bench:
        yield bench


def _without_asyncio() -> None:
    """A queue for this test, in its event loop; needs pytest-asyncio."""
    pytest.fail(
        "The fixture async_workbench needs pytest-asyncio, which is not installed. Install it, use the "
        "fixture workbench in a plain test, or 'async with Workbench(lineshaft_dsn)'.",
        pytrace=False,
    )


def _asynchronous_fixture() -> Any:
    try:
        import pytest_asyncio  # noqa: PLC0415 - it may not be installed
    except ModuleNotFoundError:
        return pytest.fixture(_without_asyncio, name="async_workbench")
    # In its auto mode as well as in its strict mode.
    return pytest_asyncio.fixture(_async_workbench, name="async_workbench")


async_workbench = _asynchronous_fixture()
