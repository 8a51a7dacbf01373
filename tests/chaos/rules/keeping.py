"""What was accepted stays, and whatever was answered is so."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.chaos.evidence import Evidence, TaskFact
from tests.chaos.history import Record

ENDED = frozenset({"COMPLETED", "CANCELLED", "DEAD_LETTERED"})
_ACCEPTED = frozenset({"ok", "known"})


def answers(evidence: Evidence) -> dict[str, Record]:
    return {record["call"]: record for record in evidence.records if record["what"] == "answered"}


def accepted_tasks_exist(evidence: Evidence) -> Iterator[str]:
    answered = answers(evidence)
    for record in evidence.records:
        if record["what"] != "submit":
            continue
        missing = [name for name in record["ids"] if name not in evidence.tasks]
        if not missing:
            continue
        if answered.get(record["call"], {}).get("verdict") in _ACCEPTED:
            yield f"{record['who']} got {missing} accepted, but they don't exist"
        elif len(missing) < len(record["ids"]):
            yield f"of the tasks of one call, {missing} don't exist, but others do"


def nothing_comes_from_nowhere(evidence: Evidence) -> Iterator[str]:
    asked = {name for record in evidence.records if record["what"] == "submit" for name in record["ids"]}
    spawners = {record["task"] for record in evidence.records if record["what"] == "spawn"}
    for task in evidence.tasks.values():
        if task.id not in asked and task.parent_id not in spawners:
            yield f"{task.id} was never submitted"


def everything_comes_to_an_end(evidence: Evidence) -> Iterator[str]:
    """Only what waits for a dead letter, or for money that its DAG hasn't got, may be left."""
    waiting = _without_money(evidence)
    open_edges = defaultdict(list)
    for edge in evidence.edges:
        if not edge.satisfied and edge.depends_on in evidence.tasks:
            open_edges[edge.depends_on].append(edge.task_id)
            if evidence.tasks[edge.depends_on].status in ENDED:
                waiting.add(edge.task_id)
    new = list(waiting)
    while new:
        new = [name for done in new for name in open_edges[done] if name not in waiting]
        waiting.update(new)
    for task in evidence.tasks.values():
        if task.status not in ENDED and task.id not in waiting:
            yield f"{task.id} is still {task.status} (parked: {task.parked}, epoch {task.epoch})"


def _without_money(evidence: Evidence) -> set[str]:
    dags = {dag.id: dag for dag in evidence.dags}
    found = set()
    for task in evidence.tasks.values():
        dag = dags.get(task.dag_id)
        if task.parked == "dag_budget" and dag is not None and dag.limit_usd is not None:
            left = dag.limit_usd - dag.spent_usd - dag.reserved_usd
            if left < (task.max_cost_usd or 0):
                found.add(task.id)
    return found


class Answer(NamedTuple):
    """To one completion of a call; both are None while there is none."""

    status: str | None = None
    error: str | None = None


def completions(evidence: Evidence) -> Iterator[tuple[Record, Mapping[str, Any], Answer]]:
    """Every submitted outcome: the record, the item and the response."""
    answered = answers(evidence)
    for record in evidence.records:
        if record["what"] != "complete":
            continue
        found = answered.get(record["call"])
        for place, item in enumerate(record["items"]):
            answer = Answer(found["statuses"][place], found["errors"][place]) if found else Answer()
            yield record, item, answer


def one_outcome(evidence: Evidence) -> Iterator[str]:
    """The recorded output is that of the claim that won, and no other claim was reported as the winner."""
    handed_in: dict[tuple[str, int], Any] = {}
    winners: dict[str, set[int]] = defaultdict(set)
    for _, item, answer in completions(evidence):
        handed_in[item["task"], item["epoch"]] = item["output"]
        if answer.status == "COMPLETED":
            winners[item["task"]].add(item["epoch"])
    for name, epochs in winners.items():
        task = evidence.tasks.get(name)
        if task is None or task.status != "COMPLETED" or epochs != {task.epoch}:
            yield f"{name}: claims {sorted(epochs)} were reported as completed, but it is {_state(task)}"
    for task in evidence.tasks.values():
        claim = task.id, task.epoch
        if task.status != "COMPLETED" or task.is_batch:
            continue
        if claim not in handed_in:
            yield f"{task.id} is completed by claim {task.epoch}, which never handed anything in"
        elif handed_in[claim] != task.output:
            yield f"{task.id} has the output {task.output}, not {handed_in[claim]}"


def _state(task: TaskFact | None) -> str:
    return "not there" if task is None else f"{task.status} with epoch {task.epoch}"


def answers_are_true(evidence: Evidence) -> Iterator[str]:
    """Every acknowledged change is in the tables, whatever was killed afterwards."""
    acknowledged = answers(evidence)
    books = _Books(evidence)
    for record in evidence.records:
        answer = acknowledged.get(record.get("call", ""))
        find = getattr(books, record["what"], None)
        if answer is not None and find is not None:
            yield from find(record, answer)


class _Books:
    """Looks up what was answered; one method for each kind of call."""

    def __init__(self, evidence: Evidence) -> None:
        self._tasks = evidence.tasks
        self._attempts = {(attempt.task_id, attempt.epoch) for attempt in evidence.attempts}
        self._steps = {(step.task_id, step.name): step.data for step in evidence.steps}
        self._events = {(event.task_id, event.kind) for event in evidence.events}

    def fail(self, record: Record, answer: Record) -> Iterator[str]:
        for item, status in zip(record["items"], answer["statuses"], strict=True):
            if status is not None and (item["task"], item["epoch"]) not in self._attempts:
                yield f"{record['what']} of {item['task']}/{item['epoch']} was answered, but isn't recorded"

    release = fail

    def step(self, record: Record, answer: Record) -> Iterator[str]:
        place = record["task"], record["name"]
        if place not in self._steps or self._steps[place] != answer["stored"]:
            yield f"step {place} was answered {answer['stored']}, but is {self._steps.get(place)}"

    def spawn(self, record: Record, answer: Record) -> Iterator[str]:
        for child in answer["children"]:
            if child not in self._tasks or self._tasks[child].parent_id != record["task"]:
                yield f"{child} was spawned from {record['task']}, but isn't there"

    def cancel(self, record: Record, answer: Record) -> Iterator[str]:
        done = answer.get("verdict", "ok") == "ok"
        if done and (record["task"], "task.cancelled") not in self._events:
            yield f"{record['task']} was cancelled, but has no such event"

    cancel_held = cancel

    def revive(self, _: Record, answer: Record) -> Iterator[str]:
        if answer["verdict"] == "ok" and (answer["task"], "task.resolved") not in self._events:
            yield f"{answer['task']} was revived, but has no such event"


def _recorded_steps(evidence: Evidence) -> dict[str, dict[str, int]]:
    """By task: steps whose recording was answered, and the first claim that did it."""
    answered = answers(evidence)
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for record in evidence.records:
        if record["what"] == "step" and record["call"] in answered:
            steps = found[record["task"]]
            steps[record["name"]] = min(steps.get(record["name"], record["epoch"]), record["epoch"])
    return found


def steps_run_once(evidence: Evidence) -> Iterator[str]:
    """Once a step is recorded, no later claim runs it, and each is given it."""
    recorded = _recorded_steps(evidence)
    for record in evidence.records:
        if record["what"] not in {"ran_step", "claimed"}:
            continue
        done = {name for name, by in recorded.get(record["task"], {}).items() if by < record["epoch"]}
        if record["what"] == "ran_step" and record["name"] in done:
            yield f"{record['name']} of {record['task']} was run again by claim {record['epoch']}"
        elif record["what"] == "claimed" and (missing := done - set(record["steps"])):
            yield f"claim {record['epoch']} of {record['task']} was not given {sorted(missing)}"
