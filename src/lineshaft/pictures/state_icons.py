"""Icons of states: one shape each, so that colour is never the only difference.

All are drawn in `currentColor` on 16 × 16 units. A page has the symbols once; `state_icon` refers to them.
"""

from collections.abc import Iterable, Mapping

from lineshaft.model.states import Status

#: The name of the icon of a task that waits for a person's decision on its output.
PERSON = "person"

_LINE = 'fill="none" stroke="currentColor" stroke-width="1.75" stroke-linecap="round" stroke-linejoin="round"'
_BOLD = 'fill="none" stroke="currentColor" stroke-width="2.4" stroke-linecap="round"'
_SOLID = 'fill="currentColor" fill-rule="evenodd"'
_RING = f'<circle cx="8" cy="8" r="6" {_LINE}/>'
_DOTTED_RING = f'<circle cx="8" cy="8" r="6" {_BOLD} stroke-dasharray="0.01 4.7"/>'
_HOURGLASS = (
    f'<path {_LINE} d="M4 1.9h8M4 14.1h8M5 1.9v2.4L8 8l3-3.7V1.9M5 14.1v-2.4L8 8l3 3.7v2.4"/>'
    f'<path {_SOLID} d="M6 13.4v-1.2l2-2 2 2v1.2z"/>'
)
_LEFT_HALF = f'<path {_SOLID} d="M8 3.6v8.8a4.4 4.4 0 0 1 0-8.8z"/>'
#: Pages may turn the arc.
_TRIANGLE_IN_ARC = (
    f'<path {_SOLID} d="M6.2 4.9v6.2L11.2 8z"/><path class="turning" {_LINE} d="M8 1.5A6.5 6.5 0 1 1 1.5 8"/>'
)
_MAGNIFIER = f'<circle cx="6.8" cy="6.8" r="4.6" {_LINE}/><path {_BOLD} d="m10.5 10.5 3.6 3.6"/>'
_CHECK_IN_DISC = (
    f'<path {_SOLID} d="M8 1a7 7 0 1 1 0 14A7 7 0 0 1 8 1z'
    'm-1.2 10.7 5.2-5.3-1.3-1.3-3.9 4-1.6-1.6-1.3 1.3z"/>'
)
_CROSS = f'<path {_BOLD} d="m3.4 3.4 9.2 9.2m0-9.2-9.2 9.2"/>'
_CIRCULAR_ARROW = f'<path {_LINE} d="M13.6 8.6A5.7 5.7 0 1 1 11.6 3.7"/><path {_SOLID} d="M9.2 5.6h5V.7z"/>'
_OCTAGON = (
    f'<path {_SOLID} d="M5 .8h6L15.2 5v6L11 15.2H5L.8 11V5zM7 3.6l.3 5.5h1.4L9 3.6z'
    'M8 10.4a1.1 1.1 0 1 0 0 2.2 1.1 1.1 0 0 0 0-2.2z"/>'
)
_BAR = f'<path {_LINE} d="m4 12 8-8"/>'
_RAISED_HAND = (
    f'<path {_LINE} d="M4.6 8.8V4.4a1 1 0 0 1 2 0V7.6V2.6a1 1 0 0 1 2 0V7.6V3.2a1 1 0 0 1 2 0V8V5'
    'a1 1 0 0 1 2 0V10.2a4.6 4.6 0 0 1-4.6 4.6C5.8 14.8 4.9 14 3.9 12.3L2.4 9.8a1 1 0 0 1 1.7-1l.5.8"/>'
)
#: By the name of the icon.
_SHAPES: Mapping[str, str] = {
    Status.CREATED: _DOTTED_RING,
    Status.PENDING: _HOURGLASS,
    Status.READY: _RING,
    Status.CLAIMED: _RING + _LEFT_HALF,
    Status.RUNNING: _TRIANGLE_IN_ARC,
    Status.VALIDATING: _MAGNIFIER,
    Status.COMPLETED: _CHECK_IN_DISC,
    Status.FAILED: _CROSS,
    Status.RETRYING: _CIRCULAR_ARROW,
    Status.DEAD_LETTERED: _OCTAGON,
    Status.CANCELLED: _RING + _BAR,
    PERSON: _RAISED_HAND,
}


def state_symbols(names: Iterable[str] = tuple(_SHAPES)) -> str:
    """The `<symbol>` elements of these icons, such as `<symbol id="state-READY">`; all by default."""
    return "".join(
        f'<symbol id="state-{name}" viewBox="0 0 16 16">{_SHAPES[name]}</symbol>' for name in names
    )


def look_of(status: Status) -> Status:
    """The state whose icon and colours it has: a state that this version doesn't know looks like CREATED."""
    return status if status.is_known else Status.CREATED


def icon_name(status: Status, *, by_person: bool = False) -> str:
    return PERSON if by_person and status is Status.VALIDATING else look_of(status).value


def state_icon(status: Status, *, by_person: bool = False) -> str:
    """An icon for a page that has the symbols. Screen readers skip it: the state's name is beside it."""
    name = icon_name(status, by_person=by_person)
    return (
        f'<svg class="state-icon state-{look_of(status)}" width="16" height="16" aria-hidden="true">'
        f'<use href="#state-{name}"/></svg>'
    )
