"""The check that an output has a decision report: why it was done, what was done, and the trade-offs.

`docs/gates.md` has the schema. `why`, `what` and `tradeoffs` are required and must not be empty; other fields
are allowed.
"""

from collections.abc import Mapping
from typing import Any

from lineshaft.checks.verdict import PASSED, CandidateOutput, Verdict, rejected
from lineshaft.model.retry import SystemReason

METHOD = "decision-report"
REQUIRED = ("why", "what", "tradeoffs")
#: Larger reports could not be searched; details belong in an artifact.
MAX_BYTES = 64 << 10


def check(_: Any, candidate: CandidateOutput) -> Verdict:
    fault = fault_of(candidate.decision_report)
    return PASSED if fault is None else rejected(fault)


def fault_of(report: Any) -> str | None:
    """What a decision report lacks; None: nothing."""
    if not report:
        return _incomplete("decision_report is missing; submit one with why, what and tradeoffs")
    if not isinstance(report, Mapping):
        return _incomplete(f"decision_report must be an object, got {type(report).__name__}")
    missing = [name for name in REQUIRED if not _has_content(report.get(name))]
    if missing:
        return _incomplete(f"{', '.join(missing)} missing or empty in decision_report")
    return None


def _incomplete(fault: str) -> str:
    return f"{SystemReason.INCOMPLETE_DECISION_REPORT}: {fault}"


def _has_content(value: Any) -> bool:
    """Whether a value is text that isn't blank, or contains such text."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, Mapping):
        return any(_has_content(item) for item in value.values())
    if isinstance(value, list):
        return any(_has_content(item) for item in value)
    return value is not None and not isinstance(value, bool)
