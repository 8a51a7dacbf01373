"""Tasks and their attempts as callers read them."""

from datetime import datetime
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from lineshaft.model.admission import LockKey
from lineshaft.model.parts import DEFAULT_MAX_ITEMS
from lineshaft.model.priority import Tier
from lineshaft.model.retry import RetryPolicy
from lineshaft.model.states import Status
from lineshaft.types.json import JsonStruct, decoded, empty_list, null


class ClaimInfo(Struct, frozen=True):
    """The agent that holds a task, or held it when it ended; without one, only the interval and the epoch."""

    agent_id: str | None
    claimed_at: datetime | None
    heartbeat_at: datetime | None
    heartbeat_interval_sec: float
    epoch: int
    #: The process of the agent; None: it is no longer known.
    instance: str | None = None


_Tokens = Annotated[int, Meta(ge=0, le=2**62)]


class TokensUsed(Struct, frozen=True):
    input: _Tokens = 0
    output: _Tokens = 0


class FailedAttempt(Struct, frozen=True, kw_only=True):
    attempt: int
    agent: str | None
    #: The process of the agent.
    instance: str | None = None
    category: str
    error: str
    started_at: datetime | None
    duration_sec: float
    cost_usd: Decimal
    #: How often the task had been revived or replaced by then; attempts count from 1 again after that.
    revival: int
    #: The version that its agent declared.
    version: str | None = None
    #: The end of the traceback, if the agent sent one.
    traceback: str | None = None
    tokens_used: TokensUsed = TokensUsed(0, 0)


class ForEachInfo(Struct, frozen=True):
    """The list for whose items a task has children."""

    #: The key of the task that returns it, with the path to it in the output.
    over: str
    #: The task fails if the list has more items.
    max: int = DEFAULT_MAX_ITEMS
    #: How many children run at once; None: any number.
    concurrency: int | None = None


class OutputGate(JsonStruct, frozen=True):
    method: str
    schema_json: Raw = field(name="schema", default_factory=null)

    @cached_property
    def schema(self) -> Any:
        return decoded(self.schema_json)


class TaskOutput(JsonStruct, frozen=True, kw_only=True):
    """The output contract of a task and, once there is one, the output."""

    type: str | None = None
    #: `none`, one method with its schema in `validation_schema`, or several gates in order.
    validation: str | tuple[OutputGate, ...] = "none"
    validation_schema_json: Raw = field(name="validation_schema", default_factory=null)
    require_decision_report: bool = False
    #: While the task is VALIDATING this is a candidate; it counts once the task is COMPLETED.
    data_json: Raw = field(name="data", default_factory=null)
    artifacts_json: Raw = field(name="artifacts", default_factory=empty_list)
    decision_report_json: Raw = field(name="decision_report", default_factory=null)
    #: The artifact with the data, if it is large; `data` is null then, unless the whole task was requested.
    data_ref: str | None = None
    #: Bytes of that data, as JSON.
    size: int | None = None

    @cached_property
    def validation_schema(self) -> Any:
        return decoded(self.validation_schema_json)

    @cached_property
    def data(self) -> Any:
        return decoded(self.data_json)

    @cached_property
    def artifacts(self) -> list[Any]:
        found: list[Any] = decoded(self.artifacts_json)
        return found

    @cached_property
    def decision_report(self) -> Any:
        return decoded(self.decision_report_json)


class Task(JsonStruct, frozen=True, kw_only=True):
    id: str
    dag_id: str
    #: Its name among the tasks of its DAG, as submitted.
    key: str | None
    parent_id: str | None
    #: What a dead letter of a task with a parent does to the DAG, `block` or `ignore`.
    on_failure: str | None
    idempotency_key: str | None
    #: How long after its completion the key is free again; None: never.
    idempotency_ttl_sec: float | None
    type: str
    title: str
    spec_json: Raw = field(name="spec")
    #: The tasks whose outputs it gets, by the name of the input; with a path, a part of one (`ID.PATH`).
    inputs: dict[str, str | list[str]]
    #: It has one child for each item of this list.
    for_each: ForEachInfo | None = None
    #: Of the child of a list: what it gets as the inputs `item` and `index`.
    item_json: Raw = field(name="item", default_factory=null)
    index: int | None = None
    preset: str
    required_capabilities: list[str]
    model_preferences: list[str]
    fallback_models: list[str]
    max_cost_usd: Decimal | None
    max_total_cost_usd: Decimal | None
    max_duration_sec: float | None
    heartbeat_interval_sec: float | None
    status: Status
    priority: int
    #: The lowest is claimed first; None once the task has ended.
    effective_priority: float | None
    tier: Tier | None
    priority_boost_per_minute: float
    deadline: datetime | None
    #: It is cancelled when its deadline passes.
    expire_at_deadline: bool
    run_at: datetime | None
    depends_on: list[str]
    blocked_by: list[str]
    #: Set while a dead letter upstream blocks the task.
    blocked_reason: str | None
    lock_key: str | None
    #: Its document locks, if it has several, or a shared one.
    lock_keys: list[LockKey] = field(default_factory=list)
    quota_keys: list[str] = field(default_factory=list)
    fair_key: str | None = None
    #: READY, but waiting for `lock`, `dag_budget`, `quota` or its turn (`fair`).
    parked: str | None
    is_batch: bool
    max_attempts: int
    attempts: int
    #: How often the task was revived or rerun by hand, or replaced after its first attempt.
    revivals: int
    retry: RetryPolicy
    retry_at: datetime | None
    claim: ClaimInfo
    lease_until: datetime | None
    model: str | None
    progress_json: Raw = field(name="progress", default_factory=null)
    output: TaskOutput
    failure_reason: str | None
    failure_category: str | None
    failure_history: list[FailedAttempt]
    cost_usd: Decimal
    #: What its claims reported beyond their ceilings: it counts nowhere until a person accepts it.
    disputed_usd: Decimal = Decimal(0)
    reserved_usd: Decimal
    tokens_used: TokensUsed
    tags: list[str]
    #: A label that the caller chose; it proves nothing.
    created_by: str | None
    #: The name of the token that the server saw; None: there was none, or the call was not over HTTP.
    created_by_token: str | None
    created_at: datetime
    ready_at: datetime | None
    #: When the first attempt started.
    first_started_at: datetime | None
    #: When the current or last attempt started.
    started_at: datetime | None
    #: When the task ended, in whatever state.
    ended_at: datetime | None
    completed_at: datetime | None
    cancelled_at: datetime | None
    cancel_reason: str | None
    #: What a compatible API, such as OfficePlane's, received and returns unchanged.
    surface_json: Raw | UnsetType = field(name="surface", default=UNSET)
    #: Only in the response to a submission: the idempotency key was already in use.
    duplicate: bool | UnsetType = UNSET
    #: Only in the response to a submission: the key was in use for a different request.
    mismatch: bool | UnsetType = UNSET
    #: Only in the response to a submission: it replaced what the task, which waited, was to do.
    replaced: bool | UnsetType = UNSET

    @cached_property
    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = decoded(self.spec_json)
        return found

    @cached_property
    def item(self) -> Any:
        return decoded(self.item_json)

    @cached_property
    def surface(self) -> Any:
        return None if self.surface_json is UNSET else decoded(self.surface_json)

    @cached_property
    def progress(self) -> Any:
        return decoded(self.progress_json)

    @property
    def result(self) -> Any:
        """The value that the handler returned; None until the task is COMPLETED."""
        return self.output.data if self.status is Status.COMPLETED else None


class Attempt(JsonStruct, frozen=True, kw_only=True):
    """One claim of a task."""

    #: The fencing number of the claim.
    epoch: int
    #: Counts from 1 after every revival and replacement.
    number: int
    revival: int
    agent_id: str | None
    #: The process of the agent.
    instance: str | None = None
    model: str | None
    #: The version that its agent declared.
    version: str | None = None
    #: The account that it used; None: its agent has none.
    account: str | None = None
    #: running, validating, completed, failed, rate_limited, released, waiting or cancelled.
    outcome: str
    category: str | None
    error: str | None
    #: The end of the traceback, if the agent sent one.
    traceback: str | None = None
    claimed_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    cost_usd: Decimal
    tokens_used: TokensUsed
    #: {data, artifacts, decision_report}, if an output was submitted.
    output_json: Raw = field(name="output", default_factory=null)

    @cached_property
    def output(self) -> Any:
        return decoded(self.output_json)


class Submitted(Struct, frozen=True):
    """A task that a submission created, or the existing task with its idempotency key."""

    id: str
    duplicate: bool = False
    #: The key was in use for a different request.
    mismatch: bool = False
    #: The existing task waited, and was replaced with what this call submits.
    replaced: bool = False
