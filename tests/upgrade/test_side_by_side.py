"""A rolling upgrade: servers and agents of two versions on one database; some are killed, nothing is lost."""

import asyncio
import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lineshaft.engine.postgres import migrate
from tests.agent.helpers import PATIENCE
from tests.e2e.conftest import address
from tests.ports import reserved_port
from tests.upgrade.supply import all_ended, check_ends, keep_supplied
from tests.upgrade.versions import Version, previous_version, this_version

Process = subprocess.Popen[str]

WORKER = str(Path(__file__).parent / "worker.py")
#: An answer of 500, in the log of a server.
FAULT = re.compile(r"status\W{1,4}500|Unexpected error|Traceback")


class Site:
    """Processes of both versions."""

    def __init__(self, dsn: str, folder: Path, running: ExitStack) -> None:
        self.dsn = dsn
        self._folder = folder
        self._running = running
        self._settings = {
            "LINESHAFT_DATABASE_URL": dsn,
            "LINESHAFT_REAPER_INTERVAL_SEC": "0.2",
            "LINESHAFT_PROMOTER_INTERVAL_SEC": "0.2",
        }
        self._logs: list[Path] = []

    def serve(self, version: Version, port: int) -> Process:
        log = self._folder / f"server-{len(self._logs)}.log"
        self._logs.append(log)
        return self._running.enter_context(
            version.started(
                *("-m", "lineshaft.cli.main", "up", "--json", "--port", str(port)),
                cwd=self._folder,
                log=self._running.enter_context(log.open("wb")),
                settings=self._settings,
            )
        )

    def employ(self, version: Version, where: str, name: str) -> Process:
        """An agent; those of one version and those of the other are processes of the same agent."""
        return self._running.enter_context(
            version.started(WORKER, where, name, cwd=self._folder, settings=self._settings)
        )

    def faults(self) -> list[str]:
        return [line for log in self._logs for line in log.read_text().splitlines() if FAULT.search(line)]


@pytest.fixture
def site(empty_dsn: str, tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as running:
        yield Site(empty_dsn, tmp_path, running)


async def begins(worker: Process, version: Version) -> None:
    """Wait until it is open, with the code of its version."""
    assert (await said(worker)).startswith(str(version.source))


async def works(worker: Process) -> None:
    """Wait until it has started a task."""
    assert await said(worker) in {"work", "flaky", "parent"}


async def ready(server: Process) -> None:
    await asyncio.to_thread(address, server)


async def said(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        return (await asyncio.to_thread(process.stdout.readline)).strip()


def kill(process: Process) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)


@pytest.mark.slow("starts eight processes")
async def test_two_versions_work_on_one_database(site: Site, pytestconfig: pytest.Config) -> None:
    """Migrate, then servers, then agents, in the middle of work; one process of each kind is killed."""
    assert pytestconfig.cache is not None
    old, new = previous_version(pytestconfig.cache), this_version()
    ports = [reserved_port(), reserved_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    servers = [site.serve(old, ports[0])]
    await ready(servers[0])
    on_database = [site.employ(old, site.dsn, "on-database")]
    places = list(urls)
    supply = asyncio.create_task(keep_supplied(places, site.dsn))
    await begins(on_database[0], old)
    await works(on_database[0])

    await asyncio.to_thread(migrate.up, site.dsn)
    # This process is of the new version, which needs the new schema.
    places.append(site.dsn)
    servers.append(site.serve(new, ports[1]))
    await ready(servers[1])
    on_database.append(site.employ(new, site.dsn, "on-database"))
    over_http = {site.employ(new, urls[0], "over-http"): new, site.employ(old, urls[1], "over-http"): old}
    for worker, version in ({on_database[1]: new} | over_http).items():
        await begins(worker, version)
        await works(worker)
    for process in (*on_database, *servers):
        kill(process)
    # An older server starts on the newer schema too, and the agents come back to both.
    for server in [site.serve(old, ports[0]), site.serve(new, ports[1])]:
        await ready(server)
    supply.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await supply
    await all_ended(site.dsn)

    check_ends(site.dsn)
    assert site.faults() == []
