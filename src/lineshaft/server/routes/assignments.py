"""Claimed tasks as agents get them: with what they need to work, and what earlier attempts left behind."""

from typing import Any

import msgspec
from msgspec import Raw

from lineshaft.engine.engine import Engine
from lineshaft.server.routes import responses
from lineshaft.server.routes.claim_tokens import token_of
from lineshaft.types import Task
from lineshaft.types.json import raw
from lineshaft.types.work import Claim, ClaimedTask, Resumed

_NOTHING_YET = Resumed("")
_EMPTY = Raw(b"{}")


async def assignments(engine: Engine, claim: Claim) -> list[responses.Assignment]:
    if not claim.tasks:
        return []
    found = {view.id: view for view in await engine.read.tasks_by_id([task.id for task in claim.tasks])}
    return [_assignment(task, found[task.id], claim) for task in claim.tasks if task.id in found]


def _assignment(task: ClaimedTask, view: Task, claim: Claim) -> responses.Assignment:
    before = claim.resumed.get(task.id, _NOTHING_YET)
    return responses.Assignment(
        task=view,
        claim_token=token_of(task.id, task.epoch),
        model=task.model,
        inputs=_inputs(task.spec, claim) if b'"context_refs"' in task.spec else {},
        children=Raw(before.children) if before.children else _EMPTY,
        resume=task.resume,
        checkpoint=raw(before.checkpoint),
        steps=Raw(before.steps) if before.steps else _EMPTY,
        last_error=raw(before.last_error),
    )


def _inputs(spec: bytes, claim: Claim) -> dict[str, Any]:
    """What `context_refs` refer to: outputs of tasks, by value; artifacts, by their name."""
    inputs: dict[str, Any] = {}
    for ref in msgspec.json.decode(spec).get("context_refs", ()):
        kind, _, rest = ref.partition(":")
        inputs[ref] = rest if kind == "artifact" else raw(claim.inputs.get(rest.removesuffix(":output")))
    return inputs
