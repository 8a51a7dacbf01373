"""Names of instances that say which process they are, and their short forms for people."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_NAME = re.compile(r"(.*)/([0-9a-f-]{8,36})/(\d+)/(\d+)/(\d+)/(\d+)", re.DOTALL)


class ProcessName(NamedTuple):
    """One agent in one process of one machine."""

    host: str
    #: The boot and the PID namespace in which process id and start time name a process.
    boot: str
    namespace: str
    pid: str
    start: str
    #: Counts the agents of the process.
    number: str

    def __str__(self) -> str:
        return "/".join(self)


def parse(name: str) -> ProcessName | None:
    """None: it was given by a person."""
    found = _NAME.fullmatch(name)
    return None if found is None else ProcessName(*found.groups())


def short_names(names: Sequence[str]) -> list[str]:
    """Host and process id, where that is enough to tell them apart."""
    short = [_short(name) for name in names]
    counts = Counter(short)
    return [name if counts[brief] > 1 else brief for name, brief in zip(names, short, strict=True)]


def _short(name: str) -> str:
    process = parse(name)
    if process is None:
        return name
    number = "" if process.number == "1" else f" no. {process.number}"
    return f"{process.host} pid {process.pid}{number}"
