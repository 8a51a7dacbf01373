"""What happens to a claimed task until it ends. Every operation takes many tasks and is one transaction.

Each call names the claim by its epoch. Whoever holds an older one changes nothing and is told so; what it
wanted to hand in is kept as an event. Repeating a call that won answers as it did the first time.

One class in four files, each on the next: a task in its agent's hands (this one), how it ends well
(`completing.py`) or fails (`failing.py`), and where it stands (`standing.py`).
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.pipeline import pipelined
from lineshaft.engine.transition.changes import Changes
from lineshaft.engine.transition.complete import Completing
from lineshaft.engine.transition.outcomes import claim_columns, has_duplicate_tasks
from lineshaft.model.states import Status
from lineshaft.model.storable import check_json
from lineshaft.types.work import UNREPORTED, ClaimRef, Moved, Spent

_SQL = catalog.load("transition/lifecycle", "transition/task_locks")
_STARTABLE = frozenset({Status.CLAIMED, Status.RUNNING})


class Lifecycle(Completing):
    async def start(self, claims: Sequence[ClaimRef]) -> list[Moved]:
        if has_duplicate_tasks(claims):
            return [answer for claim in claims for answer in await self.start([claim])]
        call = _SQL["start_tasks"], {**self._database.now, **claim_columns(claims)}
        (rows,) = await self._database.run_alone(lambda own: pipelined(own, call))
        started = {row[0] for row in rows}
        if all(claim.id in started for claim in claims):
            return [Moved(claim.id, Status.RUNNING) for claim in claims]
        return await self._database.run(
            lambda own: self._answer(own, claims, started, Status.RUNNING, "start")
        )

    async def save_step(
        self, claim: ClaimRef, name: str, data: bytes, *, cost_usd: Decimal = Decimal(0)
    ) -> bytes:
        """Record a step's result; gives the one that counts, which is the first."""
        check_json(data=data)
        values = {"name": name, "data": data.decode(), "cost": cost_usd}
        return bytes((await self._save("save_step", claim, values))[0] or b"null")

    async def save_checkpoint(self, claim: ClaimRef, data: bytes) -> None:
        await self._database.run(lambda own: self.save_checkpoint_in(own, claim, data))

    async def save_checkpoint_in(self, connection: Connection, claim: ClaimRef, data: bytes) -> None:
        check_json(data=data)
        await self._save_in(connection, "save_checkpoint", claim, {"data": data.decode()})

    async def _save(self, statement: str, claim: ClaimRef, values: Mapping[str, Any]) -> tuple[Any, ...]:
        return await self._database.run(lambda own: self._save_in(own, statement, claim, values))

    async def _save_in(
        self, connection: Connection, statement: str, claim: ClaimRef, values: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        cursor = await connection.execute(
            _SQL[statement],
            {**self._database.now, "id": claim.id, "epoch": claim.epoch, **values},
        )
        row = await cursor.fetchone()
        if row is None:
            (refused,) = await self._answer(connection, [claim], set(), Status.RUNNING, "write to")
            refused.unwrap()
        return row or ()

    async def release(
        self,
        claims: Sequence[ClaimRef],
        *,
        delay_sec: float | None = None,
        spent: Mapping[str, Spent] | None = None,
    ) -> list[Moved]:
        """Hand back without using an attempt; with a delay it comes back later. `spent`: by task."""
        if has_duplicate_tasks(claims):
            one_by_one = [await self.release([claim], delay_sec=delay_sec, spent=spent) for claim in claims]
            return [answer for answers in one_by_one for answer in answers]

        async def work(connection: Connection) -> list[Moved]:
            locked = await self.lock(connection, [claim.id for claim in claims])
            changes = Changes(self._database.now)
            target = Status.PENDING if delay_sec else Status.READY
            moved = set()
            for claim in claims:
                task = locked.get(claim.id)
                if task is None or task.epoch != claim.epoch or task.status not in _STARTABLE:
                    continue
                used = (spent or {}).get(task.id, UNREPORTED).no_less_than_known(task)
                changes.requeue(task, target, delay_sec=delay_sec or None, spent=used)
                changes.attempt(task, "released", spent=used)
                kinds = ["task.released"] if delay_sec else ["task.released", "task.ready"]
                changes.event(task, kinds, {"delay_sec": delay_sec} if delay_sec else None)
                moved.add(task.id)
            await changes.write(connection)
            return await self._answer(connection, claims, moved, target, "release")

        return await self._database.run(work)
