"""What every process of a run did and saw: lines of JSON, one file a process, kept by the kernel.

A line is handed to the kernel with one write, so that whatever a process has recorded is there also after
SIGKILL. Times are those of the monotonic clock, which all processes of a machine share.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]


class Recorder:
    def __init__(self, path: Path, who: str) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._who = who
        self._calls = 0

    def __call__(self, what: str, **facts: Any) -> None:
        line = {"t": time.monotonic(), "who": self._who, "pid": os.getpid(), "what": what, **facts}
        os.write(self._handle, json.dumps(line, default=str).encode() + b"\n")

    def next_call(self) -> str:
        """A name for a call, to find its answer by."""
        self._calls += 1
        return f"{self._who}/{os.getpid()}/{self._calls}"


def read(directory: Path) -> list[Record]:
    """All records, in the order of time."""
    records = [record for path in sorted(directory.glob("*.jsonl")) for record in read_file(path)]
    return sorted(records, key=lambda record: float(record["t"]))


def read_file(path: Path) -> Iterator[Record]:
    with path.open() as lines:
        for line in lines:
            # A line without its end is one that a killed process was about to write.
            if line.endswith("\n"):
                yield json.loads(line)
