"""Whether an output comes with a decision report: why it was done, what was done, what was given up for it.

`docs/gates.md` has the schema. `why`, `what` and `tradeoffs` must be there and say something; whatever else
an agent wants to tell may stand beside them.
"""

from collections.abc import Mapping
from typing import Any

from lineshaft.checks.verdict import PASSED, CandidateOutput, Verdict, refused
from lineshaft.model.retry import SystemReason

METHOD = "decision-report"
REQUIRED = ("why", "what", "tradeoffs")
#: Larger ones could not be searched; details belong in an artifact.
MAX_BYTES = 64 << 10


def check(_: Any, handed_in: CandidateOutput) -> Verdict:
    report = handed_in.decision_report
    if not report:
        return _incomplete("there is no decision_report; hand one in with why, what and tradeoffs")
    if not isinstance(report, Mapping):
        return _incomplete(f"decision_report must be an object, got {type(report).__name__}")
    missing = [name for name in REQUIRED if not _says_something(report.get(name))]
    if missing:
        return _incomplete(f"{', '.join(missing)} missing or empty in decision_report")
    return PASSED


def _incomplete(what: str) -> Verdict:
    return refused(f"{SystemReason.INCOMPLETE_DECISION_REPORT}: {what}")


def _says_something(value: Any) -> bool:
    """A text, or a list or an object with one in it."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, Mapping):
        return any(_says_something(item) for item in value.values())
    if isinstance(value, list):
        return any(_says_something(item) for item in value)
    return value is not None and not isinstance(value, bool)
