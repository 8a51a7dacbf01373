"""Small charts as SVG. Colours come from classes, because the pages' policy forbids inline styles."""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

_HEIGHT = 96
_BAR = 10
_GAP = 2


class ChartBar(NamedTuple):
    """One bar: the values of its parts from the bottom up, each with its class, and its description."""

    parts: Sequence[tuple[str, float]]
    about: str


def bars(label: str, given: Sequence[ChartBar]) -> Markup:
    """Stacked bars. The table beside it is for those who can't see it."""
    highest = max((sum(value for _, value in bar.parts) for bar in given), default=0.0)
    width = max(len(given), 1) * _BAR
    drawn = [_bar(index, bar, highest) for index, bar in enumerate(given)]
    return _svg("bars", label, width, Markup("").join(drawn))


def _bar(index: int, bar: ChartBar, highest: float) -> Markup:
    top = float(_HEIGHT)
    parts = []
    for name, value in bar.parts:
        if value > 0 and highest > 0:
            height = max(value / highest * (_HEIGHT - 4), 1.0)
            top -= height
            parts.append(
                Markup('<rect class="{}" x="{}" y="{:.1f}" width="{}" height="{:.1f}"/>').format(
                    name, index * _BAR, top, _BAR - _GAP, height
                )
            )
    # A whole column reacts to the pointer, so that a low bar can be hit.
    parts.append(
        Markup('<rect class="hit" x="{}" y="0" width="{}" height="{}"><title>{}</title></rect>').format(
            index * _BAR, _BAR, _HEIGHT, bar.about
        )
    )
    return Markup("").join(parts)


def _svg(kind: str, label: str, width: int, inner: Markup) -> Markup:
    return Markup(
        '<svg class="chart {}" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">'
        "{}</svg>"
    ).format(kind, width, _HEIGHT, label, inner)
