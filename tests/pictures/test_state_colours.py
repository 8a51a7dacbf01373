"""Colours: readable on every surface, distinct in every kind of sight."""

import math
from itertools import combinations

import pytest

from lineshaft.model.states import Status
from lineshaft.pictures.state_colours import STATES, SURFACES, css_variables

Triple = tuple[float, float, float]

#: Machado, Oliveira and Fernandes (2009), severity 1.0, for linear RGB.
SIGHTS: dict[str, tuple[Triple, Triple, Triple]] = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
TO_XYZ: tuple[Triple, Triple, Triple] = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)


def times(matrix: tuple[Triple, Triple, Triple], vector: Triple) -> Triple:
    one, two, three = (sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)
    return one, two, three


def linear(colour: str) -> Triple:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))

    def channel(value: float) -> float:
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    return channel(red), channel(green), channel(blue)


def contrast(one: str, other: str) -> float:
    lights = sorted(sum(a * b for a, b in zip(TO_XYZ[1], linear(c), strict=True)) for c in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def lab(colour: str, sight: str) -> Triple:
    seen = times(SIGHTS[sight], linear(colour))
    seen = (min(1, max(0, seen[0])), min(1, max(0, seen[1])), min(1, max(0, seen[2])))
    x, y, z = times(TO_XYZ, seen)

    def f(t: float) -> float:
        return t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29

    fx, fy, fz = f(x / 0.95047), f(y), f(z / 1.08883)
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def delta_e_2000(one: Triple, other: Triple) -> float:
    (l1, a1, b1), (l2, a2, b2) = one, other
    c_mean = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 0.5 * (1 - math.sqrt(c_mean**7 / (c_mean**7 + 25**7)))
    a1, a2 = a1 * (1 + g), a2 * (1 + g)
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = math.degrees(math.atan2(b1, a1)) % 360, math.degrees(math.atan2(b2, a2)) % 360
    dh, h = 0.0, h1 + h2
    if c1 * c2:
        dh = (h2 - h1 + 180) % 360 - 180
        h = (h1 + h2) / 2 if abs(h1 - h2) <= 180 else ((h1 + h2 + 360) / 2) % 360
    d_hue = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(dh) / 2)
    light, c = (l1 + l2) / 2, (c1 + c2) / 2
    t = (
        1
        - 0.17 * math.cos(math.radians(h - 30))
        + 0.24 * math.cos(math.radians(2 * h))
        + 0.32 * math.cos(math.radians(3 * h + 6))
        - 0.20 * math.cos(math.radians(4 * h - 63))
    )
    sl = 1 + 0.015 * (light - 50) ** 2 / math.sqrt(20 + (light - 50) ** 2)
    sc, sh = 1 + 0.045 * c, 1 + 0.015 * c * t
    rt = (
        -2
        * math.sqrt(c**7 / (c**7 + 25**7))
        * math.sin(math.radians(60 * math.exp(-(((h - 275) / 25) ** 2))))
    )
    dl, dc, dhue = (l2 - l1) / sl, (c2 - c1) / sc, d_hue / sh
    return math.sqrt(dl**2 + dc**2 + dhue**2 + rt * dc * dhue)


def test_the_formula_gives_published_values() -> None:
    """Three pairs of Sharma, Wu and Dalal (2005)."""
    assert delta_e_2000((50, 2.6772, -79.7751), (50, 0, -82.7485)) == pytest.approx(2.0425, abs=1e-4)
    assert delta_e_2000((50, 2.5, 0), (73, 25, -18)) == pytest.approx(27.1492, abs=1e-4)
    assert delta_e_2000((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514)) == pytest.approx(
        0.9082, abs=1e-4
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_states_are_readable_on_page_and_panel(scheme: str) -> None:
    for status, colour in STATES.items():
        for surface in ("page", "panel"):
            found = contrast(getattr(colour, scheme), getattr(SURFACES[surface], scheme))
            assert found >= 4.5, (status, surface, found)
    for name in ("ink", "muted", "accent"):
        for surface in ("page", "panel"):
            assert contrast(getattr(SURFACES[name], scheme), getattr(SURFACES[surface], scheme)) >= 4.5, name


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_two_states_differ(scheme: str, sight: str) -> None:
    seen = {status: lab(getattr(colour, scheme), sight) for status, colour in STATES.items()}
    for one, other in combinations(seen, 2):
        found = delta_e_2000(seen[one], seen[other])
        assert found >= 11, (one, other, found)


def test_each_state_has_a_colour_and_a_variable() -> None:
    assert set(STATES) == set(Status)
    assert css_variables(dark=False)["--state-READY"] == STATES[Status.READY].light
    assert css_variables(dark=True)["--panel"] == SURFACES["panel"].dark
