"""Drawing alike tasks of a large DAG as one."""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence

from lineshaft.model import graph
from lineshaft.pictures.nodes import Box, DagNode, Edge, Group

#: A DAG with more tasks is collapsed, unless the caller decides.
OPEN_UP_TO = 300
#: A picture never has more boxes.
MOST_BOXES = 2_000
_ROUNDS = 20


def collapsed(
    nodes: Sequence[DagNode],
    edges: Iterable[Edge],
    *,
    collapse: bool | None = None,
    expanded: Collection[str] = (),
) -> tuple[list[Box], list[Edge]]:
    """The boxes of a picture and the edges between them.

    Tasks form a group if they have the same type, follow the same tasks or groups, and precede the same. If
    too many boxes are left, groups are coarser: tasks of a type at the same depth, then tasks at similar
    depths.

    `collapse` None: only if there are many tasks. The groups whose ids are in `expanded` stay open, if there
    is room for their tasks.
    """
    upstream: dict[str, list[str]] = {node.id: [] for node in nodes}
    known = dict.fromkeys((a, b) for a, b in edges if a in upstream and b in upstream)
    for before, after in known:
        upstream[after].append(before)
    if collapse is None:
        collapse = len(nodes) > OPEN_UP_TO
    if not collapse and len(nodes) <= MOST_BOXES:
        return list(nodes), list(known)
    depths = graph.depths(upstream)
    types = {node.id: node.type for node in nodes}
    boxes, of_node = _grouped(nodes, _alike(upstream, types, depths), expanded)
    if len(boxes) > MOST_BOXES:
        by_depth: dict[str, Hashable] = {name: (types[name], depth) for name, depth in depths.items()}
        boxes, of_node = _grouped(nodes, by_depth, ())
    if len(boxes) > MOST_BOXES:
        layers = -(-(max(depths.values()) + 1) // MOST_BOXES)
        boxes, of_node = _grouped(nodes, {name: depth // layers for name, depth in depths.items()}, ())
    between = dict.fromkeys((of_node[a], of_node[b]) for a, b in known if of_node[a] != of_node[b])
    return boxes, list(between)


def _alike(
    upstream: dict[str, list[str]], types: dict[str, str], depths: dict[str, int]
) -> dict[str, Hashable]:
    """A class for each task: the same for tasks of a type and depth whose neighbours have the same classes.

    An edge always leads to a greater depth, so the edges between classes have no cycle.
    """
    downstream: defaultdict[str, list[str]] = defaultdict(list)
    for after, names in upstream.items():
        for before in names:
            downstream[before].append(after)
    classes: dict[str, int] = _numbered({name: (types[name], depths[name]) for name in upstream})
    for _ in range(_ROUNDS):
        finer = _numbered(
            {
                name: (
                    classes[name],
                    frozenset(classes[other] for other in names),
                    frozenset(classes[other] for other in downstream[name]),
                )
                for name, names in upstream.items()
            }
        )
        stable = len(set(finer.values())) == len(set(classes.values()))
        classes = finer
        if stable:
            break
    return dict(classes)


def _numbered(keys: dict[str, Hashable]) -> dict[str, int]:
    numbers: dict[Hashable, int] = {}
    return {name: numbers.setdefault(key, len(numbers)) for name, key in keys.items()}


def _grouped(
    nodes: Sequence[DagNode], classes: dict[str, Hashable], expanded: Collection[str]
) -> tuple[list[Box], dict[str, str]]:
    """The boxes, in the order of their first tasks, and the box of each task."""
    members: defaultdict[Hashable, list[DagNode]] = defaultdict(list)
    for node in nodes:
        members[classes[node.id]].append(node)
    boxes: list[Box] = []
    of_node: dict[str, str] = {}
    for alike in members.values():
        name = f"group_{alike[0].id}"
        if len(alike) == 1 or name in expanded:
            boxes += alike
            of_node |= {node.id: node.id for node in alike}
        else:
            types = {node.type for node in alike}
            boxes.append(Group(id=name, type=types.pop() if len(types) == 1 else None, members=alike))
            of_node |= {node.id: name for node in alike}
    return boxes, of_node
