"""Stores for tests of artifacts: a folder, and a bucket of a real S3 server (SeaweedFS)."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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


#: How its log names a port that another process has taken.
_TAKEN = ("is not available", "address already in use")
_TRIES = 5


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """The URL of an S3 server that has one bucket."""
    for number in range(_TRIES):
        own = folder / str(number)
        own.mkdir()
        process, url = _started(own)
        try:
            if _is_ready(process, url):
                yield url
                return
        finally:
            process.kill()
            process.wait()
        said = (own / "log").read_text(errors="replace")
        # Between the choice of a port and its use, another process may take it.
        assert any(sign in said for sign in _TAKEN), f"The S3 server ended: {said[-2000:]}"
    raise AssertionError(f"The S3 server found its ports taken {_TRIES} times.")


def _started(folder: Path) -> tuple["subprocess.Popen[bytes]", str]:
    """The process, and the URL that it will have."""
    bound = [socket.create_server(("127.0.0.1", 0)) for _ in _PORTS]
    ports = dict(zip(_PORTS, (each.getsockname()[1] for each in bound), strict=True))
    for each in bound:
        each.close()
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
    return process, f"http://127.0.0.1:{ports['s3.port']}"


def _is_ready(process: "subprocess.Popen[bytes]", url: str) -> bool:
    """Wait until the bucket exists: then a request without a signature is refused, not unknown.

    False: the process has ended.
    """
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/{BUCKET}", timeout=5)  # noqa: S310 - our own server
        except urllib.error.HTTPError as refused:
            if refused.code == 403:
                return True
        except OSError:
            pass
        time.sleep(0.05)
    return False


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


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """LINESHAFT_ARTIFACTS: of each kind of store in turn."""
    if request.param == "s3":
        found: str = request.getfixturevalue("s3_place")
        return found
    return str(tmp_path / "artifacts")


@pytest.fixture
def store(place: str) -> Store:
    return open_store(Settings(artifacts=place))
