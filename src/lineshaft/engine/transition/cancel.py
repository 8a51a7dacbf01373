"""Cancelling a task, its children and, with `cascade`, all tasks that depend on it.

A dead letter that a person cancels is treated the same way, though it has ended: its dependents would wait
forever.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from lineshaft.engine.feed.actor import with_actor
from lineshaft.engine.live.task_locks import LockedTask
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows
from lineshaft.engine.transition.dependencies import TaskDependencies
from lineshaft.engine.transition.effects import Effects, log_events
from lineshaft.engine.transition.reviews import LockedDeadLetter, NewReview, Reviews
from lineshaft.engine.transition.rows import NewEvent
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import InvalidTransitionError, LineshaftError, NotFoundError, UnavailableError
from lineshaft.model.states import DEADLINE_MISSED, Status
from lineshaft.model.storable import replace_unstorable
from lineshaft.types.work import UNREPORTED, Cancellation, Moved, Spent

_SQL = catalog.load(__name__)


class _SubtreeMember(Struct, frozen=True):
    id: str
    parent_id: str | None
    waits_for: list[str]


class _Expired(Struct, frozen=True):
    id: str
    deadline: str


class _Subtree(Struct):
    """The tasks of one cancellation, locked."""

    roots: Sequence[str]
    members: dict[str, _SubtreeMember] = field(default_factory=dict)
    live: dict[str, LockedTask] = field(default_factory=dict)
    dead_letters: dict[str, LockedDeadLetter] = field(default_factory=dict)

    def reason(self, name: str, given: str) -> str:
        if name in self.roots:
            return given
        member = self.members[name]
        cancelled = (
            upstream
            for upstream in (*member.waits_for, member.parent_id)
            if upstream in self.live or upstream in self.dead_letters
        )
        return f"Parent {next(cancelled, self.roots[0])} cancelled"

    def with_other_upstream(self) -> list[str]:
        """Live tasks that waited for tasks outside the cancellation."""
        return [
            name
            for name in self.live
            if any(other not in self.live for other in self.members[name].waits_for)
        ]


class Cancellations:
    def __init__(self, transitions: Transitions, dependencies: TaskDependencies, reviews: Reviews) -> None:
        self._transitions = transitions
        self._database = transitions.database
        self._locks = transitions.locks
        self._dependencies = dependencies
        self._reviews = reviews

    async def cancel(self, task_id: str, reason: str, *, cascade: bool = True) -> list[str]:
        """Returns the cancelled tasks: none, if the task was cancelled before.

        A COMPLETED or DEAD_LETTERED task can't be cancelled.
        """

        async def work(connection: Connection) -> list[str]:
            cancelled = await self._cancel(
                connection, [task_id], replace_unstorable(reason), cascade=cascade, by_hand=True
            )
            if task_id not in cancelled:
                status = await self._locks.end_status(connection, task_id)
                if status is not Status.CANCELLED:
                    raise InvalidTransitionError(f"Can't cancel task {task_id}: it is {status} already.")
            return cancelled

        return await self._database.run(work)

    async def cancel_in(self, connection: Connection, ids: Sequence[str], reason: str) -> None:
        """Cancel those of these tasks that haven't ended, with their dependents, as part of another act."""
        if ids:
            await self._cancel(connection, ids, reason, cascade=True, by_hand=True)

    async def cancel_many(self, ids: Sequence[str], reason: str) -> list[str]:
        """Cancel those of these tasks that haven't ended, with their dependents; returns those of `ids`."""

        async def work(connection: Connection) -> list[str]:
            cancelled = await self._cancel(
                connection, ids, replace_unstorable(reason), cascade=True, by_hand=True
            )
            found = await self._locks.ends(connection, ids)
            before = [
                name
                for name, task in found.items()
                if name not in cancelled and task.status == Status.CANCELLED
            ]
            # Cancelled since they were found: as dependents of others, or by somebody else.
            return [name for name in ids if name in cancelled or name in before]

        return await self._database.run(work)

    async def expire(self, ids: Sequence[str]) -> list[str]:
        """Cancel those of these tasks that missed a deadline at which they expire, as if by hand."""

        async def work(connection: Connection) -> list[str]:
            missed = await self._missed(connection, ids)
            if not missed:
                return []
            return await self._cancel(connection, list(missed), DEADLINE_MISSED, cascade=True, missed=missed)

        return await self._database.run(work)

    async def _missed(self, connection: Connection, ids: Sequence[str]) -> dict[str, str]:
        """The deadlines that those of these tasks missed that expire then."""
        parameters = {**self._database.now, "ids": list(ids)}
        expired = await fetch_rows(connection, _Expired, _SQL["expired_now"], parameters)
        return {task.id: task.deadline for task in expired}

    async def cancel_dag(self, dag_id: str, reason: str) -> list[str]:
        """Cancel the tasks of a DAG that haven't ended, and their dependents elsewhere; returns them."""

        async def work(connection: Connection) -> list[str]:
            cancelled: list[str] = []
            while True:
                members = await fetch_column(connection, _SQL["dag_members"], {"dag_id": dag_id})
                if not members:
                    raise NotFoundError(f"There is no DAG {dag_id}.")
                # Until no running task has added others in the meantime.
                more = await self._cancel(
                    connection, members, replace_unstorable(reason), cascade=True, by_hand=True
                )
                if not more:
                    return sorted(cancelled)
                cancelled += more

        return await self._database.run(work)

    async def cancel_claims(self, items: Sequence[Cancellation]) -> list[Moved]:
        """Cancel held tasks by their claims; each item is a transaction of its own."""
        return [await self._cancel_claim(item) for item in items]

    async def _cancel_claim(self, item: Cancellation) -> Moved:
        async def work(connection: Connection) -> Moved:
            cancelled = await self._cancel(
                connection,
                [item.claim.id],
                replace_unstorable(item.reason),
                cascade=item.cascade,
                held=item,
            )
            if item.claim.id in cancelled:
                return Moved(item.claim.id, Status.CANCELLED)
            (refused,) = await self._locks.refuse(
                connection,
                [item.claim],
                "cancel",
                repeated=[Status.CANCELLED],
                spent={item.claim: item.spent},
            )
            return refused

        try:
            return await self._database.run(work)
        except UnavailableError:
            raise
        except LineshaftError as error:
            return Moved(item.claim.id, None, error)

    async def _cancel(
        self,
        connection: Connection,
        roots: Sequence[str],
        reason: str,
        *,
        cascade: bool,
        held: Cancellation | None = None,
        missed: Mapping[str, str] | None = None,
        by_hand: bool = False,
    ) -> list[str]:
        """Returns the cancelled tasks; none, if the claim in `held` doesn't hold its task."""
        subtree = await self._lock_subtree(connection, roots, cascade=cascade)
        spent: dict[str, Spent] = {}
        if held is not None:
            task = subtree.live.get(held.claim.id)
            if task is None or task.epoch != held.claim.epoch or not task.is_held:
                return []
            if not await self._locks.book_checked(connection, subtree.live, {held.claim: held.spent}):
                spent[task.id] = held.spent
        if missed is not None and missed != await self._missed(connection, roots):
            # Before the locks somebody gave one of them another deadline: the next run decides again.
            return []
        if not subtree.live:
            return []
        effects = self._transitions.effects()
        _end(effects, subtree, reason, spent, missed=missed or {}, act=with_actor() if by_hand else {})
        await self._write(connection, effects, subtree)
        return sorted(subtree.live)

    async def cancel_dead_letters(
        self, connection: Connection, roots: Sequence[str], review: NewReview
    ) -> list[str]:
        """Cancel dead letters with all their dependents, as part of a review; returns the cancelled tasks."""
        subtree = await self._lock_subtree(connection, roots, cascade=True, dead_letters=True)
        reason = review.note or f"{review.resolution} by {review.reviewer}"
        reasons = {name: subtree.reason(name, reason) for name in subtree.dead_letters}
        await connection.execute(
            _SQL["cancel_dead_letters"],
            {**self._database.now, "ids": list(reasons), "reasons": list(reasons.values())},
        )
        await self._log_dead_letters(connection, subtree, reasons, review)
        effects = self._transitions.effects()
        for name, found in subtree.dead_letters.items():
            effects.cancel_dead_letter(name, found.dag_id)
        _end(effects, subtree, reason, {}, missed={}, act=with_actor())
        await self._write(connection, effects, subtree)
        return sorted([*subtree.dead_letters, *subtree.live])

    async def _log_dead_letters(
        self, connection: Connection, subtree: _Subtree, reasons: Mapping[str, str], review: NewReview
    ) -> None:
        causes = await self._reviews.record(connection, list(reasons), review)
        events = [
            NewEvent.of(
                ["task.resolved", "task.cancelled"],
                name,
                subtree.dead_letters[name].dag_id,
                epoch=subtree.dead_letters[name].epoch,
                data=review.event_data(name) | causes.get(name, {}) | {"reason": reason},
            )
            for name, reason in reasons.items()
        ]
        await log_events(connection, self._database.now, events)

    async def _lock_subtree(
        self, connection: Connection, roots: Sequence[str], *, cascade: bool, dead_letters: bool = False
    ) -> _Subtree:
        subtree = _Subtree(roots)
        parameters = {"ids": list(roots), "cascade": cascade, "dead_letters": dead_letters}
        # Adding a dependent locks its upstream first: once these are locked, the set can't grow.
        while True:
            found = await fetch_rows(connection, _SubtreeMember, _SQL["subtree"], parameters)
            members = {member.id: member for member in found}
            if members.keys() <= subtree.members.keys():
                break
            subtree.members = members
            if dead_letters:
                subtree.dead_letters = await self._reviews.lock(connection, sorted(members))
            subtree.live = await self._locks.lock_with_dependents(connection, sorted(members))
        subtree.members = members
        subtree.live = {name: task for name, task in subtree.live.items() if name in members}
        subtree.dead_letters = {
            name: found for name, found in subtree.dead_letters.items() if name in members
        }
        return subtree

    async def _write(self, connection: Connection, effects: Effects, subtree: _Subtree) -> None:
        await self._transitions.write(connection, effects)
        # The critical paths above these tasks are shorter now.
        if waited := subtree.with_other_upstream():
            await self._dependencies.rekey_paths(connection, waited)


def _end(
    effects: Effects,
    subtree: _Subtree,
    reason: str,
    spent: Mapping[str, Spent],
    *,
    missed: Mapping[str, str],
    act: Mapping[str, str],
) -> None:
    """`missed`: deadlines that some of the tasks missed; `act`: who cancels, for the events."""
    for name, task in subtree.live.items():
        why = subtree.reason(name, reason)
        used = spent.get(name, UNREPORTED)
        effects.end(task, Status.CANCELLED, spent=used, reason=why)
        effects.attempt(task, "cancelled", spent=used)
        if name in missed:
            data = {"deadline": missed[name], "reason": why}
            effects.event(task, ["task.deadline_missed", "task.cancelled"], data)
        else:
            effects.event(task, ["task.cancelled"], {"reason": why, **act})
