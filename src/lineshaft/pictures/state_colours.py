"""Colours of states and surfaces, light and dark.

Each state has a contrast of at least 4.5:1 on page and panel, and any two states differ by a ΔE2000 of at
least 11 in normal, deutan, protan and tritan sight. A test computes both.
"""

from collections.abc import Mapping
from typing import NamedTuple

from lineshaft.model.states import Status


class Colour(NamedTuple):
    light: str
    dark: str


STATES: Mapping[Status, Colour] = {
    Status.CREATED: Colour("#686E7D", "#7D8796"),
    Status.PENDING: Colour("#464C61", "#A9B1BE"),
    Status.READY: Colour("#1776BE", "#9DD3FC"),
    Status.CLAIMED: Colour("#041556", "#E2E8F3"),
    Status.RUNNING: Colour("#190EE5", "#7971FE"),
    Status.VALIDATING: Colour("#6E228F", "#B88FCF"),
    Status.COMPLETED: Colour("#115545", "#1EFFA3"),
    Status.FAILED: Colour("#962713", "#E78C63"),
    Status.RETRYING: Colour("#A06505", "#EDC33C"),
    Status.DEAD_LETTERED: Colour("#5C141A", "#E24C6E"),
    Status.CANCELLED: Colour("#7A7256", "#ADA89E"),
}
SURFACES: Mapping[str, Colour] = {
    "page": Colour("#F6F8FA", "#0D1117"),
    "panel": Colour("#FFFFFF", "#161B22"),
    "ink": Colour("#1F2328", "#E6EDF3"),
    "muted": Colour("#59636E", "#9DA7B3"),
    "accent": Colour("#0B57D0", "#7AB7FF"),
    "control-border": Colour("#7D8590", "#7D8590"),
}


def css_variables(*, dark: bool) -> dict[str, str]:
    """The colours of one scheme by CSS variable, such as `--state-READY` and `--panel`."""
    named = {f"--state-{status}": colour for status, colour in STATES.items()}
    named |= {f"--{name}": colour for name, colour in SURFACES.items()}
    return {name: colour.dark if dark else colour.light for name, colour in named.items()}
