"""What comes after what: the state machine, and dependencies."""

from collections import defaultdict
from collections.abc import Iterator

from lineshaft.model.states import TRANSIENT, TRANSITIONS, Status
from tests.chaos.evidence import Evidence
from tests.chaos.rules.keeping import completions

_MOVES: dict[str, list[tuple[Status, Status]]] = defaultdict(list)
for _move in TRANSITIONS:
    if _move.event is not None:
        _MOVES[_move.event].append((_move.source, _move.target))
_ENDS = frozenset({"task.completed", "task.cancelled", "task.dead_lettered"})


def events_follow_the_state_machine(evidence: Evidence) -> Iterator[str]:
    """The events of a task are a way through `model/states.py` that ends where the task is."""
    places: dict[str, set[Status]] = {name: {Status.CREATED} for name in evidence.tasks}
    ways: dict[str, list[str]] = defaultdict(list)
    for event in evidence.events:
        name = event.task_id
        if name is None or event.kind not in _MOVES:
            continue
        if name not in places:
            yield f"{event.kind} of {name}, which doesn't exist"
            continue
        ways[name].append(event.kind)
        # Without a known state it has been reported already.
        if places[name]:
            places[name] = {new for old, new in _MOVES[event.kind] if old in places[name]}
            if not places[name]:
                yield f"{name}: {event.kind} can't come after {ways[name][-5:-1]}"
    for name, found in places.items():
        status = Status(evidence.tasks[name].status)
        if found and status not in found - TRANSIENT:
            yield f"{name} is {status}, but its events say {sorted(found)}: {ways[name][-5:]}"


def dependents_start_after_dependencies(evidence: Evidence) -> Iterator[str]:
    claimed: dict[str, list[int]] = defaultdict(list)
    created: dict[str, int] = {}
    completed: dict[str, int] = {}
    ended: dict[str, int] = {}
    for place, event in enumerate(evidence.events):
        name = event.task_id or ""
        if event.kind == "task.claimed":
            claimed[name].append(place)
        elif event.kind == "task.created":
            created[name] = place
        elif event.kind in _ENDS:
            ended.setdefault(name, place)
            if event.kind == "task.completed":
                completed[name] = place
    for edge in evidence.edges:
        done = (completed if edge.kind == "success" else ended).get(edge.depends_on)
        for claim in claimed[edge.task_id]:
            # A parent that waits for a child was claimed before the child existed.
            was_there = edge.kind == "success" or claim > created.get(edge.depends_on, claim)
            if was_there and (done is None or claim < done):
                yield f"{edge.task_id} was claimed before {edge.depends_on}, which it depends on, was done"
                break


def handlers_begin_after_dependencies(evidence: Evidence) -> Iterator[str]:
    """As the clients saw it, by the clock that they share."""
    handed_in: dict[tuple[str, int], float] = {}
    begun: dict[str, float] = {}
    for record in evidence.records:
        if record["what"] == "complete":
            for item in record["items"]:
                handed_in.setdefault((item["task"], item["epoch"]), record["t"])
        elif record["what"] == "begun":
            begun.setdefault(record["task"], record["t"])
    for edge in evidence.edges:
        before = evidence.tasks.get(edge.depends_on)
        if edge.kind != "success" or before is None or before.is_batch or edge.task_id not in begun:
            continue
        at = handed_in.get((before.id, before.epoch))
        if at is None or begun[edge.task_id] < at:
            yield f"{edge.task_id} began before {before.id}, which it depends on, was completed"


def inputs_are_recorded_outputs(evidence: Evidence) -> Iterator[str]:
    for record in evidence.records:
        if record["what"] != "claimed":
            continue
        for ref, value in record["inputs"].items():
            source = evidence.tasks.get(ref.removeprefix("task:").removesuffix(":output"))
            if source is None or source.output != value:
                yield f"{record['task']} was given {value} for {ref}, which is {source and source.output}"


def refusals_change_nothing(evidence: Evidence) -> Iterator[str]:
    """A claim that was reported as stale has no outcome."""
    for _, item, answer in completions(evidence):
        task = evidence.tasks.get(item["task"])
        if task is None or (answer.error, task.status) != ("stale_claim", "COMPLETED"):
            continue
        if (task.epoch, task.output) == (item["epoch"], item["output"]):
            yield f"{task.id}: claim {task.epoch} was refused as stale, but its output is recorded"
