"""Agents: claims with long polls, and heartbeats."""

from typing import Any

from lineshaft.operations import examples
from lineshaft.operations.operation import operation
from lineshaft.server.routes import work_calls
from lineshaft.server.routes.work_calls import only
from lineshaft.server.service import Call
from lineshaft.types import Scope, Task, protocol
from lineshaft.types.protocol import BatchView


class ClaimWork(protocol.Claim, frozen=True, kw_only=True):
    #: The id of the agent.
    id: str


@operation(
    "POST /v1/agents/{id:path}/claim",
    Scope.AGENT,
    response=protocol.ClaimResult[Task],
    codes=("not_found", "superseded"),
    example={"incarnation": 1, "limit": 1, "wait_sec": 30},
)
async def claim_work(call: Call, request: ClaimWork) -> Any:
    """Claim up to `limit` tasks, best first, waiting for up to `wait_sec` until there is one.

    They are CLAIMED until they are started; with `start` they are RUNNING at once. An empty list means that
    there was no work in that time.
    """
    item = protocol.ClaimItem(
        agent_id=request.id,
        incarnation=request.incarnation,
        limit=request.limit,
        types=request.types,
        start=request.start,
    )
    return only(await work_calls.claim(call, [item], wait_sec=request.wait_sec, view=BatchView.FULL))


class BeatOfAgent(protocol.Heartbeat, frozen=True, kw_only=True):
    #: The id of the agent.
    id: str


@operation(
    "POST /v1/agents/{id:path}/heartbeat",
    Scope.AGENT,
    response=protocol.HeartbeatResult,
    repeatable=True,
    codes=("not_found", "superseded"),
    example={
        "incarnation": 1,
        "tasks": [
            {
                "id": "task_01J8K2M3N4P5Q6R7S8T9V0W1X2",
                "claim_token": examples.CLAIM_TOKEN,
                "progress": {"percent": 40},
                "cost_usd": 0.04,
            }
        ],
    },
)
async def heartbeat(call: Call, request: BeatOfAgent) -> Any:
    """Renew the leases of tasks.

    Returns for each task `continue`, `cancel` (it was cancelled) or `lost` (another agent may have it).
    """
    item = protocol.HeartbeatItem(agent_id=request.id, incarnation=request.incarnation, tasks=request.tasks)
    return only(await work_calls.heartbeat(call, [item]))
