"""A quota with its keys, and the tasks that use it and wait for it."""

from datetime import datetime
from decimal import Decimal

from msgspec import Struct

from lineshaft.types.quotas import Quota

#: Keys and tasks that are named.
MAX_NAMED = 100


class QuotaKey(Struct, frozen=True):
    """What counts for one key of a quota."""

    #: Null: all matching keys share the limits.
    key: str | None
    #: Held tasks.
    running: int
    #: READY tasks that wait for it, counted up to 10,000 of all keys.
    waiting: int
    #: Of the rate, within its window.
    used: Decimal


class QuotaUser(Struct, frozen=True):
    """A held task that has acquired some of a rate within its window."""

    task_id: str
    #: Null: all matching keys share the limit.
    key: str | None
    agent_id: str
    amount: Decimal
    reservations: int
    last_at: datetime


class QuotaWaiter(Struct, frozen=True):
    """A READY task that waits for a quota."""

    task_id: str
    #: Null: all matching keys share the limit.
    key: str | None
    type: str
    title: str
    ready_at: datetime | None


class QuotaDetails(Struct, frozen=True):
    quota: Quota
    #: Up to 100, the busiest first.
    keys: list[QuotaKey]
    #: Up to 100, those with the most first.
    users: list[QuotaUser]
    #: Up to 100, the oldest first.
    waiters: list[QuotaWaiter]
