"""Answers of a server that programs see in another form; all others are read straight into their types."""

from datetime import datetime
from decimal import Decimal

from msgspec import Struct, field, structs

from lineshaft.client.problems import Problem
from lineshaft.client.views import Event
from lineshaft.engine.agents import AgentInfo
from lineshaft.engine.read.why import Reason, ReasonCode, Why
from lineshaft.engine.review.dead_letters import BulkReview
from lineshaft.engine.submit.submission import Submitted, SubmittedDag
from lineshaft.engine.transition.outcomes import Moved
from lineshaft.errors import LineshaftError
from lineshaft.model.states import Status


class Items(Struct, frozen=True):
    items: list[Submitted]


class _Id(Struct, frozen=True):
    id: str


class NewDag(Struct, frozen=True):
    dag: _Id
    #: By the keys of the call.
    submitted: dict[str, Submitted]
    duplicate: bool = False

    @property
    def value(self) -> SubmittedDag:
        return SubmittedDag(self.dag.id, self.submitted, self.duplicate)


class _Reason(Struct, frozen=True):
    code: ReasonCode
    detail: str


class Explanation(Struct, frozen=True):
    runnable: bool
    reasons: list[_Reason]
    status: Status

    def value(self, task_id: str) -> Why:
        reasons = tuple(Reason(reason.code, reason.detail) for reason in self.reasons)
        return Why(task_id, self.status, self.runnable, reasons)


class Events(Struct, frozen=True):
    items: list[Event]
    next_cursor: str
    caught_up: bool


class Ended(Struct, frozen=True):
    ids: dict[str, str]


class Agent(Struct, frozen=True, kw_only=True):
    id: str
    type: str | None
    capabilities: list[str]
    types: list[str] | None
    models_available: list[str]
    max_concurrent_tasks: int
    held: int = field(name="current_tasks")
    budget_usd: Decimal | None
    spent_usd: Decimal
    reserved_usd: Decimal
    status: str
    last_heartbeat: datetime
    poll_interval_sec: float
    claim_ttl_sec: float
    heartbeat_interval_sec: float
    incarnation: int
    registered_at: datetime

    @property
    def value(self) -> AgentInfo:
        return AgentInfo(**structs.asdict(self))


class _Moved(Struct, frozen=True):
    id: str
    status: Status | None
    error: Problem | None

    @property
    def value(self) -> Moved:
        return Moved(self.id, self.status, None if self.error is None else self.error.exception)


class MovedItems(Struct, frozen=True):
    items: list[_Moved]


class _Refusal(Struct, frozen=True):
    task_id: str
    code: str
    detail: str

    @property
    def exception(self) -> LineshaftError:
        return Problem(code=self.code, detail=self.detail).exception


class Resolved(Struct, frozen=True):
    resolved: list[str]
    refused: list[_Refusal]
    more: bool

    @property
    def value(self) -> BulkReview:
        return BulkReview(self.resolved, {item.task_id: item.exception for item in self.refused}, self.more)
