"""`make bench-peers`: Lineshaft, the queues people would pick instead, and bare SQL, in turns on one server.

It writes `benchmarks/results/peers.json`, and shows the tables that `docs/performance.md` has. `--quick` runs
everything at a small size to see that it works, and writes nothing unless `--json` names a file. `--page`
only writes the tables and the plot of the page, from the existing results.
"""

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
from rich.console import Console

from benchmarks.common import progress
from benchmarks.peers import page, stage
from benchmarks.peers.environments import python_for
from benchmarks.peers.results import Results
from benchmarks.peers.subjects import SUBJECTS, WORKLOADS, Subject, Workload
from benchmarks.peers.workloads import MEASURES, QUICK, Figures, Sizes, depth

RESULTS = Path(__file__).parent.parent / "results" / "peers.json"
#: These take so long that they are measured once.
_ONCE: frozenset[Workload] = frozenset({"depth", "pinned"})


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement; `waiting`: at which depth."""

    subject: Subject
    workload: Workload
    turn: int
    waiting: int = 0

    def __str__(self) -> str:
        return f"{self.subject.name} {self.workload} {self.waiting or self.turn:,}"

    def measure(self, session: stage.Session, sizes: Sizes) -> Figures:
        if self.workload == "depth":
            return depth(session, sizes, self.waiting)
        return MEASURES[self.workload](session, sizes)


def plan(chosen: list[Subject], workloads: list[Workload], sizes: Sizes) -> Iterator[Job]:
    """Every measurement in order: all queues take turns before any has its next one."""
    for workload in workloads:
        able = [subject for subject in chosen if workload in subject.workloads]
        for turn in range(1 if workload in _ONCE else sizes.turns):
            # No subject is always the first.
            first = turn % max(len(able), 1)
            for waiting in sizes.depths if workload == "depth" else (0,):
                for subject in able[first:] + able[:first]:
                    yield Job(subject, workload, turn + 1, waiting)


def run(args: argparse.Namespace, console: Console) -> Results:
    sizes = QUICK if args.quick else Sizes()
    sizes = replace(sizes, turns=args.turns or sizes.turns)
    chosen = _choose(args.peers)
    results = Results.begin(chosen, quick=args.quick, turns=sizes.turns)
    with stage.set_up() as place:
        if place.redis is None and any(subject.store == "redis" for subject in chosen):
            without = ", ".join(subject.title for subject in chosen if subject.store == "redis")
            console.print(f"redis-server is not installed here. Left out: {without}.")
            chosen = [subject for subject in chosen if subject.store != "redis"]
        results.tell_server(place)
        planned = list(plan(chosen, args.workloads or list(WORKLOADS), sizes))
        with progress(len(planned) + len(chosen)) as step:
            pythons = {
                subject.name: python_for(subject.name, step) if subject.peer else stage.this_python()
                for subject in chosen
            }
            for job in planned:
                step(str(job))
                try:
                    with stage.Session(place, job.subject, pythons[job.subject.name]) as session:
                        figures = job.measure(session, sizes)
                except (stage.MeasurementError, psycopg.Error) as error:
                    results.failed(str(job), str(error))
                    console.print(f"{job!s:<28} came to nothing: {_short(str(error))}", markup=False)
                    continue
                results.add(job.subject, figures)
                text = "  ".join(f"{name} {value:,.4g}" for name, value in figures.items())
                console.print(f"{job!s:<28} {text}")
    return results


def _short(error: str) -> str:
    """What was wanted, and the last that was heard; the whole is among the results."""
    lines = error.strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def _choose(names: list[str] | None) -> list[Subject]:
    """Lineshaft, the floor, and these peers; None: those that are measured by default."""
    known = [subject.name for subject in SUBJECTS if subject.peer]
    if unknown := set(names or ()) - set(known):
        raise SystemExit(f"Unknown: {', '.join(sorted(unknown))}. Known are {', '.join(known)}.")
    return [
        subject
        for subject in SUBJECTS
        if not subject.peer or (subject.by_default if names is None else subject.name in names)
    ]


@contextmanager
def ended_in_good_order() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does: servers and workers are stopped first."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit("Stopped; nothing was written.") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=" ".join(WORKLOADS))
    parser.add_argument("--peers", nargs="*", metavar="PEER", help="these instead of the default ones")
    parser.add_argument("--turns", type=int, help="how often each is measured (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"instead of {RESULTS.name} of the results")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page's tables")
    args = parser.parse_args()
    if unknown := set(args.workloads) - WORKLOADS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(WORKLOADS)}")
    console = Console(width=200, highlight=False)
    if args.page:
        page.write(Results.read(args.json or RESULTS))
        return
    with ended_in_good_order():
        results = run(args, console)
    console.print(page.tables(results), markup=False)
    target = args.json or (None if args.quick else RESULTS)
    if target is not None:
        target.parent.mkdir(exist_ok=True)
        results.write(target)
        console.print(f"Written: {target}. 'make bench-page' brings it into docs/performance.md.")


if __name__ == "__main__":
    main()
