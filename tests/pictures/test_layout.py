"""Places of boxes and routes of edges."""

from itertools import pairwise

import pytest
from hypothesis import given

from lineshaft.errors import CycleError
from lineshaft.pictures import layout as module
from lineshaft.pictures.layout import COLUMN_GAP, HEIGHT, ROW_GAP, WIDTH, GraphLayout, layout
from tests.pictures.graphs import patient, structures

Structure = tuple[int, tuple[tuple[int, int], ...]]


def assert_sound(found: GraphLayout, boxes: int, edges: tuple[tuple[int, int], ...]) -> None:
    assert len(found.corners) == boxes
    columns: dict[float, list[float]] = {}
    for x, y in found.corners:
        assert 0 <= x <= found.width - WIDTH
        assert 0 <= y <= found.height - HEIGHT
        columns.setdefault(x, []).append(y)
    for one, other in pairwise(sorted(columns)):
        assert other - one >= WIDTH + COLUMN_GAP - 0.01
    for tops in columns.values():
        assert all(lower - upper >= HEIGHT + ROW_GAP - 0.01 for upper, lower in pairwise(sorted(tops)))
    assert set(found.routes) == set(edges)
    for (start, end), points in found.routes.items():
        assert points[0] == pytest.approx(
            (found.corners[start][0] + WIDTH, found.corners[start][1] + HEIGHT / 2)
        )
        assert points[-1] == pytest.approx((found.corners[end][0], found.corners[end][1] + HEIGHT / 2))
        assert all(before[0] < after[0] for before, after in pairwise(points))
        assert all(0 <= y <= found.height for _, y in points)


def assert_no_edge_behind_a_box(found: GraphLayout) -> None:
    for points in found.routes.values():
        for x, y in points[1:-1]:
            for left, top in found.corners:
                assert not (left <= x <= left + WIDTH and top <= y <= top + HEIGHT)


@patient(max_examples=150)
@given(structures())
def test_boxes_are_apart_and_edges_lead_from_left_to_right_around_them(structure: Structure) -> None:
    found = layout(*structure)
    assert_sound(found, *structure)
    assert_no_edge_behind_a_box(found)
    layout.cache_clear()
    assert layout(*structure) == found


FAN = tuple((0, box) for box in range(1, 1_000)) + tuple((box, 1_000) for box in range(1, 1_000))


@pytest.mark.parametrize(
    ("boxes", "edges"),
    [
        pytest.param(0, (), id="nothing"),
        pytest.param(1, (), id="one box"),
        pytest.param(300, (), id="no edges"),
        pytest.param(1_000, tuple(pairwise(range(1_000))), id="a chain"),
        pytest.param(1_001, FAN, id="a wide fan"),
        pytest.param(60, tuple((a, b) for a in range(60) for b in range(a + 1, 60)), id="all edges"),
        pytest.param(
            200, tuple((a, b) for a in range(100) for b in range(100, 200)), id="two layers, all edges"
        ),
    ],
)
def test_large_and_unusual_shapes(boxes: int, edges: tuple[tuple[int, int], ...]) -> None:
    assert_sound(layout(boxes, edges), boxes, edges)


def test_parts_without_edges_between_them_share_the_width() -> None:
    alone = layout(100, ())
    assert len({x for x, _ in alone.corners}) > 3
    chains = layout(60, tuple((box, box + 1) for box in range(0, 60, 2)))
    assert len({x for x, _ in chains.corners}) > 3


def test_alike_boxes_are_in_their_own_order_from_top_to_bottom() -> None:
    for leaves in (2, 5, 40):
        found = layout(leaves + 1, tuple((0, leaf) for leaf in range(1, leaves + 1)))
        heights = [y for _, y in found.corners[1:]]
        assert heights == sorted(heights)


def test_a_chain_is_a_straight_line() -> None:
    found = layout(5, tuple(pairwise(range(5))))
    assert len({y for _, y in found.corners}) == 1
    assert [x for x, _ in found.corners] == sorted(x for x, _ in found.corners)


@patient(max_examples=100)
@given(structures())
def test_the_plain_layout_for_shapes_that_would_take_too_long(structure: Structure) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROUTED_PLACES", -1)
        layout.cache_clear()
        try:
            assert_sound(layout(*structure), *structure)
        finally:
            layout.cache_clear()


@pytest.mark.parametrize("edges", [((0, 0),), ((0, 1), (1, 0)), ((0, 1), (1, 2), (2, 1))])
def test_a_cycle_is_an_error(edges: tuple[tuple[int, int], ...]) -> None:
    """The layout library would abort the process."""
    with pytest.raises(CycleError):
        layout(3, edges)
