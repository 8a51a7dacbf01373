"""The review desk: what failed for good waits here for a person, with its whole history, until one decides.

A decision is one transaction; one about many is a few, of a bounded number each. It begins with a lock on the
dead letters, so of two reviewers who decide at once one wins, and the other is told what was decided. Nothing
that ever lay here is deleted by itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.review.dead_letter_views import (
    ALL_LETTERS,
    open_letters,
    read_groups,
    read_letter,
    read_letters,
)
from lineshaft.engine.review.resolution import Review
from lineshaft.engine.transition.cancel import LockedLetter
from lineshaft.engine.transition.operations import Operations
from lineshaft.errors import (
    AlreadyReviewedError,
    InvalidInputError,
    InvalidTransitionError,
    LineshaftError,
    NotFoundError,
    UnavailableError,
)
from lineshaft.model.reviews import Resolution, ResolutionRequest
from lineshaft.model.spec_change import spec_changes
from lineshaft.model.tasks import LIMITS_IN_SPEC, NewTask, TaskRow, resolve
from lineshaft.types import BulkResolution, DeadLetter, DeadLetterFilter, DeadLetterGroup, Page, Refusal
from lineshaft.types.page import DEFAULT_LIMIT

#: Dead letters that one call decides about.
MAX_BULK = 1_000
#: Dead letters that one transaction decides about: enough to be quick, few enough to let others in between.
_AT_ONCE = 100
#: What people are told when one is escalated (000).
HUMAN_REVIEW_NEEDED = "HUMAN_REVIEW_NEEDED"


class DeadLetters:
    def __init__(self, database: Database, operations: Operations) -> None:
        self._database = database
        self._operations = operations
        self._sql = catalog.load("review/dead_letters")

    async def letter(self, task_id: str) -> DeadLetter:
        """The last time that a task failed for good, whatever was decided since."""
        return await read_letter(self._database, task_id)

    async def letters(
        self,
        filters: DeadLetterFilter = ALL_LETTERS,
        *,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
    ) -> Page[DeadLetter]:
        """Newest first."""
        return await read_letters(self._database, filters, limit=limit, cursor=cursor)

    async def groups(
        self, *, types: Sequence[str] = (), categories: Sequence[str] = (), limit: int = DEFAULT_LIMIT
    ) -> list[DeadLetterGroup]:
        """What nobody has looked at, by like error; the largest group first (R-137)."""
        return await read_groups(self._database, types=types, categories=categories, limit=limit)

    async def resolve(self, task_id: str, decision: ResolutionRequest) -> DeadLetter:
        decision.check()
        _, refused = await self._resolve([task_id], decision)
        if refused:
            raise refused[task_id]
        return await self.letter(task_id)

    async def resolve_all(
        self, filters: DeadLetterFilter, decision: ResolutionRequest, *, limit: int = MAX_BULK
    ) -> BulkResolution:
        """Decide about everything open that a filter finds, some at a time.

        One that can't be resolved keeps none of the others from it. What the database can't answer for is
        not in the result: the same call again finds what is left.
        """
        decision.check()
        if not 1 <= limit <= MAX_BULK:
            raise InvalidInputError(errors=[("limit", f"must be from 1 to {MAX_BULK}, got {limit}")])
        found = await open_letters(self._database, filters, limit + 1)
        resolved: set[str] = set()
        refused: dict[str, LineshaftError] = {}
        for start in range(0, min(limit, len(found)), _AT_ONCE):
            chunk = found[start : min(start + _AT_ONCE, limit)]
            # Some may have gone along with others before.
            left = [task_id for task_id in chunk if task_id not in resolved]
            moved, not_these = await self._resolve_each(left, decision)
            resolved |= moved
            refused |= not_these
        decided = [task_id for task_id in found[:limit] if task_id in resolved]
        refusals = [Refusal(task_id, error.code, str(error)) for task_id, error in refused.items()]
        return BulkResolution(decided, refusals, more=len(found) > limit)

    async def _resolve_each(self, ids: Sequence[str], decision: ResolutionRequest) -> "_Resolved":
        """All in one transaction; if one of them makes that fail, each in its own."""
        if not ids:
            return set(), {}
        try:
            return await self._resolve(ids, decision)
        except UnavailableError:
            raise
        except LineshaftError as error:
            if len(ids) == 1:
                return set(), {ids[0]: error}
        resolved: set[str] = set()
        refused: dict[str, LineshaftError] = {}
        for task_id in ids:
            if task_id not in resolved:
                moved, not_this = await self._resolve_each([task_id], decision)
                resolved |= moved
                refused |= not_this
        return resolved, refused

    async def _resolve(self, ids: Sequence[str], decision: ResolutionRequest) -> "_Resolved":
        """In one transaction; gives all tasks that it moved, and why it didn't those that were not open."""
        resolution = decision.check()
        review = Review(
            resolution=resolution,
            reviewer=decision.reviewer,
            note=decision.note or None,
            not_before=decision.not_before,
        )

        async def work(connection: Connection) -> _Resolved:
            letters = await self._operations.cancelling.lock_letters(connection, ids)
            if resolution is Resolution.ESCALATE:
                letters = {name: letter for name, letter in letters.items() if not letter.reviewed}
            refused = {
                name: await self._refusal(connection, name, resolution) for name in ids if name not in letters
            }
            # In the order that was asked for.
            asked = [letters[name] for name in ids if name in letters]
            return set(await self._decide(connection, asked, decision, review)) if asked else set(), refused

        return await self._database.run(work)

    async def _decide(
        self,
        connection: Connection,
        letters: Sequence[LockedLetter],
        decision: ResolutionRequest,
        review: Review,
    ) -> Iterable[str]:
        """Gives all tasks that it moved."""
        cancelling, reviving = self._operations.cancelling, self._operations.reviving
        match review.resolution:
            case Resolution.ESCALATE:
                return await self._escalate(connection, letters, review)
            case Resolution.CANCEL | Resolution.DELETE:
                return await cancelling.cancel_letters(connection, [letter.id for letter in letters], review)
            case Resolution.RETRY:
                delays = {letter.id: _delay(letter, decision) for letter in letters}
                return await reviving.revive(connection, delays, review)
            case Resolution.MODIFY_AND_RETRY:
                moved: list[str] = []
                for letter in letters:
                    # What was changed is another thing for each.
                    changed = await self._change_spec(connection, letter, decision.spec, review)
                    delay = _delay(letter, decision)
                    moved += await reviving.revive(connection, {letter.id: delay}, changed)
                return moved

    async def _escalate(
        self, connection: Connection, letters: Sequence[LockedLetter], review: Review
    ) -> list[str]:
        ids = [letter.id for letter in letters]
        causes = await self._operations.reviving.record_review(connection, ids, review)
        told = [
            (letter.id, letter.dag_id, letter.epoch, _alert(letter, review) | causes[letter.id])
            for letter in letters
        ]
        await self._operations.reviving.log(connection, ["task.resolved", "alert"], told)
        return ids

    async def _change_spec(
        self, connection: Connection, letter: LockedLetter, spec: Any, review: Review
    ) -> Review:
        """Put another spec in place, checked like a submission; what it refers to is waited for."""
        row = resolve(NewTask(letter.type, spec=spec, preset=letter.preset))
        before = msgspec.json.decode(letter.spec)
        after = msgspec.json.decode(row.spec)
        await self._operations.wait_for_inputs(connection, letter.id, row.context_tasks)
        await connection.execute(
            self._sql["change_spec"],
            {"id": letter.id, "spec": row.spec.decode(), **_limits(letter, row, before, after)},
        )
        found = tuple(spec_changes(before, after))
        return replace(review, spec_before=letter.spec, spec_change=msgspec.json.encode(found), changed=found)

    async def _refusal(self, connection: Connection, task_id: str, resolution: Resolution) -> LineshaftError:
        cursor = await connection.execute(self._sql["last_review"], {"id": task_id})
        row = await cursor.fetchone()
        if row is None:
            return NotFoundError(
                f"There is no dead letter of a task {task_id!r}; it may never have failed for good."
            )
        decided, reviewer, at, status = row
        asked = f"Can't resolve the dead letter of task {task_id} as {resolution}"
        if decided is None:
            return InvalidTransitionError(f"{asked}: it is {status}.")
        who = "it was retried by hand" if reviewer is None else f"{reviewer} decided {decided}"
        return AlreadyReviewedError(
            f"{asked}: {who} at {at.isoformat()}, and it is {status} now. Nothing was changed.",
            resolution=decided,
            reviewer=reviewer,
        )


#: Tasks that were moved; and why others were not.
_Resolved = tuple[set[str], dict[str, LineshaftError]]


def _alert(letter: LockedLetter, review: Review) -> dict[str, Any]:
    message = f"{review.reviewer} wants somebody else to decide about task {letter.id}"
    return review.told(letter.id) | {"alert": HUMAN_REVIEW_NEEDED, "message": message}


def _delay(letter: LockedLetter, decision: ResolutionRequest) -> float:
    if decision.not_before is None:
        return 0.0
    return max((decision.not_before - letter.now).total_seconds(), 0.0)


def _limits(letter: LockedLetter, row: TaskRow, before: Any, after: Any) -> dict[str, Any]:
    """Limits that stand in the new spec count, as at submission; those it doesn't have any more are gone."""
    old, new = (
        found if isinstance(found := spec.get("constraints"), dict) else {} for spec in (before, after)
    )
    limits = {}
    for name in LIMITS_IN_SPEC:
        value = getattr(row if name in new or name in old else letter, name)
        limits[name] = list(value) if isinstance(value, tuple) else value
    return limits
