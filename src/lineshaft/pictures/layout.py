"""Layered layout of a DAG, from left to right, with routed edges.

All boxes have the same size. Each layer is a column; an edge that passes a layer has a place of its own
there, so that it doesn't run behind boxes. fast-sugiyama assigns layers and orders them. It holds the
interpreter's lock while it works, and aborts the process on a cycle. So cycles are refused first, and a graph
whose shape would take longer than a fraction of a second gets the plain layout: columns by depth, edges
without places.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from fast_sugiyama import from_edges
from msgspec import Struct

from lineshaft.model import graph

Point = tuple[float, float]

# It reports each step of each layout.
logging.getLogger("rust-sugiyama").setLevel(logging.WARNING)

WIDTH, HEIGHT = 248.0, 52.0
#: Between columns, and between the boxes of a column.
COLUMN_GAP, ROW_GAP = 72.0, 20.0
MARGIN = 16.0
#: From the middle of an edge to a box, and to another edge.
_EDGE_TO_BOX, _EDGE_TO_EDGE = 14.0, 10.0

#: Limits of boxes and of places of edges in layers, up to which a layout takes about 0.1 s.
_CAREFUL_BOXES, _CAREFUL_EDGES, _CAREFUL_PLACES = 300, 600, 1_500
_ROUTED_EDGES, _ROUTED_PLACES = 3_000, 8_000


class GraphLayout(Struct, frozen=True):
    width: float
    height: float
    #: The upper left corner of each box.
    corners: tuple[Point, ...]
    #: The points of each edge: the right side of its first box, the left and right end of its place in each
    #: layer that it passes, and the left side of its last box.
    routes: dict[tuple[int, int], tuple[Point, ...]]


class _LayerPlace(Struct):
    """A box, or an edge's place in a layer. `y` is its middle."""

    column: int
    y: float
    is_box: bool


@lru_cache(maxsize=128)
def layout(boxes: int, edges: tuple[tuple[int, int], ...]) -> GraphLayout:
    """Place boxes 0 to `boxes` − 1, and route the edges between them. Raises CycleError if there is a cycle.

    The result depends on the structure only and is cached by it. Edges must be distinct.
    """
    upstream: dict[str, list[str]] = {str(box): [] for box in range(boxes)}
    for before, after in edges:
        upstream[str(after)].append(str(before))
    depths = {int(box): depth for box, depth in graph.depths(upstream).items()}
    parts = _routed(boxes, edges, depths) or _plain(boxes, edges, depths)
    return _packed(boxes, parts)


class _Part(Struct):
    """A connected part of the graph, or all of it."""

    places: dict[int, _LayerPlace]
    #: The places that each edge passes.
    passed: dict[tuple[int, int], list[int]]


def _routed(boxes: int, edges: Sequence[tuple[int, int]], depths: dict[int, int]) -> list[_Part] | None:
    """The parts with routed edges; None if their shape would take too long."""
    places = boxes + sum(depths[after] - depths[before] - 1 for before, after in edges)
    if len(edges) > _ROUTED_EDGES or places > _ROUTED_PLACES:
        return None
    careful = boxes <= _CAREFUL_BOXES and len(edges) <= _CAREFUL_EDGES and places <= _CAREFUL_PLACES
    parts = [
        _routed_part(members, its_edges, boxes, careful=careful)
        for members, its_edges in _connected(boxes, edges)
    ]
    for part in parts:
        _separate_all(part)
    return parts


def _connected(boxes: int, edges: Iterable[tuple[int, int]]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """The boxes and edges of each connected part."""
    neighbours: list[list[int]] = [[] for _ in range(boxes)]
    for before, after in edges:
        neighbours[before].append(after)
        neighbours[after].append(before)
    part_of: dict[int, int] = {}
    parts: list[tuple[list[int], list[tuple[int, int]]]] = []
    for start in range(boxes):
        if start in part_of:
            continue
        part_of[start] = len(parts)
        members = [start]
        # The list grows during the loop.
        for box in members:
            for other in neighbours[box]:
                if other not in part_of:
                    part_of[other] = len(parts)
                    members.append(other)
        parts.append((sorted(members), []))
    for edge in edges:
        parts[part_of[edge[0]]][1].append(edge)
    return parts


def _routed_part(
    members: Sequence[int], edges: Sequence[tuple[int, int]], boxes: int, *, careful: bool
) -> _Part:
    """A connected part, one call each: with several, the library's names of places are ambiguous."""
    if not edges:
        return _Part({members[0]: _LayerPlace(0, 0, is_box=True)}, {})
    number = {box: index for index, box in enumerate(members)}
    ((positions, _, _, segments),) = from_edges(
        [(number[before], number[after]) for before, after in edges],
        vertex_spacing=HEIGHT + ROW_GAP,
        dummy_vertices=True,
        dummy_size=0.25,
        ranking_type="minimize" if careful else "up",
        transpose=careful,
    )

    def name_of(found: int | str) -> int:
        """Places of edges get the numbers after those of all boxes."""
        return members[int(found)] if int(found) < len(members) else boxes + int(found)

    layers = sorted({y for _, (_, y) in positions}, reverse=True)
    column = {y: index for index, y in enumerate(layers)}
    places = {
        name_of(name): _LayerPlace(column[y], x, int(name) < len(members)) for name, (x, y) in positions
    }
    following: defaultdict[int, list[int]] = defaultdict(list)
    for before, after in segments or ():
        following[name_of(before)].append(name_of(after))
    passed: dict[tuple[int, int], list[int]] = {}
    for start in members:
        for step in following[start]:
            between, end = [], step
            while not places[end].is_box:
                between.append(end)
                (end,) = following[end]
            passed[start, end] = between
    return _Part(places, passed)


def _plain(boxes: int, edges: Sequence[tuple[int, int]], depths: dict[int, int]) -> list[_Part]:
    """All boxes in columns by depth, in their own order."""
    columns: defaultdict[int, list[int]] = defaultdict(list)
    for box in range(boxes):
        columns[depths[box]].append(box)
    highest = max(map(len, columns.values()), default=0)
    places = {
        box: _LayerPlace(column, (row + (highest - len(members)) / 2) * (HEIGHT + ROW_GAP), is_box=True)
        for column, members in columns.items()
        for row, box in enumerate(members)
    }
    return [_Part(places, {edge: [] for edge in edges})]


def _separate_all(part: _Part) -> None:
    """Move places apart where the library left them too close, with the first boxes above the others."""
    columns: defaultdict[int, list[int]] = defaultdict(list)
    for name, place in part.places.items():
        columns[place.column].append(name)
    for members in columns.values():
        members.sort(key=lambda name: (part.places[name].y, name))
    boxes = [[name for name in members if part.places[name].is_box] for members in columns.values()]
    if sum(1 if one < other else -1 for names in boxes for one, other in pairwise(names)) < 0:
        # Upside down there are as many crossings, and more boxes in their own order.
        for place in part.places.values():
            place.y = -place.y
        for members in columns.values():
            members.reverse()
    for members in columns.values():
        _separate(part, members)


def _separate(part: _Part, members: Sequence[int]) -> None:
    """Place the members of a column as near to their heights as the distances between them allow.

    Members that are too close form a block, which is placed at the mean of what its members want.
    """
    offset, offsets = 0.0, []
    for index, name in enumerate(members):
        if index:
            offset += _distance(part.places[members[index - 1]], part.places[name])
        offsets.append(offset)
    blocks: list[tuple[float, int]] = []  # the height of the first member, the number of members
    for name, shift in zip(members, offsets, strict=True):
        blocks.append((part.places[name].y - shift, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (lower, its_size), (upper, size) = blocks.pop(), blocks.pop()
            blocks.append(((upper * size + lower * its_size) / (size + its_size), size + its_size))
    heights = [height for height, size in blocks for _ in range(size)]
    for name, height, shift in zip(members, heights, offsets, strict=True):
        part.places[name].y = height + shift


def _distance(one: _LayerPlace, other: _LayerPlace) -> float:
    """The least distance between the middles of two neighbours in a column."""
    if one.is_box and other.is_box:
        return HEIGHT + ROW_GAP
    if one.is_box or other.is_box:
        return HEIGHT / 2 + _EDGE_TO_BOX
    return _EDGE_TO_EDGE


def _packed(boxes: int, parts: Iterable[_Part]) -> GraphLayout:
    """Put the parts beside and below each other, in rows: the picture becomes wider than high."""
    sized = []
    for part in parts:
        tops = [place.y - (HEIGHT / 2 if place.is_box else 0) for place in part.places.values()]
        bottoms = [place.y + (HEIGHT / 2 if place.is_box else 0) for place in part.places.values()]
        columns = 1 + max((place.column for place in part.places.values()), default=0)
        sized.append((max(bottoms, default=0) - min(tops, default=0), columns, min(tops, default=0), part))
    sized.sort(key=lambda found: (-found[0], -found[1], min(found[3].places, default=0)))
    area = sum((height + ROW_GAP) * columns * (WIDTH + COLUMN_GAP) for height, columns, _, _ in sized)
    widest = max((columns for _, columns, _, _ in sized), default=0)
    most_columns = max(widest, round((3 * area) ** 0.5 / (WIDTH + COLUMN_GAP)))
    corners: dict[int, Point] = {}
    routes: dict[tuple[int, int], tuple[Point, ...]] = {}
    used, top, row_height, right, bottom = 0, MARGIN, 0.0, 0.0, 0.0
    for height, columns, highest, part in sized:
        if used and used + columns > most_columns:
            used, top, row_height = 0, top + row_height + 2 * ROW_GAP, 0.0
        shift = top - highest

        def left(place: _LayerPlace, first: int = used) -> float:
            return MARGIN + (first + place.column) * (WIDTH + COLUMN_GAP)

        for name, place in part.places.items():
            if place.is_box:
                corners[name] = (left(place), place.y + shift - HEIGHT / 2)
        for (start, end), passed in part.passed.items():
            first, last = part.places[start], part.places[end]
            points: list[Point] = [(left(first) + WIDTH, first.y + shift)]
            for name in passed:
                place = part.places[name]
                points += [(left(place), place.y + shift), (left(place) + WIDTH, place.y + shift)]
            routes[start, end] = (*points, (left(last), last.y + shift))
        used += columns
        row_height = max(row_height, height)
        right = max(right, MARGIN + used * (WIDTH + COLUMN_GAP) - COLUMN_GAP)
        bottom = max(bottom, top + row_height)
    return GraphLayout(
        width=right + MARGIN,
        height=bottom + MARGIN,
        corners=tuple(corners[box] for box in range(boxes)),
        routes=routes,
    )
