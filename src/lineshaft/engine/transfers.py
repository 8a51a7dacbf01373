"""Claims that begin in the transaction of something else: no other agent can have it in between."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from lineshaft.engine.claim.claims import Claims
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.submit.submission import Submission
from lineshaft.engine.transition.release import Releases
from lineshaft.model.tasks import NewTask
from lineshaft.types import Submitted
from lineshaft.types.work import ClaimRef, Presence, Release

T = TypeVar("T")


class _RefusedError(Exception):
    """The agent can't have the task: the transaction is rolled back."""


class Transfers:
    def __init__(
        self, database: Database, *, releases: Releases, claims: Claims, submission: Submission
    ) -> None:
        self._database = database
        self._releases = releases
        self._claims = claims
        self._submission = submission

    async def hand_over(self, claim: ClaimRef, to: Presence) -> ClaimRef | None:
        """Let another instance hold a task that this claim holds, and start it. No attempt is used.

        None: the instance can't have it, or the claim has ended; nothing is changed then.
        """

        async def work(connection: Connection) -> ClaimRef:
            (released,) = await self._releases.release_in(connection, [Release(claim)])
            if released.error is not None:
                raise _RefusedError
            return await self._claim(connection, claim.id, to, start=True)

        return await self._run(work)

    async def submit_claimed(
        self, task: NewTask, to: Presence, *, start: bool = True
    ) -> tuple[Submitted, ClaimRef] | None:
        """Submit a task that an agent has already; with `start` it works on it.

        None: the agent can't have it, or it exists.
        """

        async def work(connection: Connection) -> tuple[Submitted, ClaimRef]:
            (submitted,) = await self._submission.submit([task], connection=connection)
            if submitted.duplicate:
                raise _RefusedError
            return submitted, await self._claim(connection, submitted.id, to, start=start)

        return await self._run(work)

    async def _claim(self, connection: Connection, task_id: str, to: Presence, *, start: bool) -> ClaimRef:
        task = await self._claims.claim_in(connection, to.agent_id, to.incarnation, task_id, start=start)
        if task is None:
            raise _RefusedError
        return ClaimRef(task.id, task.epoch)

    async def _run(self, work: Callable[[Connection], Awaitable[T]]) -> T | None:
        try:
            # Not in a pipeline of psycopg's: a claim has its own.
            return await self._database.run(work, pipeline=False)
        except _RefusedError:
            return None
