"""Cancelling and retrying all tasks that match a filter.

The tasks are found first, then changed in chunks, each in a transaction of its own: a chunk of many tasks
doesn't hold locks for long, and what is done stays done if the call is interrupted. The same call again finds
the rest.
"""

from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import asdict, replace

from lineshaft.engine.read.queries import Queries
from lineshaft.engine.transition.cancel import Cancellations
from lineshaft.engine.transition.revive import Revive
from lineshaft.errors import InvalidInputError, LineshaftError, UnavailableError
from lineshaft.model.states import LIVE, Status
from lineshaft.types.filters import MatchedTasks, TaskFilter, names

_CHUNK = 100
_RETRIED = frozenset({Status.DEAD_LETTERED, Status.CANCELLED, Status.RETRYING})


class Matching:
    def __init__(self, queries: Queries, cancel: Cancellations, revive: Revive) -> None:
        self._queries = queries
        self._cancel = cancel
        self._revive = revive

    async def cancel(self, wanted: TaskFilter, reason: str, *, dry_run: bool = False) -> MatchedTasks:
        """Cancel those that haven't ended, with their children and dependents."""
        ids = await self._find(wanted, LIVE)
        return MatchedTasks(ids, len(ids)) if dry_run else await self.cancel_tasks(ids, reason)

    async def retry(self, wanted: TaskFilter, *, dry_run: bool = False) -> MatchedTasks:
        """Retry those that are DEAD_LETTERED, CANCELLED or RETRYING; one that can't be is left as it is."""
        ids = await self._find(wanted, _RETRIED)
        return MatchedTasks(ids, len(ids)) if dry_run else await self.retry_tasks(ids)

    async def cancel_tasks(self, ids: Sequence[str], reason: str) -> MatchedTasks:
        """Cancel those of these tasks that haven't ended, with their children and dependents."""
        return await _each(ids, lambda chunk: self._cancel.cancel_many(chunk, reason))

    async def retry_tasks(self, ids: Sequence[str]) -> MatchedTasks:
        """Retry those of these tasks that are DEAD_LETTERED, CANCELLED or RETRYING."""
        return await _each(ids, self._retry)

    async def _find(self, wanted: TaskFilter, possible: frozenset[Status]) -> list[str]:
        if all(value in ((), [], "", None, False) for value in asdict(wanted).values()):
            fault = "must have a field, such as status or type: an empty filter would match every task"
            raise InvalidInputError(errors=[("filter", fault)])
        asked = {Status.parse(name) for name in names(wanted.status)}
        statuses = sorted(asked & possible if asked else possible)
        return await self._queries.task_ids(replace(wanted, status=statuses)) if statuses else []

    async def _retry(self, ids: Sequence[str]) -> list[str]:
        try:
            return await self._revive.retry_many(ids)
        except UnavailableError:
            raise
        except LineshaftError:
            if len(ids) == 1:
                # It was retried or ended in the meantime, or its idempotency key is in use by another task.
                return []
        # One of them can't be retried: the others must not suffer.
        return [name for each in ids for name in await self._retry([each])]


async def _each(ids: Sequence[str], change: Callable[[Sequence[str]], Awaitable[list[str]]]) -> MatchedTasks:
    done: list[str] = []
    for first in range(0, len(ids), _CHUNK):
        done += await change(ids[first : first + _CHUNK])
    return MatchedTasks(done, len(done))
