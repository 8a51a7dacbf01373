"""Nodes and edges for tests of pictures."""

import random
from decimal import Decimal
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from lineshaft.model.states import Status
from lineshaft.pictures import DagNode
from lineshaft.pictures.nodes import Edge


def patient(max_examples: int) -> settings:
    """The machine may be busy."""
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def node(name: object, **facts: Any) -> DagNode:
    facts = {"title": f"Title of {name}", "type": "code", "status": Status.PENDING, **facts}
    return DagNode(id=f"task_{name}", **facts)


def edges(*pairs: tuple[object, object]) -> list[Edge]:
    return [(f"task_{before}", f"task_{after}") for before, after in pairs]


def structures(most: int = 25) -> st.SearchStrategy[tuple[int, tuple[tuple[int, int], ...]]]:
    """A number of boxes and edges without a cycle, in any order; also empty, unconnected and dense ones."""
    return st.builds(_structure, st.integers(0, most), st.integers(0, 3 * most), st.integers(0, 2**32))


def _structure(boxes: int, most_edges: int, seed: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    chance = random.Random(seed)
    names = chance.sample(range(boxes), boxes)
    picked = [sorted(chance.sample(range(boxes), 2)) for _ in range(most_edges if boxes > 1 else 0)]
    return boxes, tuple(dict.fromkeys((names[before], names[after]) for before, after in picked))


#: Any text, with what is dangerous in HTML, XML, terminals and Mermaid more often.
hostile_texts = st.one_of(
    st.text(st.characters(), max_size=40),
    st.sampled_from(
        [
            "<script>alert(1)</script>",
            '"]:::x\nclick n0 "javascript:alert(1)"',
            "]]> & &amp; &#0; ' \" --",
            "a\x00b\x1b[31mc\x08\x7f\x9b",
            "\u202egnp.exe\u2066\u200f",
            "\ud800 \udfff \ufffe \uffff",
            "e\u0301" * 50,
            "語" * 100,
            "%% #quot; end subgraph",
            "x" * 1_000_000,
        ]
    ),
)


@st.composite
def nodes(draw: st.DrawFn, count: int) -> list[DagNode]:
    return [
        DagNode(
            id=f"task_{number}",
            title=draw(hostile_texts),
            type=draw(hostile_texts),
            status=draw(st.sampled_from(Status)),
            duration_sec=draw(st.none() | st.floats(0, 1e9)),
            cost_usd=draw(st.decimals(0, 10_000, places=6).map(Decimal)),
            progress=draw(st.none() | st.floats(0, 1)),
            by_person=draw(st.booleans()),
        )
        for number in range(count)
    ]
