"""The decision after a failed attempt: retry later, or dead-letter the task.

Attempts are counted, not retries: with `max_attempts` 3 a task runs at most three times. The delay grows with
n, the number of failures so far. A preset fills in what the caller left out.

- Each delay is computed from the policy, which never changes, and from n, never from the previous delay: the
  series is 60, 120, 240, 480 and not 60, 120, 480, 3840.
- The delay is capped, then spread by ±50 %, then capped again: jitter never exceeds the maximum. Without a
  maximum the limit is a year, which keeps every timestamp within the range of the database.
- Some categories of failure are never retried: invalid input stays invalid, a spent budget stays spent, a
  cancelled task isn't wanted any more, and a recorded step stays recorded, as does a wait that timed out.
  `no_retry_on` adds to them and wins over `retry_on`. A category in neither list is retried like a crash,
  unless the caller set `retry_on`: then that list is complete. An `error` in neither list is treated as a
  crash in any case.
- A poison pill is a task that failed three times with at least two agents: the cause is the task, not an
  agent. The flag is computed first, so that it is correct for every reason a task ends. Failures without a
  known agent (an expired claim) don't count; neither does a step mismatch, whose cause is a deployment.
- From the second failure on, the fallback models are used. They don't replace the preferences: a revived task
  starts with its own preferences again.

Cancellation is not decided here, nor are rate limits, which only count as failures once the waits are used
up: see `ratelimit`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import shown, total_limit_reached

Uniform = Callable[[], float]
"""Returns numbers uniformly distributed over [0, 1), as `random.Random().random` does."""

DEFAULT_MAX_DURATION_SEC = 3600.0
LONGEST_DELAY_SEC = 365 * 86_400.0
_LARGEST_MULTIPLIER = 1_000.0
_FALLBACK_FROM_ATTEMPT = 2
_POISON_AGENTS = 2
_POISON_ATTEMPTS = 3


class Strategy(StrEnum):
    EXPONENTIAL = "exponential"
    FIXED = "fixed"
    IMMEDIATE = "immediate"


class FailureCategory(StrEnum):
    TIMEOUT = "timeout"
    #: The process was lost or killed.
    CRASH = "crash"
    #: The handler's own code failed. Where lists of a policy name only `crash`, that means this too.
    ERROR = "error"
    RATE_LIMIT = "rate_limit"
    INVALID_OUTPUT = "invalid_output"
    INVALID_INPUT = "invalid_input"
    AUTH_FAILURE = "auth_failure"
    BUDGET_EXCEEDED = "budget_exceeded"
    CANCELLED = "cancelled"
    DEPENDENCY = "dependency"
    #: A recorded step doesn't fit the code that runs now.
    STEP_MISMATCH = "step_mismatch"
    #: A signal didn't come in time, and the handler didn't catch that. The next attempt would find the same.
    SIGNAL_TIMEOUT = "signal_timeout"


class SystemReason(StrEnum):
    """The reason why Lineshaft, not an agent, ended an attempt."""

    HEARTBEAT_TIMEOUT = "heartbeat_timeout"
    CLAIM_EXPIRED = "claim_expired"
    AGENT_RESTARTED = "agent_restarted"
    EXECUTION_LIMIT = "execution_limit"
    VALIDATION = "validation"
    INCOMPLETE_DECISION_REPORT = "incomplete_decision_report"


#: The process of an agent was lost, with everything that it held.
LOST_PROCESS = frozenset(
    {SystemReason.HEARTBEAT_TIMEOUT, SystemReason.CLAIM_EXPIRED, SystemReason.AGENT_RESTARTED}
)


def timed_out(limit_sec: float) -> str:
    """The error of an attempt that exceeded its time limit."""
    return f"Timed out after {round(limit_sec, 3):.15g} s (max_duration_sec)"


_CATEGORIES: Mapping[str, FailureCategory] = MappingProxyType(
    {
        **{category.value: category for category in FailureCategory},
        SystemReason.HEARTBEAT_TIMEOUT: FailureCategory.CRASH,
        SystemReason.CLAIM_EXPIRED: FailureCategory.CRASH,
        SystemReason.AGENT_RESTARTED: FailureCategory.CRASH,
        SystemReason.EXECUTION_LIMIT: FailureCategory.TIMEOUT,
        SystemReason.VALIDATION: FailureCategory.INVALID_OUTPUT,
        SystemReason.INCOMPLETE_DECISION_REPORT: FailureCategory.INVALID_OUTPUT,
    }
)

DEFAULT_RETRY_ON: tuple[str, ...] = (
    FailureCategory.TIMEOUT,
    FailureCategory.CRASH,
    FailureCategory.RATE_LIMIT,
    FailureCategory.INVALID_OUTPUT,
)
DEFAULT_NO_RETRY_ON: tuple[str, ...] = (
    FailureCategory.AUTH_FAILURE,
    FailureCategory.BUDGET_EXCEEDED,
    FailureCategory.CANCELLED,
)
NEVER_RETRIED = frozenset(
    {
        FailureCategory.INVALID_INPUT,
        FailureCategory.BUDGET_EXCEEDED,
        FailureCategory.CANCELLED,
        FailureCategory.STEP_MISMATCH,
        FailureCategory.SIGNAL_TIMEOUT,
    }
)

#: Their cause is neither the task nor an agent.
_NO_POISON = frozenset({FailureCategory.STEP_MISMATCH, FailureCategory.SIGNAL_TIMEOUT})


def category_of(reason: str) -> str:
    """The category of a reason, or of the name of a category; text after a colon is detail.

    An unknown name is an agent's own category and is returned unchanged; an empty one is a crash.
    """
    text = reason.strip()
    name = "_".join(text.partition(":")[0].replace("-", " ").lower().split())
    return _CATEGORIES.get(name) or text or FailureCategory.CRASH


def fault_in(value: object, rule: str, *, ok: bool) -> str | None:
    return None if ok else f"{rule}, got {shown(value)}"


def number_fault(value: object, least: float, most: float, *, whole: bool = False) -> str | None:
    """What is wrong with a number that must be between two bounds, for a message; None if nothing is."""
    kind, kinds = ("whole number", int) if whole else ("number", int | float)
    ok = isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= most
    return fault_in(value, f"must be a {kind} from {least:.15g} to {most:.15g}", ok=ok)


def raise_faults(faults: Mapping[str, str | None]) -> None:
    """Raise one error with all faults, each with the name of its field."""
    present = [(name, fault) for name, fault in faults.items() if fault is not None]
    if present:
        raise InvalidInputError(errors=present)


def _categories_fault(value: object) -> str | None:
    names = isinstance(value, list | tuple) and all(isinstance(item, str) and item.strip() for item in value)
    return fault_in(value, "must be a list of category names", ok=value is None or names)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How a task is retried. The defaults are those of the factory preset.

    A list that the caller left out is None, which has another meaning than a list equal to the default.
    """

    strategy: Strategy = Strategy.EXPONENTIAL
    initial_delay_sec: float = 10.0
    backoff_multiplier: float = 2.0
    max_delay_sec: float | None = 300.0
    jitter: bool = True
    retry_on: tuple[str, ...] | None = None
    no_retry_on: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        longest = 0 if self.max_delay_sec is None else self.max_delay_sec
        choice = f"must be one of {', '.join(Strategy)}"
        raise_faults(
            {
                "strategy": fault_in(self.strategy, choice, ok=self.strategy in tuple(Strategy)),
                "initial_delay_sec": number_fault(self.initial_delay_sec, 0, LONGEST_DELAY_SEC),
                "backoff_multiplier": number_fault(self.backoff_multiplier, 1, _LARGEST_MULTIPLIER),
                "max_delay_sec": number_fault(longest, 0, LONGEST_DELAY_SEC),
                "jitter": fault_in(self.jitter, "must be true or false", ok=isinstance(self.jitter, bool)),
                "retry_on": _categories_fault(self.retry_on),
                "no_retry_on": _categories_fault(self.no_retry_on),
            }
        )
        object.__setattr__(self, "strategy", Strategy(self.strategy))
        for name in ("retry_on", "no_retry_on"):
            categories: tuple[str, ...] | None = getattr(self, name)
            if categories is not None:
                object.__setattr__(self, name, tuple(dict.fromkeys(category_of(item) for item in categories)))

    @property
    def retried(self) -> tuple[str, ...]:
        """The effective `retry_on`."""
        return DEFAULT_RETRY_ON if self.retry_on is None else self.retry_on

    @property
    def not_retried(self) -> tuple[str, ...]:
        """The effective `no_retry_on`: a `retry_on` of the caller overrides the default."""
        if self.no_retry_on is not None:
            return self.no_retry_on
        return tuple(category for category in DEFAULT_NO_RETRY_ON if category not in (self.retry_on or ()))

    @property
    def effective(self) -> "RetryPolicy":
        """With both lists, for readers."""
        return replace(self, retry_on=self.retried, no_retry_on=self.not_retried)

    def refuses(self, category: str) -> bool:
        """Whether the category excludes another attempt, even a free one after a rate limit."""
        return category in NEVER_RETRIED or category in self.not_retried

    def retries(self, category: str) -> bool:
        if category == FailureCategory.ERROR and category not in (*self.retried, *self.not_retried):
            return self.retries(FailureCategory.CRASH)
        if self.refuses(category):
            return False
        if category in self.retried:
            return True
        return self.retry_on is None and not self.refuses(FailureCategory.CRASH)


def retry_delay(policy: RetryPolicy, failures: int, uniform: Uniform) -> float:
    """Seconds to wait after the n-th failure, n counted from 1."""
    if failures < 1:
        raise ValueError(f"A delay follows a failure: failures must be at least 1, got {failures}.")
    if policy.strategy is Strategy.IMMEDIATE or not policy.initial_delay_sec:
        return 0.0
    delay = float(policy.initial_delay_sec)
    if policy.strategy is Strategy.EXPONENTIAL:
        try:
            delay *= float(policy.backoff_multiplier) ** (failures - 1)
        except OverflowError:
            delay = math.inf
    longest = LONGEST_DELAY_SEC if policy.max_delay_sec is None else policy.max_delay_sec
    delay = min(delay, longest)
    if policy.jitter:
        delay = min(delay * (0.5 + uniform()), longest)
    return delay


def models_for_next(
    failures: int, model_preferences: Sequence[str], fallback_models: Sequence[str]
) -> tuple[str, ...]:
    """The models of the next attempt after this many failures."""
    fall_back = failures >= _FALLBACK_FROM_ATTEMPT and len(fallback_models) > 0
    return tuple(fallback_models if fall_back else model_preferences)


def is_poison_pill(failures: int, failed_agents: Iterable[str | None]) -> bool:
    agents = {agent for agent in failed_agents if agent is not None}
    return len(agents) >= _POISON_AGENTS and failures >= _POISON_ATTEMPTS


class DeadLetterReason(StrEnum):
    NOT_RETRYABLE = "not_retryable"
    BUDGET_EXCEEDED = "budget_exceeded"
    POISON_PILL = "poison_pill"
    MAX_ATTEMPTS = "max_attempts"
    QUOTA_SPENT = "quota_spent"


class RetryDecision(Struct, frozen=True):
    """Retry after `delay_sec` with these models; with none, any model."""

    delay_sec: float
    models: tuple[str, ...] = ()


class DeadLetterDecision(Struct, frozen=True):
    reason: DeadLetterReason
    poison_pill: bool


def decide_failure(
    *,
    category: str,
    attempts: int,
    max_attempts: int,
    policy: RetryPolicy,
    failed_agents: Iterable[str | None],
    uniform: Uniform,
    ends_poison_pills: bool = True,
    total_cost_usd: Decimal = Decimal(0),
    max_total_cost_usd: Decimal | None = None,
    model_preferences: Sequence[str] = (),
    fallback_models: Sequence[str] = (),
) -> RetryDecision | DeadLetterDecision:
    """Decide what happens to a task after a failed attempt.

    `attempts`, `failed_agents` and `total_cost_usd` include the attempt that has just failed.
    `ends_poison_pills` is that of the task's preset.
    """
    category = category_of(category)
    poison_pill = category not in _NO_POISON and is_poison_pill(attempts, failed_agents)
    if category == FailureCategory.BUDGET_EXCEEDED or total_limit_reached(total_cost_usd, max_total_cost_usd):
        return DeadLetterDecision(DeadLetterReason.BUDGET_EXCEEDED, poison_pill)
    if not policy.retries(category):
        return DeadLetterDecision(DeadLetterReason.NOT_RETRYABLE, poison_pill)
    if poison_pill and ends_poison_pills:
        return DeadLetterDecision(DeadLetterReason.POISON_PILL, poison_pill)
    if attempts >= max_attempts:
        return DeadLetterDecision(DeadLetterReason.MAX_ATTEMPTS, poison_pill)
    return RetryDecision(
        delay_sec=retry_delay(policy, attempts, uniform),
        models=models_for_next(attempts, model_preferences, fallback_models),
    )
