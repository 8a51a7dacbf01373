"""What processes use of the machine. CPU time, known on Linux only, is the steadiest figure on a busy one."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")


def memory_mb(groups: Iterable[int]) -> float:
    """What all processes of these groups have in memory; pages that they share are counted for each."""
    wanted = set(map(str, groups))
    listed = subprocess.run(
        ["ps", "-A", "-o", "pgid=,rss="],  # noqa: S607 - wherever the system has it
        check=True,
        capture_output=True,
        text=True,
    )
    rows = (line.split() for line in listed.stdout.splitlines())
    return sum(int(rss) for group, rss in rows if group in wanted) / 1024


def cpu_sec(*, groups: Iterable[int] = (), parents: Iterable[int] = ()) -> float | None:
    """CPU time of all processes in these groups, and of these parents with all children they have or had."""
    if not (_PROC / "self" / "stat").exists():
        return None
    in_groups, of_parents = set(groups), set(parents)
    ticks = 0
    for process in _PROC.iterdir():
        if not process.name.isdecimal():
            continue
        try:
            # The name, in brackets, may have blanks in it.
            words = (
                (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            )
        except OSError:
            continue
        parent, group = int(words[1]), int(words[2])
        own, ended = sum(map(int, words[11:13])), sum(map(int, words[13:15]))
        if int(process.name) in of_parents:
            ticks += own + ended
        elif group in in_groups or parent in of_parents:
            ticks += own
    return ticks / os.sysconf("SC_CLK_TCK")
