"""Who is measured: each queue with what it needs, what it can do, and how much of it is measured."""

from dataclasses import dataclass
from typing import Literal

Workload = Literal["submit", "bulk", "drain1", "drain2", "latency", "depth", "fan", "chain", "pinned"]

WORKLOADS: dict[Workload, str] = {
    "submit": "submit one by one, tasks/s",
    "bulk": "submit in bulk, tasks/s",
    "drain1": "drain, one process, tasks/s",
    "drain2": "drain, two processes, tasks/s",
    "latency": "submit → start, ms",
    "depth": "drain a deep queue, tasks/s",
    "fan": "fan-out and join, tasks/s",
    "chain": "chain, ms a hop",
    "pinned": "an old transaction held open, tasks/s",
}
_ON_POSTGRES: frozenset[Workload] = frozenset({"submit", "bulk", "drain1", "drain2", "latency", "depth"})
_ON_REDIS: frozenset[Workload] = _ON_POSTGRES - {"depth"}
_GRAPHS: frozenset[Workload] = frozenset({"fan", "chain"})


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    title: str
    store: Literal["postgresql", "redis"]
    workloads: frozenset[Workload]
    #: How many tasks are submitted and drained: what it does in some seconds.
    bulk: int
    drain: int
    #: What its own documentation and code say of a worker that is killed.
    crash: str
    peer: bool = True
    by_default: bool = True


SUBJECTS = (
    Subject(
        "floor",
        "bare SQL",
        "postgresql",
        _ON_POSTGRES | _GRAPHS | {"pinned"},
        50_000,
        50_000,
        "claimed forever: it has no leases",
        peer=False,
    ),
    Subject(
        "lineshaft",
        "Lineshaft",
        "postgresql",
        _ON_POSTGRES | _GRAPHS | {"pinned"},
        50_000,
        50_000,
        "what was not recorded runs again",
        peer=False,
    ),
    Subject(
        "pgqueuer",
        "PgQueuer",
        "postgresql",
        _ON_POSTGRES | {"pinned"},
        50_000,
        50_000,
        "up to a batch of finished tasks runs again",
    ),
    Subject(
        "procrastinate",
        "Procrastinate",
        "postgresql",
        _ON_POSTGRES | {"pinned"},
        10_000,
        5_000,
        "stays 'doing' until a task of your own retries it",
    ),
    Subject(
        "dbos",
        "DBOS",
        "postgresql",
        _ON_POSTGRES | _GRAPHS,
        2_000,
        5_000,
        "carried on when a process of its name starts again",
    ),
    Subject(
        "celery",
        "Celery",
        "redis",
        _ON_REDIS | _GRAPHS,
        10_000,
        10_000,
        "lost, as acknowledged early (its default)",
    ),
    Subject(
        "dramatiq",
        "Dramatiq",
        "redis",
        _ON_REDIS | _GRAPHS,
        20_000,
        20_000,
        "runs again",
    ),
    Subject(
        "huey",
        "Huey",
        "redis",
        _ON_REDIS | _GRAPHS,
        20_000,
        20_000,
        "lost",
    ),
    # On request.
    Subject(
        "chancy",
        "Chancy",
        "postgresql",
        _ON_POSTGRES | {"pinned"},
        10_000,
        20_000,
        "stays 'running' without its recovery plugin, as here",
        by_default=False,
    ),
    Subject(
        "taskiq",
        "Taskiq",
        "redis",
        _ON_REDIS,
        10_000,
        10_000,
        "runs again ten minutes later (its default), when another task comes",
        by_default=False,
    ),
    Subject(
        "arq",
        "arq",
        "redis",
        _ON_REDIS,
        10_000,
        5_000,
        "runs again five minutes later (its default)",
        by_default=False,
    ),
    Subject(
        "saq",
        "SAQ",
        "redis",
        _ON_REDIS,
        10_000,
        5_000,
        "aborted by its sweep, unless it has retries",
        by_default=False,
    ),
    Subject(
        "rq",
        "RQ",
        "redis",
        _ON_REDIS | _GRAPHS,
        20_000,
        2_000,
        "failed as abandoned, unless it has retries",
        by_default=False,
    ),
)
