"""Who is next: effective priority, tiers, lanes and ranks.

Document 004 orders claims by

    effective = priority − age · boost − deadline_boost − critical_path_boost        (lower is sooner)

Age moves every value every minute, so that expression can't be indexed. But two tasks with the same boost
rate age in step and never overtake each other; `rank` is the part that orders them for ever:

    rank      = priority − deadline_boost − critical_path_boost + boost · ready_at   (in minutes)
    effective = rank − boost · now

Tasks that are interchangeable for eligibility and age at the same rate form a lane. A claim compares the
heads of its lanes by effective priority and takes them in order of rank; that is 004's order exactly. Only
the deadline boost moves on its own: such a task is re-keyed whenever its boost has grown by `REKEY_STEP`.
"""

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import NamedTuple

from lineshaft.errors import InvalidInputError

MIN_PRIORITY, MAX_PRIORITY, DEFAULT_PRIORITY = 0, 100, 50
MAX_DEADLINE_BOOST = 40.0
MAX_CRITICAL_PATH_BOOST = 10
#: The order by deadline is exact to this much priority; smaller steps mean more re-keying.
REKEY_STEP = 0.5

#: Ranks count minutes from here rather than from 1970, which keeps them small enough for exact sums.
_ORIGIN = datetime(2026, 1, 1, tzinfo=UTC)


class Tier(StrEnum):
    CRITICAL = "critical"
    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"
    BACKGROUND = "background"


#: Where each tier ends, exclusively: 59.5 is normal, 60 is low (R-161). What is past the last is background.
TIER_ENDS = ((10.0, Tier.CRITICAL), (30.0, Tier.HIGH), (60.0, Tier.NORMAL), (80.0, Tier.LOW))


def tier(effective: float) -> Tier:
    """The tier of an effective priority; a negative one is critical."""
    return next((name for end, name in TIER_ENDS if effective < end), Tier.BACKGROUND)


def minutes(instant: datetime) -> float:
    """An instant as ranks count it."""
    return (instant - _ORIGIN) / timedelta(minutes=1)


def deadline_boost(deadline: datetime | None, now: datetime) -> float:
    """40 at or after the deadline, and half of it for each hour before (R-162)."""
    if deadline is None:
        return 0.0
    hours_left = (deadline - now) / timedelta(hours=1)
    return MAX_DEADLINE_BOOST * math.exp2(-max(hours_left, 0.0))


def critical_path_boost(downstream_length: int) -> int:
    """One for each unfinished task on the longest chain below, at most ten (R-163)."""
    return min(downstream_length, MAX_CRITICAL_PATH_BOOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityInputs:
    """Everything about one task that decides when it is its turn."""

    priority: float
    boost_per_minute: float
    #: When it first became READY: a task that was blocked for long doesn't jump the others (R-164).
    ready_at: datetime
    deadline: datetime | None = None
    downstream_length: int = 0


def effective_priority(task: PriorityInputs, now: datetime) -> float:
    """Document 004's formula, literally. What a claim uses is `rank`; a test shows that they agree."""
    age_minutes = (now - task.ready_at) / timedelta(minutes=1)
    return (
        task.priority
        - age_minutes * task.boost_per_minute
        - deadline_boost(task.deadline, now)
        - critical_path_boost(task.downstream_length)
    )


def rank(task: PriorityInputs, now: datetime) -> float:
    """What a task is sorted by inside its lane; holds until `rekey_at`."""
    return (
        task.priority
        - deadline_boost(task.deadline, now)
        - critical_path_boost(task.downstream_length)
        + task.boost_per_minute * minutes(task.ready_at)
    )


def rekey_at(deadline: datetime | None, now: datetime) -> datetime | None:
    """When the deadline boost will have grown by `REKEY_STEP`; None once it no longer grows."""
    if deadline is None or now >= deadline:
        return None
    target = deadline_boost(deadline, now) + REKEY_STEP
    if target >= MAX_DEADLINE_BOOST:
        return deadline
    due = deadline - timedelta(hours=math.log2(MAX_DEADLINE_BOOST / target))
    # Rounding to microseconds must not name the present again, or re-keying would never end.
    return max(due, now + timedelta(seconds=1))


class Lane(NamedTuple):
    """What tasks have in common that are interchangeable for eligibility and ageing.

    Capabilities are sorted: their order means nothing. Models keep theirs: the first that the agent has is
    the one it uses.
    """

    type: str
    required_capabilities: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    boost_per_minute: float = 0.0
    max_cost_usd: Decimal | None = None


def check_priority(value: float) -> int:
    """Refuse what isn't a whole number from 0 to 100."""
    if isinstance(value, bool) or value != int(value) or not MIN_PRIORITY <= value <= MAX_PRIORITY:
        raise InvalidInputError(
            errors=[
                ("priority", f"must be a whole number from 0 (critical) to 100 (background), got {value!r}")
            ]
        )
    return int(value)
