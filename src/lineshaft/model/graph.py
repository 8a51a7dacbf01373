"""Dependencies between tasks: cycles, roots and leaves, depths, the critical path.

A graph maps each task to the tasks it depends on. Names that appear only as a dependency are tasks outside
the graph (of another DAG, or submitted earlier): they count as upstream, never as members. All algorithms are
iterative, so a chain of 100,000 tasks doesn't exhaust the stack.
"""

from collections.abc import Iterable, Mapping
from graphlib import CycleError as _GraphlibCycleError
from graphlib import TopologicalSorter

from lineshaft.errors import CycleError

Graph = Mapping[str, Iterable[str]]


def order(graph: Graph) -> list[str]:
    """All names, each after its dependencies. Raises CycleError with the cycle, if there is one."""
    # graphlib creates an object for each name, which takes four times as long for a large DAG.
    dependents: dict[str, list[str]] = {}
    missing: dict[str, int] = {}
    for task, upstream in graph.items():
        count = 0
        for name in upstream:
            count += 1
            if name in dependents:
                dependents[name].append(task)
            else:
                dependents[name] = [task]
        missing[task] = count
    outside = [name for name in dependents if name not in missing]
    listed = outside + [task for task, count in missing.items() if not count]
    # The list grows during the loop: each name may free others.
    for name in listed:
        for task in dependents.get(name, ()):
            missing[task] -= 1
            if not missing[task]:
                listed.append(task)
    if len(listed) < len(outside) + len(missing):
        raise CycleError(_cycle(graph))
    return listed


def _cycle(graph: Graph) -> list[str]:
    """A cycle of a graph that has one."""
    try:
        TopologicalSorter(graph).prepare()
    except _GraphlibCycleError as error:
        # graphlib lists a cycle from upstream to downstream; the message reads "a depends on b".
        return list(error.args[1][::-1])
    raise AssertionError("unreachable")


def closes_cycle(graph: Graph, task: str, depends_on: Iterable[str]) -> list[str] | None:
    """The cycle that these new dependencies of a task would close, or None.

    `graph` needs to contain only what is upstream of `depends_on`.
    """
    came_from: dict[str, str] = {}
    to_visit = []
    for upstream in depends_on:
        if upstream not in came_from:
            came_from[upstream] = task
            to_visit.append(upstream)
    while to_visit:
        current = to_visit.pop()
        if current == task:
            path = [current]
            while path[-1] != task or len(path) == 1:
                path.append(came_from[path[-1]])
            return path[::-1]
        for upstream in graph.get(current, ()):
            if upstream not in came_from:
                came_from[upstream] = current
                to_visit.append(upstream)
    return None


def roots(graph: Graph) -> list[str]:
    """Members that depend on no other member."""
    return [task for task, upstream in graph.items() if not any(name in graph for name in upstream)]


def leaves(graph: Graph) -> list[str]:
    """Members that no other member depends on."""
    needed = {name for upstream in graph.values() for name in upstream}
    return [task for task in graph if task not in needed]


def downstream_lengths(graph: Graph, *, finished: Iterable[str] = ()) -> dict[str, int]:
    """The number of unfinished tasks in the longest chain below each member, itself not counted."""
    done = set(finished)
    lengths = dict.fromkeys(graph, 0)
    for task in reversed(order(graph)):
        if task not in graph:
            continue
        below = lengths[task] + (task not in done)
        for upstream in graph[task]:
            if upstream in lengths and lengths[upstream] < below:
                lengths[upstream] = below
    return lengths


def critical_path(graph: Graph, *, finished: Iterable[str] = ()) -> list[str]:
    """The longest chain of unfinished tasks, from root to leaf; the first in graph order if several tie."""
    done = set(finished)
    lengths = downstream_lengths(graph, finished=done)
    dependents: dict[str, list[str]] = {task: [] for task in graph}
    for task, upstream in graph.items():
        for name in upstream:
            if name in dependents:
                dependents[name].append(task)

    def chain_length(task: str) -> int:
        return lengths[task] + (task not in done)

    path: list[str] = []
    step = max(graph, key=chain_length, default=None)
    while step is not None and chain_length(step):
        if step not in done:
            path.append(step)
        step = max(dependents[step], key=chain_length, default=None)
    return path


def depths(graph: Graph) -> dict[str, int]:
    """The number of members in the longest chain above each member, itself not counted."""
    found = dict.fromkeys(graph, 0)
    for task in order(graph):
        if task in found:
            found[task] = max((found[name] + 1 for name in graph[task] if name in found), default=0)
    return found


def longest_path(graph: Graph, lengths: Mapping[str, float]) -> list[str]:
    """The chain whose lengths add up to the most, from root to leaf; the first in graph order if several tie.

    With durations as lengths, this is the chain that decides when the whole graph ends.
    """
    total: dict[str, float] = {}
    before: dict[str, str] = {}
    for task in order(graph):
        if task not in graph:
            continue
        members = [name for name in graph[task] if name in total]
        if members:
            before[task] = max(members, key=total.__getitem__)
        total[task] = lengths[task] + (total[before[task]] if members else 0)
    leaf = max(graph, key=total.__getitem__, default=None)
    path: list[str] = []
    while leaf is not None:
        path.append(leaf)
        leaf = before.get(leaf)
    return path[::-1]
