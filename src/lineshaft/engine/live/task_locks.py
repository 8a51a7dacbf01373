"""Locks on the rows of tasks, and the result for a claim that no longer holds its task."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal

import msgspec
from msgspec import Struct

from lineshaft.engine.live import spending
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.literals import array_literal, json_text
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows
from lineshaft.errors import InvalidTransitionError, NotFoundError, StaleClaimError
from lineshaft.model.states import Status
from lineshaft.types.work import ClaimRef, Moved, Spent

_SQL = catalog.load(__name__)
#: Comes before a statement that ends tasks.
LOCK_DEPENDENTS = _SQL["lock_dependents"]

#: An agent holds the task, or its output is being checked.
HELD = frozenset({Status.CLAIMED, Status.RUNNING, Status.VALIDATING})


def claim_columns(claims: Sequence[ClaimRef]) -> dict[str, str]:
    """Parameters of a statement that takes many claims."""
    return {
        "ids": array_literal([claim.id for claim in claims]),
        "epochs": array_literal([claim.epoch for claim in claims]),
    }


def has_duplicate_tasks(claims: Sequence[ClaimRef]) -> bool:
    """Whether two of them are of one task.

    An agent that lost a task and claimed it again may report on both claims in one call. Results are matched
    by task, so both would get the same result: such calls are split.
    """
    return len({claim.id for claim in claims}) < len(claims)


class LockedTask(Struct, frozen=True):
    """A live task as `lock_tasks` reads it: everything that decides about a transition."""

    id: str
    epoch: int
    status: str
    dag_id: str | None
    agent_id: str | None
    #: The instance of the agent that holds the task.
    incarnation: int | None
    reserved_usd: Decimal
    #: Whether the reservation is part of the agent's reserved money, and of the day's.
    agent_reserved: bool
    day_reserved: bool
    cost_usd: Decimal
    attempt_cost_usd: Decimal
    attempt_tokens_input: int
    attempt_tokens_output: int
    tokens_input: int
    tokens_output: int
    attempts: int
    rate_limits: int
    long_waits: int
    revivals: int
    claimed_at: datetime | None
    started_at: datetime | None
    first_started_at: datetime | None
    ready_at: datetime | None
    lease_until: datetime | None
    limit_at: datetime | None
    lock_key: str | None
    lock_owner: str | None
    lock_token: int | None
    lane_id: int
    model: str | None
    version: str | None
    account: str | None
    is_batch: bool
    blocked: int
    progress: bytes | None
    is_gated: bool
    type: str
    title: str
    parent_id: str | None
    task_dag_id: str
    preset: str
    retry: bytes | None
    max_attempts: int
    max_cost_usd: Decimal | None
    max_total_cost_usd: Decimal | None
    required_capabilities: list[str]
    model_preferences: list[str]
    fallback_models: list[str]
    priority_boost_per_minute: float
    gates: bytes | None
    require_decision_report: bool
    idempotency_key: str | None
    heartbeat_sec: float
    #: Its claim has slots of quotas; or it is READY, and others may be claimed in its place.
    concerns_quotas: bool
    #: JSON: by document lock who holds it for the task, now or later: itself, or a batch. None: no locks.
    lock_holders: bytes | None

    @property
    def locks(self) -> dict[str, str]:
        """Its document locks, and who holds each for it: the task itself, or a batch."""
        return {} if self.lock_holders is None else msgspec.json.decode(self.lock_holders)

    @property
    def is_held(self) -> bool:
        """Whether its claim may still end it: not once its output waits for a gate elsewhere or a person."""
        return self.status in HELD and (self.status != Status.VALIDATING or self.agent_id is not None)


class LiveTask(Struct, frozen=True):
    id: str
    epoch: int
    status: str


class EndedTask(Struct, frozen=True):
    id: str
    epoch: int
    status: str
    category: str | None


class _ChildTask(Struct, frozen=True):
    id: str
    parent_id: str


class TaskLocks:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def lock(self, connection: Connection, ids: Sequence[str]) -> dict[str, LockedTask]:
        """Those of these tasks that haven't ended."""
        if not ids:
            return {}
        tasks = await fetch_rows(connection, LockedTask, _SQL["lock_tasks"], {"ids": list(ids)})
        return {task.id: task for task in tasks}

    async def kept_locks(self, connection: Connection, tasks: Iterable[LockedTask]) -> set[str]:
        """Those of these tasks that still have all document locks that their claims were given."""
        ids = [task.id for task in tasks if task.lock_token is not None]
        return set(await fetch_column(connection, _SQL["kept_locks"], {"ids": ids})) if ids else set()

    async def lock_with_dependents(self, connection: Connection, ids: Sequence[str]) -> dict[str, LockedTask]:
        """As `lock`; tasks that wait for them are locked too."""
        await connection.execute(LOCK_DEPENDENTS, {"ids": list(ids)})
        return await self.lock(connection, ids)

    async def hold(self, connection: Connection, claim: ClaimRef, verb: str) -> LockedTask:
        """Lock the RUNNING task of a claim that is still held, or raise why it isn't."""
        task = (await self.lock(connection, [claim.id])).get(claim.id)
        if task is None or task.epoch != claim.epoch or task.status != Status.RUNNING:
            (refused,) = await self.refuse(connection, [claim], verb)
            refused.unwrap()
            raise AssertionError("a claim that isn't held is refused")
        return task

    async def book_checked(
        self, connection: Connection, locked: dict[str, LockedTask], spent: Mapping[ClaimRef, Spent]
    ) -> set[ClaimRef]:
        """Book what these claims report, if their output is being checked: what it cost is booked already.

        Returns those claims; their rows in `locked` are read again.
        """
        checked = {
            claim: report
            for claim, report in spent.items()
            if (task := locked.get(claim.id)) is not None
            and (task.epoch, task.status) == (claim.epoch, Status.VALIDATING)
        }
        if checked:
            await spending.book_late(connection, list(checked.items()), self._database.now)
            locked |= await self.lock(connection, [claim.id for claim in checked])
        return set(checked)

    async def live(self, connection: Connection, ids: Sequence[str]) -> dict[str, LiveTask]:
        """Those of these tasks that haven't ended, without a lock."""
        return {
            task.id: task
            for task in await fetch_rows(connection, LiveTask, _SQL["read_live"], {"ids": list(ids)})
        }

    async def ends(self, connection: Connection, ids: Sequence[str]) -> dict[str, EndedTask]:
        """Those of these tasks that have ended."""
        return {
            task.id: task
            for task in await fetch_rows(connection, EndedTask, _SQL["read_ends"], {"ids": list(ids)})
        }

    async def end_status(self, connection: Connection, task_id: str) -> Status:
        """How a task ended that isn't live."""
        ended = (await self.ends(connection, [task_id])).get(task_id)
        if ended is None:
            raise NotFoundError(f"There is no task {task_id}.")
        return Status(ended.status)

    async def children(self, connection: Connection, ids: Sequence[str]) -> dict[str, str]:
        """The children of these tasks, each with its parent."""
        children = await fetch_rows(connection, _ChildTask, _SQL["children"], {"ids": list(ids)})
        return {child.id: child.parent_id for child in children}

    async def refuse(
        self,
        connection: Connection,
        claims: Sequence[ClaimRef],
        verb: str,
        *,
        repeated: Collection[Status] = (),
        ended_by: str | None = None,
        late_outputs: Mapping[str, bytes | None] | None = None,
        spent: Mapping[ClaimRef, Spent] | None = None,
    ) -> list[Moved]:
        """The results of claims that moved nothing: the first result of a repeated call, or the reason.

        `repeated`: the statuses that the call leads to, if it may be repeated. Where something else leads to
        them too, `ended_by` is the call: only a claim that it ended can be of a repeated call. What a stale
        claim reports as its output is kept as an event, and what a refused one has `spent` is booked.
        """
        if not claims:
            return []
        ids = [claim.id for claim in claims]
        live, ends = await self.live(connection, ids), await self.ends(connection, ids)
        may_repeat = set(ids) if ended_by is None else await self.ended_by(connection, claims, ended_by)
        results = [
            _refusal(
                claim,
                live.get(claim.id) or ends.get(claim.id),
                verb,
                repeated if claim.id in may_repeat else (),
            )
            for claim in claims
        ]
        stale = [
            claim
            for claim, result in zip(claims, results, strict=True)
            if isinstance(result.error, StaleClaimError)
        ]
        if late_outputs is not None:
            await self.log_late(connection, stale, late_outputs)
        if spent:
            # This includes a claim whose output is being checked: it isn't stale, but can't do anything else.
            refused = [
                claim for claim, result in zip(claims, results, strict=True) if result.error is not None
            ]
            late = [(claim, spent[claim]) for claim in refused if claim in spent]
            await spending.book_late(connection, late, self._database.now)
        return results

    async def ended_by(self, connection: Connection, claims: Sequence[ClaimRef], call: str) -> set[str]:
        """The tasks of those of these claims that this call ended."""
        parameters = {**claim_columns(claims), "call": call}
        return set(await fetch_column(connection, _SQL["ended_by"], parameters))

    async def log_late(
        self, connection: Connection, claims: Sequence[ClaimRef], outputs: Mapping[str, bytes | None]
    ) -> None:
        """Keep outputs that are refused as events."""
        if claims:
            texts = [json_text(outputs.get(claim.id)) for claim in claims]
            await connection.execute(
                _SQL["log_late_results"], {**self._database.now, **claim_columns(claims), "outputs": texts}
            )


def _refusal(
    claim: ClaimRef, task: LiveTask | EndedTask | None, verb: str, repeated: Collection[Status]
) -> Moved:
    if task is None:
        return Moved(claim.id, None, NotFoundError(f"There is no task {claim.id}."))
    if task.epoch == claim.epoch and task.status in repeated:
        # A repeated call, whose first result was lost on the way.
        return Moved(claim.id, Status(task.status))
    if task.epoch != claim.epoch or task.status not in HELD:
        error = StaleClaimError(
            f"Can't {verb} task {claim.id} with the claim of epoch {claim.epoch}: it is {task.status} with "
            f"epoch {task.epoch}. The claim ended; stop working on this task."
        )
        return Moved(claim.id, None, error)
    message = f"Can't {verb} task {claim.id}: it is {task.status}."
    if task.status == Status.VALIDATING:
        message += " Its output was handed in: only its gates and people decide about it now."
    return Moved(claim.id, None, InvalidTransitionError(message))
