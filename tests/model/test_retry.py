"""Policies, delays, and the decision to retry or to dead-letter."""

import random
from dataclasses import FrozenInstanceError, replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lineshaft.errors import InvalidInputError
from lineshaft.integrations.officeplane.preset import OFFICEPLANE
from lineshaft.model.retry import (
    DEFAULT_NO_RETRY_ON,
    DEFAULT_RETRY_ON,
    LONGEST_DELAY_SEC,
    DeadLetterDecision,
    DeadLetterReason,
    FailureCategory,
    RetryDecision,
    RetryPolicy,
    Strategy,
    category_of,
    decide_failure,
    is_poison_pill,
    models_for_next,
    retry_delay,
)

units = st.floats(0, 1, exclude_max=True)
policies = st.builds(
    RetryPolicy,
    strategy=st.sampled_from(Strategy),
    initial_delay_sec=st.floats(0, 10_000),
    backoff_multiplier=st.floats(1, 100),
    max_delay_sec=st.none() | st.floats(0, 100_000),
    jitter=st.booleans(),
)
categories = st.sampled_from([*FailureCategory, "flaky_network", "heartbeat_timeout"])


def middle() -> float:
    return 0.5


def decide(**changes: Any) -> RetryDecision | DeadLetterDecision:
    """The decision after a first crash of an ordinary task, with these changes."""
    facts: dict[str, Any] = {
        "category": "crash",
        "attempts": 1,
        "max_attempts": 3,
        "policy": RetryPolicy(),
        "failed_agents": ["a"],
        "uniform": middle,
    }
    return decide_failure(**(facts | changes))


class TestCategories:
    @pytest.mark.parametrize(
        ("reason", "category"),
        [
            ("heartbeat_timeout", "crash"),
            ("claim_expired", "crash"),
            ("agent_restarted", "crash"),
            ("execution_limit", "timeout"),
            ("validation", "invalid_output"),
            ("incomplete_decision_report", "invalid_output"),
            ("incomplete_decision_report: no tradeoffs", "invalid_output"),
            ("rate_limit", "rate_limit"),
            (" Rate-Limit ", "rate_limit"),
            ("", "crash"),
        ],
    )
    def test_system_reasons_have_a_category(self, reason: str, category: str) -> None:
        """F-25: reasons of the reaper and of gates map to categories that policies name."""
        assert category == category_of(reason)

    def test_an_agents_own_category_is_kept(self) -> None:
        assert category_of(" Flaky network: eu-1 ") == "Flaky network: eu-1"

    @given(st.text())
    def test_a_category_maps_to_itself(self, text: str) -> None:
        assert category_of(category_of(text)) == category_of(text)


class TestPolicy:
    def test_defaults(self) -> None:
        """R-019: exponential, 10, 2.0, 300, true, and the two lists."""
        policy = RetryPolicy()

        assert (policy.strategy, policy.initial_delay_sec, policy.backoff_multiplier) == (
            "exponential",
            10,
            2,
        )
        assert (policy.max_delay_sec, policy.jitter) == (300, True)
        assert policy.retried == ("timeout", "crash", "rate_limit", "invalid_output")
        assert policy.not_retried == ("auth_failure", "budget_exceeded", "cancelled")

    @pytest.mark.parametrize(
        ("field", "value", "rule"),
        [
            ("strategy", "linear", "must be one of exponential, fixed, immediate, got 'linear'"),
            ("initial_delay_sec", -1, "must be a number from 0 to 31536000, got -1"),
            ("initial_delay_sec", True, "must be a number from 0 to 31536000, got True"),
            ("initial_delay_sec", float("nan"), "must be a number from 0 to 31536000, got nan"),
            ("initial_delay_sec", "10", "must be a number from 0 to 31536000, got '10'"),
            ("backoff_multiplier", 0.5, "must be a number from 1 to 1000, got 0.5"),
            ("backoff_multiplier", 10**400, "must be a number from 1 to 1000, got 1000"),
            pytest.param(
                "backoff_multiplier", 10**5000, "must be a number from 1 to 1000, got a number", id="huge"
            ),
            ("max_delay_sec", float("inf"), "must be a number from 0 to 31536000, got inf"),
            ("jitter", 0.5, "must be true or false, got 0.5"),
            ("retry_on", "timeout", "must be a list of category names, got 'timeout'"),
            ("retry_on", [""], "must be a list of category names, got ['']"),
            ("no_retry_on", [3], "must be a list of category names, got [3]"),
        ],
    )
    def test_a_fault_names_the_field_the_rule_and_the_value(
        self, field: str, value: object, rule: str
    ) -> None:
        fields: dict[str, Any] = {field: value}
        with pytest.raises(InvalidInputError) as caught:
            RetryPolicy(**fields)

        assert str(caught.value).startswith(f"{field}: {rule}")

    def test_all_faults_are_reported_at_once(self) -> None:
        with pytest.raises(InvalidInputError) as caught:
            RetryPolicy(initial_delay_sec=-1, max_delay_sec=-2)

        assert [place for place, _ in caught.value.errors] == ["initial_delay_sec", "max_delay_sec"]

    def test_text_from_json_is_normalised(self) -> None:
        fields: dict[str, Any] = {"strategy": "fixed", "retry_on": ["Timeout", "timeout", "claim_expired"]}
        policy = RetryPolicy(**fields)

        assert policy.strategy is Strategy.FIXED
        assert policy.retry_on == ("timeout", "crash")

    def test_it_is_immutable(self) -> None:
        with pytest.raises(FrozenInstanceError):
            RetryPolicy().jitter = False  # type: ignore[misc]

    def test_the_lists_decide(self) -> None:
        """R-118: a category in neither list is retried like a crash."""
        policy = RetryPolicy()

        assert all(policy.retries(category) for category in (*DEFAULT_RETRY_ON, "dependency", "my_own"))
        assert not any(policy.retries(category) for category in DEFAULT_NO_RETRY_ON)

    def test_an_explicit_retry_on_is_complete(self) -> None:
        """R-118: once retry_on is given, a category in neither list is not retried, not even a crash."""
        policy = RetryPolicy(retry_on=("timeout", "my_own"))

        assert policy.retries("timeout")
        assert policy.retries("my_own")
        assert not policy.retries("crash")
        assert not policy.retries("my_other")

    def test_an_explicit_retry_on_equal_to_the_default_is_still_explicit(self) -> None:
        """R-118: whether the caller gave the list matters, not only its content."""
        assert RetryPolicy().retries("dependency")
        assert not RetryPolicy(retry_on=DEFAULT_RETRY_ON).retries("dependency")

    def test_an_unlisted_category_is_not_retried_if_crashes_are_not(self) -> None:
        """R-118."""
        policy = RetryPolicy(no_retry_on=("crash",))

        assert not policy.retries("my_own")
        assert policy.retries("timeout")
        assert policy.retries("auth_failure") is False

    def test_an_error_of_the_handler_is_a_crash_wherever_only_crashes_are_named(self) -> None:
        """R-118: policies were written before the two were told apart."""
        assert RetryPolicy().retries("error")
        assert RetryPolicy(retry_on=("crash",)).retries("error")
        assert not RetryPolicy(retry_on=("timeout",)).retries("error")
        assert not RetryPolicy(no_retry_on=("crash",)).retries("error")
        only_error = RetryPolicy(retry_on=("error",))
        assert (only_error.retries("error"), only_error.retries("crash")) == (True, False)
        only_lost = RetryPolicy(no_retry_on=("error",))
        assert (only_lost.retries("error"), only_lost.retries("crash")) == (False, True)
        both = RetryPolicy(retry_on=("error",), no_retry_on=("crash",))
        assert (both.retries("error"), both.retries("crash")) == (True, False)
        assert category_of("Error: KeyError") == "error"

    def test_an_explicit_retry_on_wins_over_a_default(self) -> None:
        """U15: explicit fields win; of two explicit lists, no_retry_on wins."""
        assert RetryPolicy(retry_on=("auth_failure",)).retries("auth_failure")
        assert not RetryPolicy(retry_on=("auth_failure",), no_retry_on=("auth_failure",)).retries(
            "auth_failure"
        )

    @pytest.mark.parametrize(
        "category", ["invalid_input", "budget_exceeded", "cancelled", "step_mismatch", "signal_timeout"]
    )
    def test_some_categories_are_never_retried(self, category: str) -> None:
        """R-118, R-235, R-176: with any policy."""
        assert not RetryPolicy(retry_on=(category,), no_retry_on=()).retries(category)

    @given(policies, categories)
    def test_an_excluded_category_is_not_retried(self, policy: RetryPolicy, category: str) -> None:
        refusing = replace(policy, no_retry_on=(category,))

        assert refusing.refuses(category_of(category))
        assert not refusing.retries(category_of(category))


class TestDelay:
    def test_fixed_and_immediate(self) -> None:
        """R-115, F-24."""
        fixed = RetryPolicy(strategy=Strategy.FIXED, initial_delay_sec=7)
        immediate = RetryPolicy(strategy=Strategy.IMMEDIATE, initial_delay_sec=7)

        assert [retry_delay(fixed, n, middle) for n in (1, 2, 9)] == [7, 7, 7]
        assert [retry_delay(immediate, n, middle) for n in (1, 2, 9)] == [0, 0, 0]

    def test_jitter_spreads_by_half(self) -> None:
        """R-114: ×0.5 to ×1.5, for fixed delays too."""
        for strategy in (Strategy.EXPONENTIAL, Strategy.FIXED):
            policy = RetryPolicy(strategy=strategy)

            assert retry_delay(policy, 1, lambda: 0.0) == 5
            assert retry_delay(policy, 1, lambda: 0.999) == pytest.approx(14.99)

    def test_jitter_never_exceeds_the_cap(self) -> None:
        """F-24: below the cap the spread is unchanged."""
        assert retry_delay(RetryPolicy(), 20, lambda: 0.999) == 300
        assert retry_delay(RetryPolicy(), 20, lambda: 0.0) == 150

    @given(policies, st.integers(1, 10_000), units)
    def test_it_stays_within_its_bounds(self, policy: RetryPolicy, failures: int, unit: float) -> None:
        """R-114: never negative, never above max_delay_sec, and without a cap never above a year."""
        most = LONGEST_DELAY_SEC if policy.max_delay_sec is None else policy.max_delay_sec

        assert 0 <= retry_delay(policy, failures, lambda: unit) <= most

    @given(policies, st.integers(1, 9_999))
    def test_delays_never_shrink(self, policy: RetryPolicy, failures: int) -> None:
        """R-112: more failures never mean a shorter delay."""
        assert retry_delay(policy, failures, middle) <= retry_delay(policy, failures + 1, middle)

    def test_no_number_of_failures_overflows(self) -> None:
        """U3: officeplane has no cap, and 5·5^9999 exceeds a float."""
        assert retry_delay(OFFICEPLANE.retry, 10_000, middle) == LONGEST_DELAY_SEC
        assert retry_delay(RetryPolicy(initial_delay_sec=0, max_delay_sec=None), 10_000, middle) == 0

    @given(policies, st.integers(1, 50), st.integers())
    def test_a_seed_gives_the_same_delay(self, policy: RetryPolicy, failures: int, seed: int) -> None:
        """R-114: the caller provides the random numbers."""
        first, second = random.Random(seed), random.Random(seed)

        assert retry_delay(policy, failures, first.random) == retry_delay(policy, failures, second.random)

    def test_there_is_no_delay_without_a_failure(self) -> None:
        with pytest.raises(ValueError, match="at least 1, got 0"):
            retry_delay(RetryPolicy(), 0, middle)


class TestDecision:
    def test_a_first_crash_is_retried(self) -> None:
        """R-110."""
        assert decide() == RetryDecision(10)

    @pytest.mark.parametrize("reason", ["heartbeat_timeout", "claim_expired", "agent_restarted"])
    def test_a_lost_lease_is_retried_as_a_crash(self, reason: str) -> None:
        """F-25: also with an explicit list."""
        assert decide(category=reason, policy=RetryPolicy(retry_on=("crash",))) == RetryDecision(10)

    def test_the_last_failed_attempt_dead_letters_the_task(self) -> None:
        """R-111: at max_attempts, not after."""
        assert isinstance(decide(attempts=2), RetryDecision)
        assert decide(attempts=3) == DeadLetterDecision(DeadLetterReason.MAX_ATTEMPTS, poison_pill=False)
        assert decide(attempts=1, max_attempts=1) == DeadLetterDecision(
            DeadLetterReason.MAX_ATTEMPTS, poison_pill=False
        )

    @pytest.mark.parametrize("category", ["auth_failure", "cancelled", "invalid_input"])
    def test_some_categories_dead_letter_immediately(self, category: str) -> None:
        """R-118."""
        assert decide(category=category) == DeadLetterDecision(
            DeadLetterReason.NOT_RETRYABLE, poison_pill=False
        )

    def test_an_attempt_over_its_budget_dead_letters_the_task(self) -> None:
        """R-235: no retry."""
        assert decide(category="budget_exceeded") == DeadLetterDecision(
            DeadLetterReason.BUDGET_EXCEEDED, poison_pill=False
        )

    def test_a_step_mismatch_is_not_a_poison_pill(self) -> None:
        """Its cause is a deployment, not the task."""
        assert decide(
            category="step_mismatch", attempts=3, max_attempts=9, failed_agents=["a", "b", "c"]
        ) == DeadLetterDecision(DeadLetterReason.NOT_RETRYABLE, poison_pill=False)

    def test_two_agents_and_three_failures_are_a_poison_pill(self) -> None:
        """R-136: remaining attempts are skipped."""
        assert decide(attempts=3, max_attempts=9, failed_agents=["a", "b", "b"]) == DeadLetterDecision(
            DeadLetterReason.POISON_PILL, poison_pill=True
        )

    @pytest.mark.parametrize("changes", [{"max_attempts": 3}, {"category": "auth_failure"}])
    def test_the_poison_flag_is_set_for_every_reason(self, changes: dict[str, Any]) -> None:
        """R-136, F-26: also when the attempts end at the same time."""
        decision = decide(attempts=3, failed_agents=["a", "b", "a"], **changes)

        assert isinstance(decision, DeadLetterDecision)
        assert decision.poison_pill

    @pytest.mark.parametrize(
        ("failures", "agents"),
        [(3, ["a", "a", "a"]), (2, ["a", "b"]), (3, ["a", None, None]), (3, [None, None, None]), (3, [])],
    )
    def test_not_a_poison_pill(self, failures: int, agents: list[str | None]) -> None:
        """F-26, F-37: the same agent three times, too few failures, failures without an agent."""
        assert not is_poison_pill(failures, agents)

    def test_the_total_cost_can_end_the_retries(self) -> None:
        """R-238: no attempt after the limit over all attempts."""
        limit = Decimal("1.00")

        assert isinstance(decide(total_cost_usd=Decimal("0.999999"), max_total_cost_usd=limit), RetryDecision)
        assert decide(total_cost_usd=Decimal(1), max_total_cost_usd=limit) == DeadLetterDecision(
            DeadLetterReason.BUDGET_EXCEEDED, poison_pill=False
        )
        assert isinstance(decide(total_cost_usd=Decimal(5000)), RetryDecision)

    def test_fallback_models_from_the_second_failure_on(self) -> None:
        """R-117, F-28: derived from the count, so that a revived task starts with its preferences."""
        models = {"model_preferences": ["sonnet", "gpt"], "fallback_models": ["haiku"]}

        assert decide(attempts=1, **models) == RetryDecision(10, ("sonnet", "gpt"))
        assert decide(attempts=2, **models) == RetryDecision(20, ("haiku",))
        assert models_for_next(0, **models) == ("sonnet", "gpt")
        assert models_for_next(2, ["sonnet"], []) == ("sonnet",)

    @given(
        categories,
        st.integers(1, 12),
        st.integers(1, 12),
        policies,
        st.lists(st.sampled_from(["a", "b", "c", None]), max_size=12),
    )
    def test_a_retry_is_always_allowed_by_every_rule(
        self,
        category: str,
        attempts: int,
        max_attempts: int,
        policy: RetryPolicy,
        agents: list[str | None],
    ) -> None:
        """R-111, R-118, R-136: exactly if attempts are left, the category allows it, and no poison pill."""
        decision = decide(
            category=category,
            attempts=attempts,
            max_attempts=max_attempts,
            policy=policy,
            failed_agents=agents,
        )
        poison = (
            attempts >= 3
            and len(set(agents) - {None}) >= 2
            and category_of(category)
            not in {
                "step_mismatch",
                "signal_timeout",
            }
        )
        allowed = attempts < max_attempts and policy.retries(category_of(category)) and not poison

        assert isinstance(decision, RetryDecision) == allowed
        if isinstance(decision, DeadLetterDecision):
            assert decision.poison_pill == poison

    @given(st.text(min_size=1))
    def test_an_unknown_category_is_treated_like_a_crash(self, category: str) -> None:
        """R-118."""
        assume(category_of(category) not in tuple(FailureCategory))

        assert decide(category=category) == decide(category="crash")
