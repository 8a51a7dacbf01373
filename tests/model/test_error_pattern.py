"""Errors of one cause have one pattern; others don't."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.model.error_pattern import MAX_PATTERN, error_pattern

#: Fixed: the processes of a parallel run must find the same tests.
TASKS = ("task_01M7HE1D4NX2CHSJE5GA6KX2PV", "task_01M7HE1DNKMY344DV9ZV715ZXX")


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ("timeout after 300 s", "timeout after 31.5 s", "timeout after <n> s"),
        (f"no output of {TASKS[0]}", f"no output of {TASKS[1]}", "no output of <id>"),
        (
            "row 6f1c0a52-0a3f-4b0e-9d8c-111111111111 is locked",
            "row 00000000-0000-4000-8000-abcdefabcdef is locked",
            "row <id> is locked",
        ),
        ("at 0x7f3a11 in main", "at 0xdeadbeef in main", "at <hex> in main"),
        ("commit 3f2a9bc812d4 not found", "commit 00ff00ff00ff00 not found", "commit <hex> not found"),
        ("can't open '/tmp/a/b.txt'", "can't open '/srv/x/y/z.json'", "can't open '<path>'"),
        ("can't open C:\\work\\one.txt", "can't open D:\\other\\two.txt", "can't open <path>"),
        ("GET https://a.example/x?id=1 gave 500", "GET https://b.example/y gave 502", "GET <url> gave <n>"),
        ("refused at 2026-02-08T10:30:00Z", "refused at 2026-12-31 23:59:59.5+01:00", "refused at <time>"),
        ("10.0.0.1:443 is down", "192.168.1.20:8080 is down", "<n> is down"),
        (
            'Traceback (most recent call last):\n  File "/a/b.py", line 3, in f\nKeyError: 17',
            'Traceback (most recent call last):\n  File "/c.py", line 9, in g\n    x\nKeyError: 4',
            "KeyError: <n>",
        ),
    ],
)
def test_errors_that_differ_in_details_have_one_pattern(one: str, other: str, common: str) -> None:
    """R-137."""
    assert error_pattern(one) == error_pattern(other) == common


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("invalid JSON", "tests failed"),
        ("timeout after 3 s", "timeout before 3 s"),
        ("KeyError: 'a'", "KeyError: 'b'"),
        ("a decade of facade", "a facade of decade"),
    ],
)
def test_errors_that_differ_in_words_have_different_patterns(one: str, other: str) -> None:
    """R-137: letters alone are words, however much they look like hexadecimal digits."""
    assert error_pattern(one) != error_pattern(other)


@given(st.text(max_size=3_000))
def test_a_pattern_is_bounded_not_empty_and_stable(error: str) -> None:
    found = error_pattern(error)

    assert 0 < len(found) <= MAX_PATTERN
    assert re.search(r"[0-9]", found) is None
    assert error_pattern(found) == found


@given(st.text(alphabet="ab 7/.:-_<>'\"\n", max_size=200), st.integers(0, 10**6))
def test_numbers_do_not_change_the_pattern(error: str, number: int) -> None:
    assert error_pattern(f"{error} x {number} y") == error_pattern(f"{error} x {number + 1} y")


def test_a_huge_error_is_fast() -> None:
    """No expression backtracks: a megabyte takes milliseconds."""
    for part in ("a1-", "/a", "0x", "task_", "2026-02-08T", "a://", "1.", "\n ", "é"):
        assert error_pattern(part * 400_000)
