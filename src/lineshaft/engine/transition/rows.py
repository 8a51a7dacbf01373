"""Rows of the array parameters of effects.sql: each field has the name of its parameter."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from lineshaft.model.states import Status
from lineshaft.model.storable import check_json
from lineshaft.types.work import NOTHING


class RequeuedRow(NamedTuple):
    ids: str
    statuses: Status
    delays: float | None
    lane_ids: int
    attempts: int
    rate_limits: int
    long_waits: int
    blocked: int
    costs: Decimal
    tokens_in: int
    tokens_out: int
    categories: str | None
    accounts: str | None


class EndedRow(NamedTuple):
    ids: str
    statuses: Status
    attempts: int
    costs: Decimal
    tokens_in: int
    tokens_out: int
    reasons: str | None
    categories: str | None
    outputs: str | None


class AttemptRow(NamedTuple):
    task_ids: str
    epochs: int
    numbers: int
    revivals: int
    agent_ids: str | None
    incarnations: int | None
    models: str | None
    versions: str | None
    accounts: str | None
    claimed_at: datetime | None
    started_at: datetime | None
    outcomes: str
    categories: str | None
    errors: str | None
    tracebacks: str | None
    ended_by: str | None
    costs: Decimal
    tokens_in: int
    tokens_out: int


class DeadLetterRow(NamedTuple):
    task_ids: str
    epochs: int
    revivals: int
    costs: Decimal
    poison: bool
    categories: str | None
    errors: str | None
    patterns: str


class NewEvent(NamedTuple):
    #: An array, as text.
    kinds: str
    task_ids: str
    dag_ids: str | None
    agent_ids: str | None
    epochs: int | None
    data: str | None

    @classmethod
    def of(
        cls,
        kinds: Sequence[str],
        task_id: str,
        dag_id: str | None = None,
        *,
        agent_id: str | None = None,
        epoch: int | None = None,
        data: Any = None,
    ) -> "NewEvent":
        encoded = None if data is None else msgspec.json.encode(data)
        check_json(data=encoded)
        return cls(
            "{" + ",".join(kinds) + "}",
            task_id,
            dag_id,
            agent_id,
            epoch,
            None if encoded is None else encoded.decode(),
        )


class FreedKeyRow(NamedTuple):
    keys: str
    task_ids: str


class HeldLockRow(NamedTuple):
    keys: str
    holders: str


class InstanceShareRow(NamedTuple):
    agent_ids: str
    incarnations: int
    counts: int


class ShareRow(NamedTuple):
    """What one task, or a cost that is charged without a claim, changes in the ledgers and in its DAG."""

    agent_ids: str | None = None
    dag_ids: str | None = None
    reserved: Decimal = NOTHING
    #: Whether the reservation is part of the agent's reserved money, and of the day's.
    agent_reserved: bool = False
    day_reserved: bool = False
    #: What the claim had reported before it ended.
    reported: Decimal = NOTHING
    costs: Decimal = NOTHING
    added: int = 0
    completed: int = 0
    cancelled: int = 0
    dead: int = 0

    @property
    def has_money(self) -> bool:
        return bool(self.reserved or self.costs)
