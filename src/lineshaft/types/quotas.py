"""Quotas: at most so many tasks of a key at once, or so much in a time."""

from datetime import datetime
from decimal import Decimal

from msgspec import Struct

from lineshaft.model.quotas import RateUnit

#: Holders of a quota that are named.
MAX_HOLDERS = 100


class Rate(Struct, frozen=True):
    """At most `amount` in any window of `per_sec`."""

    amount: Decimal | float
    unit: RateUnit
    per_sec: float


class QuotaHolder(Struct, frozen=True):
    """A held task that counts."""

    task_id: str
    #: The key that it counts for; null: all matching keys share the limit.
    key: str | None
    agent_id: str
    since: datetime


class Quota(Struct, frozen=True):
    name: str
    #: The key that it is for; or `PREFIX:*`, for all keys that begin with `PREFIX:`.
    match: str
    #: Whether every matching key has its own limits; otherwise all share one.
    each: bool
    max_running: int | None
    max_waiting: int | None
    rate: Rate | None
    #: The share of its keys among tasks with a `fair_key`.
    weight: float
    changed_at: datetime
    #: Held tasks that count, of all keys.
    running: int
    #: READY tasks that wait for it, counted up to 10,000.
    waiting: int
    #: What was used of the rate within its window, by the key that used most.
    used: Decimal
    #: Up to 100, the oldest first.
    holders: list[QuotaHolder]
