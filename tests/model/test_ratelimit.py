"""Rate limits: detection, the wait, and the decision."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.model.ratelimit import (
    LONGEST_RETRY_AFTER_SEC,
    MAX_LONG_WAITS,
    CountsAsFailure,
    QuotaSpent,
    WaitForLimit,
    backoff_wait,
    decide_rate_limit,
    is_rate_limit,
    is_spent_quota,
    parse_retry_after,
    retry_after_in_error,
)
from lineshaft.model.retry import FailureCategory

NOW = datetime(2026, 2, 8, 9, 0, tzinfo=UTC)
units = st.floats(0, 1, exclude_max=True)


def nothing() -> float:
    return 0.0


class TestDetection:
    @pytest.mark.parametrize(
        "text",
        [
            "Rate limit reached for gpt-4o",
            "you are being RATE LIMITED",
            "HTTP 429",
            "429",
            "status_code=429: slow down",
            '{"status":429}',
            "(429) please wait",
            "failed with 429.",
            "Too Many Requests",
            "Quota exceeded for this project",
            "Retry-After: 30",
            "openai.RateLimitError",
            "AnthropicRateLimitError: slow down",
            "error code rate_limit_exceeded",
            '{"retry_after": 0.5}',
            "insufficient balance",
            "You exceeded your current quota",
        ],
    )
    def test_indicators_are_found_in_any_case(self, text: str) -> None:
        """R-210."""
        assert is_rate_limit(text)
        assert is_rate_limit(text.upper()) or "RateLimit" in text

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "connection reset",
            "task_429 failed",
            "4290 tokens",
            "1429",
            "0.429 s",
            "429.5 tokens",
            "429ms",
            "1,429 rows",
            "429,000 rows",
            "see issue #429",
            "cost $429",
            'File "app.py", line 429, in run',
            "app.py:429: error",
            "run-429-b",
            "https://example.com/issues/429",
            "a separate limit applies",
            "we retry after fixing the tests",
        ],
    )
    def test_other_texts_are_not_rate_limits(self, text: str) -> None:
        """F-17: 429 as a whole number only, not in ids, amounts or line numbers."""
        assert not is_rate_limit(text)

    @given(st.integers(0, 10**6), st.text("0123456789abcdef_", min_size=1, max_size=4))
    def test_a_longer_word_with_429_is_not_a_status(self, number: int, tail: str) -> None:
        """F-17."""
        assert not is_rate_limit(f"id {number}429")
        assert not is_rate_limit(f"id 429{tail}")

    def test_the_category_decides_before_the_text(self) -> None:
        """R-210: the agent's category wins, except those of unknown failures."""
        assert is_rate_limit("try later", "rate_limit")
        assert is_rate_limit("HTTP 429", "crash")
        assert is_rate_limit("HTTP 429", "error")
        assert is_rate_limit("HTTP 429", "api_error")
        unspecific = {FailureCategory.CRASH, FailureCategory.ERROR}
        for category in set(FailureCategory) - unspecific - {FailureCategory.RATE_LIMIT}:
            assert not is_rate_limit("expected status 429, got 200", category)

    @pytest.mark.parametrize(
        ("text", "lasting"),
        [
            ("Quota exceeded", True),
            ("QuotaExceeded", True),
            ("Insufficient Balance", True),
            ("insufficient_quota", True),
            ("You exceeded your current quota, check your plan", True),
            ("429 Too Many Requests", False),
            ("rate limit", False),
        ],
    )
    def test_a_spent_quota_differs_from_a_temporary_limit(self, text: str, lasting: bool) -> None:
        """R-217."""
        assert is_spent_quota(text) == lasting
        assert is_rate_limit(text)


class TestRetryAfter:
    @pytest.mark.parametrize(
        ("value", "seconds"),
        [
            (30, 30),
            (1.5, 1.5),
            ("120", 120),
            (" 1.5 ", 1.5),
            ("0", 0),
            ("30s", 30),
            ("2 minutes", 120),
            ("2 days", 172_800),
            ("1d12h", 129_600),
            ("Sun, 08 Feb 2026 09:02:00 GMT", 120),
            ("Sunday, 08-Feb-26 09:02:00 GMT", 120),
            ("Sun Feb  8 09:02:00 2026", 120),
            ("Sun, 08 Feb 2026 08:00:00 GMT", 0),
            ("429 Too Many Requests. Retry-After: 120", 120),
            ("rate limit, retry after 30s", 30),
            ('{"error": "slow down", "retry_after": 0.25}', 0.25),
            ("retry-after-ms: 1500", 1.5),
            ("Please try again in 6m0s.", 360),
            ("Please try again in 1.242s. Visit the console", 1.242),
            ("try again in 28ms", 0.028),
            ("Retrying in 0.5 hours", 1800),
            ("'Retry-After': 'Sun, 08 Feb 2026 09:00:10 GMT', 'Server': 'x'", 10),
        ],
    )
    def test_retry_after_is_parsed(self, value: Any, seconds: float) -> None:
        """R-212: seconds, fractions, HTTP's three forms of a date, and either of them in an error text."""
        assert parse_retry_after(value, NOW) == pytest.approx(seconds)

    @pytest.mark.parametrize(
        "value",
        [
            None,
            "",
            "soon",
            True,
            float("nan"),
            "HTTP 429",
            "retry after 2026-02-08T09:02:00Z",
            "retry after the weekend",
            "Sun, 99 Feb 2026 09:02:00 GMT",
            "no entry in 5 tables",
        ],
    )
    def test_other_values_are_none(self, value: Any) -> None:
        """R-212: then Lineshaft chooses the wait."""
        assert parse_retry_after(value, NOW) is None

    @pytest.mark.parametrize(
        ("value", "seconds"),
        [
            (-5, 0),
            ("-5", 0),
            ("Retry-After: -5", 0),
            (1_000_000, 691_200),
            (float("inf"), 691_200),
            pytest.param(10**400, 691_200, id="huge"),
            pytest.param("9" * 400, 691_200, id="huge text"),
            ("9 days", 691_200),
            ("Tue, 17 Feb 2026 09:00:00 GMT", 691_200),
        ],
    )
    def test_it_is_clamped(self, value: Any, seconds: float) -> None:
        """R-216: from 0 to 8 days."""
        assert parse_retry_after(value, NOW) == seconds

    @pytest.mark.parametrize("error", ["429", " 429\n", "-1", "1.5"])
    def test_an_error_that_is_only_a_number_has_no_wait(self, error: str) -> None:
        """R-212, R-216: it is a status."""
        assert retry_after_in_error(error, NOW) is None

    @pytest.mark.parametrize(
        ("error", "seconds"), [("30s", 30), ("429 Too Many Requests. Retry-After: 7", 7), ("no", None)]
    )
    def test_any_other_error_may_have_one(self, error: str, seconds: float | None) -> None:
        """R-212."""
        assert retry_after_in_error(error, NOW) == seconds

    def test_the_bound_is_a_setting(self) -> None:
        """R-216: an operator can shorten waits."""
        assert parse_retry_after(7200, NOW, longest_sec=3600) == 3600

    @given(st.integers(-10_000, 10_000))
    def test_a_date_equals_its_seconds(self, seconds: int) -> None:
        """R-212."""
        date = format_datetime(NOW + timedelta(seconds=seconds), usegmt=True)

        assert parse_retry_after(date, NOW) == parse_retry_after(seconds, NOW)

    @given(st.text() | st.floats() | st.integers())
    def test_any_text_is_accepted(self, value: str | float) -> None:
        """R-216: the result is None or within bounds."""
        wait = parse_retry_after(value, NOW)

        assert wait is None or 0 <= wait <= LONGEST_RETRY_AFTER_SEC

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize(
        "text", ["retry after " + "1" * 50_000 + "x", "retry after" + " " * 50_000, ".a" * 50_000]
    )
    def test_hostile_texts_are_fast(self, text: str) -> None:
        """General: an agent's error text can't stall the server."""
        assert parse_retry_after(text, NOW) is None
        assert not is_rate_limit(text)


class TestBackoff:
    def test_it_doubles_from_60_to_an_hour(self) -> None:
        """R-212, F-17: the number of waits is used."""
        assert [backoff_wait(n, nothing) for n in range(8)] == [60, 120, 240, 480, 960, 1920, 3600, 3600]

    def test_up_to_a_tenth_is_added(self) -> None:
        """R-212."""
        assert backoff_wait(0, lambda: 0.5) == pytest.approx(63)

    @given(st.integers(0, 10_000), units)
    def test_it_never_exceeds_the_cap(self, waits: int, unit: float) -> None:
        """F-17: with jitter too."""
        wait = backoff_wait(waits, lambda: unit)

        assert backoff_wait(waits, nothing) <= wait <= min(backoff_wait(waits, nothing) * 1.1, 3600)


class TestDecision:
    def test_a_wait_uses_no_attempt_and_slows_others_for_half_its_time(self) -> None:
        """U13, R-212, R-214."""
        assert decide_rate_limit(
            waits_so_far=0, retry_after_sec=30, spent_quota=False, uniform=nothing
        ) == WaitForLimit(wait_sec=30, slowdown_sec=15, waits=1)
        assert decide_rate_limit(
            waits_so_far=2, retry_after_sec=None, spent_quota=True, uniform=nothing
        ) == WaitForLimit(wait_sec=240, slowdown_sec=120, waits=3)

    def test_zero_seconds_is_not_the_same_as_no_value(self) -> None:
        """R-212, R-216."""
        assert decide_rate_limit(
            waits_so_far=0, retry_after_sec=0, spent_quota=False, uniform=nothing
        ) == WaitForLimit(wait_sec=0, slowdown_sec=0, waits=1)

    @pytest.mark.parametrize(("spent_quota", "end"), [(False, CountsAsFailure()), (True, QuotaSpent())])
    def test_after_ten_waits_it_is_a_failure(self, spent_quota: bool, end: object) -> None:
        """U13, R-217: a failed attempt, or for a spent quota a dead letter."""
        waits = 0
        for _ in range(10):
            decision = decide_rate_limit(
                waits_so_far=waits, retry_after_sec=1, spent_quota=spent_quota, uniform=nothing
            )
            assert isinstance(decision, WaitForLimit)
            waits = decision.waits

        assert end == decide_rate_limit(
            waits_so_far=waits, retry_after_sec=1, spent_quota=spent_quota, uniform=nothing
        )

    def test_a_wait_of_a_minute_that_the_provider_asked_for_is_not_counted(self) -> None:
        """R-217: 50 times in a row, then it counts like any other."""
        waits, long_waits = 3, 0
        for n in range(1, MAX_LONG_WAITS + 11):
            decision = decide_rate_limit(
                waits_so_far=waits,
                long_waits_so_far=long_waits,
                retry_after_sec=60,
                spent_quota=True,
                uniform=nothing,
            )
            if n > MAX_LONG_WAITS + 7:
                assert decision == QuotaSpent()
                continue
            assert isinstance(decision, WaitForLimit)
            waits, long_waits = decision.waits, decision.long_waits
            assert (waits, long_waits) == ((3, n) if n <= MAX_LONG_WAITS else (n - 47, MAX_LONG_WAITS))

    @pytest.mark.parametrize(
        ("asked", "decision"),
        [
            (59.9, WaitForLimit(wait_sec=59.9, slowdown_sec=29.95, waits=1)),
            (None, WaitForLimit(wait_sec=60, slowdown_sec=30, waits=1)),
            (3_600, WaitForLimit(wait_sec=3_600, slowdown_sec=1_800, waits=0, long_waits=1)),
            (18_000, WaitForLimit(wait_sec=18_000, slowdown_sec=18_000, waits=0, long_waits=1)),
        ],
    )
    def test_a_window_holds_others_back_until_its_end(
        self, asked: float | None, decision: WaitForLimit
    ) -> None:
        """R-214: beyond an hour; a shorter wait only for half of it."""
        decided = decide_rate_limit(waits_so_far=0, retry_after_sec=asked, spent_quota=False, uniform=nothing)

        assert decided == decision
        assert decision.is_window is (asked == 18_000)

    def test_a_policy_can_exclude_waiting(self) -> None:
        """R-118: rate_limit in no_retry_on."""
        assert (
            decide_rate_limit(
                waits_so_far=0, retry_after_sec=1, spent_quota=True, uniform=nothing, refused=True
            )
            == CountsAsFailure()
        )
