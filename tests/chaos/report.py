"""What came of a run, for people and for programs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tests.chaos.evidence import Evidence
from tests.chaos.faults import Kind
from tests.chaos.fleet import Member


class Report(msgspec.Struct, kw_only=True):
    held: bool
    seed: int
    seconds: float
    postgres: str
    faults: dict[str, int]
    skipped: dict[str, int]
    tasks: dict[str, int]
    claims: int
    attempts: dict[str, int]
    events: int
    answered: dict[str, int]
    unanswered: int
    starts: dict[str, int]
    #: Exit codes of processes that ended unexpectedly.
    own_ends: dict[str, dict[str, int]]
    rules: dict[str, list[str]]
    #: What went wrong with the run itself.
    trouble: list[str]
    left_in: str | None = None


def summarize(
    found: Evidence,
    verdicts: dict[str, list[str]],
    *,
    seed: int,
    seconds: float,
    postgres: str,
    faults: Mapping[Kind, int],
    skipped: Mapping[Kind, int],
    trouble: Sequence[str],
    members: Mapping[str, Member],
) -> Report:
    calls = {r["call"]: r["what"] for r in found.records if "call" in r and r["what"] not in _REPLIES}
    replied = {r["call"] for r in found.records if r["what"] == "answered"}
    return Report(
        held=not any(verdicts.values()) and not trouble,
        seed=seed,
        seconds=round(seconds, 1),
        postgres=postgres,
        faults=_counts(faults),
        skipped=_counts(skipped),
        tasks=_counts(Counter(task.status for task in found.tasks.values())),
        claims=sum(event.kind == "task.claimed" for event in found.events),
        attempts=_counts(Counter(attempt.outcome for attempt in found.attempts)),
        events=len(found.events),
        answered=_counts(Counter(what for call, what in calls.items() if call in replied)),
        unanswered=len(calls.keys() - replied),
        starts={name: member.starts for name, member in members.items()},
        own_ends={name: _counts(member.own_ends) for name, member in members.items() if member.own_ends},
        rules=verdicts,
        trouble=list(trouble),
    )


_REPLIES = frozenset({"answered", "refused", "again"})


def _counts(counted: Mapping[Any, int]) -> dict[str, int]:
    return {str(name): count for name, count in sorted(counted.items())}


def table(report: Report) -> str:
    lines = [
        f"seed {report.seed}, {report.seconds} s, PostgreSQL {report.postgres}",
        "",
        *_row("faults", report.faults),
        *(_row("skipped", report.skipped) if report.skipped else ()),
        *_row("tasks", report.tasks),
        *_row("claims", {"": report.claims}),
        *_row("attempts", report.attempts),
        *_row("events", {"": report.events}),
        *_row("calls answered", report.answered),
        *_row("calls without answer", {"": report.unanswered}),
        *_row("starts", report.starts),
    ]
    for name, codes in report.own_ends.items():
        lines += _row("ended unexpectedly", {f"{name} with code {code}": n for code, n in codes.items()})
    lines.append("")
    for rule, breaches in report.rules.items():
        lines.append(f"{'held  ' if not breaches else 'BROKEN'}  {rule}")
        lines += [f"          {breach}" for breach in breaches]
    lines += [f"TROUBLE {trouble}" for trouble in report.trouble]
    if report.left_in:
        lines.append(f"Histories and logs are in {report.left_in}")
    lines.append("All held." if report.held else "NOT all held.")
    return "\n".join(lines)


def _row(name: str, counts: Mapping[str, int]) -> list[str]:
    total = sum(counts.values())
    parts = ", ".join(f"{count} {what}" for what, count in counts.items() if what)
    return [f"{name:<22}{total:>7}  {parts}".rstrip()]
