"""Guards: document locks, circuit breakers, slowdowns, pauses."""

from datetime import datetime
from decimal import Decimal

from msgspec import Struct


class Lock(Struct, frozen=True):
    key: str
    holder_task_id: str
    agent_id: str | None
    #: The fencing number of this grant.
    token: int
    acquired_at: datetime
    expires_at: datetime
    #: READY tasks that wait for the lock, counted up to 10,000.
    waiting: int
    #: The holder is a reader; each reader is an item of its own.
    shared: bool = False


class Breaker(Struct, frozen=True):
    key: str
    #: closed, open or half_open.
    state: str
    failures: int
    last_failure: datetime | None
    opened_at: datetime | None
    half_open_at: datetime | None
    probe_task_id: str | None
    #: Opened by hand: it stays open until it is reset.
    forced: bool
    #: When a claim may take a task as a probe; None: not automatically.
    probe_at: datetime | None = None


class Slowdown(Struct, frozen=True):
    #: `account:NAME`, `model:NAME`, `provider:NAME` for all models NAME/…, `agent:ID`, or `*` for all.
    key: str
    until: datetime
    reason: str | None
    signalled_at: datetime


class Pause(Struct, frozen=True):
    #: `*` is every type.
    type: str
    since: datetime
    reason: str | None
    #: Who paused it; None: unknown, or the cost-velocity stop.
    actor: str | None


class ShortDag(Struct, frozen=True):
    """A DAG whose budget is too small for some of its READY tasks."""

    id: str
    title: str
    budget_ceiling_usd: Decimal
    spent_usd: Decimal
    reserved_usd: Decimal
    #: READY tasks that it can't pay for; of all DAGs, the first 10,000 are counted.
    waiting: int
