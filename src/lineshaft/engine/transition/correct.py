"""Correcting what a task has cost, by hand.

A correction is a row beside what the claims have reported, so a report that is repeated later is compared
with the reports and books nothing again. An amount decides on what is disputed, too.
"""

from decimal import Decimal
from typing import Any

from msgspec import Struct

from lineshaft.engine.feed.actor import act_json, actor_name
from lineshaft.engine.live.parking import unpark_budget_waiters
from lineshaft.engine.live.waking import wake_all
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_row, fetch_rows
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import NotFoundError
from lineshaft.model.corrections import ClaimCost, shares
from lineshaft.model.storable import is_storable, replace_unstorable
from lineshaft.types.costs import CostCorrection, Disputed

_SQL = catalog.load(__name__)
#: A task may end, or be revived, while its row is waited for: then it has the other row.
_LOCKS = ("lock_live", "lock_ended", "lock_live", "lock_disputes")


class _Cost(Struct, frozen=True):
    id: str
    cost_usd: Decimal
    epoch: int
    dag_id: str | None


class Corrections:
    def __init__(self, transitions: Transitions) -> None:
        self._database = transitions.database

    async def correct(self, task_id: str, correction: CostCorrection) -> None:
        """Book the difference to what the task has cost in the end; a repeated call finds none."""
        amount = correction.checked_cost()
        if not is_storable(task_id):
            raise NotFoundError(f"There is no task {task_id!r}.")

        async def work(connection: Connection) -> None:
            for name in _LOCKS:
                await connection.execute(_SQL[name], {"id": task_id})
            before = await fetch_row(connection, _Cost, _SQL["read_cost"], {"id": task_id})
            if before is None:
                raise NotFoundError(f"There is no task {task_id}. It may have been deleted after it ended.")
            claims = await fetch_rows(connection, ClaimCost, _SQL["read_claims"], {"id": task_id})
            accepted = (
                sum(claim.disputed_usd for claim in claims) if correction.disputed is Disputed.ACCEPT else 0
            )
            after = before.cost_usd + accepted if amount is None else amount
            if after != before.cost_usd or any(claim.disputed_usd for claim in claims):
                await self._book(connection, before, after, claims, correction.reason)

        await self._database.run(work)

    async def _book(
        self, connection: Connection, before: _Cost, after: Decimal, claims: list[ClaimCost], reason: str
    ) -> None:
        parts = shares(claims, after - before.cost_usd)
        disputed = [claim for claim in claims if claim.disputed_usd]
        await connection.execute(
            _SQL["correct"],
            {
                **self._database.now,
                "id": before.id,
                "dag_id": before.dag_id,
                "epoch": before.epoch,
                "epochs": [claim.epoch for claim, _ in parts],
                "agent_ids": [claim.agent_id for claim, _ in parts],
                "amounts": [amount for _, amount in parts],
                "disputed_epochs": [claim.epoch for claim in disputed],
                "disputed_amounts": [claim.disputed_usd for claim in disputed],
                "actor": actor_name(),
                "reason": replace_unstorable(reason),
                "data": act_json(_event(before.cost_usd, after, disputed), reason),
            },
        )
        if after < before.cost_usd:
            # There is money again.
            if before.dag_id is not None:
                await unpark_budget_waiters(connection, [before.dag_id])
            await wake_all(connection)


def _event(old: Decimal, new: Decimal, disputed: list[ClaimCost]) -> dict[str, Any]:
    data = {"old": float(old), "new": float(new)}
    if disputed:
        data["disputed_usd"] = float(sum(claim.disputed_usd for claim in disputed))
    return data
