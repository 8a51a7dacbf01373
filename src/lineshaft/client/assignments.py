"""Claimed tasks with all that their handlers are given, from what a claim brought."""

from typing import Any

import msgspec

from lineshaft.types.work import NO_HISTORY, Assignment, Child, Claim, History, PastAttempt, Resumed


def assignments(claim: Claim, past: dict[str, list[PastAttempt]]) -> list[Assignment]:
    """`past`: earlier attempts, by task."""
    found = []
    for task in claim.tasks:
        resumed = claim.resumed.get(task.id)
        history = NO_HISTORY if resumed is None else _history(resumed, past.get(task.id, []))
        found.append(Assignment(task, history, _inputs(task.spec, claim.inputs) if claim.inputs else {}))
    return found


_STEPS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _history(resumed: Resumed, past: list[PastAttempt]) -> History:
    children = msgspec.json.decode(resumed.children) if resumed.children else {}
    return History(
        checkpoint=resumed.checkpoint,
        steps={name: bytes(data) for name, data in _STEPS.decode(resumed.steps).items()}
        if resumed.steps
        else {},
        children={name: Child(name, child["status"], child["output"]) for name, child in children.items()},
        attempts=past,
    )


def _inputs(spec: bytes, outputs: dict[str, bytes | None]) -> dict[str, Any]:
    """What `context_refs` refer to: outputs of tasks, by value; artifacts, by their name."""
    inputs: dict[str, Any] = {}
    for ref in msgspec.json.decode(spec).get("context_refs", ()):
        kind, _, rest = ref.partition(":")
        if kind == "artifact":
            inputs[ref] = rest
        else:
            output = outputs.get(rest.removesuffix(":output"))
            inputs[ref] = None if output is None else msgspec.json.decode(output)
    return inputs
