"""Spending: what attempts report to have cost, written through while they run.

Cost and tokens are cumulative since the claim and never go down. What an attempt spends above its reservation
counts at once against the agent, the DAG and the day.
"""

from collections.abc import Sequence
from typing import Any

from lineshaft.engine.live import velocity
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.pipeline import pipelined
from lineshaft.engine.postgres.rows import send
from lineshaft.types.work import ClaimRef, Spent

_SQL = catalog.load(__name__)
Report = tuple[ClaimRef, Spent]
#: Statements of one transaction.
_LATE = ("lock_spenders", "lock_ended_spenders", "spend_late")
#: Comes before statements that wait for locked rows no longer than a second.
LIMIT_WAIT = _SQL["limit_spending_wait"]


def reported(items: Sequence[Report]) -> list[Report]:
    """Those of these reports that say something, one for each claim."""
    by_claim: dict[ClaimRef, Spent] = {}
    for claim, spent in items:
        if spent.says_something:
            by_claim[claim] = spent if claim not in by_claim else by_claim[claim].most(spent)
    return list(by_claim.items())


async def book(connection: Connection, items: Sequence[Report], now: dict[str, Any]) -> None:
    """Book reports as part of a transaction. Those of claims that are not held change nothing."""
    if items := reported(items):
        spend = await send(connection, _SQL["spend"], {**now, **_columns(items)})
        due = await send(connection, velocity.IS_DUE, now)
        if _must_look(await spend.fetchall(), await due.fetchall()):
            await velocity.look(connection, now)


def _must_look(spend: Sequence[Any], due: Sequence[Any]) -> bool:
    """By the rows of `spend` and of `velocity.IS_DUE`, which was sent after it."""
    return bool(spend[0].passed_step or due[0].is_due)


async def book_at_once(
    connection: Connection, items: Sequence[Report], now: dict[str, Any]
) -> dict[ClaimRef, str]:
    """As `book`, in a transaction of its own, which waits for locked rows for a second at most.

    Returns the claims that are over a limit, with the name of the limit.
    """
    if not (items := reported(items)):
        return {}
    parameters = {**now, **_columns(items)}
    statements = (_SQL["limit_spending_wait"], _SQL["spend"], velocity.IS_DUE, _SQL["limits_reached"])
    _, spend, due, rows = await pipelined(connection, *((sql, parameters) for sql in statements))
    if _must_look(spend, due) and await velocity.look(connection, now):
        (rows,) = await pipelined(connection, (_SQL["limits_reached"], parameters))
    held = {ClaimRef(row.id, row.epoch): row.reason for row in rows}
    # Claims that ended while the report waited for their rows.
    await book_late_at_once(connection, [item for item in items if item[0] not in held], now)
    return {claim: reason for claim, reason in held.items() if reason is not None}


async def limits_reached(
    connection: Connection, claims: Sequence[ClaimRef], now: dict[str, Any]
) -> dict[ClaimRef, str]:
    """Those of these claims that are over a limit, with the name of the limit."""
    parameters = {**now, "ids": [claim.id for claim in claims], "epochs": [claim.epoch for claim in claims]}
    (rows,) = await pipelined(connection, (_SQL["limits_reached"], parameters))
    return {ClaimRef(row.id, row.epoch): row.reason for row in rows if row.reason is not None}


async def book_late(connection: Connection, items: Sequence[Report], now: dict[str, Any]) -> None:
    """Book what claims that have ended, or have handed in their output, had not reported before."""
    if items := reported(items):
        parameters = {**now, **_columns(items)}
        for name in _LATE:
            await connection.execute(_SQL[name], parameters)
        await velocity.look_if_due(connection, now)


async def book_late_at_once(connection: Connection, items: Sequence[Report], now: dict[str, Any]) -> None:
    """As `book_late`, in a transaction of its own, which waits for locked rows for a second at most."""
    if items := reported(items):
        parameters = {**now, **_columns(items)}
        names = ("limit_spending_wait", *_LATE)
        await pipelined(connection, *((_SQL[name], parameters) for name in names))
        await velocity.look_if_due(connection, now)


def _columns(items: Sequence[Report]) -> dict[str, Any]:
    return {
        "ids": [claim.id for claim, _ in items],
        "epochs": [claim.epoch for claim, _ in items],
        "costs": [spent.cost_usd for _, spent in items],
        "tokens_in": [spent.tokens_input for _, spent in items],
        "tokens_out": [spent.tokens_output for _, spent in items],
    }
