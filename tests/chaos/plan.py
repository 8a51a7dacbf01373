"""What a run shall be, and what of it this machine can do."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.faults import QUICK, Fault, Kind, schedule

_DISK_BYTES = 256 * 1024


@dataclass(kw_only=True)
class Plan:
    seed: int
    seconds: float
    kinds: Sequence[Kind] = QUICK
    agents: int = 4
    #: Seconds between faults, and between the calls of a client, on average.
    faults_every_sec: float = 2.0
    calls_every_sec: float = 0.3
    #: The program, if some of the processes shall be behind it.
    pgbouncer: str | None = None
    major: int | None = None
    #: Whether hostile clients call the servers, which then need tokens.
    attacks: bool = False
    #: On a database that forgets what it has answered: then the checker must object.
    lossy: bool = False
    #: Where logs and histories are copied to; None: they go with the run, unless it fails.
    keep: Path | None = None
    log: Callable[[str], None] = field(default=lambda _: None)

    @property
    def processes(self) -> list[str]:
        agents = [f"agent-{n}" for n in range(self.agents)]
        return [*agents, "server-0", "server-1", "client-db", "client-http", "reader-db", "reader-http"]

    @property
    def attackers(self) -> list[str]:
        """Not among the processes that faults meet: a seed has the same faults with and without them."""
        return ["attacker-0", "attacker-1"] if self.attacks else []

    def faults(self) -> list[Fault]:
        return schedule(self.seed, self.seconds, self.processes, self.kinds, every_sec=self.faults_every_sec)


def impossible(kinds: Sequence[Kind]) -> dict[Kind, str]:
    """Of these kinds, those that can't be done on this machine, and why."""
    if Kind.DISK_FULL in kinds and not _can_mount():
        return {Kind.DISK_FULL: "needs the right to mount a tmpfs"}
    return {}


def _can_mount() -> bool:
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as place:
        if mount(Path(place)):
            unmount(Path(place))
            return True
    return False


def mount(place: Path) -> bool:
    """A disk of its own, small enough to be filled up in no time."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def unmount(place: Path) -> None:
    subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)  # noqa: S607
