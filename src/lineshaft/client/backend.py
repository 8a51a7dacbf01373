"""The interface of the two backends: a database, and a server over HTTP.

`call` carries out any operation of the table (`lineshaft.operations`). The rest is what the transports really
do differently: transactions of the caller, claims and their outcomes, waiting for work, heartbeats, and the
bytes of artifacts.
"""

from collections.abc import AsyncGenerator, AsyncIterable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from msgspec import Struct, field

from lineshaft.model.tasks import NewTask
from lineshaft.operations.operation import Operation
from lineshaft.types import Artifact, InstanceInfo, NewDag, Readiness, Submitted, SubmittedDag
from lineshaft.types import work as w
from lineshaft.types.assignments import Assignment
from lineshaft.types.reservations import NewReservation, Settlement
from lineshaft.types.waits import NewSuspension, WaitEnd

Req = TypeVar("Req", bound=Struct)
Res = TypeVar("Res")
Claimed = list[Assignment[w.ClaimedTask]]


class Waited(Struct, frozen=True):
    """A reason to look for work; over HTTP, tasks that are already claimed."""

    assignments: Claimed = field(default_factory=list)
    #: How long the server had waited when it claimed them; None: an older server, which doesn't say.
    before_claim_sec: float | None = None


class WorkWaiter(Protocol):
    """How an idle agent waits for work."""

    async def wait(
        self,
        timeout: float,  # noqa: ASYNC109 - the end of the time is a result
        *,
        types: Sequence[str],
        limit: int,
    ) -> Waited | None:
        """There may be work; over HTTP, up to `limit` tasks of these types are already claimed.

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
        self, agents: Sequence[w.Presence], tasks: Sequence[w.HeldTask], *, answer_within_sec: float
    ) -> w.HeartbeatAnswers: ...

    async def release(
        self, agent: w.Presence, items: Sequence[tuple[w.Release, bytes | None]], *, answer_within_sec: float
    ) -> list[w.Moved]:
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

    async def call(self, operation: Operation[Req, Res], request: Req) -> Res: ...

    async def health(self) -> Readiness: ...

    # Submitting. `connection`: the caller's own, whose transaction it becomes part of.

    async def submit(self, tasks: Sequence[NewTask], *, connection: Any) -> list[Submitted]: ...

    async def submit_dag(self, dag: NewDag, *, connection: Any) -> SubmittedDag: ...

    # The bytes of artifacts.

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

    def read_artifact(self, artifact: Artifact, start: int, stop: int) -> AsyncGenerator[bytes, None]: ...

    # Working.

    async def claim(self, agent_id: str, incarnation: int, *, limit: int, types: Sequence[str]) -> Claimed:
        """Claim and start."""
        ...

    async def complete(self, items: Sequence[w.Completion]) -> list[w.Moved]: ...

    async def complete_and_claim(
        self, item: w.Completion, *, types: Sequence[str]
    ) -> tuple[w.Moved, Claimed]:
        """Complete a task, and start the next one of these types for the same instance, if there is one."""
        ...

    async def fail(self, items: Sequence[w.Failure]) -> list[w.Moved]: ...

    async def release(self, items: Sequence[w.Release]) -> list[w.Moved]: ...

    async def cancel_held(self, items: Sequence[w.Cancellation]) -> list[w.Moved]: ...

    async def record_step(self, step: w.NewStep) -> tuple[bytes, w.RemainingBudgets]: ...

    async def save_checkpoint(self, claim: w.ClaimRef, data: bytes) -> None: ...

    async def spawn(
        self, claim: w.ClaimRef, key: str, tasks: Sequence[NewTask], *, wait: bool, spent: w.Spent
    ) -> w.Spawned: ...

    async def suspend(self, new: NewSuspension) -> WaitEnd | None:
        """How the wait has ended; None: the claim is over until it has."""
        ...

    async def acquire(self, new: NewReservation, *, wait_sec: float) -> str | None:
        """The reservation; None: no quota counts it. RateLimitedError: no room within `wait_sec`."""
        ...

    async def settle(self, settlement: Settlement) -> None: ...

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
