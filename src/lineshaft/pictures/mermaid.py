"""The picture of a DAG as text for Mermaid, which many wikis and forges draw."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from lineshaft.model.states import Status
from lineshaft.pictures.dag import DagPicture
from lineshaft.pictures.nodes import DagNode, Edge
from lineshaft.pictures.state_colours import STATES
from lineshaft.pictures.state_icons import look_of
from lineshaft.pictures.text import clean

_LONGEST_TITLE = 80
#: Mermaid gives a meaning to most punctuation, even in quotes: everything but letters, digits and a few
#: harmless marks is written as a number.
_SPECIAL = re.compile(r"[^\w ×.,…/-]")


def dag_mermaid(
    nodes: Sequence[DagNode], edges: Iterable[Edge], *, title: str, collapse: bool | None = None
) -> str:
    """A `flowchart LR`: boxes in the colours of their states, the critical path with thick arrows."""
    picture = DagPicture(nodes, edges, collapse=collapse)
    number = {box.id: f"n{index}" for index, box in enumerate(picture.boxes)}
    lines = ["flowchart LR", f"  accTitle: {_escaped(title)}"]
    lines += [
        f'  {number[box.id]}["{_escaped(box.title)}<br/>{_escaped(box.status)}"]:::{look_of(box.status)}'
        for box in picture.boxes
    ]
    critical = set(pairwise(picture.critical))
    lines += [
        f"  {number[before]} {'==>' if (before, after) in critical else '-->'} {number[after]}"
        for before, after in picture.edges
    ]
    used = {look_of(box.status) for box in picture.boxes}
    lines += [
        f"  classDef {status} fill:#ffffff,color:#1f2328,stroke:{STATES[status].light},stroke-width:2px"
        for status in Status.in_order(used)
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda found: f"#{ord(found[0])};", clean(text, _LONGEST_TITLE))
