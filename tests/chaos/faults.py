"""What the nemesis does and when: a schedule from a seed, the same for the same seed."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    KILL = "kill"
    STOP = "stop"
    PAUSE = "pause"
    RESTART_FAST = "restart-fast"
    RESTART_IMMEDIATE = "restart-immediate"
    TERMINATE = "terminate"
    RESET = "reset"
    BLACK_HOLE = "black-hole"
    HOLD = "hold"
    CLOCK = "clock"
    DISK_FULL = "disk-full"
    FAIL_OVER = "fail-over"
    READ_ONLY = "read-only"
    REDIS_KILL = "redis-kill"
    REDIS_RESTART = "redis-restart"
    REDIS_FREEZE = "redis-freeze"
    REDIS_FLUSH = "redis-flush"
    REDIS_LATENCY = "redis-latency"


ABOUT = {
    Kind.KILL: "SIGKILL of a process; it is started again later",
    Kind.STOP: "SIGTERM of an agent's process, as in a deploy; it is started again later",
    Kind.PAUSE: "SIGSTOP of a process for longer than its leases, then SIGCONT",
    Kind.RESTART_FAST: "PostgreSQL is restarted, as an operator does it",
    Kind.RESTART_IMMEDIATE: "PostgreSQL is restarted after a crash",
    Kind.TERMINATE: "pg_terminate_backend for every client",
    Kind.RESET: "all connections of a process are reset",
    Kind.BLACK_HOLE: "all connections of a process go silent permanently; new ones work",
    Kind.HOLD: "nothing passes between a process and the database for a while; then all of it arrives",
    Kind.CLOCK: "the wall clock of an agent jumps",
    Kind.DISK_FULL: "the disk of an agent is full for a while",
    Kind.FAIL_OVER: "the primary is killed and its synchronous standby promoted",
    Kind.READ_ONLY: "the database can only be read for a while, as one that another has taken over from",
    Kind.REDIS_KILL: "Redis is killed; it is started again later, empty",
    Kind.REDIS_RESTART: "Redis is killed and started at once, empty",
    Kind.REDIS_FREEZE: "SIGSTOP of Redis for a while, then SIGCONT",
    Kind.REDIS_FLUSH: "Redis forgets everything",
    Kind.REDIS_LATENCY: "each answer of Redis takes seconds for a while",
}

#: Only of runs with a Redis: others have the same faults for a seed as without these.
OF_REDIS = tuple(kind for kind in Kind if kind.startswith("redis-"))
OTHERS = tuple(kind for kind in Kind if kind not in OF_REDIS)

#: Whose processes may be hit; the last word of a fault's target is a number.
ANY_PROCESS = frozenset({Kind.KILL, Kind.PAUSE, Kind.RESET, Kind.BLACK_HOLE, Kind.HOLD})
AGENTS_ONLY = frozenset({Kind.STOP, Kind.CLOCK, Kind.DISK_FULL})
QUICK = (
    Kind.KILL,
    Kind.STOP,
    Kind.PAUSE,
    Kind.RESTART_FAST,
    Kind.RESTART_IMMEDIATE,
    Kind.TERMINATE,
    Kind.RESET,
    Kind.BLACK_HOLE,
    Kind.HOLD,
    Kind.CLOCK,
    Kind.READ_ONLY,
)
_WEIGHTS = {Kind.KILL: 4, Kind.STOP: 3, Kind.PAUSE: 4, Kind.HOLD: 2, Kind.FAIL_OVER: 2}


@dataclass(frozen=True, slots=True)
class Fault:
    #: Seconds after the beginning.
    at: float
    kind: Kind
    #: A process; None: the database.
    target: str | None
    #: How long it lasts.
    seconds: float

    def __str__(self) -> str:
        whom = f" {self.target}" if self.target else ""
        return f"{self.kind}{whom} ({self.seconds:.1f} s)"


def schedule(
    seed: int, seconds: float, processes: Sequence[str], kinds: Sequence[Kind], *, every_sec: float = 2.0
) -> list[Fault]:
    """Faults until shortly before the end, on average one in `every_sec`."""
    dice = random.Random(f"faults of {seed}")
    agents = [name for name in processes if name.startswith("agent")]
    weights = [_WEIGHTS.get(kind, 1) for kind in kinds]
    faults: list[Fault] = []
    at = dice.uniform(0.5, 1.5) * every_sec
    # Each kind once before any comes again: also a short run has them all.
    unused = dice.sample(list(kinds), len(kinds))
    while at < seconds:
        kind = unused.pop() if unused else dice.choices(list(kinds), weights)[0]
        target = None
        if kind in ANY_PROCESS:
            target = dice.choice(list(processes))
        elif kind in AGENTS_ONLY:
            target = dice.choice(agents)
        faults.append(Fault(round(at, 2), kind, target, round(_lasts(kind, dice), 2)))
        at += dice.uniform(0.5, 1.5) * every_sec
    return faults


def _lasts(kind: Kind, dice: random.Random) -> float:
    match kind:
        case Kind.PAUSE | Kind.HOLD:
            # Leases are 3 s: some pauses are shorter, most are longer.
            return dice.uniform(2.0, 6.0)
        case Kind.KILL | Kind.STOP | Kind.RESTART_FAST | Kind.RESTART_IMMEDIATE:
            return dice.choice([0.0, 0.2, 1.0, 2.0])
        case (
            Kind.CLOCK
            | Kind.DISK_FULL
            | Kind.READ_ONLY
            | Kind.REDIS_KILL
            | Kind.REDIS_FREEZE
            | Kind.REDIS_LATENCY
        ):
            return dice.uniform(1.0, 5.0)
        case _:
            return 0.0


def pgbouncer() -> str | None:
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
