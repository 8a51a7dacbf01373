"""Two servers and a fleet in separate processes, on one database; shared by all scenarios."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import TEMPLATE, NewDatabase
from tests.server.client import Client

ROOT = Path(__file__).parents[2]
BREAKERS = """
defaults: {failureThreshold: 5}
overrides:
  fragile: {failureThreshold: 2, halfOpenAfter: 0.3}
"""


@dataclass
class Site:
    urls: list[str]
    #: The database of both servers.
    dsn: str
    fleet: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)

    @property
    def client(self) -> Client:
        return self.clients[0]

    @property
    def clients(self) -> list[Client]:
        """One for each server."""
        return [Client(int(url.rpartition(":")[2])) for url in self.urls]

    def hear(self, name: str, what: str) -> None:
        """Wait until this process prints it."""
        said = self.fleet[name].stdout
        assert said is not None
        line = said.readline()
        assert line.strip() == what, line

    def send(self, name: str, number: signal.Signals) -> None:
        self.fleet[name].send_signal(number)


@contextmanager
def started(*command: str, cwd: Path, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=cwd,
        # The code of this checkout, also where another one is installed.
        env=environment | variables | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def address(process: "subprocess.Popen[str]") -> str:
    """The URL that a server prints when it is ready."""
    assert process.stdout is not None
    said = ""
    while not said.endswith("\n}\n"):
        line = process.stdout.readline()
        assert line, said
        said += line
    return str(json.loads(said)["url"])


@pytest.fixture(scope="module")
def site(new_database: NewDatabase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with new_database(TEMPLATE) as dsn, running_site(dsn, tmp_path_factory.mktemp("site")) as running:
        yield running


@contextmanager
def running_site(dsn: str, folder: Path) -> Iterator[Site]:
    (folder / "breakers.yaml").write_text(BREAKERS)
    settings = {
        "LINESHAFT_DATABASE_URL": dsn,
        "LINESHAFT_CIRCUIT_BREAKERS": str(folder / "breakers.yaml"),
        "LINESHAFT_REAPER_INTERVAL_SEC": "0.1",
        "LINESHAFT_PROMOTER_INTERVAL_SEC": "0.1",
    }
    up = ("lineshaft.cli.main", "up", "--json", "--port", "0")
    fleet = {
        "workers": ("worker-1", "worker-2", "limiter"),
        "crasher": ("crasher",),
        "sleeper": ("sleeper",),
        **{f"victim-{n}": (f"victim-{n}",) for n in (1, 2, 3)},
    }
    with ExitStack() as running:
        servers = [running.enter_context(started(*up, cwd=folder, **settings)) for _ in range(2)]
        here = Site([address(server) for server in servers], dsn)
        for number, (name, agents) in enumerate(fleet.items()):
            url = here.urls[number % 2]
            here.fleet[name] = running.enter_context(started("tests.e2e.fleet", url, *agents, cwd=folder))
        yield here
