"""The worker protocol: bodies and responses of the calls under `/v1/work`.

The client encodes what the server decodes, and the reverse. A batch is `{"items": [...]}`. An item is the
body of the single call (`/v1/tasks/{id}/complete`) and its path parameters.
"""

from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import money
from lineshaft.model.states import Status
from lineshaft.model.storable import readable_json, replace_unstorable
from lineshaft.model.tasks import NewTask
from lineshaft.types import work as w
from lineshaft.types.agents import Incarnation
from lineshaft.types.assignments import Assignment, T
from lineshaft.types.data_refs import DataRef, data_ref_in
from lineshaft.types.features import Needs
from lineshaft.types.json import json_or_none, null, raw
from lineshaft.types.problems import Problem
from lineshaft.types.request import Name, Request, Seconds, Text
from lineshaft.types.tasks import Submitted, Task, TokensUsed
from lineshaft.types.waits import NewSuspension, Signal, Suspended, WaitEnd
from lineshaft.types.work import MAX_ERROR, Child, ClaimedTask, ClaimRef, RemainingBudgets, Spent, end_of

MAX_ITEMS = 1_000
MAX_WAIT_SEC = 60.0

WaitSeconds = Annotated[float, Meta(ge=0, le=MAX_WAIT_SEC)]
Types = Annotated[list[Name], Meta(max_length=1_000)]


class BatchView(StrEnum):
    """How much a batch returns."""

    #: What the single call returns, with full task objects.
    FULL = "full"
    #: Only what a worker needs.
    WORK = "work"


I = TypeVar("I")  # noqa: E741 - the type of an item


class Batch(Request, Generic[I], frozen=True, kw_only=True):
    items: Annotated[list[I], Meta(max_length=MAX_ITEMS)]


class ViewedBatch(Batch[I], Generic[I], frozen=True, kw_only=True):
    view: BatchView = BatchView.FULL


class ClaimBatch(ViewedBatch[I], Generic[I], frozen=True, kw_only=True):
    #: How long to wait until one of the items has work.
    wait_sec: WaitSeconds = 0.0
    #: A unique name for this long poll. A later call with the same name ends it: it returns what it has.
    poll: Name | None = None


# Claims.


class ClaimOptions(Request, frozen=True, kw_only=True):
    incarnation: Incarnation
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 1
    #: None: all types that the agent registered for.
    types: Types | None = None
    #: Start the tasks at once: they are RUNNING.
    start: bool = False


class Claim(ClaimOptions, frozen=True, kw_only=True):
    wait_sec: WaitSeconds = 0.0


class ClaimItem(ClaimOptions, frozen=True, kw_only=True):
    agent_id: Name


class ClaimTask(Request, frozen=True, kw_only=True):
    agent_id: Name
    incarnation: Incarnation


class ClaimResult(Struct, Generic[T], frozen=True, kw_only=True, omit_defaults=True):
    tasks: list[Assignment[T]] | UnsetType = UNSET
    #: How long the call had waited when it claimed the tasks. Their leases count from then: a caller that
    #: adds it to the time at which it sent the call knows when they end at the earliest.
    waited_sec: float | UnsetType = UNSET
    #: Some of the agent's models, all its accounts or the agent itself are slowed down until then.
    slowdown_until: datetime | UnsetType = UNSET
    problem: Problem | None = None


# Heartbeats.


class ReportedTokens(TokensUsed, frozen=True, forbid_unknown_fields=True):
    """In a request, where a misspelt field is refused."""


class Spending(Request, frozen=True, kw_only=True):
    """What an attempt has used since its claim."""

    cost_usd: Decimal | float | None = None
    tokens_used: ReportedTokens | None = None

    @property
    def spent(self) -> Spent:
        used = self.tokens_used or _NO_TOKENS
        cost = None if self.cost_usd is None else money(self.cost_usd, "cost_usd")
        return Spent(cost, used.input, used.output)


_NO_TOKENS = ReportedTokens()


def _tokens(spent: Spent) -> ReportedTokens | None:
    if not spent.tokens_input and not spent.tokens_output:
        return None
    return ReportedTokens(spent.tokens_input, spent.tokens_output)


def _claimed(
    given: w.Completion
    | w.Failure
    | w.Release
    | w.Cancellation
    | w.NewStep
    | w.NewCheckpoint
    | w.NewSpawn
    | NewSuspension,
) -> Any:
    """The fields that every item about a claim has."""
    return {
        "id": given.claim.id,
        "claim_token": given.claim.token,
        "cost_usd": given.spent.cost_usd,
        "tokens_used": _tokens(given.spent),
    }


def raise_problem(problem: Problem | None) -> None:
    if problem is not None:
        raise problem.exception


#: No claim has it.
_NO_EPOCH = -1


class HeartbeatTask(Spending, frozen=True, kw_only=True):
    id: Name
    claim_token: str
    #: Null: nothing new.
    progress: Raw = field(default_factory=null)

    def held(self, claim: ClaimRef | None, holder: w.Presence) -> w.HeldTask:
        """`claim` is None if the token is invalid."""
        progress = json_or_none("progress", self.progress)
        epoch = _NO_EPOCH if claim is None else claim.epoch
        return w.HeldTask(self.id, epoch, holder, progress, self.spent, self.claim_token)

    @classmethod
    def of(cls, held: w.HeldTask) -> "HeartbeatTask":
        return cls(
            id=held.id,
            claim_token=held.token,
            progress=raw(held.progress),
            cost_usd=held.spent.cost_usd or None,
            tokens_used=_tokens(held.spent),
        )


class Heartbeat(Request, frozen=True, kw_only=True):
    incarnation: Incarnation
    tasks: Annotated[list[HeartbeatTask], Meta(max_length=10_000)] = field(default_factory=list)


class HeartbeatItem(Heartbeat, frozen=True, kw_only=True):
    agent_id: Name


class HeartbeatResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    #: By task: continue, cancel or lost.
    tasks: dict[str, str] | UnsetType = UNSET
    #: By task that has to be cancelled though it is held: the limit that it is over.
    reasons: dict[str, str] | UnsetType = UNSET
    #: The cost could not be written, because another transaction holds the task: report it again.
    spent_later: bool | UnsetType = UNSET
    #: Tasks that go on, but whose leases were not renewed: another transaction holds them, or they haven't
    #: been started. Send another heartbeat soon.
    not_renewed: list[str] | UnsetType = UNSET
    #: active, draining or offline.
    status: str | UnsetType = UNSET
    #: How many tasks the agent may hold, which an operator may change.
    max_concurrent_tasks: int | UnsetType = UNSET
    #: Some of the agent's models, all its accounts or the agent itself are slowed down until then.
    slowdown_until: datetime | UnsetType = UNSET
    problem: Problem | None = None


# Work on a claim. Each body has an item with the task's id.


def _data(place: str, data: Raw, data_ref: str | None) -> bytes:
    if data_ref is None:
        return readable_json(place, bytes(data))
    if bytes(data) != b"null":
        raise InvalidInputError(errors=[(f"{place}_ref", "can't be given together with data")])
    reference = DataRef(data_ref=data_ref).json
    if data_ref_in(reference) is None:
        raise InvalidInputError(errors=[(f"{place}_ref", "must be artifact:ID")])
    return reference


class Start(Request, frozen=True, kw_only=True):
    claim_token: str


class StartItem(Start, frozen=True, kw_only=True):
    id: Name


class Output(Request, frozen=True, kw_only=True):
    #: The kind of the output, for readers; default: the one that the task asked for.
    type: Name | None = None
    data: Raw = field(default_factory=null)
    #: An artifact with the data as JSON, in place of `data`.
    data_ref: str | None = None
    artifacts: Raw = field(default_factory=null)
    decision_report: Raw = field(default_factory=null)


class Next(Request, frozen=True, kw_only=True):
    """Which task the instance takes next."""

    #: None: all types that the agent registered for.
    types: Types | None = None


class Complete(Spending, frozen=True, kw_only=True):
    claim_token: str
    output: Output = field(default_factory=Output)
    #: With true the same instance claims and starts its next task in the same call; `types` restricts it.
    next: bool | Next = False

    def completion(self, claim: ClaimRef) -> w.Completion:
        output = self.output
        return w.Completion(
            claim,
            output=_data("output.data", output.data, output.data_ref),
            artifacts=json_or_none("output.artifacts", output.artifacts),
            decision_report=json_or_none("output.decision_report", output.decision_report),
            spent=self.spent,
            output_type=output.type,
        )


class CompleteItem(Complete, frozen=True, kw_only=True):
    id: Name

    @classmethod
    def of(cls, given: w.Completion, *, following: Next | None = None) -> "CompleteItem":
        return cls(
            **_claimed(given),
            next=following or False,
            output=Output(
                type=given.output_type,
                data=raw(given.output),
                artifacts=raw(given.artifacts),
                decision_report=raw(given.decision_report),
            ),
        )


class Fail(Spending, frozen=True, kw_only=True):
    claim_token: str
    error: str
    category: Name | None = None
    retry_after_sec: Seconds | None = None
    #: The last 16 KiB are kept, for people: it decides nothing.
    traceback: str | None = None
    #: When the provider's limit ends; it counts instead of `retry_after_sec`.
    retry_at: Annotated[Annotated[datetime, Meta(tz=True)] | None, Needs("accounts")] = None
    #: The account that the attempt used; null: that of the claim.
    account: Annotated[Name | None, Needs("accounts")] = None

    def failure(self, claim: ClaimRef) -> w.Failure:
        return w.Failure(
            claim,
            self.error,
            self.category,
            self.retry_after_sec,
            self.spent,
            traceback=self.traceback,
            retry_at=self.retry_at,
            account=self.account,
        )


class FailItem(Fail, frozen=True, kw_only=True):
    id: Name

    @classmethod
    def of(cls, given: w.Failure) -> "FailItem":
        return cls(
            **_claimed(given),
            # As it is stored: not every Python string is valid JSON.
            error=replace_unstorable(given.error[:MAX_ERROR]),
            category=None if given.category is None else replace_unstorable(given.category),
            retry_after_sec=given.retry_after_sec,
            traceback=None if given.traceback is None else replace_unstorable(end_of(given.traceback)),
            retry_at=given.retry_at,
            account=given.account,
        )


class ReleaseClaim(Spending, frozen=True, kw_only=True):
    claim_token: str
    delay_sec: Seconds | None = None

    def release(self, claim: ClaimRef) -> w.Release:
        return w.Release(claim, self.delay_sec or None, self.spent)


class ReleaseItem(ReleaseClaim, frozen=True, kw_only=True):
    id: Name

    @classmethod
    def of(cls, given: w.Release) -> "ReleaseItem":
        return cls(**_claimed(given), delay_sec=given.delay_sec)


class Cancel(Spending, frozen=True, kw_only=True):
    reason: Text = "cancelled by hand"
    cascade: bool = True
    #: Required with the scope `agent`.
    claim_token: str | None = None

    def cancellation(self, claim: ClaimRef) -> w.Cancellation:
        return w.Cancellation(claim, self.reason, self.cascade, self.spent)


class CancelItem(Cancel, frozen=True, kw_only=True):
    id: Name

    @classmethod
    def of(cls, given: w.Cancellation) -> "CancelItem":
        return cls(**_claimed(given), reason=replace_unstorable(given.reason), cascade=given.cascade)


class Outcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a task is now, in the view `work`."""

    id: str | UnsetType = UNSET
    status: Status | UnsetType = UNSET
    #: Seconds until the next attempt, if this one failed or was rate limited. None if the call is repeated.
    retry_in_sec: float | None = None
    #: Why the attempt failed, also if its output was rejected. None if the call is repeated.
    failure_reason: str | None = None
    problem: Problem | None = None
    #: The next task, where one was asked for.
    next_claim: Assignment[ClaimedTask] | None = None

    def moved(self, task_id: str) -> w.Moved:
        error = None if self.problem is None else self.problem.exception
        status = None if self.status is UNSET else self.status
        return w.Moved(task_id, status, error, self.retry_in_sec, self.failure_reason)


class CompletedTask(Task, frozen=True, kw_only=True):
    #: As an item of a claim; null: there is none. Only where one was asked for.
    next_claim: Assignment[Task] | UnsetType | None = UNSET


# Progress on a claim.


class RecordStep(Spending, frozen=True, kw_only=True):
    claim_token: str
    data: Raw = field(default_factory=null)
    #: An artifact with the data as JSON, in place of `data`.
    data_ref: str | None = None
    #: The cost of this step alone; `cost_usd` is the cost of the whole attempt so far.
    step_cost_usd: Decimal | float = 0
    #: A digest of the step's arguments, in any form; later claims get it to compare. A result with another
    #: one under a later claim replaces the recorded one. null: every call of the step matches.
    digest: str | None = None
    #: Ids of signals that came with the claim: they are received, and don't come again.
    received: Annotated[list[Name], Meta(max_length=1_000)] = field(default_factory=list)

    def step(self, claim: ClaimRef, name: str) -> w.NewStep:
        return w.NewStep(
            claim,
            name,
            _data("data", self.data, self.data_ref),
            cost_usd=money(self.step_cost_usd, "step_cost_usd"),
            spent=self.spent,
            digest=self.digest,
            received=tuple(self.received),
        )


class StepItem(RecordStep, frozen=True, kw_only=True):
    id: Name
    name: str

    @classmethod
    def of(cls, given: w.NewStep) -> "StepItem":
        return cls(
            **_claimed(given),
            name=given.name,
            data=Raw(given.data),
            step_cost_usd=given.cost_usd,
            digest=given.digest,
            received=list(given.received),
        )


class StepResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str | UnsetType = UNSET
    #: The result that counts: the first one recorded with this digest.
    data: Raw | UnsetType = UNSET
    #: What is left to spend; null: no limit.
    remaining_usd: RemainingBudgets | UnsetType = UNSET
    problem: Problem | None = None

    def recorded(self) -> tuple[bytes, RemainingBudgets]:
        raise_problem(self.problem)
        budgets = RemainingBudgets() if self.remaining_usd is UNSET else self.remaining_usd
        return b"null" if self.data is UNSET else bytes(self.data), budgets


class SaveCheckpoint(Spending, frozen=True, kw_only=True):
    claim_token: str
    data: Raw = field(default_factory=null)
    #: An artifact with the data as JSON, in place of `data`.
    data_ref: str | None = None

    def checkpoint(self, claim: ClaimRef) -> w.NewCheckpoint:
        return w.NewCheckpoint(claim, _data("data", self.data, self.data_ref), self.spent)


class CheckpointItem(SaveCheckpoint, frozen=True, kw_only=True):
    id: Name

    @classmethod
    def of(cls, given: w.NewCheckpoint) -> "CheckpointItem":
        return cls(**_claimed(given), data=Raw(given.data))


class CheckpointResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    data: Raw | UnsetType = UNSET
    problem: Problem | None = None


class Subtasks(Spending, frozen=True, kw_only=True):
    claim_token: str
    tasks: Annotated[list[NewTask], Meta(min_length=1)]
    #: Children are created once per key.
    key: Name | None = None
    #: Pause the task until all children have ended.
    wait: bool = False
    #: Saved with the task, and returned when it is claimed again.
    checkpoint: Raw = field(default_factory=null)

    def spawn(self, claim: ClaimRef, tasks: list[NewTask]) -> w.NewSpawn:
        checkpoint = json_or_none("checkpoint", self.checkpoint)
        return w.NewSpawn(claim, tasks, self.key, self.wait, self.spent, checkpoint)


class SpawnItem(Subtasks, frozen=True, kw_only=True):
    id: Name

    @classmethod
    def of(cls, given: w.NewSpawn) -> "SpawnItem":
        return cls(**_claimed(given), key=given.key, tasks=list(given.tasks), wait=given.wait)


class SpawnedTasks(Struct, frozen=True, kw_only=True, omit_defaults=True):
    items: list[Submitted] | UnsetType = UNSET
    #: The same tasks, with the outcomes of those that have ended.
    children: list[Child] | UnsetType = UNSET
    #: The claim is over: the task is claimed again when all children have ended.
    paused: bool | UnsetType = UNSET
    problem: Problem | None = None

    def spawned(self) -> w.Spawned:
        raise_problem(self.problem)
        return w.Spawned(
            [] if self.children is UNSET else self.children,
            paused=self.paused is True,
            submitted=() if self.items is UNSET else self.items,
        )


class Suspend(Spending, frozen=True, kw_only=True):
    claim_token: str
    #: Of the step that records how the wait ended; the same name waits only once.
    name: Name
    #: The signal to wait for; null: it only sleeps.
    signal: Name | None = None
    #: When the wait ends at the latest; null: only with the signal.
    until: Annotated[datetime, Meta(tz=True)] | None = None
    #: The same in seconds from now, by the clock of the database.
    timeout_sec: Seconds | None = None
    #: Saved with the task, and returned when it is claimed again.
    checkpoint: Raw = field(default_factory=null)

    def suspension(self, claim: ClaimRef) -> NewSuspension:
        return NewSuspension(
            claim,
            self.name,
            self.signal,
            self.timeout_sec,
            self.until,
            json_or_none("checkpoint", self.checkpoint),
            self.spent,
        )


class SuspendItem(Suspend, frozen=True, kw_only=True):
    id: Name

    @classmethod
    def of(cls, given: NewSuspension) -> "SuspendItem":
        return cls(
            **_claimed(given),
            name=given.name,
            signal=given.signal,
            until=given.until,
            timeout_sec=given.timeout_sec,
            checkpoint=raw(given.checkpoint),
        )


class SuspendResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str | UnsetType = UNSET
    #: The claim is over: the task is claimed again when the wait has ended.
    suspended: bool | UnsetType = UNSET
    #: What it waited for; null, if the claim isn't over: the time has passed.
    signal: Signal | UnsetType | None = UNSET
    #: When the wait ends at the latest; null: only with the signal.
    until: datetime | UnsetType | None = UNSET
    problem: Problem | None = None

    @classmethod
    def of(cls, result: Suspended) -> "SuspendResult":
        end = result.unwrap()
        if end is None:
            return cls(id=result.id, suspended=True, until=result.until)
        return cls(id=result.id, suspended=False, signal=end.signal, until=end.until)

    def end(self) -> WaitEnd | None:
        """How the wait has ended; None: the claim is over."""
        raise_problem(self.problem)
        if self.suspended is True:
            return None
        return WaitEnd(
            None if self.until is UNSET else self.until, None if self.signal is UNSET else self.signal
        )


OutcomeItem = CompleteItem | FailItem | ReleaseItem | CancelItem
#: What names a claim by its token.
ItemOfClaim = StartItem | OutcomeItem | StepItem | CheckpointItem | SpawnItem | SuspendItem


class ItemProblem(Struct, frozen=True):
    """Why an item was refused."""

    problem: Problem


# The rest of what a worker needs.


class Maintained(Struct, frozen=True):
    #: Seconds until something is due again; null: nothing is known.
    next_sec: float | None


class RetryDue(Struct, frozen=True):
    #: Seconds until the first retry; null: there is none.
    due_sec: float | None
    #: How many are due in that time.
    count: int = 0
