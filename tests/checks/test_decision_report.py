"""Decision reports: why, what and tradeoffs are required."""

from typing import Any

import pytest

from lineshaft.checks import decision_report
from tests.checks.candidate import candidate

WHOLE = {"why": "It was asked for.", "what": ["a page", "a test"], "tradeoffs": {"speed": "slower"}}


@pytest.mark.parametrize(
    "report", [WHOLE, WHOLE | {"alternatives": [], "confidence": 0.8}, WHOLE | {"why": 1}]
)
def test_complete_reports(report: Any) -> None:
    """R-093."""
    assert decision_report.check(None, candidate("x", report=report)).passed


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (None, "decision_report is missing"),
        ({}, "decision_report is missing"),
        ("", "decision_report is missing"),
        ("it was asked for", "must be an object, got str"),
        ([WHOLE], "must be an object, got list"),
        ({"why": "so", "what": "this"}, "tradeoffs missing or empty"),
        (WHOLE | {"why": "  "}, "why missing or empty"),
        (WHOLE | {"why": None, "what": []}, "why, what missing or empty"),
        (WHOLE | {"tradeoffs": {"speed": " ", "size": []}}, "tradeoffs missing or empty"),
        (WHOLE | {"tradeoffs": False}, "tradeoffs missing or empty"),
    ],
)
def test_incomplete_reports(report: Any, said: str) -> None:
    """R-093: the reason starts with `incomplete_decision_report`."""
    verdict = decision_report.check(None, candidate("x", report=report))

    (reason,) = verdict.reasons
    assert not verdict.passed
    assert reason.startswith("incomplete_decision_report: ")
    assert said in reason
