"""regex: RE2 on strings, and on the JSON of anything else."""

import time
from typing import Any

import pytest

from lineshaft.checks import regex
from tests.checks.candidate import candidate


@pytest.mark.parametrize(
    ("pattern", "data", "passes"),
    [
        (r"https?://\S+", "see https://example.org for more", True),
        (r"https?://\S+", "no address here", False),
        (r"^\d+$", "42", True),
        (r"^\d+$", "42 apples", False),
        (r'"status":"ok"', {"status": "ok"}, True),
        (r"^null$", None, True),
        ("ü", "über", True),
    ],
)
def test_a_pattern_matches_anywhere_unless_anchored(pattern: str, data: Any, passes: bool) -> None:
    """R-095, F-38: as in an output that must contain a URL."""
    assert regex.fault(pattern) is None

    verdict = regex.check(pattern, candidate(data))

    assert verdict.passed is passes
    assert verdict.reasons == (() if passes else (f"output.data doesn't match {pattern}",))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (None, "must be a pattern"),
        ("", "must be a pattern"),
        ({"pattern": "a"}, "must be a pattern"),
        ("(", "missing )"),
        ("(?=a)", "linear time"),
        (r"(a)\1", "linear time"),
        ("(a{1000}){1000}", "linear time"),
        ("\ud800", "valid Unicode"),
        ("a" * 10_001, "at most 10000 characters"),
    ],
)
def test_invalid_patterns(pattern: Any, said: str) -> None:
    """R-095: reported at submission."""
    assert said in (regex.fault(pattern) or "")


def test_patterns_with_exponential_backtracking(capfd: pytest.CaptureFixture[str]) -> None:
    """Hostile input: a backtracking engine takes minutes for 30 characters."""
    started = time.monotonic()
    for pattern in ("(a+)+$", "(a|aa)+$", "(.*)*x", "(x+x+)+y"):
        assert regex.fault(pattern) is None
        assert not regex.check(pattern, candidate("a" * 1_000_000 + "b")).passed

    assert time.monotonic() - started < 30
    assert capfd.readouterr() == ("", "")
