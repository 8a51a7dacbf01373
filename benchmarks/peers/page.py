"""The tables and the plot of docs/performance.md, made from results."""

import textwrap
from pathlib import Path

from benchmarks.peers import plot
from benchmarks.peers.environments import ROOT
from benchmarks.peers.results import Results
from benchmarks.peers.subjects import SUBJECTS

PAGE = ROOT / "docs" / "performance.md"
PLOT = PAGE.with_name("benchmarks.svg")
_BEGIN, _END = "<!-- results -->", "<!-- end of results -->"

#: Title and columns (figure, heading).
_TABLES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Submit and drain, tasks per second",
        (
            ("submit_per_s", "submit one by one"),
            ("bulk_per_s", "submit in bulk"),
            ("drain1_per_s", "drain, 1 process"),
            ("drain2_per_s", "drain, 2 processes"),
        ),
    ),
    (
        "Draining: memory of the workers, and CPU time per task",
        (
            ("drain1_memory_mb", "MB, 1 process"),
            ("drain2_memory_mb", "MB, 2 processes"),
            ("drain1_worker_us", "worker, µs"),
            ("drain1_server_us", "server, µs"),
        ),
    ),
    (
        "From submission to start, milliseconds",
        (("latency_p50_ms", "median"), ("latency_p95_ms", "95 %"), ("latency_p99_ms", "99 %")),
    ),
    (
        "One process on a deep queue, tasks per second",
        tuple((f"depth_{n}_per_s", f"{n:,} waiting") for n in (1_500, 3_000, 10_000, 100_000, 1_000_000)),
    ),
    (
        "Tasks that wait for each other",
        (("fan_per_s", "fan-out and join, tasks/s"), ("chain_hop_ms", "chain, ms per hop")),
    ),
    (
        "An old transaction held open",
        (
            ("pinned_tasks", "tasks in the time given"),
            ("pinned_first_per_s", "first tenth, tasks/s"),
            ("pinned_last_per_s", "last tenth, tasks/s"),
            ("pinned_ratio", "last ÷ first"),
        ),
    ),
)
#: Not a speed: shown without a ratio to the floor.
_PLAIN = {"pinned_ratio", "pinned_tasks"}


def tables(results: Results) -> str:
    parts = []
    for title, columns in _TABLES:
        known = [
            column for column in columns if any(column[0] in figures for figures in results.runs.values())
        ]
        if not known:
            continue
        rows = [
            [subject.title, *(_cell(results, subject.name, figure) for figure, _ in known)]
            for subject in SUBJECTS
            if any(figure in results.runs.get(subject.name, {}) for figure, _ in known)
        ]
        head = [["", *(heading for _, heading in known)], ["---", *("--:" for _ in known)]]
        lines = ["| " + " | ".join(row) + " |" for row in head + rows]
        parts.append(f"### {title}\n\n" + "\n".join(lines))
    crash = "\n".join(
        f"| {subject.title} | {subject.store} | {subject.crash} |"
        for subject in SUBJECTS
        if subject.name in results.runs
    )
    parts.append(
        "### What happens to a task whose worker is killed\n\n| | store | |\n| --- | --- | --- |\n" + crash
    )
    if results.failures:
        failed = "\n".join(f"- {what}: {why.splitlines()[0]}" for what, why in results.failures.items())
        parts.append(f"### Failed measurements\n\n{failed}")
    about = "; ".join(f"{name} {value}" for name, value in results.about.items())
    parts.append(textwrap.fill(f"Measured with: {about}.", 120, break_on_hyphens=False))
    return "\n\n".join(parts) + "\n"


def _cell(results: Results, subject: str, figure: str) -> str:
    value = results.median(subject, figure)
    if value is None:
        return "–"
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 - three digits are enough
    floor = results.median("floor", figure)
    if subject == "floor" or floor is None or figure in _PLAIN:
        return text
    return f"{text} ({value / floor:.2f})"


def write(results: Results) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    if not rest or not after:
        raise SystemExit(f"{PAGE} has no place for results: a line {_BEGIN} and a line {_END}.")
    PAGE.write_text(f"{before}{_BEGIN}\n\n{tables(results)}\n{_END}{after}", encoding="utf-8")
    Path(PLOT).write_text(plot.svg(results), encoding="utf-8")
