"""Stores for tests of artifacts: a folder, and a bucket of a real S3 server (SeaweedFS)."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store as Client

from lineshaft.artifacts import open_store
from lineshaft.artifacts.store import Store
from lineshaft.ids import new_id
from lineshaft.settings import Settings

BUCKET = "lineshaft"
ACCESS_KEY, SECRET_KEY = "test-key", "test-secret"
#: It opens all of them, and chooses those that aren't given itself.
_PORTS = (
    *("admin.port", "admin.port.grpc", "filer.port", "filer.port.grpc", "master.port", "master.port.grpc"),
    *("s3.port", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance", "volume.port", "volume.port.grpc"),
    "webdav.port",
)
#: Below the ports that the system gives to connections and to servers that ask for any.
_BLOCKS = range(20_000, 32_000, len(_PORTS) + 1)


def _own_ports() -> tuple[socket.socket, list[int]]:
    """Ports that no other process of tests uses while the socket is open, which is the first of its block."""
    for first in random.sample(_BLOCKS, len(_BLOCKS)):
        ports = [first + number for number in range(1, len(_PORTS) + 1)]
        with contextlib.suppress(OSError), contextlib.ExitStack() as bound:
            kept = bound.enter_context(socket.create_server(("127.0.0.1", first)))
            for port in ports:
                socket.create_server(("127.0.0.1", port)).close()
            bound.pop_all()
            return kept, ports
    raise AssertionError("All blocks of ports are in use.")


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """The URL of an S3 server that has one bucket."""
    kept, free = _own_ports()
    ports = dict(zip(_PORTS, free, strict=True))
    url = f"http://127.0.0.1:{ports['s3.port']}"
    weed = Path(sys.executable).with_name("weed")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                *(f"-bucket={BUCKET}", "-webdav=false", "-admin.ui=false"),
                *(f"-{name}={port}" for name, port in ports.items()),
            ],
            env={**os.environ, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY},
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    try:
        _await(url, process, folder / "log")
        yield url
    finally:
        process.kill()
        process.wait()
        kept.close()


def _await(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until an object can be written, which is later than the first answer."""
    client = Client(
        BUCKET,
        endpoint=url,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        client_options={"allow_http": True, "timeout": timedelta(seconds=5)},
        retry_config={"max_retries": 0},
    )
    while process.poll() is None:
        with contextlib.suppress(obstore.exceptions.BaseError):
            obstore.put(client, "ready", b"x", use_multipart=False)
            return
        time.sleep(0.05)
    raise AssertionError(f"The S3 server ended: {log.read_text(errors='replace')[-2000:]}")


@pytest.fixture(scope="session")
def s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture
def s3_place(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of the test's own."""
    use_s3(monkeypatch, s3_url)
    return f"s3://{BUCKET}/{new_id('test')}"


def use_s3(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow("a real S3 server"))])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """LINESHAFT_ARTIFACTS: of each kind of store in turn."""
    if request.param == "s3":
        found: str = request.getfixturevalue("s3_place")
        return found
    return str(tmp_path / "artifacts")


@pytest.fixture
def store(place: str) -> Store:
    return open_store(Settings(artifacts=place))
