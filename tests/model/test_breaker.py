"""The circuit breaker's state machine and its configuration."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from lineshaft.errors import InvalidInputError, InvalidTransitionError
from lineshaft.model.breaker import (
    Admission,
    Breaker,
    BreakerChange,
    BreakerConfig,
    BreakerEvent,
    BreakerPolicy,
    BreakerState,
    admission,
    counts_against,
    force_open,
    hand_out_probe,
    on_failure,
    on_probe_gone,
    on_success,
    policy_from_document,
    reset,
)

NOW = datetime(2026, 2, 8, 9, 0, tzinfo=UTC)
CONFIG = BreakerConfig()
KEY = "eng-backend"
OPEN = Breaker(state=BreakerState.OPEN, failures=5, last_failure=NOW, opened_at=NOW)
PROBED_AT = NOW + timedelta(seconds=61)
PROBED = hand_out_probe(OPEN, CONFIG, task_id="probe", now=PROBED_AT).breaker


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def fail(breaker: Breaker, seconds: float, *, task_id: str = "t", counts: bool = True) -> BreakerChange:
    return on_failure(breaker, CONFIG, key=KEY, task_id=task_id, now=at(seconds), counts=counts)


def failed(times: int, every: float = 1) -> Breaker:
    breaker = Breaker()
    for n in range(times):
        breaker = fail(breaker, n * every).breaker
    return breaker


class TestConfig:
    def test_defaults(self) -> None:
        """R-182."""
        assert BreakerConfig(failure_threshold=5, cooldown_sec=300, half_open_after_sec=60) == CONFIG

    @pytest.mark.parametrize(
        ("field", "value", "rule"),
        [
            ("failure_threshold", 0, "must be a whole number from 1 to 1000000, got 0"),
            ("failure_threshold", 2.5, "must be a whole number from 1 to 1000000, got 2.5"),
            ("failure_threshold", True, "must be a whole number from 1 to 1000000, got True"),
            ("cooldown_sec", 0, "must be a number from 0.05 to 31536000, got 0"),
            ("half_open_after_sec", -1, "must be a number from 0 to 31536000, got -1"),
            ("half_open_after_sec", 1e300, "must be a number from 0 to 31536000, got 1e+300"),
        ],
    )
    def test_a_fault_names_the_field_the_rule_and_the_value(
        self, field: str, value: object, rule: str
    ) -> None:
        fields: dict[str, Any] = {field: value}
        with pytest.raises(InvalidInputError) as caught:
            BreakerConfig(**fields)

        assert str(caught.value) == f"{field}: {rule}"

    def test_the_documented_example_file(self) -> None:
        """R-182: overrides are merged over the defaults."""
        policy, warnings = policy_from_document(
            {
                "defaults": {"failureThreshold": 6, "cooldownSeconds": 200, "halfOpenAfter": 30},
                "overrides": {
                    "ops-security": {"failureThreshold": 3},
                    "biz-marketing": {"failureThreshold": 10, "halfOpenAfter": 1.5},
                },
            }
        )

        assert warnings == ()
        assert policy.config_for("eng-backend") == BreakerConfig(
            failure_threshold=6, cooldown_sec=200, half_open_after_sec=30
        )
        assert policy.config_for("ops-security") == BreakerConfig(
            failure_threshold=3, cooldown_sec=200, half_open_after_sec=30
        )
        assert policy.config_for("biz-marketing") == BreakerConfig(
            failure_threshold=10, cooldown_sec=200, half_open_after_sec=1.5
        )

    @pytest.mark.parametrize("document", [None, {}, {"defaults": None, "overrides": None}])
    def test_an_empty_file_means_the_defaults(self, document: object) -> None:
        """R-182."""
        policy, warnings = policy_from_document(document)

        assert (policy.config_for("any"), warnings) == (CONFIG, ())

    @pytest.mark.parametrize(
        ("document", "warning"),
        [
            ([1, 2], "the file: must be a mapping, got [1, 2]; using the defaults"),
            ("text", "the file: must be a mapping, got 'text'; using the defaults"),
            ({"defaults": 5}, "defaults: must be a mapping, got 5; using the defaults"),
            ({"overrides": ["x"]}, "overrides: must be a mapping, got ['x']; using the defaults"),
            ({"overrides": {"x": 3}}, "overrides.x: must be a mapping, got 3; using the defaults"),
            ({"overrides": {7: {}}}, "overrides: names must be text, got 7; ignored"),
            ({"default": {}}, "default: unknown section, ignored; expected defaults and overrides"),
            (
                {"defaults": {"failureTreshold": 3}},
                (
                    "defaults.failureTreshold: unknown setting, ignored; "
                    "expected one of failureThreshold, cooldownSeconds, halfOpenAfter"
                ),
            ),
            (
                {"defaults": {"failureThreshold": "many"}},
                "defaults.failureThreshold: must be a whole number from 1 to 1000000, got 'many'; using 5",
            ),
        ],
    )
    def test_malformed_values_are_reported_and_replaced_by_the_defaults(
        self, document: object, warning: str
    ) -> None:
        """R-182: a broken file doesn't stop the queue."""
        policy, warnings = policy_from_document(document)

        assert warnings == (warning,)
        assert policy.config_for("x") == CONFIG

    def test_a_bad_value_does_not_affect_the_others(self) -> None:
        """R-182: the value it would have overridden is used."""
        policy, warnings = policy_from_document(
            {
                "defaults": {"failureThreshold": 7},
                "overrides": {"x": {"failureThreshold": -1, "halfOpenAfter": 5}},
            }
        )

        assert policy.config_for("x") == BreakerConfig(failure_threshold=7, half_open_after_sec=5)
        assert len(warnings) == 1

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["defaults", "overrides", "failureThreshold", "halfOpenAfter", "x"])
                | st.integers(),
                inner,
                max_size=4,
            )
        ),
    )

    @given(json_values)
    def test_any_file_is_accepted(self, document: object) -> None:
        """R-182: for any YAML document."""
        policy, warnings = policy_from_document(document)

        assert isinstance(policy, BreakerPolicy)
        assert warnings or isinstance(document, dict) or document is None


class TestClosed:
    def test_the_threshold_opens_it_with_an_alert(self) -> None:
        """R-185, F-6: at 5, not after."""
        change = fail(failed(4), 4)

        assert change == BreakerChange(
            Breaker(state=BreakerState.OPEN, failures=5, last_failure=at(4), opened_at=at(4)),
            BreakerEvent.OPENED,
            "Circuit breaker OPEN for eng-backend",
        )

    def test_below_the_threshold_it_stays_closed(self) -> None:
        """R-181."""
        breaker = failed(4)

        assert (breaker.state, breaker.failures) == (BreakerState.CLOSED, 4)
        assert admission(breaker, CONFIG, at(4)) is Admission.FLOW

    def test_a_success_resets_the_count(self) -> None:
        """F-3, R-091: only failures in a row count."""
        breaker = on_success(failed(4), task_id="t").breaker

        assert breaker.failures == 0
        assert fail(breaker, 5).event is None

    def test_a_success_with_nothing_to_reset_changes_nothing(self) -> None:
        """R-091: so nothing is written."""
        breaker = Breaker()

        assert on_success(breaker, task_id="t").breaker is breaker

    @pytest.mark.parametrize(("pause", "failures"), [(300, 5), (300.001, 1)])
    def test_old_failures_do_not_count(self, pause: float, failures: int) -> None:
        """R-186: once more than cooldownSeconds have passed since the last one."""
        assert fail(failed(4), 3 + pause).breaker.failures == failures

    def test_slow_failures_count_while_each_is_within_the_cooldown(self) -> None:
        """R-186: the time since the last one matters, not since the first."""
        assert failed(5, every=299).state is BreakerState.OPEN

    def test_a_clock_that_lags_does_not_move_the_last_failure_back(self) -> None:
        breaker = fail(fail(Breaker(), 10).breaker, 5).breaker

        assert (breaker.failures, breaker.last_failure) == (2, at(10))

    @pytest.mark.parametrize(
        ("category", "counted"),
        [
            ("cancelled", False),
            ("rate_limit", False),
            ("budget_exceeded", False),
            ("dependency", False),
            ("step_mismatch", False),
            ("signal_timeout", False),
            ("crash", True),
            ("error", True),
            ("heartbeat_timeout", True),
            ("timeout", True),
            ("invalid_output", True),
            ("auth_failure", True),
            ("invalid_input", True),
            ("my_own", True),
        ],
    )
    def test_which_failures_count(self, category: str, counted: bool) -> None:
        """F-4, R-176, U13: each but cancel, rate limit, budget, dependency and step mismatch."""
        assert counts_against(category) == counted

    def test_a_failure_that_does_not_count_changes_nothing(self) -> None:
        """F-4."""
        breaker = failed(4)

        assert fail(breaker, 5, counts=False).breaker is breaker


class TestOpen:
    @pytest.mark.parametrize(
        ("seconds", "expected"), [(0, Admission.BLOCK), (60, Admission.BLOCK), (60.001, Admission.PROBE)]
    )
    def test_it_blocks_until_the_pause_is_over(self, seconds: float, expected: Admission) -> None:
        """R-181, R-183: strictly after openedAt + halfOpenAfter."""
        assert admission(OPEN, CONFIG, at(seconds)) is expected

    def test_reading_does_not_use_up_the_probe(self) -> None:
        """F-1: after any number of reads the probe is still available."""
        assert {admission(OPEN, CONFIG, at(61)) for _ in range(3)} == {Admission.PROBE}
        assert hand_out_probe(OPEN, CONFIG, task_id="t", now=at(61)).breaker.probe_task_id == "t"

    def test_the_claim_of_a_probe_makes_it_half_open(self) -> None:
        """R-180, F-1, F-6: half_open_at and the probe are recorded."""
        assert hand_out_probe(OPEN, CONFIG, task_id="probe", now=PROBED_AT) == BreakerChange(
            replace(OPEN, state=BreakerState.HALF_OPEN, half_open_at=PROBED_AT, probe_task_id="probe"),
            BreakerEvent.HALF_OPEN,
        )

    @pytest.mark.parametrize(
        ("breaker", "message"),
        [(OPEN, "breaker is open"), (Breaker(), "closed"), (PROBED, "its probe is probe")],
    )
    def test_there_is_no_second_probe(self, breaker: Breaker, message: str) -> None:
        """R-181: exactly one."""
        with pytest.raises(InvalidTransitionError, match=message):
            hand_out_probe(breaker, CONFIG, task_id="t", now=at(1))

    def test_a_failure_of_a_running_task_does_not_prolong_the_pause(self) -> None:
        """F-5."""
        change = fail(OPEN, 30)

        assert change == BreakerChange(replace(OPEN, failures=6, last_failure=at(30)))
        assert admission(change.breaker, CONFIG, at(61)) is Admission.PROBE

    def test_an_open_breaker_without_a_time_is_not_stuck(self) -> None:
        """F-1: the next claim takes the probe."""
        assert admission(Breaker(state=BreakerState.OPEN), CONFIG, NOW) is Admission.PROBE

    def test_a_success_of_a_running_task_does_not_close_it(self) -> None:
        """R-184: only the probe's does."""
        assert on_success(OPEN, task_id="t") == BreakerChange(OPEN)


class TestHalfOpen:
    def test_there_is_at_most_one_probe(self) -> None:
        """R-181: however long it takes."""
        assert admission(PROBED, CONFIG, at(100_000)) is Admission.BLOCK

    def test_the_probes_success_closes_it(self) -> None:
        """R-184."""
        assert on_success(PROBED, task_id="probe") == BreakerChange(
            Breaker(last_failure=NOW), BreakerEvent.CLOSED
        )

    def test_the_probes_failure_opens_it_again(self) -> None:
        """R-184, F-2: with a new openedAt, and an alert."""
        change = fail(PROBED, 70, task_id="probe")

        assert change == BreakerChange(
            Breaker(state=BreakerState.OPEN, failures=6, last_failure=at(70), opened_at=at(70)),
            BreakerEvent.OPENED,
            "Circuit breaker OPEN for eng-backend",
        )
        assert admission(change.breaker, CONFIG, at(130)) is Admission.BLOCK

    def test_a_probe_without_a_result_is_replaced(self) -> None:
        """F-2: cancelled, released or rate-limited: still half-open, the next claim takes another."""
        gone = on_probe_gone(PROBED, key=KEY, task_id="probe", now=at(70), failed=False)
        assert gone == BreakerChange(replace(PROBED, probe_task_id=None))
        assert fail(PROBED, 70, task_id="probe", counts=False) == gone
        assert admission(gone.breaker, CONFIG, at(70)) is Admission.PROBE

        again = hand_out_probe(gone.breaker, CONFIG, task_id="second", now=at(71))
        assert again == BreakerChange(replace(PROBED, probe_task_id="second"))

    def test_a_crashed_probe_counts_as_failed(self) -> None:
        """F-2: a crash or a timeout opens it again."""
        gone = on_probe_gone(PROBED, key=KEY, task_id="probe", now=at(70), failed=True)

        assert gone == fail(PROBED, 70, task_id="probe")

    def test_only_the_probe_decides(self) -> None:
        """R-181, F-5: not tasks started before it opened, nor an earlier probe."""
        assert on_success(PROBED, task_id="t") == BreakerChange(PROBED)
        assert fail(PROBED, 70) == BreakerChange(replace(PROBED, failures=6, last_failure=at(70)))
        for how in (True, False):
            assert on_probe_gone(PROBED, key=KEY, task_id="t", now=at(70), failed=how) == BreakerChange(
                PROBED
            )


class TestManually:
    def test_opened_manually_it_stays_open(self) -> None:
        """R-187: until reset, after any time and any result."""
        change = force_open(PROBED, key=KEY, now=at(70))
        assert (change.event, change.alert) == (BreakerEvent.OPENED, "Circuit breaker OPEN for eng-backend")

        breaker = on_success(change.breaker, task_id="probe").breaker
        breaker = fail(breaker, 80, task_id="probe").breaker
        assert (breaker.state, breaker.forced, breaker.opened_at) == (BreakerState.OPEN, True, at(70))
        assert admission(breaker, CONFIG, at(10**6)) is Admission.BLOCK

        assert reset(breaker) == BreakerChange(Breaker(last_failure=at(80)), BreakerEvent.CLOSED)

    def test_opening_an_open_breaker_emits_no_event(self) -> None:
        """R-187: it only makes the state permanent."""
        held = force_open(OPEN, key=KEY, now=at(70))

        assert held == BreakerChange(replace(OPEN, forced=True))
        assert force_open(held.breaker, key=KEY, now=at(80)).breaker is held.breaker

    def test_reset_clears_the_count(self) -> None:
        """R-187."""
        assert reset(failed(4)) == BreakerChange(Breaker(last_failure=at(3)))
        breaker = Breaker(last_failure=NOW)
        assert reset(breaker).breaker is breaker


class BreakerMachine(RuleBasedStateMachine):
    """A fleet with one breaker: claims, results of any kind, the clock, and an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker()
        self.now = NOW
        self.submitted = 0
        self.running: set[str] = set()
        self.probes: set[str] = set()

    def move(self, change: BreakerChange) -> None:
        before, self.breaker = self.breaker, change.breaker
        expected = {
            BreakerState.OPEN: BreakerEvent.OPENED,
            BreakerState.HALF_OPEN: BreakerEvent.HALF_OPEN,
            BreakerState.CLOSED: BreakerEvent.CLOSED,
        }[change.breaker.state]
        assert change.event == (None if before.state is change.breaker.state else expected)
        assert (change.alert is not None) == (change.event is BreakerEvent.OPENED)

    def end(self, pick: int) -> str:
        task_id = sorted(self.running)[pick % len(self.running)]
        self.running.remove(task_id)
        self.probes.discard(task_id)
        return task_id

    @rule(seconds=st.integers(0, 400))
    def wait(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule()
    def claim(self) -> None:
        allowed = admission(self.breaker, CONFIG, self.now)
        if allowed is Admission.BLOCK:
            return
        self.submitted += 1
        task_id = f"t{self.submitted}"
        self.running.add(task_id)
        if allowed is Admission.PROBE:
            self.probes.add(task_id)
            self.move(hand_out_probe(self.breaker, CONFIG, task_id=task_id, now=self.now))

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 1000))
    def succeed(self, pick: int) -> None:
        self.move(on_success(self.breaker, task_id=self.end(pick)))

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 1000), counts=st.booleans())
    def fail(self, pick: int, counts: bool) -> None:
        self.move(
            on_failure(self.breaker, CONFIG, key=KEY, task_id=self.end(pick), now=self.now, counts=counts)
        )

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick: int) -> None:
        self.move(on_probe_gone(self.breaker, key=KEY, task_id=self.end(pick), now=self.now, failed=False))

    @rule()
    def open_manually(self) -> None:
        self.move(force_open(self.breaker, key=KEY, now=self.now))
        self.probes.clear()

    @rule()
    def reset_manually(self) -> None:
        self.move(reset(self.breaker))
        self.probes.clear()

    @invariant()
    def exactly_one_probe(self) -> None:
        """R-181: the breaker's probe is the one that is running."""
        held = {self.breaker.probe_task_id} - {None}
        assert held == self.probes
        assert self.breaker.probe_task_id is None or self.breaker.state is BreakerState.HALF_OPEN

    @invariant()
    def never_stuck(self) -> None:
        """F-1, F-2: without a probe and unless opened manually, time alone admits a task."""
        if not self.probes and not self.breaker.forced:
            assert admission(self.breaker, CONFIG, self.now + timedelta(days=1)) is not Admission.BLOCK

    @invariant()
    def times_fit_the_state(self) -> None:
        """R-180: the record is complete for its state, and forced only while open."""
        breaker = self.breaker
        assert (breaker.opened_at is None) == (breaker.state is BreakerState.CLOSED)
        assert (breaker.half_open_at is not None) == (breaker.state is BreakerState.HALF_OPEN)
        assert not breaker.forced or breaker.state is BreakerState.OPEN
        assert breaker.state is not BreakerState.CLOSED or breaker.failures < CONFIG.failure_threshold


TestAnyFleet = BreakerMachine.TestCase


class TestLostProcesses:
    """F-4: a lost process is one failure, however many tasks it held."""

    @staticmethod
    def lose(breaker: Breaker, process: str, seconds: float, task_id: str = "t") -> BreakerChange:
        return on_failure(
            breaker, CONFIG, key=KEY, task_id=task_id, now=at(seconds), counts=True, lost=process
        )

    def test_it_counts_once_in_90_seconds(self) -> None:
        breaker = Breaker()
        for n in range(8):
            breaker = self.lose(breaker, "a#1", n).breaker
        assert (breaker.state, breaker.failures) == (BreakerState.CLOSED, 1)

        breaker = self.lose(breaker, "a#1", 89.9).breaker
        assert breaker.failures == 1
        assert self.lose(breaker, "a#1", 90).breaker.failures == 2

    def test_each_process_counts(self) -> None:
        breaker = Breaker()
        for n in range(4):
            breaker = self.lose(breaker, f"a#{n}", n).breaker
        change = self.lose(breaker, "a#5", 5)
        assert (change.event, change.breaker.failures) == (BreakerEvent.OPENED, 5)

    def test_other_failures_of_the_process_count_as_ever(self) -> None:
        breaker = self.lose(Breaker(), "a#1", 0).breaker
        assert fail(breaker, 1).breaker.failures == 2

    @pytest.mark.parametrize("order", [("probe", "t"), ("t", "probe")])
    def test_a_lost_process_with_the_probe_counts_once_too(self, order: tuple[str, str]) -> None:
        """F-2, F-4: in whatever order its tasks fail; the breaker is open again."""
        breaker = PROBED
        for task_id in order:
            breaker = self.lose(breaker, "a#1", 70, task_id).breaker

        assert (breaker.state, breaker.failures) == (BreakerState.OPEN, PROBED.failures + 1)

    def test_a_reset_or_a_success_does_not_count_the_same_loss_again(self) -> None:
        lost = self.lose(Breaker(), "a#1", 0).breaker
        for breaker in (reset(lost).breaker, on_success(lost, task_id="x").breaker):
            assert self.lose(breaker, "a#1", 1).breaker.failures == 0

    def test_the_loss_of_a_probe_always_decides(self) -> None:
        known = replace(PROBED, losses=(("a#1", PROBED_AT),))
        change = self.lose(known, "a#1", 62, "probe")
        assert (change.event, change.breaker.state) == (BreakerEvent.OPENED, BreakerState.OPEN)

    def test_old_losses_are_forgotten(self) -> None:
        breaker = self.lose(self.lose(Breaker(), "a#1", 0).breaker, "b#1", 100).breaker
        assert breaker.losses == (("b#1", at(100)),)
