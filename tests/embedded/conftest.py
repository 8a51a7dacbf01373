import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from lineshaft.embedded import Binaries, EmbeddedServer, find_binaries
from tests.embedded.helpers import FAST, stop_server, wait_until_idle
from tests.in_memory import memory_folder


@cache
def binaries_of(source: str) -> Binaries | None:
    return next((found for found in find_binaries() if found.source == source), None)


def _binaries_or_skip(source: str) -> Binaries:
    found = binaries_of(source)
    if found is None:
        pytest.skip(f"no PostgreSQL from this source here: {source}")
    return found


@pytest.fixture
def system_binaries() -> Binaries:
    return _binaries_or_skip("system")


@pytest.fixture
def wheel_binaries() -> Binaries:
    return _binaries_or_skip("wheel")


@pytest.fixture(params=["system", "wheel"])
def binaries(request: pytest.FixtureRequest) -> Binaries:
    """Each kind of binaries."""
    return _binaries_or_skip(request.param)


@pytest.fixture
def some_binaries() -> Binaries:
    return find_binaries()[0]


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Unlike tmp_path, short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="ls-", dir=memory_folder())).resolve()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def new_home(short_directory: Path) -> Iterator[Path]:
    """A home that doesn't exist yet."""
    home = short_directory / "home"
    yield home
    stop_server(home)


@pytest.fixture(scope="session")
def copy_of_made_home() -> Iterator[Callable[[Binaries, Path], None]]:
    """Copies of a home with data, for tests that don't test its creation: initdb is slow."""
    templates: dict[Binaries, Path] = {}
    top = Path(tempfile.mkdtemp(prefix="ls-", dir=memory_folder()))

    def copy(binaries: Binaries, home: Path) -> None:
        if binaries not in templates:
            template = top / binaries.source
            EmbeddedServer.start(template, binaries=binaries, options=FAST).close()
            wait_until_idle(template)
            templates[binaries] = template
        subprocess.run(["/bin/cp", "-a", str(templates[binaries]), str(home)], check=True)

    yield copy
    shutil.rmtree(top)


@pytest.fixture
def home(
    new_home: Path, some_binaries: Binaries, copy_of_made_home: Callable[[Binaries, Path], None]
) -> Path:
    """A home with data and no server."""
    copy_of_made_home(some_binaries, new_home)
    return new_home
