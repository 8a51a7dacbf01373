"""Calls of tools that need a person: each is a task for `human`; the run waits without a slot.

For an approval, the answer `true`, `{"approved": true}` or nothing approves; `{"approved": true,
"arguments": {…}}` approves with other arguments; `false`, `{"approved": false, "message": …}` or a rejection
denies, and the model sees that. For a tool that is executed elsewhere, the answer is the tool's result.
"""

from typing import Any

from pydantic_ai.messages import ToolCallPart
from pydantic_ai.tools import (
    DeferredToolRequests,
    DeferredToolResults,
    RunContext,
    ToolApproved,
    ToolDenied,
)

from lineshaft.agent.execution import Execution
from lineshaft.agent.steps import running_step
from lineshaft.errors import LineshaftError
from lineshaft.integrations.pydantic_ai.steps import context_of, occurrence
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import Child

#: Types of these tasks.
APPROVAL, EXECUTION = "approve-tool-call", "execute-tool-call"
HUMAN = "human"


async def resolved(
    execution: Execution, ctx: RunContext[Any], requests: DeferredToolRequests
) -> DeferredToolResults:
    """What people decided; ends the claim until all have."""
    if (step := running_step(execution.task.id)) is not None:
        raise LineshaftError(
            f"A tool that needs a person was called inside of the step {step!r}. The wait ends the handler, "
            "and the step would run again. Call such tools from the agent that the handler runs, not from an "
            "agent in a tool."
        )
    run = (ctx.run_id or "").removeprefix(f"{execution.task.id}:")
    calls = [*requests.approvals, *requests.calls]
    tasks = [_task(call, run, requests, APPROVAL) for call in requests.approvals]
    tasks += [_task(call, run, requests, EXECUTION) for call in requests.calls]
    children = await context_of(execution).spawn(occurrence(execution, f"{run}/people"), tasks, wait=True)
    results = DeferredToolResults()
    for call, child in zip(calls, children, strict=True):
        if call in requests.approvals:
            results.approvals[call.tool_call_id] = _decision(child)
        else:
            results.calls[call.tool_call_id] = _result(child)
    return results


def _task(call: ToolCallPart, run: str, requests: DeferredToolRequests, task_type: str) -> NewTask:
    verb = "Approve" if task_type == APPROVAL else "Execute"
    spec: dict[str, Any] = {"tool": call.tool_name, "arguments": call.args_as_dict(), "agent": run}
    if about := requests.metadata.get(call.tool_call_id):
        spec["about"] = about
    # A refusal is an answer to the model: it neither fails the DAG nor the task that asks.
    return NewTask(
        task_type,
        title=f"{verb} {call.tool_name}",
        spec=spec,
        required_capabilities=[HUMAN],
        on_failure="ignore",
    )


def _decision(child: Child) -> bool | ToolApproved | ToolDenied:
    if child.status != Status.COMPLETED:
        return ToolDenied("A person rejected the call of this tool.")
    match child.output:
        case None | True:
            return True
        case {"approved": True, "arguments": dict(arguments)}:
            return ToolApproved(override_args=arguments)
        case {"approved": True}:
            return True
        case {"approved": False, "message": str(message)} if message:
            return ToolDenied(message)
        case _:
            return ToolDenied("A person denied the call of this tool.")


def _result(child: Child) -> Any:
    if child.status != Status.COMPLETED:
        return ToolDenied("A person declined to execute this tool.")
    return child.output
