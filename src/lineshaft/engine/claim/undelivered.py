"""Undelivered claims: tasks whose claim never reached an agent are released.

The client has left, or the database went away before the whole response was read. Without this such tasks
would wait until their leases expire, which uses an attempt of those that were started.

If not even the ids arrived, because the connection was lost while the database carried the claim out, only
the agent can find them: they are what the database says it holds and it doesn't know (`release_unknown`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

from msgspec import Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_rows
from lineshaft.types.work import ClaimedTask, ClaimRef, Moved, Release

#: Two minutes in all, while the database doesn't answer: after that most of their leases have expired.
_PAUSES_SEC = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * 23)
#: `close` waits no longer than this.
_CLOSES_WITHIN_SEC = 1.0

_log = logging.getLogger(__name__)
_SQL = catalog.load(__name__)


class _Claimed(Struct, frozen=True):
    id: str
    epoch: int


class UndeliveredClaims:
    def __init__(
        self, database: Database, release: Callable[[Sequence[Release]], Awaitable[list[Moved]]]
    ) -> None:
        self._database = database
        self._release = release
        self._releasing: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def release_if_undelivered(self, tasks: Sequence[ClaimedTask]) -> Iterator[None]:
        """Around everything that remains to be done until the agent has the tasks."""
        try:
            yield
        except BaseException:
            if tasks:
                claims = [Release(ClaimRef(task.id, task.epoch)) for task in tasks]
                releasing = asyncio.get_running_loop().create_task(self._keep_trying(claims))
                self._releasing.add(releasing)
                releasing.add_done_callback(self._releasing.discard)
            raise

    async def release(self, tasks: Sequence[ClaimedTask]) -> None:
        """Give these claims up."""
        await self._release([Release(ClaimRef(task.id, task.epoch)) for task in tasks])

    async def release_unknown(self, agent_id: str, incarnation: int, known: Collection[str]) -> int:
        """Release what this instance of an agent holds, except the tasks that it knows; returns how many.

        The instance must have no claim of its own under way, apart from those that it has given up.
        """
        own = {"agent_id": agent_id, "incarnation": incarnation}

        async def work(connection: Connection) -> list[_Claimed]:
            await connection.execute(_SQL["lock_instance"], own)
            return await fetch_rows(
                connection, _Claimed, _SQL["unknown_claims"], {**own, "known": list(known)}
            )

        found = await self._database.run(work)
        if found:
            await self._release([Release(ClaimRef(task.id, task.epoch)) for task in found])
        return len(found)

    async def _keep_trying(self, claims: Sequence[Release]) -> None:
        for pause in _PAUSES_SEC:
            try:
                # A claim that has ended in the meantime, because its lease expired, is refused.
                await self._release(claims)
            except Exception as error:  # noqa: BLE001 - the claims still exist, whatever the error is
                _log.warning("Can't release %d undelivered claims, retrying: %s", len(claims), error)
                await asyncio.sleep(pause)
            else:
                return

    async def close(self) -> None:
        if not self._releasing:
            return
        _, late = await asyncio.wait(self._releasing, timeout=_CLOSES_WITHIN_SEC)
        for releasing in late:
            releasing.cancel()
        await asyncio.gather(*late, return_exceptions=True)
