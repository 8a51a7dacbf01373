"""No two hold the same: neither a claim nor a document."""

from collections import defaultdict
from collections.abc import Iterator

from tests.chaos.evidence import Evidence

#: A claim is over with one of these.
LET_GO = frozenset(
    {
        "task.validating",
        "task.completed",
        "task.failed",
        "task.released",
        "task.waiting",
        "task.rate_limited",
        "task.cancelled",
        "task.dead_lettered",
    }
)
_ENDS = frozenset({"task.completed", "task.cancelled", "task.dead_lettered"})


def claims_belong_to_one(evidence: Evidence) -> Iterator[str]:
    written = {
        (event.task_id, event.epoch): event.agent_id
        for event in evidence.events
        if event.kind == "task.claimed"
    }
    holders: dict[tuple[str, int], list[str]] = defaultdict(list)
    for record in evidence.records:
        if record["what"] == "claimed":
            holders[record["task"], record["epoch"]].append(record["agent"])
    for claim, agents in holders.items():
        if len(agents) > 1:
            yield f"claim {claim} was given to {agents}"
        if claim not in written:
            yield f"claim {claim} was given to {agents[0]}, but not recorded"
        elif written[claim] != agents[0]:
            yield f"claim {claim} was given to {agents[0]}, but recorded for {written[claim]}"


def one_claim_at_a_time(evidence: Evidence) -> Iterator[str]:
    """A task is claimed again only after the claim before is over; epochs count the claims."""
    open_claims: dict[str, int] = {}
    last: dict[str, int] = {}
    for event in evidence.events:
        name = event.task_id
        if name is None:
            continue
        if event.kind == "task.claimed":
            if name in open_claims:
                yield f"{name}: claim {event.epoch} began while claim {open_claims[name]} was held"
            if event.epoch != last.get(name, 0) + 1:
                yield f"{name}: claim {event.epoch} followed claim {last.get(name, 0)}"
            open_claims[name] = last[name] = event.epoch or 0
        elif event.kind in LET_GO:
            open_claims.pop(name, None)
    for name, epoch in last.items():
        if name in evidence.tasks and evidence.tasks[name].epoch != epoch:
            yield f"{name} has epoch {evidence.tasks[name].epoch}, but its last claim was {epoch}"


def one_holder_of_a_document(evidence: Evidence) -> Iterator[str]:
    """In the order of their events, claims under one lock come one after the other.

    A batch has the lock from its first child's claim until its own end.
    """
    holders: dict[str, dict[str, str]] = defaultdict(dict)
    for event in evidence.events:
        task = evidence.tasks.get(event.task_id or "")
        if task is None:
            continue
        owner = _owner(evidence, task.id)
        key = task.lock_key or evidence.tasks[owner].lock_key
        if key is None:
            continue
        held = holders[key]
        if event.kind == "task.claimed":
            others = {name for name, by in held.items() if by != owner}
            if others:
                yield f"{key}: {task.id} was claimed while {sorted(others)} had it"
            held[task.id] = owner
            if owner != task.id:
                held[owner] = owner
        elif task.is_batch:
            if event.kind in _ENDS:
                held.pop(task.id, None)
        elif event.kind in LET_GO:
            held.pop(task.id, None)


def _owner(evidence: Evidence, name: str) -> str:
    """The outermost batch that it belongs to, else itself."""
    task = evidence.tasks[name]
    parent = evidence.tasks.get(task.parent_id or "")
    if parent is None or not parent.is_batch:
        return name
    above = _owner(evidence, parent.id)
    return above if evidence.tasks[above].lock_key is not None else name
