"""Completing tasks: the output is recorded, and dependents may become READY.

A task with gates is VALIDATING first, and completes when its gates accept the output (`Acceptance`). Most
tasks depend on nothing and nothing depends on them: one short statement completes them (`complete_fast`). A
single task, with what depends on it, is completed by a function (engine/claim/single.py).
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from lineshaft.engine.artifacts.references import refer, referred, referred_data, unknown_artifacts
from lineshaft.engine.claim.fast_path import FastClaim, FastPath
from lineshaft.engine.claim.single import claimed_with, complete_and_claim, complete_one
from lineshaft.engine.guards.breakers import Breakers
from lineshaft.engine.live import spending, velocity
from lineshaft.engine.live.parking import look_at_quotas, unpark_budget_waiters, unpark_lock_waiters
from lineshaft.engine.live.task_locks import LOCK_DEPENDENTS, LockedTask, claim_columns, has_duplicate_tasks
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.literals import column_literal, json_text, raw_json
from lineshaft.engine.postgres.pipeline import pipelined, transaction
from lineshaft.engine.postgres.rows import fetch_rows, send
from lineshaft.engine.transition.effects import UNBLOCK_DEPENDENTS, Unblocked, finished_batches, judge_dags
from lineshaft.engine.transition.fail import Failures, over_own_limit
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import StaleClaimError
from lineshaft.model import retry
from lineshaft.model.states import Status
from lineshaft.types.work import ClaimRef, Completion, Failure, Moved

_SQL = catalog.load(__name__)
#: The name of the call, in errors and in the attempts that it ends without success.
COMPLETE = "complete"


class Gatekeeper(Protocol):
    """Checks the outputs of tasks with gates (engine/review/gates.py)."""

    async def begin(self, connection: Connection, ids: Sequence[str]) -> None:
        """In the transaction that records the outputs."""
        ...

    async def check(self, claims: Sequence[ClaimRef]) -> dict[str, Moved]:
        """Afterwards; returns the results of checks that run at once."""
        ...


class _Completed(Protocol):
    """The columns of `complete_tasks`."""

    id: str
    dag_id: str | None
    dag_needs_care: bool | None
    lock_released: bool | None
    #: Somebody took its document lock away while the statement ran.
    lock_lost: bool
    lock_key: str | None
    has_slots: bool
    #: Document locks that it had together, or with readers; None: it had none.
    released_together: list[str] | None
    #: Breakers with failures to forget, or with this task as their probe; None: all breakers are closed.
    breakers: list[str] | None


class _Answered(Struct, frozen=True):
    task_id: str
    status: str


class _LockLostError(Exception):
    """A document lock was taken away during the completion, which is rolled back and tried again."""


class _UnknownArtifactsError(Exception):
    """Outputs refer to artifacts that don't exist. The completion is rolled back; their attempts fail."""

    def __init__(self, faults: dict[str, str]) -> None:
        super().__init__()
        #: By task id.
        self.faults = faults


class Acceptance:
    """Ends the validation of outputs: accepted or rejected."""

    def __init__(self, transitions: Transitions, fail: Failures, breakers: Breakers) -> None:
        self._transitions = transitions
        self._fail = fail
        self._breakers = breakers

    async def accept(self, connection: Connection, completions: Sequence[Completion]) -> None:
        """VALIDATING to COMPLETED. The tasks are locked."""
        parameters = {**self._transitions.now, **_completion_columns(completions), "accepted": True}
        # Both are sent before the first result is awaited.
        completed = await send(connection, _SQL["complete_tasks"], parameters)
        unblocked = await send(connection, UNBLOCK_DEPENDENTS, parameters)
        await self.after_completion(connection, await completed.fetchall(), await unblocked.fetchall())

    async def reject(
        self, connection: Connection, failures: Sequence[tuple[LockedTask, Failure]]
    ) -> dict[str, Moved]:
        """Failed attempts. The tasks are locked."""
        return await self._fail.fail_locked(connection, failures)

    async def after_completion(
        self, connection: Connection, completed: Sequence[_Completed], unblocked: Sequence[Unblocked]
    ) -> None:
        released = {task.lock_key for task in completed if task.lock_released and task.lock_key}
        released.update(key for task in completed for key in task.released_together or ())
        if released:
            await unpark_lock_waiters(connection, sorted(released))
        if freed := [task.id for task in completed if task.has_slots]:
            look_at_quotas(connection, self._transitions.now, ids=freed)
        if dags := sorted({task.dag_id for task in completed if task.dag_needs_care and task.dag_id}):
            await unpark_budget_waiters(connection, dags)
            await judge_dags(connection, self._transitions.now, dags)
        await self._transitions.finish_batches(connection, finished_batches(unblocked))
        await self._breakers.succeeded(
            connection, [(task.id, task.breakers) for task in completed if task.breakers]
        )

    async def refuse(self, connection: Connection, items: Sequence[Completion]) -> list[Moved]:
        """Completions that moved nothing: the first result of a repeated call, or the reason."""
        claims = [item.claim for item in items]
        ids = [claim.id for claim in claims]
        epochs = {claim.id: claim.epoch for claim in claims}
        locks = self._transitions.locks
        # A repeated call may report more than the first.
        await spending.book_late(
            connection, [(item.claim, item.spent) for item in items], self._transitions.now
        )
        ended = await locks.ended_by(connection, claims, COMPLETE)
        results = {
            # A repeated call, which cost too much the first time.
            end.id: Moved(end.id, Status.DEAD_LETTERED)
            for end in (await locks.ends(connection, ids)).values()
            if end.id in ended and (end.status, end.epoch) == (Status.DEAD_LETTERED, epochs[end.id])
        }
        answered = await fetch_rows(
            connection, _Answered, _SQL["answered_before"], {"ids": ids, "epochs": list(epochs.values())}
        )
        results |= {row.task_id: Moved(row.task_id, Status(row.status)) for row in answered}
        rest = [item for item in items if item.claim.id not in results]
        refused = await locks.refuse(
            connection,
            [item.claim for item in rest],
            COMPLETE,
            repeated=[Status.COMPLETED],
            late_outputs={item.claim.id: item.output for item in rest},
            spent={item.claim: item.spent for item in rest},
        )
        results |= {result.id: result for result in refused}
        return [results[claim.id] for claim in claims]


class Completions:
    def __init__(
        self, transitions: Transitions, acceptance: Acceptance, fail: Failures, gates: Gatekeeper | None
    ) -> None:
        """`gates`: None leaves tasks with gates VALIDATING."""
        self._transitions = transitions
        self._database = transitions.database
        self._locks = transitions.locks
        self._acceptance = acceptance
        self._fail = fail
        self._gates = gates
        self._fast_path = FastPath()
        # An attempt that finds nothing to do costs little, and tasks of all kinds pass here.
        self._single_path = FastPath(first_skips=2, most_skips=32)

    async def complete(self, completions: Sequence[Completion]) -> list[Moved]:
        if has_duplicate_tasks([item.claim for item in completions]):
            return [result for item in completions for result in await self.complete([item])]
        done: set[str] = set()
        refs = _references(completions)
        plain = [item for item in completions if item.claim.id not in refs]
        if len(plain) == 1 and self._single_path.is_open():
            (item,) = plain
            if await complete_one(self._database, item):
                done = {item.claim.id}
            self._single_path.tried(worked=bool(done))
        elif len(plain) > 1 and self._fast_path.is_open():
            call = _SQL["complete_fast"], {**self._database.now, **_completion_columns(plain)}
            (rows,) = await self._database.run_alone(lambda own: pipelined(own, call, named=False))
            done = {task_id for (task_id,) in rows}
            self._fast_path.tried(worked=2 * len(done) >= len(plain))
        rest = [item for item in completions if item.claim.id not in done]
        results = iter(await self._complete(rest) if rest else ())
        await self._watch_velocity(completions)
        return [
            Moved(item.claim.id, Status.COMPLETED) if item.claim.id in done else next(results)
            for item in completions
        ]

    async def complete_and_claim(
        self, item: Completion, *, types: list[str] | None
    ) -> tuple[Moved, FastClaim | None]:
        """Complete a task, and take the next one in the same transaction where that is possible.

        None: the claim remains to be made. A repeated call has the first one's claim, while that is held, and
        never makes another.
        """
        if not _references([item]) and self._single_path.is_open():
            looked = await complete_and_claim(self._database, item, types=types)
            self._single_path.tried(worked=looked is not None)
            if looked is not None:
                paused = await self._watch_velocity([item])
                return Moved(item.claim.id, Status.COMPLETED), looked._replace(paused=paused)
        recorded: set[str] = set()
        (moved,) = await self._complete([item], recorded)
        await self._watch_velocity([item])
        if moved.id in recorded or moved.error is not None:
            return moved, None
        async with self._database.connection() as connection:
            before = await claimed_with(connection, self._database.now, item.claim)
        return moved, FastClaim([] if before is None else [before], has_room=True)

    async def _watch_velocity(self, completions: Sequence[Completion]) -> bool:
        """After the money is booked; returns whether everything is paused.

        Doesn't look after completions that report no cost: these book what was reported before.
        """
        if not any(item.spent.cost_usd for item in completions):
            return False
        now = self._database.now
        return await self._database.run_alone(lambda own: velocity.look_if_due(own, now))

    async def _complete(
        self, completions: Sequence[Completion], recorded: set[str] | None = None
    ) -> list[Moved]:
        """Adds to `recorded` the tasks whose output this call recorded or rejected, and no earlier one."""
        refs = _references(completions)
        #: Why outputs are not valid, by task id.
        faults: dict[str, str] = {}

        async def work(connection: Connection) -> list[Moved]:
            valid = [item for item in completions if item.claim.id not in faults]
            parameters = {**self._database.now, **_completion_columns(valid), "accepted": False}
            calls = [
                (statement, parameters)
                for statement in (LOCK_DEPENDENTS, _SQL["complete_tasks"], UNBLOCK_DEPENDENTS)
            ]
            async with transaction(connection, *calls) as (_, rows, unblocked):
                completed: list[_Completed] = rows
                if any(task.lock_lost for task in completed):
                    raise _LockLostError
                await self._acceptance.after_completion(connection, completed, unblocked)
                results = {task.id: Moved(task.id, Status.COMPLETED) for task in completed}
                rest = [item for item in completions if item.claim.id not in results]
                done = set(results)
                if rest:
                    special, done_specially = await self._complete_special(connection, rest, faults)
                    results |= special
                    done |= done_specially
                if refs:
                    accepted = (name for name in done if results[name].status in _WITH_OUTPUT)
                    await _refer(connection, {name: refs[name] for name in accepted if name in refs})
            if recorded is not None:
                recorded.update(done)
            return [results[item.claim.id] for item in completions]

        while True:
            # Each time a lock fewer is held, so this ends.
            with contextlib.suppress(_LockLostError):
                try:
                    results = await self._database.run_alone(work)
                except _UnknownArtifactsError as unknown:
                    faults |= unknown.faults
                    continue
                break
        validating = [
            item.claim
            for item, result in zip(completions, results, strict=True)
            if result.status is Status.VALIDATING
        ]
        if not validating or self._gates is None:
            return results
        checked = await self._gates.check(validating)
        return [checked.get(result.id, result) for result in results]

    async def _complete_special(
        self, connection: Connection, items: Sequence[Completion], faults: Mapping[str, str]
    ) -> tuple[dict[str, Moved], set[str]]:
        """Completions that `complete_tasks` left: gated, too expensive, invalid, repeated, or no longer held.

        Also returns the first three: those that moved now. `faults` of outputs are by task id.
        """
        locked = await self._locks.lock(connection, [item.claim.id for item in items])
        # A repeated call may report more than the first.
        await self._locks.book_checked(connection, locked, {item.claim: item.spent for item in items})
        kept = await self._locks.kept_locks(connection, locked.values())
        results: dict[str, Moved] = {}
        failed: list[tuple[LockedTask, Failure]] = []
        gated: list[tuple[LockedTask, Completion]] = []
        unlocked: list[tuple[LockedTask, Completion]] = []
        rest: list[Completion] = []
        for item in items:
            task = locked.get(item.claim.id)
            if task is not None and task.epoch == item.claim.epoch and task.status == Status.VALIDATING:
                # A repeated call: its output is being checked.
                results[task.id] = Moved(task.id, Status.VALIDATING)
            elif task is None or task.epoch != item.claim.epoch or task.status != Status.RUNNING:
                rest.append(item)
            elif task.lock_token is not None and task.id not in kept:
                unlocked.append((task, item))
            elif (failure := _failure(task, item, faults)) is not None:
                failed.append((task, failure))
            else:
                gated.append((task, item))
        if unlocked:
            results |= await self._refuse_unlocked(connection, unlocked)
        if failed:
            results |= await self._fail.fail_locked(connection, failed, ended_by=COMPLETE)
        if gated:
            await self._begin_validation(connection, gated)
            results |= {task.id: Moved(task.id, Status.VALIDATING) for task, _ in gated}
        if rest:
            results |= {result.id: result for result in await self._acceptance.refuse(connection, rest)}
        return results, {task.id for task, _ in (*failed, *gated)}

    async def _refuse_unlocked(
        self, connection: Connection, items: Sequence[tuple[LockedTask, Completion]]
    ) -> dict[str, Moved]:
        """The claims lost their document locks: other tasks may have changed the documents since."""
        await spending.book(connection, [(item.claim, item.spent) for _, item in items], self._database.now)
        await self._locks.log_late(
            connection, [item.claim for _, item in items], {task.id: item.output for task, item in items}
        )
        return {
            task.id: Moved(
                task.id,
                None,
                StaleClaimError(
                    f"Can't complete task {task.id}: its claim no longer has {_named(task.locks)}, so "
                    "another task may have changed the document. Stop working on it."
                ),
            )
            for task, item in items
        }

    async def _begin_validation(
        self, connection: Connection, items: Sequence[tuple[LockedTask, Completion]]
    ) -> None:
        await spending.book(connection, [(item.claim, item.spent) for _, item in items], self._database.now)
        await connection.execute(
            _SQL["begin_validation"],
            {
                **self._database.now,
                "ids": [task.id for task, _ in items],
                "outputs": column_literal([_stored_output(item) for _, item in items]),
            },
        )
        effects = self._transitions.effects()
        for task, _ in items:
            effects.event(task, ["task.validating"])
        await effects.write(connection)
        if self._gates is not None:
            await self._gates.begin(connection, [task.id for task, _ in items])


def _named(locks: Collection[str]) -> str:
    names = ", ".join(map(repr, locks))
    return f"the document lock {names}" if len(locks) == 1 else f"all its document locks, {names}"


def _failure(task: LockedTask, item: Completion, faults: Mapping[str, str]) -> Failure | None:
    """Why a completion is a failed attempt; None: it isn't."""
    if (error := over_own_limit(task, item.spent)) is not None:
        return Failure(item.claim, error, retry.FailureCategory.BUDGET_EXCEEDED, spent=item.spent)
    if task.id in faults:
        category = retry.FailureCategory.INVALID_OUTPUT
        return Failure(item.claim, faults[task.id], category, spent=item.spent)
    return None


#: States of a task whose output was recorded by this call.
_WITH_OUTPUT = frozenset({Status.COMPLETED, Status.VALIDATING})


def _references(items: Sequence[Completion]) -> dict[str, list[str]]:
    """Ids of artifacts that outputs refer to, by task id, for those that do."""
    return {
        item.claim.id: found
        for item in items
        if (found := [*referred(item.artifacts), *referred_data(item.output)])
    }


async def _refer(connection: Connection, refs: Mapping[str, list[str]]) -> None:
    unknown = await refer(connection, refs)
    if unknown:
        raise _UnknownArtifactsError(
            {
                task_id: f"output: {unknown_artifacts(missing)}"
                for task_id, ids in refs.items()
                if (missing := [each for each in ids if each in unknown])
            }
        )


def _stored_output(item: Completion) -> str:
    """All parts of an output as one JSON object."""
    parts: dict[str, Any] = {
        "data": raw_json(item.output),
        "artifacts": raw_json(item.artifacts),
        "decision_report": raw_json(item.decision_report),
    }
    if item.output_type is not None:
        parts["type"] = item.output_type
    return msgspec.json.encode(parts).decode()


def _completion_columns(items: Sequence[Completion]) -> dict[str, Any]:
    return {
        **claim_columns([item.claim for item in items]),
        "outputs": column_literal([json_text(item.output) for item in items]),
        "artifacts": column_literal([json_text(item.artifacts) for item in items]),
        "reports": column_literal([json_text(item.decision_report) for item in items]),
        "output_types": column_literal([item.output_type for item in items]),
        "costs": column_literal([item.spent.cost_usd for item in items]),
        "tokens_in": column_literal([item.spent.tokens_input for item in items]),
        "tokens_out": column_literal([item.spent.tokens_output for item in items]),
    }
