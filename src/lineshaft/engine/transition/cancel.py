"""Cancelling: a task, and everything that goes down with it.

Cancelling cascades along dependencies and to children. A dead letter that a person gives up is cancelled the
same way, though it had ended: what waits for it would wait for ever (U6).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.review.reviews import LockedDeadLetter, NewReview, Reviews
from lineshaft.engine.transition.changes import Changes, LockedTask
from lineshaft.engine.transition.lifecycle import Lifecycle
from lineshaft.engine.transition.outcomes import HELD
from lineshaft.engine.transition.revive import Reviving
from lineshaft.model.states import Status
from lineshaft.types.work import UNREPORTED, ClaimRef, Spent


@dataclass(slots=True)
class _Doomed:
    """What a cancellation takes along, locked."""

    roots: Sequence[str]
    #: For each task all that it hangs on.
    above: dict[str, list[str]] = field(default_factory=dict)
    live: dict[str, LockedTask] = field(default_factory=dict)
    dead_letters: dict[str, LockedDeadLetter] = field(default_factory=dict)

    def reason(self, name: str, asked: str) -> str:
        if name in self.roots:
            return asked
        going = (
            upstream
            for upstream in self.above[name]
            if upstream in self.live or upstream in self.dead_letters
        )
        return f"Parent {next(going, self.roots[0])} cancelled"

    def hung_on_others(self) -> list[str]:
        """Tasks that waited for some that go on."""
        return [name for name in self.live if any(other not in self.live for other in self.above[name][:-1])]


class Cancelling:
    def __init__(self, database: Database, lifecycle: Lifecycle, reviving: Reviving) -> None:
        self._database = database
        self._lifecycle = lifecycle
        self._reviving = reviving
        self._sql = catalog.load("transition/operations")
        self._moves = catalog.load("transition/revive")
        self._reviews = Reviews(database)

    async def cancel(
        self, connection: Connection, roots: Sequence[str], reason: str, *, cascade: bool
    ) -> list[str]:
        """Whatever of these has not ended; gives who was cancelled."""
        return await self._cancel(connection, roots, reason, cascade=cascade)

    async def cancel_claimed(
        self, connection: Connection, claim: ClaimRef, spent: Spent, reason: str, *, cascade: bool
    ) -> list[str]:
        """As `cancel`, by whoever holds the task and has spent so much on it; nobody, if it is not held."""
        return await self._cancel(connection, [claim.id], reason, cascade=cascade, held=(claim, spent))

    async def _cancel(
        self,
        connection: Connection,
        roots: Sequence[str],
        reason: str,
        *,
        cascade: bool,
        held: tuple[ClaimRef, Spent] | None = None,
    ) -> list[str]:
        doomed = await self._lock_doomed(connection, roots, cascade=cascade)
        spent: dict[str, Spent] = {}
        if held is not None:
            claim, used = held
            task = doomed.live.get(claim.id)
            if task is None or task.epoch != claim.epoch or task.status not in HELD:
                return []
            spent[task.id] = used.no_less_than_known(task)
        if not doomed.live:
            return []
        changes = Changes(self._database.now)
        self._end_doomed(changes, doomed, reason, spent)
        await self._bury(connection, changes, doomed)
        return sorted(doomed.live)

    async def cancel_dead_letters(
        self, connection: Connection, roots: Sequence[str], review: NewReview
    ) -> list[str]:
        """Give up dead letters with all that waits for them, as part of a review; gives who was cancelled."""
        doomed = await self._lock_doomed(connection, roots, cascade=True, dead_letters=True)
        reason = review.note or f"{review.resolution} by {review.reviewer}"
        reasons = {name: doomed.reason(name, reason) for name in doomed.dead_letters}
        await connection.execute(
            self._sql["cancel_dead_letters"],
            {**self._database.now, "ids": list(reasons), "reasons": list(reasons.values())},
        )
        await self._log_dead_letters(connection, doomed, reasons, review)
        changes = Changes(self._database.now)
        for name, found in doomed.dead_letters.items():
            changes.give_up(name, found.dag_id)
        self._end_doomed(changes, doomed, reason, {})
        await self._bury(connection, changes, doomed)
        return sorted([*doomed.dead_letters, *doomed.live])

    async def _log_dead_letters(
        self, connection: Connection, doomed: _Doomed, reasons: Mapping[str, str], review: NewReview
    ) -> None:
        causes = await self._reviews.record(connection, list(reasons), review)
        await self._reviving.log(
            connection,
            ["task.resolved", "task.cancelled"],
            [
                (
                    name,
                    doomed.dead_letters[name].dag_id,
                    doomed.dead_letters[name].epoch,
                    review.event_data(name) | causes.get(name, {}) | {"reason": why},
                )
                for name, why in reasons.items()
            ],
        )

    async def _lock_doomed(
        self, connection: Connection, roots: Sequence[str], *, cascade: bool, dead_letters: bool = False
    ) -> _Doomed:
        known: set[str] = set()
        doomed = _Doomed(roots)
        # Whoever adds a dependent locks its upstream first: once these are locked, the set can't grow.
        while True:
            cursor = await connection.execute(
                self._sql["doomed"], {"ids": list(roots), "cascade": cascade, "letters": dead_letters}
            )
            above = {row[0]: [*row[2], row[1]] for row in await cursor.fetchall()}
            if above.keys() <= known:
                break
            known = set(above)
            if dead_letters:
                doomed.dead_letters = await self._reviews.lock(connection, sorted(above))
            doomed.live = await self._lifecycle.lock_with_dependents(connection, sorted(above))
        doomed.above = above
        doomed.live = {name: task for name, task in doomed.live.items() if name in above}
        doomed.dead_letters = {name: found for name, found in doomed.dead_letters.items() if name in above}
        return doomed

    def _end_doomed(self, changes: Changes, doomed: _Doomed, reason: str, spent: Mapping[str, Spent]) -> None:
        for name, task in doomed.live.items():
            why = doomed.reason(name, reason)
            used = spent.get(name, UNREPORTED)
            changes.end(task, Status.CANCELLED, spent=used, reason=why)
            changes.attempt(task, "cancelled", spent=used)
            changes.event(task, ["task.cancelled"], {"reason": why})

    async def _bury(self, connection: Connection, changes: Changes, doomed: _Doomed) -> None:
        await self._lifecycle.finish(connection, changes)
        # What these tasks waited for has less below it now.
        if waited := doomed.hung_on_others():
            await connection.execute(self._moves["rekey_paths"], {**self._database.now, "ids": waited})
