"""regex: RE2 on texts, and on the JSON of all else."""

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
def test_a_pattern_matches_anywhere_unless_it_says_otherwise(pattern: str, data: Any, passes: bool) -> None:
    """R-095, F-38: 004's example is an output that must contain a URL."""
    assert regex.fault(pattern) is None

    verdict = regex.check(pattern, candidate(data))

    assert verdict.passed is passes
    assert verdict.reasons == (() if passes else (f"output.data has nothing that matches {pattern}",))


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
def test_what_is_no_pattern(pattern: Any, said: str) -> None:
    """R-095: told at submission."""
    assert said in (regex.fault(pattern) or "")


def test_patterns_that_explode_elsewhere(capfd: pytest.CaptureFixture[str]) -> None:
    """Hostile input: minutes in a backtracking engine for 30 characters; here a million are nothing."""
    started = time.monotonic()
    for pattern in ("(a+)+$", "(a|aa)+$", "(.*)*x", "(x+x+)+y"):
        assert regex.fault(pattern) is None
        assert not regex.check(pattern, candidate("a" * 1_000_000 + "b")).passed

    assert time.monotonic() - started < 30
    assert capfd.readouterr() == ("", "")
