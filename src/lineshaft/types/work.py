"""Work: claims, their outcomes, heartbeats. The same values in the engine, over HTTP and in agents."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct, field

from lineshaft.checks.decision_report import MAX_BYTES as MAX_REPORT_BYTES
from lineshaft.errors import InvalidInputError, LineshaftError
from lineshaft.model import ratelimit, retry
from lineshaft.model.accounts import account_fault
from lineshaft.model.budget import money
from lineshaft.model.fields import LONGEST_SECONDS
from lineshaft.model.lock_keys import document_of
from lineshaft.model.parts import Source
from lineshaft.model.retry import number_fault, raise_faults
from lineshaft.model.states import ENDED, Status
from lineshaft.model.storable import check_json, check_storable, is_storable
from lineshaft.model.tasks import NewTask, output_type_fault
from lineshaft.types.artifacts import InputArtifact
from lineshaft.types.tasks import Submitted

T = TypeVar("T")

NOTHING = Decimal(0)

#: Steps whose names begin with this remember which children were spawned.
SPAWN_STEP = "spawn:"


#: What one report may say: sums over many fit into the database.
MOST_TOKENS = 10**15
MOST_COST = Decimal(1_000_000)


MAX_PROGRESS_BYTES = 64 << 10
#: What comes with a claimed task as inputs, together, as they are stored. One output is always smaller.
MAX_INPUT_BYTES = 64 << 20
#: Characters of an error that are kept.
MAX_ERROR = 10_000
#: How much of the end of a traceback is kept: it names the place and the error.
MAX_TRACEBACK_BYTES = 16 << 10


def end_of(traceback: str) -> str:
    """The end of a traceback, as much as is kept."""
    return traceback.encode(errors="replace")[-MAX_TRACEBACK_BYTES:].decode(errors="ignore")


class _Running(Protocol):
    """What an attempt has reported so far."""

    @property
    def attempt_cost_usd(self) -> Decimal: ...

    @property
    def attempt_tokens_input(self) -> int: ...

    @property
    def attempt_tokens_output(self) -> int: ...


class ClaimRef(msgspec.Struct, frozen=True, eq=False):
    """One claim of a task."""

    id: str
    #: The fencing number of the claim.
    epoch: int
    #: The claim token that a server issued; empty without a server. It doesn't make another claim.
    token: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClaimRef) and (self.id, self.epoch) == (other.id, other.epoch)

    def __hash__(self) -> int:
        return hash((self.id, self.epoch))


@dataclass(frozen=True, slots=True)
class Spent:
    """What an attempt has used since its claim, as its agent reports it. A lower report changes nothing."""

    cost_usd: Decimal | None = None
    tokens_input: int = 0
    tokens_output: int = 0

    def __post_init__(self) -> None:
        # Checked here, so that one invalid report is rejected alone and not with the whole call.
        if self.cost_usd is not None:
            cost = money(self.cost_usd, "cost_usd")
            if cost > MOST_COST:
                fault = f"must be at most {MOST_COST} US dollars, got {cost}"
                raise InvalidInputError(errors=[("cost_usd", fault)])
            object.__setattr__(self, "cost_usd", cost)
        if self.tokens_input or self.tokens_output:
            raise_faults(
                {
                    "tokens_used.input": number_fault(self.tokens_input, 0, MOST_TOKENS, whole=True),
                    "tokens_used.output": number_fault(self.tokens_output, 0, MOST_TOKENS, whole=True),
                }
            )

    @property
    def says_something(self) -> bool:
        return bool(self.cost_usd or self.tokens_input or self.tokens_output)

    def most(self, other: "Spent") -> "Spent":
        return Spent(
            max(self.cost_usd or NOTHING, other.cost_usd or NOTHING),
            max(self.tokens_input, other.tokens_input),
            max(self.tokens_output, other.tokens_output),
        )

    def cost(self, task: _Running) -> Decimal:
        """At least what the attempt has reported before."""
        return max(self.cost_usd or NOTHING, task.attempt_cost_usd)

    def total(self, task: _Running) -> "Spent":
        """With what the attempt has reported before."""
        return self.most(Spent(task.attempt_cost_usd, task.attempt_tokens_input, task.attempt_tokens_output))


UNREPORTED = Spent()


def check_report_size(report: bytes | None) -> None:
    if report is not None and len(report) > MAX_REPORT_BYTES:
        fault = (
            f"must be at most {MAX_REPORT_BYTES} bytes of JSON, got {len(report)}; put details in an artifact"
        )
        raise InvalidInputError(errors=[("decision_report", fault)])


class Completion(msgspec.Struct, frozen=True):
    claim: ClaimRef
    #: {"data": …, "artifacts": …, "decision_report": …}, each as JSON.
    output: bytes | None = None
    artifacts: bytes | None = None
    decision_report: bytes | None = None
    spent: Spent = UNREPORTED
    #: The declared type of the output; None: the type that the task asked for.
    output_type: str | None = None

    def __post_init__(self) -> None:
        # Checked here, so that one invalid output is rejected alone and not with the whole call.
        check_json(output=self.output, artifacts=self.artifacts, decision_report=self.decision_report)
        check_report_size(self.decision_report)
        named = self.output_type
        if named is not None and (fault := output_type_fault(named)):
            raise InvalidInputError(errors=[("output.type", fault)])


class Failure(Struct, frozen=True):
    claim: ClaimRef
    error: str
    #: A category, or a system's reason; None: a rate limit if the text looks like one, otherwise a crash.
    category: str | None = None
    retry_after_sec: float | None = None
    spent: Spent = UNREPORTED
    #: The last 16 KiB are kept.
    traceback: str | None = None
    #: When the provider's limit ends; it counts instead of `retry_after_sec`.
    retry_at: datetime | None = None
    #: The account that the attempt used, if it isn't that of its claim.
    account: str | None = None

    def __post_init__(self) -> None:
        # Checked here, so that one invalid report is rejected alone and not with the whole call.
        if self.retry_at is not None and self.retry_at.tzinfo is None:
            rule = f"must be a time with its offset from UTC, got {self.retry_at.isoformat()}"
            raise InvalidInputError(errors=[("retry_at", rule)])
        if self.account is not None and (fault := account_fault(self.account)):
            raise InvalidInputError(errors=[("account", fault)])

    @property
    def is_rate_limit(self) -> bool:
        return ratelimit.is_rate_limit(self.error, self.category)

    @property
    def kind(self) -> str:
        if self.is_rate_limit:
            return retry.FailureCategory.RATE_LIMIT.value
        return str(retry.category_of(self.category or retry.FailureCategory.CRASH))


class Release(Struct, frozen=True):
    """A claim that is given up without using an attempt; with a delay it comes back later."""

    claim: ClaimRef
    delay_sec: float | None = None
    spent: Spent = UNREPORTED

    def __post_init__(self) -> None:
        if self.delay_sec is not None:
            raise_faults({"delay_sec": number_fault(self.delay_sec, 0, LONGEST_SECONDS)})


class Cancellation(Struct, frozen=True):
    """Cancel a task by its claim and, with `cascade`, everything that depends on it."""

    claim: ClaimRef
    reason: str
    cascade: bool = True
    spent: Spent = UNREPORTED


#: Longer names would not fit into the index.
MAX_STEP_NAME = 1_000
MAX_DIGEST = 200
_MAX_STEP_NAME_BYTES = 2_000


def check_step_name(field: str, name: str) -> None:
    if not 1 <= len(name) <= MAX_STEP_NAME:
        fault = f"must be a text of 1 to {MAX_STEP_NAME} characters, got {name[:100]!r}"
        raise InvalidInputError(errors=[(field, fault)])
    check_storable(**{field: name})
    if (size := len(name.encode())) > _MAX_STEP_NAME_BYTES:
        fault = f"must be at most {_MAX_STEP_NAME_BYTES} bytes of UTF-8, got {size}: {name[:100]!r}"
        raise InvalidInputError(errors=[(field, fault)])


class NewStep(Struct, frozen=True):
    claim: ClaimRef
    name: str
    #: The result, as JSON.
    data: bytes
    #: What this step alone has cost.
    cost_usd: Decimal = NOTHING
    #: By the whole attempt since its claim.
    spent: Spent = UNREPORTED
    #: A digest of its arguments; None: every call of the step matches.
    digest: str | None = None
    #: Ids of signals that came with the claim and don't come again.
    received: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Checked here, so that one invalid step is rejected alone and not with the whole call.
        check_step_name("name", self.name)
        if self.digest is not None and not (1 <= len(self.digest) <= MAX_DIGEST and is_storable(self.digest)):
            fault = f"must be a text of 1 to {MAX_DIGEST} characters, got {self.digest[:100]!r}"
            raise InvalidInputError(errors=[("digest", fault)])
        check_json(data=self.data)
        for name in self.received:
            check_storable(received=name)


class NewCheckpoint(Struct, frozen=True):
    claim: ClaimRef
    #: As JSON.
    data: bytes
    spent: Spent = UNREPORTED

    def __post_init__(self) -> None:
        check_json(data=self.data)


class NewSpawn(Struct, frozen=True):
    """Children to create in the DAG of a held task; with `wait` the task pauses until all have ended.

    With a key the children are created once, however often the call is repeated. Without one, a call with the
    same children under the same claim is a repeated call.
    """

    claim: ClaimRef
    tasks: Sequence[NewTask]
    key: str | None = None
    wait: bool = False
    spent: Spent = UNREPORTED
    #: Saved in the same transaction, as JSON.
    checkpoint: bytes | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise InvalidInputError(errors=[("tasks", "at least one task is needed")])
        if self.key is not None:
            # It is part of the name of a step.
            check_step_name("key", self.key)
        check_json(checkpoint=self.checkpoint)


def check_progress_size(progress: bytes | None) -> None:
    """Progress is sent with heartbeats, which must be fast, and each report is kept as an event."""
    if progress is not None and len(progress) > MAX_PROGRESS_BYTES:
        fault = (
            f"must be at most {MAX_PROGRESS_BYTES} bytes of JSON, got {len(progress)}; checkpoint the rest"
        )
        raise InvalidInputError(errors=[("progress", fault)])


def _unwrapped(value: T | None, error: LineshaftError | None) -> T:
    if error is not None:
        raise error
    assert value is not None  # noqa: S101 - one of the two is always there
    return value


class Moved(msgspec.Struct, frozen=True):
    """The result for one task of a call: its new status, or why it didn't move."""

    id: str
    status: Status | None
    error: LineshaftError | None = None
    #: Seconds until the next attempt, if this one failed or was rate limited. None if the call is repeated.
    retry_in_sec: float | None = None
    #: Why the attempt failed, also if its output was rejected. None if the call is repeated.
    failure_reason: str | None = None

    def unwrap(self) -> Status:
        return _unwrapped(self.status, self.error)


class TaskAtWork(Struct, frozen=True):
    """The task that a handler works on."""

    id: str
    type: str
    title: str
    #: While the handler runs, no other task with this lock does.
    lock_key: str | None
    #: All locks; `lock_key` is the only one if there is one and it isn't shared.
    lock_keys: tuple[str, ...] = ()

    @property
    def document_id(self) -> str | None:
        """The document X of a lock `doc:X`; None: the lock is for something else, or there is none."""
        return document_of(self.lock_key)


class Child(Struct, frozen=True):
    """A spawned task: its status, and its outcome, once it has one."""

    id: str
    status: str = "PENDING"
    output: Any = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED


@dataclass(frozen=True, slots=True)
class Spawned:
    children: list[Child]
    #: The claim is over: the parent is claimed again when all of them have ended.
    paused: bool
    #: The same tasks in the same order: whether each was created, or existed before.
    submitted: Sequence[Submitted] = dataclasses.field(default=(), compare=False)


class SpawnResult(Struct, frozen=True):
    """One result of a batch of spawns: `spawned`, or why nothing was created."""

    id: str
    spawned: Spawned | None = None
    error: LineshaftError | None = None

    def unwrap(self) -> Spawned:
        return _unwrapped(self.spawned, self.error)


class PastAttempt(Struct, frozen=True):
    """How an earlier claim of the task ended."""

    number: int
    agent_id: str | None
    #: The process of the agent.
    instance: str | None
    model: str | None
    #: failed, rate_limited, released, waiting or cancelled.
    outcome: str
    category: str | None
    error: str | None
    started_at: datetime | None
    ended_at: datetime
    cost_usd: Decimal


class RemainingBudgets(Struct, frozen=True):
    """What is left to spend, apart from what is reserved; None: no limit."""

    task: Decimal | None = None
    agent: Decimal | None = None
    dag: Decimal | None = None


class RecordedStep(Struct, frozen=True):
    """One result of a batch of steps: the step's data and what is left to spend, or why it isn't recorded."""

    id: str
    #: The result that counts, as JSON.
    data: bytes | None = None
    budgets: RemainingBudgets = RemainingBudgets()
    error: LineshaftError | None = None

    def unwrap(self) -> bytes:
        return _unwrapped(self.data, self.error)


_decode_inputs = msgspec.json.Decoder(dict[str, Source | list[Source]]).decode


def decoded_inputs(inputs: msgspec.Raw) -> dict[str, Source | list[Source]]:
    """The upstream tasks of a claimed task, or parts of their outputs, by the name of the input."""
    # Most tasks have none.
    return {} if bytes(inputs) == b"null" else _decode_inputs(inputs)


def input_ids(inputs: msgspec.Raw) -> list[str]:
    """The upstream tasks of a claimed task, each once."""
    ids: dict[str, None] = {}
    for of in decoded_inputs(inputs).values():
        for source in of if isinstance(of, list) else [of]:
            name = source if isinstance(source, str) else source.task
            if name:
                ids[name] = None
    return list(ids)


def _lock_keys(lock_key: str | None, locks: dict[str, bool] | None) -> tuple[str, ...]:
    if locks is not None:
        return tuple(sorted(locks))
    return () if lock_key is None else (lock_key,)


#: Heartbeats that may be missing until a lease is over.
LEASE_INTERVALS = 3


class ClaimedTask(msgspec.Struct, frozen=True, gc=False):
    """A claimed task; `started` and the two after it are the same for all tasks of a claim."""

    id: str
    #: The fencing number: every write of this claim carries it.
    epoch: int
    #: None while the DAG is virtual: a standalone task's.
    live_dag_id: str | None
    lock_key: str | None
    model: str | None
    attempts: int
    rate_limits: int
    #: What earlier attempts have cost.
    cost_usd: Decimal
    limit_sec: float
    heartbeat_interval_sec: float
    #: It was started before: steps, checkpoint and children may be there.
    resume: bool
    type: str
    title: str
    #: JSON.
    spec: msgspec.Raw
    #: JSON: the tasks whose outputs it gets, by the name of the input: an id, a `Part`, or a list of these;
    #: null: none.
    inputs: msgspec.Raw
    dag_id: str
    parent_id: str | None
    deadline: datetime | None
    max_attempts: int
    max_cost_usd: Decimal | None
    require_decision_report: bool
    started: bool
    claimed_at: datetime
    claim_ttl_sec: float
    #: The defaults of its type have changed since it got its limits.
    outdated: bool = False
    #: The account to use; None: the instance has none.
    account: str | None = None
    #: Its document locks, if it has several or shares one: whether each is shared. See `lock_key`.
    locks: dict[str, bool] | None = None

    @property
    def lock_keys(self) -> tuple[str, ...]:
        """The document locks that it holds."""
        return _lock_keys(self.lock_key, self.locks)

    @property
    def status(self) -> str:
        return Status.RUNNING if self.started else Status.CLAIMED

    @property
    def lease_sec(self) -> float:
        """How long a lease lasts; each heartbeat of a started task renews it."""
        return LEASE_INTERVALS * self.heartbeat_interval_sec if self.started else self.claim_ttl_sec

    @property
    def lease_until(self) -> datetime:
        lease = min(self.lease_sec, self.limit_sec) if self.started else self.lease_sec
        return self.claimed_at + timedelta(seconds=lease)

    @property
    def limit_at(self) -> datetime | None:
        return self.claimed_at + timedelta(seconds=self.limit_sec) if self.started else None

    @property
    def reserved_usd(self) -> Decimal:
        return self.max_cost_usd or Decimal(0)


class Resumed(Struct, frozen=True):
    """What earlier attempts at a task left behind, each as JSON."""

    id: str
    checkpoint: bytes | None = None
    steps: bytes | None = None
    step_digests: bytes | None = None
    last_error: bytes | None = None
    children: bytes | None = None
    signals: bytes | None = None


class Claim(Struct, frozen=True):
    tasks: list[ClaimedTask] = field(default_factory=list)
    #: By task id, for those with `resume`.
    resumed: dict[str, Resumed] = field(default_factory=dict)
    #: Outputs that are inputs of these tasks, by the id of the upstream task, as JSON. Those beyond
    #: MAX_INPUT_BYTES are missing.
    inputs: dict[str, bytes | None] = field(default_factory=dict)
    #: Artifacts that tasks refer to in `context_refs`, by id.
    artifacts: dict[str, InputArtifact] = field(default_factory=dict)
    #: Some of its models, all its accounts or the agent itself are slowed down until then; None: nothing is.
    slowdown_until: datetime | None = None
    #: False: the agent has no slot free, or takes nothing now. Others may.
    has_room: bool = True
    #: There may be work that this agent can't take now, for lack of a slot, budget or model. Others may.
    leaves_some: bool = False
    #: By task id, for those with `resume`, in order.
    past_attempts: dict[str, list[PastAttempt]] = field(default_factory=dict)


class Presence(Struct, frozen=True):
    """An instance of an agent, in a heartbeat."""

    agent_id: str
    incarnation: int


class HeldTask(Struct, frozen=True):
    """A claim whose lease a heartbeat renews."""

    id: str
    epoch: int
    holder: Presence
    #: JSON; None: nothing new.
    progress: bytes | None = None
    #: Since the claim.
    spent: Spent = UNREPORTED
    #: The claim token that a server issued.
    token: str = ""

    def __post_init__(self) -> None:
        # Here, so that one bad report is refused alone and not with all others of its call.
        check_json(progress=self.progress)
        check_progress_size(self.progress)

    @property
    def claim(self) -> ClaimRef:
        return ClaimRef(self.id, self.epoch, self.token)


class EndedClaim(Struct, frozen=True):
    """A claim that its agent no longer holds: of one task it may have had two."""

    id: str
    epoch: int
    #: cancel or lost.
    answer: str
    #: The limit that it is over; it is still held then, and its agent gives it up. None: it has ended.
    reason: str | None = None


class HeartbeatAnswers(Struct, frozen=True):
    #: By instance: active, draining or offline. One that is missing was superseded, or is unknown.
    agents: dict[Presence, str]
    #: Claims that are over.
    over: list[EndedClaim] = field(default_factory=list)
    #: By instance: until when some of its models or all its accounts are slowed down; others are missing.
    slowdowns: dict[Presence, datetime] = field(default_factory=dict)
    #: By instance: how many tasks it may hold, which may be changed while it works.
    slots: dict[Presence, int] = field(default_factory=dict)
    #: What the tasks have spent could not be written, and must be reported again.
    spent_later: bool = False
    #: Ids and epochs of claims that are held, but whose leases were not renewed: another transaction had
    #: their tasks locked.
    not_renewed: set[tuple[str, int]] = field(default_factory=set)


class DueRetries(Struct, frozen=True):
    """Retries after failures that are due soon."""

    count: int
    #: Seconds until the first one.
    due_sec: float | None


class LeftBehind(Struct, frozen=True):
    """Tasks of some types that can't be claimed now; each with the seconds until the first one may be."""

    #: They failed, or were rate limited.
    retrying: int
    retry_sec: float | None
    #: They were snoozed, sleep, or were submitted for later.
    scheduled: int
    scheduled_sec: float | None
    held: int
    #: Until the first lease expires.
    lease_sec: float | None
    #: They wait for money, a breaker, a document lock or another agent; with the oldest of them.
    ready: int = 0
    ready_id: str | None = None
    #: They wait for a signal.
    waiting: int = 0
