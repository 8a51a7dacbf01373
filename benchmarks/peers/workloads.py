"""What is measured, and how. Each function measures one queue once and gives the figures by name."""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from benchmarks.peers.stage import MeasurementError, Session
from benchmarks.peers.subjects import Workload

Figures = dict[str, float]

_LOOK_EVERY_SEC = 0.002
#: A worker process has to handle its first task within this.
_FIRST_TASK_SEC = 60.0
_BULK_SEC = 180.0
_FILL_SEC = 600.0
#: A task that only shows that a worker is there: none of those whose start is looked at.
_WARM_UP = 2_000
#: A queue under steady load has about so many waiting, which are submitted in such chunks.
_WAITING, _CHUNK = 2_000, 1_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much; the most that a queue is given of each."""

    turns: int = 3
    #: Of what each queue is given to submit in bulk and to drain.
    share: float = 1.0
    submit: int = 2_000
    drain_sec: float = 10.0
    warm_up: int = 20
    latency: int = 200
    every_sec: float = 0.05
    depths: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    deep_tasks: int = 20_000
    deep_sec: float = 10.0
    fan: int = 1_000
    chain: int = 200
    pinned: int = 500_000
    pinned_sec: float = 240.0


QUICK = Sizes(1, 0.1, 100, 3.0, 3, 10, 0.05, (1_500, 3_000), 1_000, 3.0, 50, 10, 5_000, 5.0)


def submit(session: Session, sizes: Sizes) -> Figures:
    session.order("submit", 0, sizes.warm_up, within_sec=_BULK_SEC)
    seconds, _ = session.order("submit", sizes.warm_up, sizes.submit, within_sec=_BULK_SEC)
    return {"submit_per_s": sizes.submit / seconds}


def bulk(session: Session, sizes: Sizes) -> Figures:
    count = int(session.subject.bulk * sizes.share)
    session.order("bulk", 0, sizes.warm_up, within_sec=_BULK_SEC)
    session.stage.checkpoint()
    seconds, _ = session.order("bulk", sizes.warm_up, count, within_sec=_BULK_SEC)
    return {"bulk_per_s": count / seconds}


def drain(processes: int) -> Callable[[Session, Sizes], Figures]:
    def measure(session: Session, sizes: Sizes) -> Figures:
        count = int(session.subject.drain * sizes.share)
        session.order("bulk", 0, count, within_sec=_FILL_SEC)
        session.stage.checkpoint()
        figures = _drain(session, count, processes, count, sizes.drain_sec)
        return {f"drain{processes}_{name}": value for name, value in figures.items()}

    return measure


def _drain(session: Session, waiting: int, processes: int, most: int, most_sec: float) -> Figures:
    """Tasks a second that are recorded as done, memory, and CPU time a task where it is known.

    The clock starts when every process has had a task. It stops when `most` are done, or after `most_sec`:
    nothing but what is recorded by then counts.
    """
    session.start_workers(processes)
    _wait_until(session, lambda: _at_work(session) >= processes, _FIRST_TASK_SEC)
    begin = time.perf_counter()
    before = _handled(session)
    used_before = session.cpu_sec()
    until = begin + most_sec
    while _handled(session) < most and time.perf_counter() < until:
        session.check_workers()
        time.sleep(_LOOK_EVERY_SEC)
    memory = session.memory_mb()
    while True:
        end = time.perf_counter()
        done = waiting - session.left()
        if done >= most or end >= until:
            break
        time.sleep(_LOOK_EVERY_SEC)
    if done <= before:
        raise MeasurementError(
            f"{session.subject.name}: nothing was recorded as done in {most_sec:g} s:\n{session.log_tail()}"
        )
    figures = {"per_s": (done - before) / (end - begin), "memory_mb": memory}
    used = session.cpu_sec()
    if used is not None and used_before is not None:
        # Work goes on while that is looked up: counted by what was handled by now.
        handled = _handled(session) - before
        for name, now, then in zip(("worker", "server"), used, used_before, strict=True):
            figures[f"{name}_us"] = (now - then) / handled * 1e6
    return figures


def latency(session: Session, sizes: Sizes) -> Figures:
    """From just before the call that submits to the handler's first line, in another process that is idle."""
    session.start_workers(1)
    session.order("submit", _WARM_UP, 1, within_sec=_BULK_SEC)
    _wait_until(session, lambda: _handled(session) > 0 and session.left() == 0, _FIRST_TASK_SEC)
    session.order("pace", sizes.warm_up, sizes.every_sec, within_sec=_BULK_SEC)
    _wait_until(session, lambda: _handled(session) > sizes.warm_up and session.left() == 0, _FIRST_TASK_SEC)
    session.board.forget_starts()
    _, sent = session.order("pace", sizes.latency, sizes.every_sec, within_sec=_BULK_SEC)
    _wait_until(session, lambda: _handled(session) > sizes.warm_up + sizes.latency, _FIRST_TASK_SEC)
    times = [(session.board.started_at(n) - at) * 1000 for n, at in enumerate(sent)]
    shares = statistics.quantiles(times, n=100)
    return {f"latency_p{share}_ms": shares[share - 1] for share in (50, 95, 99)}


def depth(session: Session, sizes: Sizes, waiting: int) -> Figures:
    some = min(1_000, waiting)
    session.order("bulk", 0, some, within_sec=_FILL_SEC)
    session.order("clone", waiting - some, within_sec=_FILL_SEC)
    session.stage.checkpoint()
    figures = _drain(session, waiting, 1, min(sizes.deep_tasks, waiting), sizes.deep_sec)
    return {f"depth_{waiting}_per_s": figures["per_s"]}


def fan(session: Session, sizes: Sizes) -> Figures:
    """So many tasks and one that waits for them all: from the submission to that one's start."""
    _ready_for_graphs(session)
    begin = time.monotonic()
    session.order("fan", sizes.fan, within_sec=_BULK_SEC)
    _wait_until(session, lambda: session.board.started_at(0) > 0, _BULK_SEC)
    return {"fan_per_s": (sizes.fan + 1) / (session.board.started_at(0) - begin)}


def chain(session: Session, sizes: Sizes) -> Figures:
    """From the first one's start to the last one's, for each of the hops between."""
    _ready_for_graphs(session)
    session.order("chain", sizes.chain, within_sec=_BULK_SEC)
    last = sizes.chain - 1
    _wait_until(session, lambda: session.board.started_at(last) > 0, _BULK_SEC)
    took = session.board.started_at(last) - session.board.started_at(0)
    return {"chain_hop_ms": took / last * 1000}


def _ready_for_graphs(session: Session) -> None:
    session.start_workers(1, for_graphs=True)
    session.order("submit", _WARM_UP, 1, within_sec=_BULK_SEC)
    _wait_until(session, lambda: _handled(session) > 0 and session.left() == 0, _FIRST_TASK_SEC)


def pinned(session: Session, sizes: Sizes) -> Figures:
    """Submit and drain all the time, about 2,000 waiting, while an idle transaction holds a snapshot open."""
    with psycopg.connect(session.dsn) as pin:
        pin.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        pin.execute("SELECT count(*) FROM pg_class")
        session.start_workers(1)
        session.order("bulk", 0, _WAITING, within_sec=_BULK_SEC)
        submitted = _WAITING
        _wait_until(session, lambda: _handled(session) > 0, _FIRST_TASK_SEC)
        begin = time.perf_counter()
        seen = [(0.0, _handled(session))]
        while seen[-1][1] < sizes.pinned and seen[-1][0] < sizes.pinned_sec:
            session.check_workers()
            time.sleep(_LOOK_EVERY_SEC)
            seen.append((time.perf_counter() - begin, _handled(session)))
            if submitted - seen[-1][1] < _WAITING:
                session.order("bulk", submitted, _CHUNK, within_sec=_BULK_SEC)
                submitted += _CHUNK
        pin.rollback()
    rates = tenths(seen)
    return {
        "pinned_tasks": seen[-1][1],
        "pinned_first_per_s": rates[0],
        "pinned_last_per_s": rates[-1],
        "pinned_ratio": rates[-1] / rates[0],
    }


def tenths(seen: list[tuple[float, int]]) -> list[float]:
    """The rate in each tenth of the tasks, from looks at when how many were handled."""
    first, last = seen[0][1], seen[-1][1]
    bounds = [first + (last - first) * part / 10 for part in range(11)]
    reached = []
    looks = itertools.pairwise(seen)
    (before, less), (after, more) = next(looks)
    for bound in bounds:
        while more < bound:
            (before, less), (after, more) = next(looks)
        share = (bound - less) / (more - less) if more > less else 0.0
        reached.append(before + share * (after - before))
    return [(last - first) / 10 / (end - begin) for begin, end in itertools.pairwise(reached)]


def _handled(session: Session) -> int:
    return sum(session.board.counts().values())


def _at_work(session: Session) -> int:
    return sum(count > 0 for count in session.board.counts().values())


def _wait_until(session: Session, condition: Callable[[], bool], within_sec: float) -> None:
    until = time.monotonic() + within_sec
    while not condition():
        session.check_workers()
        if time.monotonic() > until:
            raise MeasurementError(
                f"{session.subject.name}: nothing more happened in {within_sec:g} s:\n{session.log_tail()}"
            )
        time.sleep(_LOOK_EVERY_SEC)


MEASURES: dict[Workload, Callable[[Session, Sizes], Figures]] = {
    "submit": submit,
    "bulk": bulk,
    "drain1": drain(1),
    "drain2": drain(2),
    "latency": latency,
    "fan": fan,
    "chain": chain,
    "pinned": pinned,
}
