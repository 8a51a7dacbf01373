"""What clients ask for: random work from a seed, the same for the same seed.

Callers give ids of their own, so that a submission whose answer was lost can be made again, and so that the
checker knows of every task that may exist.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from lineshaft import NewTask, OutputContract, RetrySpec

TYPE, FLAKY = "work", "flaky"
DOCUMENTS = 4
RETRY = RetrySpec(initial_delay_sec=0.1, backoff_multiplier=1.5, max_delay_sec=1.0)
#: Of an attempt; no handler of the workload ever spends more.
MAX_COST_USD = 0.05
#: What a few of them report instead, beyond the ceiling of a claim.
ABSURD_USD = 500
_SHARES = [70, 10, 2, 3, 2, 10, 3]
_SCHEMA = {"type": "object", "required": ["task"], "properties": {"task": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class Submit:
    """A DAG, or standalone tasks."""

    number: int
    tasks: list[NewTask]
    is_dag: bool
    ceiling_usd: float | None = None

    @property
    def ids(self) -> list[str]:
        return [task_id for task in self.tasks for task_id in _ids(task)]


@dataclass(frozen=True, slots=True)
class Cancel:
    number: int
    task_id: str


@dataclass(frozen=True, slots=True)
class Revive:
    """One of the dead letters, whichever there is."""

    number: int


@dataclass(frozen=True, slots=True)
class Correct:
    """What a task has cost, whether it waits, runs or has ended."""

    number: int
    task_id: str
    cost_usd: float


@dataclass(frozen=True, slots=True)
class Decide:
    """One of the tasks with a disputed cost, whichever there is: accept, refuse, or a cost."""

    number: int
    decision: Literal["accept", "refuse"] | float


Operation = Submit | Cancel | Revive | Correct | Decide


def _ids(task: NewTask) -> Iterator[str]:
    assert task.id is not None
    yield task.id
    for child in task.children:
        yield from _ids(child)


@dataclass
class Workload:
    seed: int
    client: str
    _known: list[str] = field(default_factory=list)

    def operations(self) -> Iterator[Operation]:
        """Without end."""
        number = 0
        while True:
            number += 1
            yield self._operation(number, random.Random(f"{self.seed}/{self.client}/{number}"))

    def _operation(self, number: int, dice: random.Random) -> Operation:
        kinds = {
            "dag": 40,
            "one": 15,
            "many": 15,
            "batch": 8,
            "cancel": 14,
            "revive": 8,
            "correct": 12,
            "decide": 8,
        }
        kind = dice.choices(list(kinds), list(kinds.values()))[0]
        if kind == "cancel" and self._known:
            # Mostly something recent, which may well be at work.
            return Cancel(number, dice.choice(self._known[-30:]))
        if kind == "revive":
            return Revive(number)
        if kind == "correct" and self._known:
            return Correct(number, dice.choice(self._known[-30:]), dice.choice([0, 0.004, 0.02]))
        if kind == "decide":
            return Decide(number, dice.choice(["accept", "refuse", "refuse", 0.01, 0.01]))
        submit = self._submit(kind, number, dice)
        self._known += submit.ids
        return submit

    def _submit(self, kind: str, number: int, dice: random.Random) -> Submit:
        name = f"{self.client}-{self.seed}-{number}"
        if kind == "dag":
            tasks = _dag(name, dice)
            ceiling = round(MAX_COST_USD * dice.uniform(0.5, 1.5) * len(tasks), 3)
            return Submit(number, tasks, is_dag=True, ceiling_usd=ceiling if dice.random() < 0.3 else None)
        if kind == "batch":
            children = [_task(f"{name}.c{n}", dice, plain=True) for n in range(dice.randint(1, 3))]
            lock = f"doc:{dice.randrange(DOCUMENTS)}" if dice.random() < 0.7 else None
            whole = NewTask(TYPE, id=name, lock_key=lock, children=children, retry=RETRY)
            return Submit(number, [whole], is_dag=False)
        count = 1 if kind == "one" else dice.choice([2, 5, 20, 60])
        tasks = [_task(f"{name}.{n}", dice, plain=count > 5) for n in range(count)]
        return Submit(number, tasks, is_dag=False)


def _dag(name: str, dice: random.Random) -> list[NewTask]:
    """Each task depends on some of those before it: chains, fans, joins, and everything between."""
    tasks: list[NewTask] = []
    size, density = dice.randint(2, 10), dice.choice([0.15, 0.4, 0.9])
    for n in range(size):
        task_id = f"{name}.{n}"
        before = [f"{name}.{m}" for m in range(n) if dice.random() < density][:3]
        tasks.append(_task(task_id, dice, depends_on=before))
    return tasks


def _task(
    task_id: str, dice: random.Random, *, depends_on: list[str] | None = None, plain: bool = False
) -> NewTask:
    plan: dict[str, Any] = {
        "seconds": round(dice.expovariate(1 / 0.05), 3),
        "steps": dice.choice([0, 0, 1, 2]),
        "cost": dice.choice([0, 0.001, 0.01]),
    }
    fields: dict[str, Any] = {"max_attempts": 6}
    kind = TYPE
    if not plain:
        kind = _add_trouble(plan, dice)
        fields |= _extras(plan, dice)
    if not plain and not plan["cost"] and dice.random() < 0.08:
        plan["exaggerates"] = True
    # What costs has a limit: then no agent and no DAG ever spends more than it may, but for what is absurd.
    elif plan["cost"] or dice.random() < 0.3:
        fields["max_cost_usd"] = MAX_COST_USD
    spec: dict[str, Any] = {"plan": plan}
    if depends_on and dice.random() < 0.5:
        spec["context_refs"] = [f"task:{name}:output" for name in depends_on]
    return NewTask(
        kind,
        id=task_id,
        key=task_id,
        spec=spec,
        depends_on=depends_on or [],
        priority=dice.choice([5, 50, 50, 50, 90]),
        retry=RETRY,
        **fields,
    )


def _add_trouble(plan: dict[str, Any], dice: random.Random) -> str:
    """What is special about it, if anything; gives its type."""
    what = dice.choices(["nothing", "fails", "hopeless", "snoozes", "cancels", "spawns", "slow"], _SHARES)[0]
    match what:
        case "fails":
            plan["fails"] = dice.randint(1, 2)
            return FLAKY
        case "hopeless":
            plan |= {"fails": 1000, "category": "auth_failure"}
        case "spawns":
            plan |= {"spawns": dice.randint(1, 3), "waits": dice.random() < 0.7}
        case "slow":
            plan["seconds"] = round(dice.uniform(1, 4), 3)
        case _:
            plan[what] = True
    return TYPE


def _extras(plan: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if dice.random() < 0.15:
        plan["wrong_first"] = dice.random() < 0.3
        fields["output"] = OutputContract(validation="json-schema", validation_schema=_SCHEMA)
    if dice.random() < 0.2:
        fields["lock_key"] = f"doc:{dice.randrange(DOCUMENTS)}"
    return fields
