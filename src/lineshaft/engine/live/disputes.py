"""Disputed costs: what a claim reports beyond its ceiling counts nowhere until a person accepts it.

The ceiling is ten times the greatest of the task's `max_cost_usd`, `default_max_cost_usd` and 1 USD. Reports
pass here before anything else: all ways of booking them see only what counts. The dispute is recorded first,
in a transaction of its own; a call that is lost after that is repeated by its agent, as any other.
"""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from lineshaft.engine.live.spending import LIMIT_WAIT, Report
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.pipeline import pipelined
from lineshaft.types.work import NOTHING, ClaimRef

_SQL = catalog.load(__name__)
#: The least result of lineshaft.cost_ceiling_1, whatever the limits: smaller reports need no look.
_LEAST_CEILING = Decimal(10)


def may_be_disputed(reports: Sequence[Report]) -> bool:
    return any((spent.cost_usd or NOTHING) > _LEAST_CEILING for _, spent in reports)


async def within_ceilings(
    connection: Connection, reports: Sequence[Report], now: dict[str, Any], *, at_once: bool = False
) -> list[Report]:
    """What counts of these reports; the rest is recorded as disputed.

    `at_once`: waits for locked rows for a second at most, as `spending.book_at_once`.
    """
    high = [(claim, spent.cost_usd) for claim, spent in reports if may_be_disputed([(claim, spent)])]
    if not high:
        return list(reports)
    parameters = {
        **now,
        "ids": [claim.id for claim, _ in high],
        "epochs": [claim.epoch for claim, _ in high],
        "costs": [cost for _, cost in high],
    }
    statements = (LIMIT_WAIT, _SQL["dispute"]) if at_once else (_SQL["dispute"],)
    *_, rows = await pipelined(connection, *((statement, parameters) for statement in statements))
    ceilings = {ClaimRef(row.task_id, row.epoch): row.ceiling_usd for row in rows}
    return [
        (claim, replace(spent, cost_usd=min(spent.cost_usd or NOTHING, ceilings[claim])))
        if claim in ceilings
        else (claim, spent)
        for claim, spent in reports
    ]
