"""One task at a time: completing one, claiming one, or both in one call, one transaction and one commit.

For a single task the functions in the database cost half of the statements for batches. They leave what they
can't decide to those.
"""

from typing import Any

import psycopg

from lineshaft.engine.claim.fast_path import FastClaim
from lineshaft.engine.claim.rows import claimed_tasks
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.literals import json_text
from lineshaft.engine.postgres.pipeline import pipelined, row_type
from lineshaft.types.work import ClaimedTask, ClaimRef, Completion, Presence

_SQL = catalog.load(__name__)
#: Raised by the function when it notices too late that it can't decide; everything is rolled back.
_UNDECIDED = "LS001"

_NO_CLAIM: dict[str, Any] = dict.fromkeys(["agent_id", "incarnation", "types", "start"]) | {"next": False}


async def claim_one(
    database: Database, agent: Presence, *, types: list[str] | None, start: bool
) -> FastClaim:
    """Take the best task. Writes nothing where there is none."""
    claim = {
        "agent_id": agent.agent_id,
        "incarnation": agent.incarnation,
        "types": types,
        "start": start,
    }
    _, looked = await _call(database, _SQL["claim"], claim)
    return looked


async def complete_one(database: Database, item: Completion) -> bool:
    """Whether the task is completed; otherwise nothing has happened."""
    completed, _ = await _call(database, _SQL["complete_and_claim"], _completion_parameters(item) | _NO_CLAIM)
    return completed


async def complete_and_claim(
    database: Database, item: Completion, *, types: list[str] | None
) -> FastClaim | None:
    """Complete a task and start the best one, for the same instance. None: nothing has happened."""
    parameters = _completion_parameters(item) | _NO_CLAIM | {"next": True, "types": types, "start": True}
    completed, looked = await _call(database, _SQL["complete_and_claim"], parameters)
    return looked._replace(outputs={item.claim.id: item.output}) if completed else None


async def claimed_with(
    connection: Connection, now: dict[str, Any], completed: ClaimRef
) -> ClaimedTask | None:
    """The claim that was made together with this completion, while it is held."""
    statement = _SQL["claimed_with"]
    parameters = {**now, "id": completed.id, "epoch": completed.epoch}
    (rows,) = await pipelined(connection, (statement, parameters), named=False)
    if not rows:
        return None
    first = row_type(statement)._make(rows[0])
    return _claimed(first, rows[:1], started=first.started)


async def _call(database: Database, statement: str, parameters: dict[str, Any]) -> tuple[bool, FastClaim]:
    """Whether the task was completed, and what was claimed."""
    parameters = {**database.now, **parameters}
    try:
        (rows,) = await database.run_alone(lambda own: pipelined(own, (statement, parameters), named=False))
    except psycopg.Error as error:
        if error.sqlstate != _UNDECIDED:
            raise
        return False, FastClaim([], has_room=True, weigh=True)
    if not rows:
        return False, FastClaim([], has_room=True)
    row = row_type(statement)._make(rows[0])
    looked = FastClaim(
        [_claimed(row, rows, started=parameters["start"])] if row.verdict == "claimed" else [],
        has_room=row.verdict != "full",
        weigh=row.verdict == "weigh",
        missed=row.verdict == "missed",
        due=row.verdict == "due",
    )
    return bool(row.completed), looked


def _claimed(first: Any, rows: list[Any], *, started: bool) -> ClaimedTask:
    (task,) = claimed_tasks(
        first._fields, rows, started=started, claimed_at=first.now, claim_ttl_sec=first.claim_ttl_sec
    )
    return task


def _completion_parameters(item: Completion) -> dict[str, Any]:
    return {
        "id": item.claim.id,
        "epoch": item.claim.epoch,
        "output": json_text(item.output),
        "artifacts": json_text(item.artifacts),
        "report": json_text(item.decision_report),
        "output_type": item.output_type,
        "cost": item.spent.cost_usd,
        "tokens_in": item.spent.tokens_input,
        "tokens_out": item.spent.tokens_output,
    }
