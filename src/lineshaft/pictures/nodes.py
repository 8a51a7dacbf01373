"""What a picture of a DAG shows: its tasks, and groups of tasks that are alike."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import cached_property
from statistics import fmean
from typing import Any

from msgspec import Struct

from lineshaft.model import graph
from lineshaft.model.parts import ForEach
from lineshaft.model.states import Status
from lineshaft.types import ForEachInfo, Task
from lineshaft.types.dags import ListItems, children_of_lists, items_of_lists

#: A task and one that depends on it, by id.
Edge = tuple[str, str]

#: The state of a group is the first of these that one of its tasks is in.
_MOST_URGENT = (
    Status.DEAD_LETTERED,
    Status.FAILED,
    Status.RUNNING,
    Status.VALIDATING,
    Status.CLAIMED,
    Status.RETRYING,
    Status.READY,
    Status.PENDING,
    Status.CREATED,
    Status.COMPLETED,
    Status.CANCELLED,
)


class DagNode(Struct, frozen=True, kw_only=True):
    """A task in a picture."""

    id: str
    title: str
    type: str
    status: Status
    #: From its first start to its end, or until now; None: it never started.
    duration_sec: float | None = None
    cost_usd: Decimal = Decimal(0)
    #: From 0 to 1; None: unknown.
    progress: float | None = None
    #: It waits for a person's decision on its output.
    by_person: bool = False
    #: The children of its list that aren't drawn, by state.
    items: Mapping[Status, int] = {}

    @property
    def counts(self) -> Mapping[Status, int]:
        """The tasks that the box stands for, by state."""
        return self.items or {self.status: 1}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tasks that are drawn as one, because they are alike."""

    #: Derived from the first member, so that it stays the same while the tasks move on.
    id: str
    #: None: the members have different types.
    type: str | None
    members: Sequence[DagNode]

    @cached_property
    def counts(self) -> Mapping[Status, int]:
        """The number of tasks by state, in the order of the states; without zeros."""
        counted = sum((Counter(member.counts) for member in self.members), Counter[Status]())
        return {status: counted[status] for status in Status.in_order(counted)}

    @property
    def status(self) -> Status:
        return _most_urgent(self.counts)

    @property
    def title(self) -> str:
        return f"{self.type or 'several types'} ×{len(self.members)}"

    @cached_property
    def cost_usd(self) -> Decimal:
        return sum((member.cost_usd for member in self.members), Decimal(0))


Box = DagNode | Group


def nodes_of(
    tasks: Sequence[Task],
    now: datetime,
    *,
    opened: Collection[str] = (),
    lists: Mapping[str, ListItems] | None = None,
) -> list[DagNode]:
    """The tasks of a DAG as a picture shows them.

    A task with a list stands for its children, except those whose ids are in `opened`. `lists` has the
    children that are not among the tasks, by the id of their task.
    """
    children = children_of_lists(tasks)
    counted = {**items_of_lists(tasks, children), **(lists or {})}
    closed = {name: items for name, items in counted.items() if name not in opened}
    nodes = []
    for task in tasks:
        if task.id in children and children[task.id] not in opened:
            continue
        items = closed.get(task.id, ListItems())
        title = task.key if task.key and task.title == task.type else task.title
        nodes.append(
            DagNode(
                id=task.id,
                # A task without a title of its own has its type as one, which the box shows anyway.
                title=_title_of_list(title, task.for_each, items),
                type=task.type,
                status=task.status if task.status.ended or not items.counts else _most_urgent(items.counts),
                duration_sec=_duration(
                    task.started_at if task.is_batch else task.first_started_at, task.ended_at or now
                ),
                cost_usd=task.cost_usd + items.cost_usd,
                progress=_fraction(task.progress) if task.status is Status.RUNNING else None,
                by_person=task.output.validation == "human",
                items={status: items.counts[status] for status in Status.in_order(items.counts)},
            )
        )
    return nodes


def edges_of(tasks: Sequence[Task]) -> list[Edge]:
    """The dependencies of the tasks; those outside of the DAG are left out by the picture.

    The children of a list come after what their task waited for.
    """
    children = children_of_lists(tasks)
    # Some of the children may not be among the tasks.
    others = {task.id for task in tasks} - children.keys()
    above = {
        task.id: [name for name in task.depends_on if name in others]
        for task in tasks
        if task.for_each is not None
    }
    return [
        (upstream, task.id)
        for task in tasks
        for upstream in (*task.depends_on, *above.get(children.get(task.id, ""), ()))
    ]


def title_of_list(title: str, for_each: ForEach | ForEachInfo | None) -> str:
    """The title of a task whose list doesn't exist yet."""
    return title if for_each is None else f"{title} for each of {for_each.over}"


def _title_of_list(title: str, for_each: ForEach | ForEachInfo | None, items: ListItems) -> str:
    count = items.counts.total()
    return f"{title} ×{count}" if count else title_of_list(title, for_each)


def _most_urgent(counts: Mapping[Status, int]) -> Status:
    return next((status for status in _MOST_URGENT if status in counts), next(iter(counts)))


def _duration(start: datetime | None, end: datetime) -> float | None:
    return None if start is None else max(0.0, (end - start).total_seconds())


def _fraction(progress: Any) -> float | None:
    """Progress that can be drawn: a number from 0 to 1, or an object with `done` and `total`."""
    match progress:
        case bool():
            return None
        case {"done": int() | float() as done, "total": int() | float() as total} if total > 0:
            return float(done / total) if 0 <= done <= total else None
        case int() | float() if 0 <= progress <= 1:
            return float(progress)
    return None


def critical_path(nodes: Sequence[DagNode], edges: Iterable[Edge]) -> list[str]:
    """The chain of tasks that takes the longest, from root to leaf.

    A task that has ended counts with its duration. One that has not counts with the mean duration of its
    type, or of all types if none of its own is completed, or with what it has taken so far if that is more.
    """
    upstream: dict[str, list[str]] = {node.id: [] for node in nodes}
    for before, after in edges:
        if before in upstream and after in upstream:
            upstream[after].append(before)
    ended: dict[str, list[float]] = {}
    for node in nodes:
        if node.status is Status.COMPLETED and node.duration_sec is not None:
            ended.setdefault(node.type, []).append(node.duration_sec)
    means = {name: fmean(durations) for name, durations in ended.items()}
    default = fmean(means.values()) if means else 1.0
    return graph.longest_path(
        upstream,
        {
            node.id: node.duration_sec or 0.0
            if node.status.ended
            else max(node.duration_sec or 0.0, means.get(node.type, default))
            for node in nodes
        },
    )
