"""Circuit breakers: tasks of a type that keeps failing are held back until one of them succeeds.

Closed: tasks are claimed as usual. Open: none is claimed; they stay READY and lose no attempt. Half-open:
exactly one task, the probe, is claimed, and its result decides.

    closed ──(threshold of failures in a row)──→ open ──(a claim takes the probe)──→ half_open
       ↑                                          ↑                                      │
       └──────────(the probe succeeds)────────────┼──────────────────────────────────────┤
                                                  └──────────(the probe fails)───────────┘

- Reading changes nothing. `admission` returns what a claim may take; only the claim that takes the probe
  moves the breaker to half-open, so every half-open breaker has been given a probe.
- A probe that ends without a result (cancelled, released, rate-limited, over its budget, waiting for its
  children) leaves the breaker half-open, and the next claim takes another. A crash or a timeout is a result.
- Any success while closed resets the count; so does a pause longer than the cool-down between two failures.
- Tasks that were running when the breaker opened don't affect it. Their failures are counted but don't
  prolong the pause, and their successes don't close it: they started before the failures, and one success
  among many failures would make the breaker flap.
- A breaker opened manually stays open until it is reset manually.
- Not every failure counts: see `counts_against`. A lost process counts once in 90 s, whatever it held.

Every function returns the new breaker (the same object if nothing changed, so nothing is written), the event
to emit, and the text of the alert.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import Enum, StrEnum, auto
from types import MappingProxyType

from msgspec import Struct, field
from msgspec.structs import replace

from lineshaft.errors import InvalidInputError, InvalidTransitionError
from lineshaft.model.budget import shown
from lineshaft.model.retry import LONGEST_DELAY_SEC, FailureCategory, category_of, number_fault, raise_faults

LOSS_WINDOW = timedelta(seconds=90)
_LARGEST_THRESHOLD = 1_000_000
_SHORTEST_COOLDOWN_SEC = 0.05
_BLAMELESS = frozenset(
    {
        FailureCategory.CANCELLED,
        FailureCategory.RATE_LIMIT,
        FailureCategory.BUDGET_EXCEEDED,
        FailureCategory.DEPENDENCY,
        FailureCategory.STEP_MISMATCH,
        FailureCategory.SIGNAL_TIMEOUT,
    }
)


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerEvent(StrEnum):
    OPENED = "breaker.opened"
    HALF_OPEN = "breaker.half_open"
    CLOSED = "breaker.closed"


class Admission(Enum):
    """What a claim may take."""

    FLOW = auto()
    PROBE = auto()
    BLOCK = auto()


class BreakerConfig(Struct, frozen=True, kw_only=True):
    failure_threshold: int = 5
    cooldown_sec: float = 300.0
    half_open_after_sec: float = 60.0

    def __post_init__(self) -> None:
        raise_faults(
            {
                "failure_threshold": number_fault(self.failure_threshold, 1, _LARGEST_THRESHOLD, whole=True),
                "cooldown_sec": number_fault(self.cooldown_sec, _SHORTEST_COOLDOWN_SEC, LONGEST_DELAY_SEC),
                "half_open_after_sec": number_fault(self.half_open_after_sec, 0, LONGEST_DELAY_SEC),
            }
        )


class BreakerPolicy(Struct, frozen=True):
    """The configuration of every breaker: defaults, and overrides by key."""

    defaults: BreakerConfig = BreakerConfig()
    overrides: Mapping[str, BreakerConfig] = field(default_factory=lambda: MappingProxyType({}))

    def config_for(self, key: str) -> BreakerConfig:
        return self.overrides.get(key, self.defaults)


_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "failureThreshold": "failure_threshold",
        "cooldownSeconds": "cooldown_sec",
        "halfOpenAfter": "half_open_after_sec",
    }
)


def policy_from_document(document: object) -> tuple[BreakerPolicy, tuple[str, ...]]:
    """Read the contents of a circuit-breakers file; returns a policy, and warnings about ignored values.

    A broken file must not stop the queue: each invalid value is reported and replaced by the value it would
    have overridden.
    """
    warnings: list[str] = []
    sections = _mapping("the file", document, warnings)
    warnings += [
        f"{name}: unknown section, ignored; expected defaults and overrides"
        for name in sections
        if name not in ("defaults", "overrides")
    ]
    defaults = _merged("defaults", sections.get("defaults"), BreakerConfig(), warnings)
    overrides = {
        key: _merged(f"overrides.{key}", values, defaults, warnings)
        for key, values in _mapping("overrides", sections.get("overrides"), warnings).items()
    }
    return BreakerPolicy(defaults, MappingProxyType(overrides)), tuple(warnings)


def document_of(policy: BreakerPolicy) -> dict[str, object]:
    """The contents of a circuit-breakers file that says the same."""

    def values(config: BreakerConfig) -> dict[str, object]:
        return {key: getattr(config, name) for key, name in _FIELDS.items()}

    overrides = {key: values(config) for key, config in policy.overrides.items()}
    return {"defaults": values(policy.defaults), "overrides": overrides}


def _mapping(place: str, value: object, warnings: list[str]) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        warnings.append(f"{place}: must be a mapping, got {shown(value)}; using the defaults")
        return {}
    warnings += [
        f"{place}: names must be text, got {shown(key)}; ignored" for key in value if not isinstance(key, str)
    ]
    return {key: inner for key, inner in value.items() if isinstance(key, str)}


def _merged(place: str, values: object, base: BreakerConfig, warnings: list[str]) -> BreakerConfig:
    config = base
    for key, value in _mapping(place, values, warnings).items():
        if key not in _FIELDS:
            warnings.append(f"{place}.{key}: unknown setting, ignored; expected one of {', '.join(_FIELDS)}")
            continue
        try:
            config = replace(config, **{_FIELDS[key]: value})  # the constructor checks it
        except InvalidInputError as error:
            warnings.append(f"{place}.{key}: {error.errors[0][1]}; using {getattr(base, _FIELDS[key])}")
    return config


class Breaker(Struct, frozen=True, kw_only=True):
    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    last_failure: datetime | None = None
    opened_at: datetime | None = None
    half_open_at: datetime | None = None
    probe_task_id: str | None = None
    forced: bool = False
    #: Processes whose loss was counted, with the time; entries older than `LOSS_WINDOW` have no meaning.
    losses: tuple[tuple[str, datetime], ...] = ()


class BreakerChange(Struct, frozen=True):
    breaker: Breaker
    event: BreakerEvent | None = None
    alert: str | None = None


def counts_against(category: str) -> bool:
    """Whether the breaker counts a failure of this category."""
    return category_of(category) not in _BLAMELESS


def admission(breaker: Breaker, config: BreakerConfig, now: datetime) -> Admission:
    match breaker.state:
        case BreakerState.CLOSED:
            return Admission.FLOW
        case BreakerState.HALF_OPEN:
            return Admission.PROBE if breaker.probe_task_id is None else Admission.BLOCK
        case BreakerState.OPEN:
            pause = timedelta(seconds=config.half_open_after_sec)
            over = breaker.opened_at is None or now > breaker.opened_at + pause
            return Admission.PROBE if over and not breaker.forced else Admission.BLOCK


def hand_out_probe(breaker: Breaker, config: BreakerConfig, *, task_id: str, now: datetime) -> BreakerChange:
    if admission(breaker, config, now) is not Admission.PROBE:
        held = f", its probe is {breaker.probe_task_id}" if breaker.probe_task_id else ""
        raise InvalidTransitionError(
            f"{task_id} can't be the probe: the breaker is {breaker.state}{held}. Check `admission` first."
        )
    if breaker.state is BreakerState.HALF_OPEN:
        return BreakerChange(replace(breaker, probe_task_id=task_id))
    return BreakerChange(
        replace(breaker, state=BreakerState.HALF_OPEN, half_open_at=now, probe_task_id=task_id),
        BreakerEvent.HALF_OPEN,
    )


def on_success(breaker: Breaker, *, task_id: str) -> BreakerChange:
    if breaker.state is BreakerState.CLOSED:
        return BreakerChange(replace(breaker, failures=0) if breaker.failures else breaker)
    if _is_probe(breaker, task_id):
        return reset(breaker)
    return BreakerChange(breaker)


def on_failure(
    breaker: Breaker,
    config: BreakerConfig,
    *,
    key: str,
    task_id: str,
    now: datetime,
    counts: bool,
    lost: str | None = None,
) -> BreakerChange:
    """Record a failed attempt; `counts` is `counts_against` of its category.

    `lost`: the attempt ended because this process was lost, which counts once for all that it held.
    """
    counted = lost is not None and _loss_is_known(breaker, lost, now)
    if lost is not None and counts and not counted:
        breaker = _with_loss(breaker, lost, now)
    if _is_probe(breaker, task_id):
        if counts and counted:
            return _opened(breaker, key, now)
        return on_probe_gone(breaker, key=key, task_id=task_id, now=now, failed=counts)
    if not counts or counted:
        return BreakerChange(breaker)
    failed = _with_failure(breaker, now)
    if breaker.state is not BreakerState.CLOSED:
        return BreakerChange(failed)
    if breaker.last_failure and now - breaker.last_failure > timedelta(seconds=config.cooldown_sec):
        failed = replace(failed, failures=1)
    if failed.failures < config.failure_threshold:
        return BreakerChange(failed)
    return _opened(failed, key, now)


def on_probe_gone(breaker: Breaker, *, key: str, task_id: str, now: datetime, failed: bool) -> BreakerChange:
    """Record a probe that ended without success: it failed, or it ended without a result."""
    if not _is_probe(breaker, task_id):
        return BreakerChange(breaker)
    if failed:
        return _opened(_with_failure(breaker, now), key, now)
    return BreakerChange(replace(breaker, probe_task_id=None))


def force_open(breaker: Breaker, *, key: str, now: datetime) -> BreakerChange:
    if breaker.state is not BreakerState.OPEN:
        opened = _opened(breaker, key, now)
        return replace(opened, breaker=replace(opened.breaker, forced=True))
    return BreakerChange(breaker if breaker.forced else replace(breaker, forced=True))


def reset(breaker: Breaker) -> BreakerChange:
    """Close the breaker and reset its count; the time of the last failure is kept."""
    closed = Breaker(last_failure=breaker.last_failure, losses=breaker.losses)
    if breaker.state is not BreakerState.CLOSED:
        return BreakerChange(closed, BreakerEvent.CLOSED)
    return BreakerChange(breaker if breaker == closed else closed)


def _is_probe(breaker: Breaker, task_id: str) -> bool:
    return breaker.state is BreakerState.HALF_OPEN and breaker.probe_task_id == task_id


def _loss_is_known(breaker: Breaker, process: str, now: datetime) -> bool:
    return any(known == process and now - at < LOSS_WINDOW for known, at in breaker.losses)


def _with_loss(breaker: Breaker, process: str, now: datetime) -> Breaker:
    recent = [loss for loss in breaker.losses if loss[0] != process and now - loss[1] < LOSS_WINDOW]
    return replace(breaker, losses=(*recent, (process, now)))


def _with_failure(breaker: Breaker, now: datetime) -> Breaker:
    # Transactions don't commit in the order of their clocks: the last failure must never move back.
    last = now if breaker.last_failure is None else max(now, breaker.last_failure)
    return replace(breaker, failures=breaker.failures + 1, last_failure=last)


def _opened(breaker: Breaker, key: str, now: datetime) -> BreakerChange:
    opened = replace(breaker, state=BreakerState.OPEN, opened_at=now, half_open_at=None, probe_task_id=None)
    return BreakerChange(opened, BreakerEvent.OPENED, f"Circuit breaker OPEN for {key}")
