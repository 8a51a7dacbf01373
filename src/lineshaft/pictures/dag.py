"""The picture of a DAG as SVG: for a file with everything in it, or for a page with its own style sheet.

In a page there is no `<style>` and no `style` attribute, so that the page's content security policy can
forbid both. The page has `dag.css`, the variables of `state_colours.css_variables` and, once, the symbols of
`state_icons.state_symbols`.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, cached_property
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import pairwise

from lineshaft.model.states import Status
from lineshaft.pictures import layout
from lineshaft.pictures.collapse import collapsed
from lineshaft.pictures.nodes import Box, DagNode, Edge, Group, critical_path
from lineshaft.pictures.state_colours import css_variables
from lineshaft.pictures.state_icons import icon_name, look_of, state_symbols
from lineshaft.pictures.text import clean, dollars, duration, fitting, text_width

#: The address of a task or a group; None: it has none.
Link = Callable[[Box], str | None]

_WAITING = frozenset({Status.CREATED, Status.PENDING, Status.READY, Status.RETRYING})
_LONGEST_TITLE, _LONGEST_TYPE, _LONGEST_ID, _LONGEST_ADDRESS = 300, 100, 100, 2_000
_TITLE_SIZE, _META_SIZE = 14, 12
_TEXT_X, _PADDING = 38.0, 14.0
_TEXT_WIDTH = layout.WIDTH - _TEXT_X - _PADDING
_BAR_HEIGHT = 4.0
#: An edge ends this far before its box, where its arrowhead begins.
_ARROW = 7.0
#: The states of a group in words, in this order.
_WORDS = (
    ("done", {Status.COMPLETED}),
    ("dead", {Status.DEAD_LETTERED, Status.FAILED}),
    ("running", {Status.CLAIMED, Status.RUNNING, Status.VALIDATING}),
    ("waiting", _WAITING),
    ("cancelled", {Status.CANCELLED}),
)


def dag_svg(
    nodes: Sequence[DagNode],
    edges: Iterable[Edge],
    *,
    title: str,
    standalone: bool = True,
    link: Link | None = None,
    collapse: bool | None = None,
    expanded: Collection[str] = (),
) -> str:
    """The picture of a DAG; the arguments are those of DagPicture and its method `svg`."""
    picture = DagPicture(nodes, edges, collapse=collapse, expanded=expanded)
    return picture.svg(title=title, standalone=standalone, link=link)


class DagPicture:
    """The boxes of a DAG and their layout. Raises CycleError if the edges have a cycle."""

    def __init__(
        self,
        nodes: Sequence[DagNode],
        edges: Iterable[Edge],
        *,
        collapse: bool | None = None,
        expanded: Collection[str] = (),
    ) -> None:
        """Edges lead from a task to one that depends on it; those of unknown tasks are ignored.

        `collapse` draws alike tasks as one group; None: only if there are many tasks. The groups whose ids
        are in `expanded` stay open.
        """
        edges = list(edges)
        self.boxes, self.edges = collapsed(nodes, edges, collapse=collapse, expanded=expanded)
        path = critical_path(nodes, edges)
        of_node = {
            member.id: box.id
            for box in self.boxes
            for member in (box.members if isinstance(box, Group) else (box,))
        }
        boxes = list(dict.fromkeys(of_node[name] for name in path))
        #: The boxes of the critical path, in order; none if nothing depends on anything.
        self.critical = boxes if len(boxes) > 1 else []

    @cached_property
    def layout(self) -> layout.GraphLayout:
        number = {box.id: index for index, box in enumerate(self.boxes)}
        return layout.layout(
            len(self.boxes), tuple((number[before], number[after]) for before, after in self.edges)
        )

    def svg(self, *, title: str, standalone: bool = True, link: Link | None = None) -> str:
        """The picture as one `<svg>` element.

        `standalone`: a file of its own, with style and icons. Otherwise it is part of a page.
        """
        width, height = f"{self.layout.width:g}", f"{self.layout.height:g}"
        name = escape(clean(title, _LONGEST_TITLE))
        description = escape(self._description())
        head = [f'<title id="dag-title">{name}</title><desc id="dag-desc">{description}</desc>']
        symbols = ""
        if standalone:
            head.append(f"<style>{_style()}</style>")
            symbols = state_symbols(sorted({_icon(box) for box in self.boxes}))
        head.append(f"<defs>{symbols}{_DEFINITIONS}</defs>")
        if standalone:
            head.append(f'<rect class="back" width="{width}" height="{height}"/>')
        parts = self._parts(link)
        role = "img" if standalone and link is None else "group"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="dag" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="{role}" aria-labelledby="dag-title dag-desc">'
            + "".join(head)
            + "".join(parts.values())
            + "</svg>"
        )

    def fragments(self, link: Link | None = None) -> dict[str, str]:
        """The markup of each edge and box, by the id of its element.

        While the structure stays the same, so do the ids and their positions: a page that shows the picture
        replaces the elements whose markup has changed.
        """
        return self._parts(link)

    def _parts(self, link: Link | None) -> dict[str, str]:
        critical = set(self.critical)
        critical_edges = set(pairwise(self.critical))
        done = {box.id for box in self.boxes if set(box.counts) == {Status.COMPLETED}}
        ids = [box.id for box in self.boxes]
        edges: dict[str, str] = {}
        important: dict[str, str] = {}
        for (start, end), points in self.layout.routes.items():
            edge = (ids[start], ids[end])
            is_critical = edge in critical_edges
            name = f"edge-{_element_id(edge[0])}-{_element_id(edge[1])}"
            classes = "edge critical" if is_critical else "edge done" if edge[0] in done else "edge"
            marker = "dag-arrow-critical" if is_critical else "dag-arrow"
            (important if is_critical else edges)[name] = (
                f'<path id="{name}" class="{classes}" d="{_path(points)}" marker-end="url(#{marker})"/>'
            )
        boxes = {}
        for box, corner in zip(self.boxes, self.layout.corners, strict=True):
            name = f"node-{_element_id(box.id)}"
            boxes[name] = _box(name, box, corner, critical=box.id in critical, href=link and link(box))
        return {**edges, **important, **boxes}

    def _description(self) -> str:
        counts: dict[Status, int] = {}
        for box in self.boxes:
            for status, count in box.counts.items():
                counts[status] = counts.get(status, 0) + count
        total = sum(counts.values())
        states = ", ".join(f"{counts[status]} {status}" for status in Status.in_order(counts))
        return f"{total} {'task' if total == 1 else 'tasks'}" + (f": {states}." if states else ".")


def stands_for_several(box: Box) -> bool:
    """Whether it is drawn as a pile, with the number of tasks in each state."""
    return isinstance(box, Group) or bool(box.items)


def _icon(box: Box) -> str:
    return icon_name(box.status, by_person=isinstance(box, DagNode) and box.by_person)


def _element_id(name: str) -> str:
    """The name as part of an element's id: ids of tasks stay as they are."""
    if len(name) > _LONGEST_ID:
        return sha256(name.encode(errors="surrogatepass")).hexdigest()
    return re.sub(r"[^A-Za-z0-9_]", lambda found: f".{ord(found[0]):x}.", name)


def _path(points: Sequence[layout.Point]) -> str:
    """Curves in the gaps between columns, straight lines through the columns that the edge passes."""
    (x, y), *rest = points
    *between, (last_x, last_y) = rest
    parts = [f"M{x:g} {y:g}"]
    ends = [*between, (last_x - _ARROW, last_y)]
    for index, (to_x, to_y) in enumerate(ends):
        if index % 2:  # from the left to the right end of its place in a column
            parts.append(f"H{to_x:g}")
        elif abs(to_y - y) < 0.5:  # noqa: PLR2004 - half a pixel
            parts.append(f"L{to_x:g} {to_y:g}")
        else:
            middle = (x + to_x) / 2
            parts.append(f"C{middle:g} {y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}")
        x, y = to_x, to_y
    return "".join(parts)


def _box(name: str, box: Box, corner: layout.Point, *, critical: bool, href: str | None) -> str:
    x, y = corner
    classes = ["node", f"state-{look_of(box.status)}"]
    if several := stands_for_several(box):
        classes.append("group")
    if box.status in _WAITING:
        classes.append("waiting")
    if critical:
        classes.append("critical")
    title = clean(box.title, _LONGEST_TITLE)
    tooltip = f"{title}\n{box.status}\n{_meta(box)}"
    size = f'width="{layout.WIDTH:g}" height="{layout.HEIGHT:g}" rx="8"'
    data = "data-group" if isinstance(box, Group) else "data-task"
    content = [
        f"<title>{escape(tooltip)}</title>",
        f'<rect class="behind" x="5" y="5" {size}/>' if several else "",
        f'<rect class="box" {size}/>',
        f'<use href="#state-{_icon(box)}" x="13" y="18" width="16" height="16"/>',
        _text("title", 22, fitting(title, _TEXT_WIDTH, _TITLE_SIZE, bold=True)),
        _text("meta", 40, _meta(box, _TEXT_WIDTH)),
        _bar(box),
    ]
    drawn = "".join(content)
    if href is not None:
        drawn = f'<a href="{escape(clean(href, _LONGEST_ADDRESS))}">{drawn}</a>'
    identity = escape(clean(box.id, _LONGEST_TITLE))
    return (
        f'<g id="{name}" class="{" ".join(classes)}" {data}="{identity}" transform="translate({x:g} {y:g})">'
        f"{drawn}</g>"
    )


def _text(name: str, y: float, text: str) -> str:
    return f'<text class="{name}" x="{_TEXT_X:g}" y="{y:g}" clip-path="url(#dag-text)">{escape(text)}</text>'


def _meta(box: Box, room: float = math.inf) -> str:
    """The second line: type, duration and cost; of a group how many are in which state, and their cost."""
    facts = []
    if several := stands_for_several(box):
        sums = ((sum(box.counts.get(status, 0) for status in states), word) for word, states in _WORDS)
        facts += [f"{count:,} {word}" for count, word in sums if count]
    elif isinstance(box, DagNode) and box.duration_sec is not None:
        facts.append(duration(box.duration_sec))
    if box.cost_usd:
        facts.append(dollars(box.cost_usd))
    if several:
        while len(facts) > 1 and text_width(" · ".join(facts), _META_SIZE) > room:
            facts.pop()
        return " · ".join(facts)
    rest = "".join(f" · {fact}" for fact in facts)
    room -= text_width(rest, _META_SIZE)
    return fitting(clean(box.type or "", _LONGEST_TYPE), room, _META_SIZE) + rest


def _bar(box: Box) -> str:
    """The bar below a group is the share of each state, that below a running task its progress."""
    x, width = 10.0, layout.WIDTH - 20.0
    top = layout.HEIGHT - _BAR_HEIGHT - 3
    shape = f'y="{top:g}" height="{_BAR_HEIGHT:g}"'
    if isinstance(box, DagNode) and not box.items:
        if box.progress is None:
            return ""
        done = max(0.0, min(1.0, box.progress)) * width
        return (
            f'<rect class="track" x="{x:g}" {shape} width="{width:g}" rx="2"/>'
            f'<rect class="bar" x="{x:g}" {shape} width="{done:.1f}" rx="2"/>'
        )
    bars = []
    for status, count in sorted(box.counts.items(), key=lambda item: _BAR_ORDER.index(look_of(item[0]))):
        share = width * count / sum(box.counts.values())
        bars.append(f'<rect class="bar state-{look_of(status)}" x="{x:.1f}" {shape} width="{share:.1f}"/>')
        x += share
    return "".join(bars)


#: From left to right in a group's bar.
_BAR_ORDER = (
    Status.COMPLETED,
    Status.VALIDATING,
    Status.RUNNING,
    Status.CLAIMED,
    Status.READY,
    Status.RETRYING,
    Status.PENDING,
    Status.CREATED,
    Status.CANCELLED,
    Status.FAILED,
    Status.DEAD_LETTERED,
)

_MARKER = (
    '<marker id="{id}" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="{size}" markerHeight="{size}" '
    'markerUnits="userSpaceOnUse" orient="auto"><path class="{class_}" d="M0 0 8 4 0 8z"/></marker>'
)
_DEFINITIONS = (
    _MARKER.format(id="dag-arrow", class_="arrow", size=8)
    + _MARKER.format(id="dag-arrow-critical", class_="arrow-critical", size=10)
    + f'<clipPath id="dag-text"><rect x="{_TEXT_X:g}" width="{_TEXT_WIDTH + _PADDING - 2:g}" '
    f'height="{layout.HEIGHT:g}"/></clipPath>'
)


@cache
def _style() -> str:
    """The style sheet with the colours written in, since not all viewers of SVG know variables."""
    sheet = files("lineshaft.pictures").joinpath("dag.css").read_text(encoding="utf-8")

    def filled(*, dark: bool) -> str:
        colours = css_variables(dark=dark)
        return re.sub(r"var\((--[\w-]+)\)", lambda found: colours[found[1]], sheet)

    coloured = "\n".join(line for line in filled(dark=True).splitlines() if "#" in line)
    return f"{filled(dark=False)}@media (prefers-color-scheme: dark) {{\n{coloured}\n}}\n"
