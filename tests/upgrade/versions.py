"""Versions of Lineshaft whose processes run side by side: the previous one and this one.

PREVIOUS names a commit. From it on migrations are append-only, and processes of its version work beside those
of this version. Each release replaces it by its own commit.
"""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parents[2]
MIGRATIONS = "src/lineshaft/engine/postgres/migrations"
PREVIOUS = (Path(__file__).parent / "PREVIOUS").read_text(encoding="utf-8").strip()


@dataclass(frozen=True)
class Version:
    name: str
    #: The folder with the package.
    source: Path

    @contextmanager
    def started(
        self,
        *command: str,
        cwd: Path,
        settings: Mapping[str, str],
        log: IO[bytes] | int = subprocess.DEVNULL,
    ) -> Iterator["subprocess.Popen[str]"]:
        """A process of this version, killed at the end of the block."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd,
            # The code of this version, also where another one is installed.
            env={**kept, **settings, "PYTHONPATH": str(self.source)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


def require_previous() -> None:
    """Skip the test in a clone without the history that it needs."""
    command = ["git", "cat-file", "-e", f"{PREVIOUS}^{{commit}}"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        found = False
    if not found:
        pytest.skip(
            f"commit {PREVIOUS} of tests/upgrade/PREVIOUS is not in this clone: git fetch --unshallow"
        )


def archived(path: str) -> tarfile.TarFile:
    """A folder of the previous version."""
    command = ["git", "archive", PREVIOUS, path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return tarfile.open(fileobj=io.BytesIO(done.stdout))


def previous_version(cache: pytest.Cache) -> Version:
    """Kept for the next run, with its compiled files: compiling takes longer than the test."""
    require_previous()
    folder = cache.mkdir(f"lineshaft-{PREVIOUS}")
    if not (folder / "src").exists():
        with tempfile.TemporaryDirectory(dir=folder) as partial, archived("src") as files:
            files.extractall(partial, filter="data")
            Path(partial, "src").rename(folder / "src")
    return Version("previous", folder / "src")


def this_version() -> Version:
    return Version("this", ROOT / "src")
