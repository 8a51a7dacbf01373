"""The peer benchmark: what its figures are made of, and one run of it without any peer."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from benchmarks.peers import page, plot
from benchmarks.peers.__main__ import _choose, plan
from benchmarks.peers.drivers.harness import BOARD_SIZE, Board, several_at_a_time
from benchmarks.peers.environments import version_of
from benchmarks.peers.results import Results
from benchmarks.peers.subjects import SUBJECTS, Subject
from benchmarks.peers.workloads import Sizes, tenths

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
PINNED = re.compile(r"[\w.-]+==\d[\w.]*")
PROC = Path("/proc")
BY_NAME = {subject.name: subject for subject in SUBJECTS}


def test_a_steady_rate_is_the_same_in_every_tenth() -> None:
    assert tenths([(0.0, 5), (1.0, 105), (4.0, 405), (10.0, 1005)]) == pytest.approx([100] * 10)


def test_a_rate_that_falls_shows_in_the_last_tenth() -> None:
    rates = tenths([(0.0, 0), (9.0, 900), (19.0, 1000)])

    assert rates[:9] == pytest.approx([100] * 9)
    assert rates[9] == pytest.approx(10)


def test_all_threads_and_processes_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.write_bytes(bytes(BOARD_SIZE))
    board = Board(path)
    board.handled(7)
    thread = threading.Thread(target=board.handled, args=[10_000])
    thread.start()
    thread.join()
    program = "import pathlib, sys; from benchmarks.peers.drivers.harness import Board"
    other = f"{program}; Board(pathlib.Path(sys.argv[1])).handled(8)"
    done = subprocess.run([sys.executable, "-c", other, str(path)], check=False, cwd=ROOT, timeout=60)

    assert done.returncode == 0
    assert sorted(board.counts().values()) == [1, 2]
    assert board.counts()[os.getpid()] == 2
    assert 0 < board.started_at(7) < board.started_at(8)
    assert board.started_at(9) == 0


def test_each_subject_has_a_turn_before_any_has_the_next() -> None:
    three = [BY_NAME["floor"], BY_NAME["lineshaft"], BY_NAME["huey"]]
    jobs = list(plan(three, ["submit", "depth"], Sizes(turns=2, depths=(10, 20))))

    turns = [(job.subject.name, job.turn) for job in jobs if job.workload == "submit"]
    assert turns == [
        ("floor", 1),
        ("lineshaft", 1),
        ("huey", 1),
        ("lineshaft", 2),
        ("huey", 2),
        ("floor", 2),
    ]
    # Deep queues are for those that have them in PostgreSQL, and once.
    assert [(job.subject.name, job.waiting) for job in jobs if job.workload == "depth"] == [
        ("floor", 10),
        ("lineshaft", 10),
        ("floor", 20),
        ("lineshaft", 20),
    ]


def test_tables_have_medians_and_the_ratio_to_the_floor() -> None:
    results = Results(
        {"when": "today"},
        {
            "floor": {"submit_per_s": [2000.0, 1000.0, 4000.0]},
            "lineshaft": {"submit_per_s": [1500.0]},
            "huey": {},
        },
        {"huey submit 1": "It was asked to 'submit' and ended:\nTraceback"},
    )
    text = page.tables(results)

    assert "| bare SQL | 2,000 |" in text
    assert "| Lineshaft | 1,500 (0.75) |" in text
    assert "- huey submit 1: It was asked to 'submit' and ended:\n" in text
    assert "Traceback" not in text


def test_the_plot_is_a_picture_with_a_bar_for_each() -> None:
    results = Results({}, {"floor": {"drain1_per_s": [9.0]}, "lineshaft": {"drain1_per_s": [3.0]}})
    picture = ET.fromstring(plot.svg(results))  # noqa: S314 - our own

    _, *bars = picture.iter("{http://www.w3.org/2000/svg}rect")
    assert [float(bar.get("width", "")) for bar in bars] == pytest.approx([240, 80])


@pytest.mark.parametrize("subject", [subject for subject in SUBJECTS if subject.peer], ids=lambda it: it.name)
def test_every_peer_has_a_driver_and_pinned_versions(subject: Subject) -> None:
    assert (PEERS / "drivers" / f"{subject.name}.py").exists()
    assert version_of(subject.name)[0].isdigit()
    lines = (PEERS / "requirements" / f"{subject.name}.txt").read_text().splitlines()
    assert [line for line in lines if not PINNED.fullmatch(line)] == []


def test_every_driver_and_every_list_of_versions_belongs_to_a_subject() -> None:
    peers = {subject.name for subject in SUBJECTS if subject.peer}

    assert {path.stem for path in (PEERS / "requirements").iterdir()} == peers
    drivers = {path.stem for path in (PEERS / "drivers").glob("*.py")}
    assert drivers - {"__init__", "harness"} == set(BY_NAME)


def test_subjects_that_are_named_replace_the_default_ones() -> None:
    assert [subject.name for subject in _choose(["rq", "chancy"])] == ["floor", "lineshaft", "chancy", "rq"]
    left_out = set(SUBJECTS) - set(_choose(None))
    assert {subject.title for subject in left_out} == {"Chancy", "Taskiq", "arq", "SAQ", "RQ"}
    page_text = page.PAGE.read_text()
    assert [subject.title for subject in left_out if subject.title not in page_text] == []
    with pytest.raises(SystemExit, match=r"Unknown: sidekiq\. Known are pgqueuer, .*, rq\."):
        _choose(["sidekiq"])


def test_many_calls_are_made_some_at_a_time_and_each_once() -> None:
    under_way, most, made = 0, 0, []

    async def submit(n: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        made.append(n)
        under_way -= 1

    asyncio.run(several_at_a_time(submit, range(5, 505)))

    assert sorted(made) == list(range(5, 505))
    assert most == 20


@pytest.mark.slow("a benchmark run with its own server")
def test_a_run_ends_with_figures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--json", str(target), "--peers"]
    done = subprocess.run(
        [*command, "--", "drain1"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=240,
    )

    assert done.returncode == 0, done.stderr
    results = Results(**json.loads(target.read_text()))
    assert results.failures == {}
    for name in ("floor", "lineshaft"):
        assert (results.median(name, "drain1_per_s") or 0) > 0
    # A server stops shortly after its last user has gone.
    until = time.monotonic() + 60
    while (left := _processes_in(tmp_path)) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []


def _processes_in(folder: Path) -> list[str]:
    """Commands of all processes that have this folder, or one below, as their working directory."""
    found = []
    for process in PROC.glob("[0-9]*") if PROC.exists() else []:
        try:
            if (process / "cwd").readlink().is_relative_to(folder):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
