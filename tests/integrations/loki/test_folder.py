"""The files: locks, replacement, and what is left as it is."""

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec import Raw

from lineshaft.integrations.loki import locks
from lineshaft.integrations.loki.folder import (
    Folder,
    UnreadableFileError,
    append_lines,
    last_lines,
    read_object,
    replace,
)
from lineshaft.integrations.loki.locks import FolderLockedError, locked
from tests.integrations.loki.readers import put


def dead_pid() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_a_bare_list_stays_one_and_a_wrapper_stays_one(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    put(tmp_path, "pending", {"version": 2, "tasks": [{"id": "a"}], "updated": None})
    put(tmp_path, "completed", [{"id": "b"}])

    for name in ("pending", "completed"):
        file = folder.read(name)
        folder.write(name, [*file.records, Raw(b'{"id":"c"}')], file.wrapper)

    assert json.loads(folder.queue("pending").read_text()) == {
        "version": 2,
        "updated": None,
        "tasks": [{"id": "a"}, {"id": "c"}],
    }
    assert json.loads(folder.queue("completed").read_text()) == [{"id": "b"}, {"id": "c"}]


@pytest.mark.parametrize(("wrapper", "expected"), [(False, []), (True, {"tasks": []})])
def test_new_files(tmp_path: Path, wrapper: bool, expected: object) -> None:
    Folder(tmp_path, wrapper=wrapper).create()

    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "queue").glob("*.json")}
    assert found == {
        f"{name}.json": expected
        for name in ("pending", "in-progress", "completed", "dead-letter", "cancelled", "failed")
    }


@pytest.mark.parametrize("content", ["", "  \n"])
def test_an_empty_file_is_an_empty_list(tmp_path: Path, content: str) -> None:
    put(tmp_path, "pending", []).write_text(content)

    assert Folder(tmp_path).read("pending").records == []


@pytest.mark.parametrize("content", ['[{"id": "a"}', "tasks:\n- a", '{"tasks": 5}', '"text"', "[NaN", "\xff"])
def test_what_is_not_json_is_kept_as_it_is(tmp_path: Path, content: str) -> None:
    path = put(tmp_path, "pending", [])
    path.write_text(content)

    with pytest.raises(UnreadableFileError, match=r"pending\.json can't be read .* left as it is"):
        Folder(tmp_path).read("pending")
    Folder(tmp_path).create()
    assert path.read_text() == content


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFDIR])
def test_what_is_not_a_file_is_not_waited_for(tmp_path: Path, kind: int) -> None:
    folder = Folder(tmp_path)
    path = folder.queue("pending")
    path.parent.mkdir()
    path.mkdir() if kind == stat.S_IFDIR else os.mkfifo(path)

    with pytest.raises(UnreadableFileError):
        folder.read("pending")
    with pytest.raises(UnreadableFileError):
        read_object(path)


def test_a_file_is_replaced_atomically_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")
    path.chmod(0o640)
    (tmp_path / ".state.json.lineshaft").write_text("left by a process that was killed")
    with path.open() as reader:
        replace(path, b"new")
        assert reader.read() == "old"
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_links_are_replaced_and_not_followed(tmp_path: Path) -> None:
    """Programs that use the folder may be less trusted than the server."""
    outside = tmp_path / "outside"
    outside.write_text("precious")
    inside = tmp_path / "loki"
    inside.mkdir()
    for name in ("file", ".file.lineshaft", "events.jsonl"):
        (inside / name).symlink_to(outside)

    replace(inside / "file", b"new")
    with pytest.raises(OSError, match="symbolic link"):
        append_lines(inside / "events.jsonl", [b"{}"])

    assert outside.read_text() == "precious"
    assert not (inside / "file").is_symlink()


def test_an_unfinished_line_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_lines(path, [b"1", b"2"])
    with path.open("ab") as file:
        file.write(b'{"cut')

    append_lines(path, [b"3"])

    assert path.read_text() == '1\n2\n{"cut\n3\n'
    assert last_lines(path) == [b"1", b"2", b'{"cut', b"3"]
    assert last_lines(path, 6) == [b"3"]
    assert last_lines(tmp_path / "none") == []


def test_both_kinds_of_locks_are_held_and_nothing_is_left(tmp_path: Path) -> None:
    """R-051."""
    with locked(tmp_path):
        with (tmp_path / locks.QUEUE_LOCK).open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in locks.DIRECTORIES:
            assert (tmp_path / name / "owner.pid").read_text().strip() == str(os.getpid())
            with pytest.raises(FileExistsError):
                (tmp_path / name).mkdir()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        locks.QUEUE_LOCK
    ]
    assert not list((tmp_path / "queue").iterdir())


def test_a_lock_that_is_held_is_waited_for_and_then_reported(tmp_path: Path) -> None:
    """R-064."""
    with (
        locked(tmp_path),
        pytest.raises(FolderLockedError, match=r"queue\.lock"),
        locked(tmp_path, wait_sec=0.05),
    ):
        pass
    (tmp_path / locks.DIRECTORIES[1]).mkdir()
    with pytest.raises(FolderLockedError, match=r"in-progress\.lock"), locked(tmp_path, wait_sec=0.05):
        pass
    assert not (tmp_path / locks.DIRECTORIES[0]).exists()


@pytest.mark.parametrize(
    ("age", "alive", "taken"), [(31, False, True), (29, False, False), (31, True, False)]
)
def test_a_stale_directory_is_taken_over(tmp_path: Path, age: int, alive: bool, taken: bool) -> None:
    held = tmp_path / locks.DIRECTORIES[0]
    held.mkdir(parents=True)
    (held / "owner.pid").write_text(str(os.getpid() if alive else dead_pid()))
    then = time.time() - age
    os.utime(held, (then, then))

    if taken:
        with locked(tmp_path, wait_sec=10):
            assert (held / "owner.pid").read_text().strip() == str(os.getpid())
    else:
        with pytest.raises(FolderLockedError), locked(tmp_path, wait_sec=0.05):
            pass


WRITER = """
import sys, itertools
from pathlib import Path
from lineshaft.integrations.loki.folder import Folder
folder = Folder(Path(sys.argv[1]))
body = b'{"id": "%d", "text": "' + b"x" * 200_000 + b'"}'
print("ready", flush=True)
for number in itertools.count():
    with folder.locked():
        folder.write("pending", [body % (number,)] * 5, None)
"""


@pytest.mark.slow("kills processes")
def test_files_parse_whenever_a_writer_is_killed(tmp_path: Path) -> None:
    """The proof of loki.md: kill -9 while writing."""
    Folder(tmp_path).create()
    for delay in (0.0, 0.003, 0.007, 0.011, 0.02, 0.03, 0.05, 0.08):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            # The moment of the death is what varies; nothing depends on its length.
            time.sleep(delay)
            writer.send_signal(signal.SIGKILL)
        assert len(json.loads((tmp_path / "queue/pending.json").read_text())) in {0, 5}
        for name in locks.DIRECTORIES:  # as if 30 s had passed
            if (tmp_path / name).exists():
                os.utime(tmp_path / name, (1, 1))
    with locked(tmp_path):
        pass
    Folder(tmp_path).write("pending", [], None)
    assert not list((tmp_path / "queue").glob(".*"))


def test_objects(tmp_path: Path) -> None:
    path = tmp_path / "orchestrator.json"
    assert read_object(path) == {}
    path.write_text("[]")
    with pytest.raises(UnreadableFileError):
        read_object(path)
