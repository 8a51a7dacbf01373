"""How a claim ends other than by success or failure: handed back, cancelled, or paused for children.

What the attempt has used is booked with it, so that nothing spent is forgotten.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.transition.changes import Changes
from lineshaft.engine.transition.lifecycle import Lifecycle
from lineshaft.engine.transition.operations import Operations
from lineshaft.engine.transition.outcomes import has_duplicate_tasks, refusal
from lineshaft.errors import InvalidInputError, StaleClaimError
from lineshaft.model.states import Status
from lineshaft.model.storable import replace_unstorable
from lineshaft.model.tasks import NewTask
from lineshaft.types import Submitted
from lineshaft.types.work import SPAWN_STEP, UNREPORTED, Child, ClaimRef, Moved, Release, Spawned, Spent


class Parting:
    def __init__(self, database: Database, lifecycle: Lifecycle, operations: Operations) -> None:
        self._database = database
        self._lifecycle = lifecycle
        self._operations = operations
        self._sql = catalog.load("transition/working")
        self._moves = catalog.load("transition/task_locks")

    async def hand_back(self, items: Sequence[Release]) -> list[Moved]:
        if has_duplicate_tasks([item.claim for item in items]):
            return [answer for item in items for answer in await self.hand_back([item])]
        by_delay: defaultdict[float | None, list[Release]] = defaultdict(list)
        for item in items:
            by_delay[item.delay_sec].append(item)
        moved: dict[str, Moved] = {}
        for delay, alike in by_delay.items():
            answers = await self._lifecycle.release(
                [item.claim for item in alike],
                delay_sec=delay,
                spent={item.claim.id: item.spent for item in alike},
            )
            moved |= {answer.id: answer for answer in answers}
        return [moved[item.claim.id] for item in items]

    async def cancel_claimed(
        self, claim: ClaimRef, reason: str, *, spent: Spent, cascade: bool = True
    ) -> None:
        """Cancel a task that one holds and, with `cascade`, what depends on it. Again changes nothing."""

        async def work(connection: Connection) -> None:
            cancelled = await self._operations.cancelling.cancel_claimed(
                connection, claim, spent, replace_unstorable(reason), cascade=cascade
            )
            if claim.id not in cancelled:
                await self._refuse_stale(connection, claim)

        await self._database.run(work)

    async def _refuse_stale(self, connection: Connection, claim: ClaimRef) -> None:
        """Not held under this claim: it may be the same call again; else refuse."""
        live = await connection.execute(self._moves["read_live"], {"ids": [claim.id]})
        ends = await connection.execute(self._moves["read_ends"], {"ids": [claim.id]})
        found = await live.fetchone()
        end = await ends.fetchone()
        refusal(
            claim, found and (found[1], found[2]), end and (end[1], end[2]), Status.CANCELLED, "cancel"
        ).unwrap()

    async def spawn(
        self, claim: ClaimRef, key: str, tasks: Sequence[NewTask], *, wait: bool, spent: Spent = UNREPORTED
    ) -> Spawned:
        """Create children once, however often this is called with the key; with `wait` pause for them.

        A paused parent uses no attempt, and gives back its slot, its money and its document lock.
        """
        if not tasks:
            raise InvalidInputError(errors=[("tasks", "at least one task is needed")])

        async def work(connection: Connection) -> Spawned:
            step = {"id": claim.id, "name": SPAWN_STEP + key}
            try:
                parent = await self._lifecycle.hold(connection, claim, "spawn from")
            except StaleClaimError:
                known = await self._read_step(connection, step)
                if known is None or known[1] != claim.epoch or not wait:
                    raise
                # The same call again: the parent waits already.
                return Spawned(
                    [Child(name) for name in known[0]],
                    paused=True,
                    submitted=[Submitted(name, duplicate=True) for name in known[0]],
                )
            # While the parent is locked: of two calls at once the second finds what the first made.
            known = await self._read_step(connection, step)
            names = [] if known is None else known[0]
            changes = Changes(self._database.now)
            if known is None:
                parent, children = await self._operations.create_children(connection, changes, parent, tasks)
                names = [child.id for child in children]
                data = msgspec.json.encode(names).decode()
                await connection.execute(
                    self._sql["insert_step"],
                    {**self._database.now, **step, "epoch": claim.epoch, "data": data},
                )
            else:
                children = [Submitted(name, duplicate=True) for name in names]
            ends = await self._ends(connection, names)
            paused = wait and any(name not in ends for name in names)
            if paused:
                await self._operations.pause_for(connection, changes, parent, children, spent)
            else:
                booked = {"id": claim.id, "epoch": claim.epoch, "cost": spent.cost_usd}
                await connection.execute(self._sql["book_cost"], booked)
                await changes.write(connection)
            return Spawned([ends.get(name) or Child(name) for name in names], paused, children)

        return await self._database.run(work, pipeline=False)

    async def _read_step(self, connection: Connection, step: dict[str, str]) -> tuple[list[str], int] | None:
        """Which children were made, and by which claim."""
        cursor = await connection.execute(self._sql["read_step"], step)
        row = await cursor.fetchone()
        return None if row is None else (msgspec.json.decode(row[0]), row[1])

    async def _ends(self, connection: Connection, names: list[str]) -> dict[str, Child]:
        cursor = await connection.execute(self._sql["child_ends"], {"ids": names})
        return {
            name: Child(name, status, None if output is None else msgspec.json.decode(output))
            for name, status, output in await cursor.fetchall()
        }
