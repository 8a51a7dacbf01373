"""The interface of the two backends: a database, and a server over HTTP."""

from collections.abc import AsyncGenerator, AsyncIterable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from decimal import Decimal
from typing import Any, Literal, Protocol

from msgspec import UnsetType

from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.tasks import NewTask
from lineshaft.types import (
    AgentInfo,
    Approval,
    ApprovalDecision,
    Artifact,
    Attempt,
    Attention,
    Breaker,
    BulkResolution,
    Costs,
    Dag,
    DagFilter,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    EventPage,
    InstanceInfo,
    Limits,
    Lock,
    MatchedTasks,
    NewAgent,
    NewToken,
    Page,
    Readiness,
    RegisteredAgent,
    Report,
    Slowdown,
    Stats,
    Submitted,
    SubmittedDag,
    Task,
    TaskChange,
    TaskFilter,
    ThroughputHistory,
    Token,
    Waiting,
    Why,
)
from lineshaft.types.assignments import Assignment
from lineshaft.types.sources import Fired, Firing, NewSource, Source, SourceChange, SourceFields
from lineshaft.types.work import (
    Cancellation,
    ClaimedTask,
    ClaimRef,
    Completion,
    DueRetries,
    Failure,
    HeartbeatAnswers,
    HeldTask,
    LeftBehind,
    Moved,
    NewStep,
    Presence,
    Release,
    RemainingBudgets,
    Spawned,
    Spent,
)


class WorkWaiter(Protocol):
    """How an idle agent waits for work."""

    async def wait(
        self,
        timeout: float,  # noqa: ASYNC109 - the end of the time is a result
        *,
        types: Sequence[str],
        limit: int,
    ) -> list[Assignment[ClaimedTask]] | None:
        """A list: look for work; over HTTP, up to `limit` tasks of these types are already claimed.

        None: the time is up, or the wait was interrupted.
        """
        ...

    def interrupt(self) -> None:
        """End the current wait soon. It still returns tasks that are already claimed."""
        ...

    def pass_on(self) -> None:
        """There may be more than this agent could take: let another agent of this process look too."""
        ...

    def decline(self) -> None:
        """No handler was free for the task that woke this agent: let another look instead.

        The backend does so itself after a claim that left something for lack of a slot, money or a model.
        """
        ...


class HeartbeatTransport(Protocol):
    """Sends heartbeats. Created in one thread, used and closed in the event loop of another."""

    async def beat(
        self, agents: Sequence[Presence], tasks: Sequence[HeldTask], *, answer_within_sec: float
    ) -> HeartbeatAnswers: ...

    async def release(
        self, agent: Presence, items: Sequence[tuple[Release, bytes | None]], *, answer_within_sec: float
    ) -> list[Moved]:
        """Release tasks of an agent that stops, each with a checkpoint to save before, if any.

        The agent is draining first: else its pending long poll could claim them again.
        """
        ...

    async def close(self) -> None: ...


class Backend(Protocol):
    @property
    def place(self) -> str:
        """Where the queue is, for people; without secrets."""
        ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    # Submitting. `connection`: the caller's own, whose transaction it becomes part of.

    async def submit(self, tasks: Sequence[NewTask], *, connection: Any) -> list[Submitted]: ...

    async def submit_dag(
        self,
        title: str,
        tasks: Sequence[NewTask],
        *,
        budget_ceiling_usd: Decimal | float | None,
        created_by: str | None,
        idempotency_key: str | None,
        connection: Any,
    ) -> SubmittedDag: ...

    # Reading and operating.

    async def task(self, task_id: str) -> Task: ...

    async def tasks(
        self, filters: TaskFilter, *, order: str, limit: int, cursor: str | None
    ) -> Page[Task]: ...

    async def attempts(self, task_id: str) -> list[Attempt]: ...

    async def steps(self, task_id: str) -> dict[str, Any]: ...

    async def why(self, task_id: str) -> Why: ...

    async def change(self, task_id: str, change: TaskChange) -> Task: ...

    async def add_dependencies(self, task_id: str, depends_on: Sequence[str]) -> Task: ...

    async def cancel(self, task_id: str, reason: str, *, cascade: bool) -> Task: ...

    async def retry(self, task_id: str, *, delay_sec: float) -> Task: ...

    async def cancel_matching(self, wanted: TaskFilter, reason: str, *, dry_run: bool) -> MatchedTasks: ...

    async def retry_matching(self, wanted: TaskFilter, *, dry_run: bool) -> MatchedTasks: ...

    async def finished(self, ids: Sequence[str]) -> dict[str, str]:
        """For each id: `open`, `unknown`, or ended as a `task` or as a `dag`."""
        ...

    async def find_ids(self, text: str, kind: Literal["task", "dag"] | None) -> list[str]: ...

    async def dag(self, dag_id: str) -> Dag: ...

    async def dags(self, filters: DagFilter, *, limit: int, cursor: str | None) -> Page[Dag]: ...

    async def cancel_dag(self, dag_id: str, reason: str) -> Dag: ...

    async def set_dag_budget(self, dag_id: str, usd: Decimal | float | None) -> Dag: ...

    async def add_dag_budget(self, dag_id: str, usd: Decimal | float) -> Dag: ...

    async def rename_dag(self, dag_id: str, title: str) -> Dag: ...

    async def events(
        self,
        after: str | None,
        *,
        limit: int,
        task_id: str | None,
        dag_id: str | None,
        kinds: Collection[str] | None,
    ) -> EventPage: ...

    async def approvals(self, *, limit: int, cursor: str | None) -> Page[Approval]: ...

    async def decide(self, task_id: str, decision: ApprovalDecision) -> Task: ...

    async def reports(
        self, query: str, *, type_: str | None, dag_id: str | None, limit: int, cursor: str | None
    ) -> Page[Report]: ...

    async def dead_letters(
        self, filters: DeadLetterFilter, *, limit: int, cursor: str | None
    ) -> Page[DeadLetter]: ...

    async def dead_letter(self, task_id: str) -> DeadLetter: ...

    async def dead_letter_groups(
        self, *, types: Sequence[str], categories: Sequence[str], limit: int
    ) -> list[DeadLetterGroup]: ...

    async def resolve(self, task_id: str, decision: ResolutionRequest) -> Task: ...

    async def resolve_all(self, filters: DeadLetterFilter, decision: ResolutionRequest) -> BulkResolution: ...

    async def put_artifact(
        self,
        chunks: AsyncIterable[bytes],
        *,
        name: str,
        content_type: str | None,
        task_id: str | None,
        size: int | None,
    ) -> Artifact:
        """`size`: None if it isn't known."""
        ...

    async def artifact(self, ref: str) -> Artifact: ...

    async def artifacts(self, *, task_id: str | None, limit: int, cursor: str | None) -> Page[Artifact]: ...

    def read_artifact(self, artifact: Artifact, start: int, stop: int) -> AsyncGenerator[bytes, None]: ...

    async def delete_artifact(self, ref: str) -> None: ...

    async def agents(self, *, status: Sequence[str], limit: int, cursor: str | None) -> Page[AgentInfo]: ...

    async def agent(self, agent_id: str) -> AgentInfo: ...

    async def change_agent(
        self,
        agent_id: str,
        *,
        status: str | None,
        max_concurrent_tasks: int | UnsetType | None,
        budget_usd: Decimal | float | UnsetType | None,
        add_budget_usd: Decimal | float | None,
        reason: str | None,
    ) -> AgentInfo: ...

    async def delete_agent(self, agent_id: str, *, reason: str | None) -> None: ...

    async def limits(self) -> Limits: ...

    async def change_limits(self, changes: Mapping[str, Any], *, reason: str | None) -> Limits: ...

    async def breakers(self, *, limit: int, cursor: str | None) -> Page[Breaker]: ...

    async def open_breaker(self, key: str, *, reason: str | None) -> Breaker: ...

    async def reset_breaker(self, key: str, *, reason: str | None) -> Breaker: ...

    async def locks(self, *, limit: int, cursor: str | None) -> Page[Lock]: ...

    async def release_lock(self, key: str, *, reason: str | None) -> None: ...

    async def slowdowns(self, *, limit: int, cursor: str | None) -> Page[Slowdown]: ...

    async def end_slowdown(self, key: str, *, reason: str | None) -> None: ...

    async def pause(self, type_: str | None, *, reason: str | None) -> None: ...

    async def resume(self, type_: str | None, *, reason: str | None) -> None: ...

    async def stats(self) -> Stats: ...

    async def waiting(self) -> Waiting: ...

    async def throughput(self) -> ThroughputHistory: ...

    async def costs(
        self, *, days: int, type_: str | None, model: str | None, agent_id: str | None
    ) -> Costs: ...

    async def attention(self) -> Attention: ...

    async def health(self) -> Readiness: ...

    async def sources(self, *, kind: str | None, limit: int, cursor: str | None) -> Page[Source]: ...

    async def source(self, name: str) -> Source: ...

    async def create_source(self, source: NewSource) -> Source: ...

    async def put_source(self, source: NewSource, *, version: int | None = None) -> Source: ...

    async def patch_source(
        self, name: str, changes: SourceFields, *, version: int | None = None
    ) -> Source: ...

    async def delete_source(self, name: str) -> None: ...

    async def fire_source(self, name: str, event: Mapping[str, Any] | None, *, dry_run: bool) -> Fired: ...

    async def source_firings(self, name: str, *, limit: int, cursor: str | None) -> Page[Firing]: ...

    async def apply_sources(
        self, sources: Sequence[NewSource], *, origin: str, dry_run: bool
    ) -> list[SourceChange]: ...

    async def tokens(self) -> list[Token]: ...

    async def create_token(
        self, name: str, scope: str, *, agent_id: str | None, budget_usd: Decimal | float | None
    ) -> NewToken: ...

    async def revoke_token(self, which: str) -> None: ...

    # Working.

    async def register(self, agent: NewAgent) -> RegisteredAgent: ...

    async def drain(self, agent_id: str, incarnation: int) -> None: ...

    async def leave(self, agent_id: str, incarnation: int) -> None: ...

    async def siblings(
        self, agent_id: str, incarnation: int, *, gone: Sequence[str], everyone: bool
    ) -> list[str]:
        """Report instances on the same machine whose processes are dead; returns some to watch, or all."""
        ...

    async def claim(
        self, agent_id: str, incarnation: int, *, limit: int, types: Sequence[str]
    ) -> list[Assignment[ClaimedTask]]:
        """Claim and start."""
        ...

    async def complete(self, items: Sequence[Completion]) -> list[Moved]: ...

    async def complete_and_claim(
        self, item: Completion, *, types: Sequence[str]
    ) -> tuple[Moved, list[Assignment[ClaimedTask]]]:
        """Complete a task, and start the next one of these types for the same instance, if there is one."""
        ...

    async def fail(self, items: Sequence[Failure]) -> list[Moved]: ...

    async def release(self, items: Sequence[Release]) -> list[Moved]: ...

    async def cancel_held(self, items: Sequence[Cancellation]) -> list[Moved]: ...

    async def record_step(self, step: NewStep) -> tuple[bytes, RemainingBudgets]: ...

    async def save_checkpoint(self, claim: ClaimRef, data: bytes) -> None: ...

    async def spawn(
        self, claim: ClaimRef, key: str, tasks: Sequence[NewTask], *, wait: bool, spent: Spent
    ) -> Spawned: ...

    # Running agents.

    def heartbeats(self) -> HeartbeatTransport: ...

    def waiter(self, agent_id: str, own: InstanceInfo) -> AbstractAsyncContextManager[WorkWaiter]: ...

    @property
    def poll_interval_sec(self) -> float | None:
        """How long an idle agent waits before it looks again; None: its own poll interval."""
        ...

    async def release_unknown(self, agent_id: str, incarnation: int, known: Collection[str]) -> int:
        """Release claims of this process whose response was lost: all but those that it knows."""
        ...

    def expect_answers_within(self, seconds: float) -> None:
        """Replace a connection that doesn't answer for so long."""
        ...

    @property
    def maintenance_interval_sec(self) -> float: ...

    async def maintain(self) -> float | None:
        """Do the duties that no server may be running; returns the seconds until something is due again."""
        ...

    async def retry_within(self, types: Sequence[str], within_sec: float) -> DueRetries: ...

    async def left_behind(self, types: Sequence[str]) -> LeftBehind: ...
