"""The order of claims: effective priority, tiers, lanes and ranks.

Claims are ordered by

    effective = priority − age · boost − deadline_boost − critical_path_boost        (lower is sooner)

Age changes every value every minute, so that expression can't be indexed. But two tasks with the same boost
rate never overtake each other; `rank` is the part that orders them permanently:

    rank      = priority − deadline_boost − critical_path_boost + boost · ready_at   (in minutes)
    effective = rank − boost · now

Tasks with the same requirements and the same boost rate, to a hundredth, form a lane. A claim compares the
heads of its lanes by effective priority and takes each lane in order of rank, which gives exactly the order
above. Only the deadline boost changes by its own rule: such a task is re-keyed whenever its boost has grown
by `REKEY_STEP`.
"""

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import NamedTuple

from msgspec import Struct

from lineshaft.errors import InvalidInputError
from lineshaft.model.open_enum import OpenEnum

MIN_PRIORITY, MAX_PRIORITY, DEFAULT_PRIORITY = 0, 100, 50
MAX_DEADLINE_BOOST = 40.0
MAX_CRITICAL_PATH_BOOST = 10
#: The precision of the order by deadline, in points of priority; smaller steps mean more re-keying.
REKEY_STEP = 0.5

#: Ranks count minutes from here rather than from 1970, which keeps them small enough for exact sums.
_ORIGIN = datetime(2026, 1, 1, tzinfo=UTC)


class Tier(OpenEnum):
    CRITICAL = "critical"
    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"
    BACKGROUND = "background"


#: The end of each tier, exclusive: 59.5 is normal, 60 is low. Everything above the last is background.
TIER_ENDS = ((10.0, Tier.CRITICAL), (30.0, Tier.HIGH), (60.0, Tier.NORMAL), (80.0, Tier.LOW))


def tier(effective: float) -> Tier:
    """The tier of an effective priority; a negative one is critical."""
    return next((name for end, name in TIER_ENDS if effective < end), Tier.BACKGROUND)


def minutes(instant: datetime) -> float:
    """The minutes from the origin of ranks to an instant."""
    return (instant - _ORIGIN) / timedelta(minutes=1)


def deadline_boost(deadline: datetime | None, now: datetime) -> float:
    """40 at or after the deadline, halved for each hour before it."""
    if deadline is None:
        return 0.0
    hours_left = (deadline - now) / timedelta(hours=1)
    return MAX_DEADLINE_BOOST * math.exp2(-max(hours_left, 0.0))


def critical_path_boost(downstream_length: int) -> int:
    """One for each unfinished task in the longest chain below, at most ten."""
    return min(downstream_length, MAX_CRITICAL_PATH_BOOST)


class PriorityInputs(Struct, frozen=True, kw_only=True):
    """The fields of a task that decide its place in the order."""

    priority: float
    boost_per_minute: float
    #: When it first became READY: time spent blocked doesn't count as age.
    ready_at: datetime
    deadline: datetime | None = None
    downstream_length: int = 0


def effective_priority(task: PriorityInputs, now: datetime) -> float:
    """The formula of this module's docstring. Claims use `rank`; a test proves that the two agree."""
    age_minutes = (now - task.ready_at) / timedelta(minutes=1)
    return (
        task.priority
        - age_minutes * task.boost_per_minute
        - deadline_boost(task.deadline, now)
        - critical_path_boost(task.downstream_length)
    )


def rank(task: PriorityInputs, now: datetime) -> float:
    """The sort key of a task in its lane, valid until `rekey_at`."""
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
    # Rounding to microseconds must not return `now` again, or re-keying would never end.
    return max(due, now + timedelta(seconds=1))


def lane_boost(boost_per_minute: float) -> float:
    """The rate at which a task ages: its own, to a hundredth, so that there are few lanes."""
    return round(boost_per_minute, 2)


def cost_from(limit_usd: Decimal | None) -> Decimal | None:
    """The least cost of a task's lane: the largest power of two in millionths of a dollar, or 0."""
    if limit_usd is None:
        return None
    millionths = int(limit_usd.scaleb(6))
    return Decimal((1 << millionths.bit_length()) >> 1).scaleb(-6)


class Lane(NamedTuple):
    """The requirements and the boost rate that the tasks of a lane share.

    Capabilities are sorted, because their order has no meaning. Models keep their order: an agent uses the
    first one that it has. Costs are grouped by powers of two: a claim that can afford twice the lane's least
    cost can afford all its tasks.
    """

    type: str
    required_capabilities: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    boost_per_minute: float = 0.0
    cost_from_usd: Decimal | None = None

    @classmethod
    def of(
        cls,
        type_: str,
        required_capabilities: Iterable[str],
        models: Iterable[str],
        boost_per_minute: float,
        limit_usd: Decimal | None,
    ) -> "Lane":
        """`limit_usd`: what the next attempt may cost; None: there is no limit."""
        return cls(
            type_,
            tuple(required_capabilities),
            tuple(models),
            lane_boost(boost_per_minute),
            cost_from(limit_usd),
        )


def check_priority(value: float) -> int:
    """Reject anything but a whole number from 0 to 100."""
    if isinstance(value, bool) or value != int(value) or not MIN_PRIORITY <= value <= MAX_PRIORITY:
        raise InvalidInputError(
            errors=[
                ("priority", f"must be a whole number from 0 (critical) to 100 (background), got {value!r}")
            ]
        )
    return int(value)
