"""Idempotency keys: which task has one, and what a submission does that finds it in use.

The first transaction that inserts a key owns it. A submission that may change the task that has its key
(`on_conflict`) locks that task before it takes the key, as a transition does that ends the task and frees the
key. Only where the key has changed hands in the meantime does it lock the new task late.

Against a claim: the claim skips a locked task, and the submission waits for a claim that was first and then
finds the task held. A claim whose snapshot is older than the replacement gives the task back. So either an
agent gets the new task, or the submission the answer that it runs.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lineshaft.engine.caller import caller
from lineshaft.engine.feed.actor import act_json
from lineshaft.engine.live.parking import (
    look_at_quotas,
    quota_names,
    unpark_budget_waiters,
    unpark_lock_waiters,
)
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows, fetch_value
from lineshaft.engine.submit.columns import task_values
from lineshaft.engine.submit.drafts import Draft
from lineshaft.errors import AlreadyExistsError, ForbiddenError, InvalidInputError
from lineshaft.model.budget import attempt_limit
from lineshaft.model.fields import CANCEL_RUNNING, REJECT, REPLACE_WAITING, STEERING
from lineshaft.model.priority import Lane
from lineshaft.model.states import Status
from lineshaft.model.tasks import KnownTypes
from lineshaft.types import Submitted

Cancel = Callable[[Connection, Sequence[str], str], Awaitable[None]]
"""Cancels tasks as part of the transaction, with a reason."""

#: Why a task was cancelled whose key another submission took.
REPLACED = "replaced"

_SQL = catalog.load(__name__)
_log = logging.getLogger(__name__)
#: Neither held nor ended.
_WAITING = frozenset({Status.PENDING, Status.READY, Status.RETRYING})


class _KeyOwner(NamedTuple):
    key: str
    task_id: str
    content_hash: bytes


class _LiveOwner(Struct, frozen=True):
    """A live task that has a key, locked."""

    id: str
    status: str
    epoch: int
    type: str
    is_batch: bool
    parent_id: str | None
    dag_id: str
    live_dag_id: str | None
    lock_keys: list[str]
    cost_usd: Decimal
    created_at: datetime
    created_by_token: str | None


class _Relations(NamedTuple):
    id: str
    depends_on: list[str]
    #: Whether tasks wait for it, or are parts of it, that haven't ended.
    has_dependents: bool
    has_children: bool


class Replacement(NamedTuple):
    """What a waiting task becomes: a draft with the id and the place of that task."""

    draft: Draft
    task: _LiveOwner

    @property
    def lane(self) -> Lane:
        row = self.draft.row
        limit = attempt_limit(row.max_cost_usd, row.max_total_cost_usd, self.task.cost_usd)
        return Lane.of(
            row.type, row.required_capabilities, row.model_preferences, row.priority_boost_per_minute, limit
        )


class TakenKeys(NamedTuple):
    #: What the drafts have become that are not new tasks, by the id of the draft.
    results: dict[str, Submitted]
    replacements: list[Replacement]


class Keys:
    def __init__(self, database: Database, cancel: Cancel) -> None:
        self._database = database
        self._cancel = cancel

    async def take(self, connection: Connection, drafts: Sequence[Draft]) -> TakenKeys:
        """Take the keys of these drafts; children of a draft that isn't a new task aren't either."""
        # The first of two drafts with the same key in one call owns it.
        keyed: dict[str, Draft] = {}
        for draft in drafts:
            if draft.row.idempotency_key is not None:
                keyed.setdefault(draft.row.idempotency_key, draft)
        if not keyed:
            return TakenKeys({}, [])
        owners, lost, locked = await self._own(connection, keyed)
        results: dict[str, Submitted] = {}
        conflicts: list[tuple[Draft, _LiveOwner]] = []
        for draft in drafts:
            key = draft.row.idempotency_key
            # A repeated call may name the id that the first one did.
            if key is None or (owners[key].task_id == draft.id and key not in lost):
                continue
            task = locked.get(owners[key].task_id)
            if draft.row.on_conflict in STEERING and task is not None and task.status in _WAITING:
                results[draft.id] = Submitted(task.id, replaced=True)
                conflicts.append((draft, task))
            else:
                results[draft.id] = _existing(draft, owners[key])
        if results:
            await connection.execute(_SQL["count_duplicates"], {"n": len(results)})
        replacements = await self._replacements(connection, conflicts)
        for draft in drafts:
            if draft.parent_id in results:
                results.setdefault(draft.id, Submitted(draft.id, duplicate=True))
        return TakenKeys(results, replacements)

    async def _own(
        self, connection: Connection, keyed: Mapping[str, Draft]
    ) -> tuple[dict[str, _KeyOwner], set[str], dict[str, _LiveOwner]]:
        """Who owns each key now, which of them others own, and those of these tasks that may change."""
        steering = {key: draft for key, draft in keyed.items() if draft.row.on_conflict in STEERING}
        locked: dict[str, _LiveOwner] = {}
        taken: set[str] = set()
        lost = set(keyed)
        owners = await self._owners(connection, steering.keys())
        for _ in range(2):
            names = {owners[key].task_id for key in steering if key in owners} - locked.keys()
            locked |= await self._lock(connection, sorted(names))
            await self._cancel_held(connection, steering, owners, locked)
            taken |= await self._take(connection, {key: keyed[key] for key in lost})
            lost -= taken
            # From here on no other transaction changes these keys.
            owners = await self._owners(connection, lost)
            if all(owners[key].task_id in locked for key in lost & steering.keys()):
                break
        return (
            owners | {key: _KeyOwner(key, keyed[key].id, keyed[key].content) for key in taken},
            lost,
            locked,
        )

    async def _take(self, connection: Connection, keyed: Mapping[str, Draft]) -> set[str]:
        keys = sorted(keyed)
        taken = await fetch_column(
            connection,
            _SQL["take_keys"],
            {
                **self._database.now,
                "keys": keys,
                "task_ids": [keyed[key].id for key in keys],
                "hashes": [keyed[key].content for key in keys],
                "ttls": [keyed[key].row.idempotency_ttl_sec for key in keys],
            },
        )
        return set(taken)

    async def _owners(self, connection: Connection, keys: Collection[str]) -> dict[str, _KeyOwner]:
        if not keys:
            return {}
        rows = await fetch_rows(connection, _KeyOwner, _SQL["read_keys"], {"keys": sorted(keys)})
        return {row.key: row for row in rows}

    async def _lock(self, connection: Connection, ids: Sequence[str]) -> dict[str, _LiveOwner]:
        if not ids:
            return {}
        tasks = await fetch_rows(connection, _LiveOwner, _SQL["lock_owners"], {"ids": list(ids)})
        return {task.id: task for task in tasks}

    async def _relations(self, connection: Connection, ids: Sequence[str]) -> dict[str, _Relations]:
        rows = await fetch_rows(connection, _Relations, _SQL["read_relations"], {"ids": list(ids)})
        return {row.id: row for row in rows}

    async def _cancel_held(
        self,
        connection: Connection,
        steering: Mapping[str, Draft],
        owners: Mapping[str, _KeyOwner],
        locked: dict[str, _LiveOwner],
    ) -> None:
        """Cancel what runs, where that is asked for: the key is free then."""
        held = [
            (draft, task)
            for key, draft in steering.items()
            if draft.row.on_conflict == CANCEL_RUNNING
            and key in owners
            and (task := locked.get(owners[key].task_id)) is not None
            and task.status not in _WAITING
        ]
        if not held:
            return
        relations = await self._relations(connection, [task.id for _, task in held])
        for draft, task in held:
            _check_rights(draft, task, relations[task.id])
        await self._cancel(connection, [task.id for _, task in held], REPLACED)
        for _, task in held:
            del locked[task.id]

    async def _replacements(
        self, connection: Connection, conflicts: Sequence[tuple[Draft, _LiveOwner]]
    ) -> list[Replacement]:
        if not conflicts:
            return []
        relations = await self._relations(connection, [task.id for _, task in conflicts])
        replacements = []
        for draft, task in conflicts:
            _check_rights(draft, task, relations[task.id])
            _check_place(draft, task, relations[task.id])
            placed = replace(
                draft,
                id=task.id,
                parent_id=task.parent_id,
                dag_id=task.dag_id,
                live_dag_id=task.live_dag_id,
                joins=False,
                depends_on=(),
            )
            replacements.append(Replacement(placed, task))
        return replacements

    # Writing.

    async def with_starts(self, connection: Connection, new: list[Draft]) -> list[Draft]:
        """New tasks with `debounce_sec` get their `run_at`."""
        if all(draft.row.debounce_sec is None for draft in new):
            return new
        now = await self._read_time(connection)
        return [_postponed(draft, now, now) for draft in new]

    async def _read_time(self, connection: Connection) -> datetime:
        now: datetime = await fetch_value(connection, _SQL["read_time"], self._database.now)
        return now

    async def replace(
        self,
        connection: Connection,
        replacements: Sequence[Replacement],
        types: KnownTypes,
    ) -> None:
        """Write what waiting tasks become; their lanes are known, and their artifacts referred to."""
        now = await self._read_time(connection) if replacements else None
        ready = [task for _, task in replacements if task.status == Status.READY]
        # They may have other keys afterwards.
        names = await quota_names(connection, [task.id for task in ready])
        for replaced, task in replacements:
            draft = replaced if now is None else _postponed(replaced, now, task.created_at)
            inputs = draft.stored_inputs()
            parameters = {
                **self._database.now,
                **task_values(draft),
                "inputs": None if inputs is None else inputs.decode(),
                "ignore_failure": draft.row.ignore_failure,
                "known_revision": types.revision,
                # It adds no task.
                "checks_waiting": True,
                "key": draft.row.idempotency_key,
                "hash": draft.content.hex(),
                "ttl": draft.row.idempotency_ttl_sec,
                "act": act_json(),
            }
            await connection.execute(_SQL["replace_task"], parameters)
        # Others may be the best waiters for the locks, the quotas and the money of DAGs now.
        if names:
            look_at_quotas(connection, self._database.now, names=names)
        if keys := sorted({key for task in ready for key in task.lock_keys}):
            await unpark_lock_waiters(connection, keys)
        if dags := sorted({task.live_dag_id for task in ready if task.live_dag_id is not None}):
            await unpark_budget_waiters(connection, dags)

    async def forget(self, connection: Connection, replacements: Sequence[Replacement]) -> None:
        """Delete what belongs to the work that these tasks were to do before."""
        if replacements:
            await connection.execute(_SQL["forget"], {"ids": [task.id for _, task in replacements]})


def refuse_cancelling(drafts: Sequence[Draft]) -> None:
    """The rows of an agent would be locked until the caller commits: it could claim nothing."""
    for draft in drafts:
        if draft.row.on_conflict == CANCEL_RUNNING:
            fault = (
                f"can't be {CANCEL_RUNNING} in your own transaction, which would hold up the agent of the "
                "running task until you commit. Submit after your commit, without a connection"
            )
            place = f"{draft.place}." if draft.place else ""
            raise InvalidInputError(errors=[(f"{place}on_conflict", fault)])


def _postponed(draft: Draft, now: datetime, first: datetime) -> Draft:
    row = draft.row
    if row.debounce_sec is None:
        return draft
    start = now + timedelta(seconds=row.debounce_sec)
    if row.max_wait_sec is not None:
        start = min(start, first + timedelta(seconds=row.max_wait_sec))
    return replace(draft, row=replace(row, run_at=start))


def _existing(draft: Draft, owner: _KeyOwner) -> Submitted:
    """The task that has the key, as the result of a submission that changes nothing."""
    if draft.row.on_conflict == REJECT:
        raise _in_use(draft, f"belongs to task {owner.task_id}")
    mismatch = draft.content not in bytes(owner.content_hash)
    _log.info("Duplicate task detected: %s", owner.key)
    if mismatch:
        # Keys are shared by the installation: somebody else may have used it first.
        _log.warning(
            "Idempotency key %r is in use for a different request: task %s", owner.key, owner.task_id
        )
    return Submitted(owner.task_id, duplicate=True, mismatch=mismatch)


def _check_rights(draft: Draft, task: _LiveOwner, relations: _Relations) -> None:
    """What steers a task needs more than the scope to submit, or every agent could steer the others."""
    if task.type != draft.row.type:
        raise _in_use(draft, f"belongs to task {task.id} of type {task.type!r}, not {draft.row.type!r}")
    own = caller().token
    what = f"Can't {_verb(draft)} task {task.id}, which has the idempotency key {draft.row.idempotency_key!r}"
    if own != task.created_by_token:
        raise ForbiddenError(
            f"{what}: it was submitted with {_token(task.created_by_token)}, and this call has {_token(own)}"
            ". Use the same token, or another key; nothing was changed."
        )
    if relations.has_dependents:
        raise ForbiddenError(
            f"{what}: other tasks wait for it. Use on_conflict return, or another key; nothing was changed."
        )


def _check_place(draft: Draft, task: _LiveOwner, relations: _Relations) -> None:
    what = f"Can't replace task {task.id}, which has the idempotency key {draft.row.idempotency_key!r}"
    if task.is_batch or relations.has_children:
        raise ForbiddenError(
            f"{what}: it has subtasks that have not ended. Cancel it first; nothing was changed."
        )
    if draft.joins and draft.parent_id not in {None, task.parent_id}:
        raise _in_use(draft, f"belongs to task {task.id} with another parent")
    if draft.joins and draft.names_dag and draft.dag_id != task.dag_id:
        raise _in_use(draft, f"belongs to task {task.id} of DAG {task.dag_id}, not {draft.dag_id}")
    if more := [name for name in draft.depends_on if name not in relations.depends_on]:
        raise _in_use(draft, f"belongs to task {task.id}, which doesn't depend on {', '.join(more[:3])}")


def _token(name: str | None) -> str:
    return "no token" if name is None else f"the token {name!r}"


def _verb(draft: Draft) -> str:
    return "replace" if draft.row.on_conflict == REPLACE_WAITING else "replace or cancel"


def _in_use(draft: Draft, found: str) -> AlreadyExistsError:
    place = f"{draft.place}: " if draft.place else ""
    return AlreadyExistsError(
        f"{place}The idempotency key {draft.row.idempotency_key!r} {found} (on_conflict "
        f"{draft.row.on_conflict}). Use another key, or on_conflict return to get that task; nothing was "
        "changed."
    )
