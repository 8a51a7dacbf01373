"""Artifacts: metadata of files that tasks read and write. Their bytes are streamed by each transport."""

from lineshaft.engine.caller import caller
from lineshaft.errors import ForbiddenError
from lineshaft.operations.operation import Engine, operation
from lineshaft.types import Artifact, Page, Scope
from lineshaft.types.request import ById, OnePage


class ListArtifacts(OnePage, frozen=True, kw_only=True):
    task_id: str | None = None


@operation("GET /v1/artifacts", Scope.READ)
async def list_artifacts(engine: Engine, request: ListArtifacts) -> Page[Artifact]:
    """List artifacts, newest first; with `task_id` those that this task made."""
    return await engine.artifacts.page(task_id=request.task_id, limit=request.limit, cursor=request.cursor)


@operation("GET /v1/artifacts/{id}", Scope.READ, codes=("not_found",))
async def read_artifact(engine: Engine, request: ById) -> Artifact:
    """Read the metadata of an artifact."""
    return await engine.artifacts.get(request.id)


@operation(
    "DELETE /v1/artifacts/{id}", Scope.AGENT, repeatable=True, codes=("not_found", "invalid_transition")
)
async def delete_artifact(engine: Engine, request: ById) -> None:
    """Delete an artifact that no live task refers to.

    A token that is bound to an agent may delete only artifacts of tasks that the agent holds.
    """
    who = caller()
    if who.agent_id is not None:
        artifact = await engine.artifacts.get(request.id)
        if artifact.task_id is None:
            raise ForbiddenError(
                f"The token {who.name!r} is bound to agent {who.agent_id!r}, and artifact {artifact.id!r} "
                "belongs to no task, so others may need it. Use a token that isn't bound to an agent."
            )
        await check_holder(engine, artifact.task_id)
    await engine.artifacts.delete(request.id)


async def check_holder(engine: Engine, task_id: str) -> None:
    """Raise ForbiddenError if the caller's token is bound to an agent that doesn't hold the task."""
    who = caller()
    if who.agent_id is None:
        return
    holder = await engine.artifacts.holder(task_id)
    if holder != who.agent_id:
        raise ForbiddenError(
            f"The token {who.name!r} is bound to agent {who.agent_id!r}, and task {task_id!r} is held by "
            f"{'no agent' if holder is None else f'agent {holder!r}'}. Only the agent that holds a task "
            "changes its artifacts: claim it first, or upload without task_id."
        )
