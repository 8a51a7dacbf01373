"""What OfficePlane's overview and history pages ask for."""

from msgspec import Struct

from lineshaft.engine.read.outcomes import Outcomes
from lineshaft.errors import InvalidInputError
from lineshaft.integrations.officeplane.conversion import state_name
from lineshaft.integrations.officeplane.history import EVENT_TYPES, MOST, HistoryEntry, read_history
from lineshaft.integrations.officeplane.officeplane import Call
from lineshaft.integrations.officeplane.tasks import STATES
from lineshaft.integrations.officeplane.this_process import System
from lineshaft.model.states import Status
from lineshaft.operations.operation import operation
from lineshaft.types import Scope
from lineshaft.types.request import Limit, Nothing


class TaskFigures(Struct, frozen=True, rename="camel"):
    total: int
    by_state: dict[str, int]
    #: From the start to the end of completed tasks, the last ones; 0: there are none.
    avg_duration_ms: float
    #: The share of FAILED and TIMEOUT among tasks that ended, apart from CANCELLED.
    failure_rate: float


class Metrics(Struct, frozen=True):
    tasks: TaskFigures
    system: System


@operation("GET /api/metrics", Scope.READ)
async def read_document_metrics(call: Call, request: Nothing) -> Metrics:  # noqa: ARG001 - every operation has them
    """How many tasks are in which state, how long they take, and how the server is doing."""
    read = call.service.engine.read
    by_status = (await read.stats()).by_status
    outcomes = await read.outcomes()
    return Metrics(_figures(by_status, outcomes), call.service.process.now())


class HistoryQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    event_type: str | None = None
    limit: Limit = 50
    offset: int = 0


@operation("GET /api/history", Scope.READ)
async def read_document_history(call: Call, request: HistoryQuery) -> list[HistoryEntry]:
    """What happened, newest first: the last 10,000 events."""
    kind = None if request.event_type is None else request.event_type.upper()
    if kind is not None and kind not in EVENT_TYPES:
        fault = f"must be one of {', '.join(EVENT_TYPES)}, got {request.event_type!r}"
        raise InvalidInputError(errors=[("eventType", fault)])
    if not 0 <= request.offset <= MOST - request.limit:
        fault = f"must be from 0 to {MOST} less the limit, got {request.offset}"
        raise InvalidInputError(errors=[("offset", fault)])
    engine = call.service.engine
    return await read_history(engine.events, engine.read, kind, request.limit, request.offset)


def _figures(by_status: dict[Status, int], outcomes: Outcomes) -> TaskFigures:
    """Some tasks are counted under another state than their status: see `state_name`."""
    by_state = dict.fromkeys(STATES, 0)
    for status, count in by_status.items():
        by_state[state_name(status)] += count
    batches = min(outcomes.batches_started, by_state["QUEUED"])
    by_state["QUEUED"] -= batches
    by_state["RUNNING"] += batches
    timed_out = min(outcomes.timed_out, by_state["FAILED"])
    by_state["FAILED"] -= timed_out
    by_state["TIMEOUT"] += timed_out
    failed = by_state["FAILED"] + by_state["TIMEOUT"]
    ended = failed + by_state["COMPLETED"]
    return TaskFigures(
        total=sum(by_state.values()),
        by_state=by_state,
        avg_duration_ms=round(1000 * (outcomes.average_sec or 0.0), 1),
        failure_rate=failed / ended if ended else 0.0,
    )
