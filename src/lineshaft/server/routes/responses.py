"""Responses that are not one of `lineshaft.types`."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType

from lineshaft.types import Dag, Submitted, Task


class SubmittedItems(Struct, frozen=True):
    items: list[Submitted]


class SubmittedDag(Struct, frozen=True):
    dag: Dag
    #: By the keys of the call.
    tasks: dict[str, str]
    #: The same, with whether each stands for a task that was there already.
    submitted: Mapping[str, Submitted]
    duplicate: bool | UnsetType = UNSET


class Assignment(Struct, frozen=True, kw_only=True):
    """A claimed task with all that is needed to work on it."""

    task: Task
    #: Goes with every call about this claim.
    claim_token: str
    model: str | None
    #: What `spec.context_refs` refer to, by reference.
    inputs: dict[str, Any]
    #: What became of the children it waited for: {id: {"status", "output"}}.
    children: Raw
    #: It was started before.
    resume: bool
    checkpoint: Raw
    #: Results of durable steps by name.
    steps: Raw
    #: {"category", "error"} of the attempt before, if that failed.
    last_error: Raw


class Assignments(Struct, frozen=True):
    tasks: list[Assignment]
    slowdown_until: datetime | UnsetType = UNSET


class HeartbeatResponse(Struct, frozen=True):
    #: By task: continue, cancel or lost.
    tasks: dict[str, str]
    #: active or draining.
    status: str
    slowdown_until: datetime | UnsetType = UNSET


class Checkpoint(Struct, frozen=True):
    data: Raw


class Step(Struct, frozen=True):
    name: str
    #: What counts: the first result that was recorded.
    data: Raw


class Paused(Struct, frozen=True):
    #: null: everything.
    type: str | None
    paused: bool


class Health(Struct, frozen=True):
    status: str
    version: str


class Ended(Struct, frozen=True):
    #: By id: `open`, or ended as a `task` or as a `dag`, or `unknown`.
    ids: dict[str, str]
