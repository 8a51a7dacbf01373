"""The navigation, with what needs a person, and the banners above every page."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from lineshaft.dashboard.rendering import usd
from lineshaft.types import Attention
from lineshaft.types.attention import MOST

#: For so long all pages share what was read.
_FRESH_SEC = 1.0


class Link(NamedTuple):
    href: str
    label: str
    #: What needs a person there: a number, and what it counts.
    number: str = ""
    what: str = ""


class Banner(NamedTuple):
    text: str
    href: str
    label: str


class SharedAttention:
    """What needs a person, read once for all pages that are rendered at about the same time."""

    def __init__(self, read: Callable[[], Awaitable[Attention]]) -> None:
        self._read = read
        self._reading = asyncio.Lock()
        self._known: Attention | None = None
        self._at = 0.0

    async def get(self) -> Attention:
        async with self._reading:
            if self._known is None or time.monotonic() - self._at > _FRESH_SEC:
                self._known = await self._read()
                self._at = time.monotonic()
            return self._known

    def forget(self) -> None:
        """Something was changed here: the next page shows it."""
        self._at = 0.0


def links(attention: Attention, *, may_submit: bool) -> list[Link]:
    guards = len(attention.open_breakers) + len(attention.paused) + len(attention.slowdowns)
    return [
        Link("/", "Overview"),
        Link("/tasks", "Tasks"),
        Link("/dags", "DAGs", _count(attention.dags_over_budget), "DAGs without money"),
        Link("/dead-letters", "Dead letters", _count(attention.dead_letters), "dead letters to decide"),
        Link("/approvals", "Approvals", _count(attention.approvals), "approvals waiting"),
        Link("/agents", "Agents"),
        Link("/guards", "Guards", _count(guards), "pauses, breakers and slowdowns in force"),
        Link("/sources", "Sources"),
        Link("/costs", "Costs"),
        *([Link("/new", "New")] if may_submit else []),
    ]


def banners(attention: Attention) -> list[Banner]:
    found = []
    if "*" in attention.paused:
        found.append(Banner("Everything is paused: no agent gets new work.", "/guards", "Resume"))
    limit = attention.daily_budget_usd
    if limit is not None and attention.spent_today_usd + attention.reserved_usd >= limit:
        spent = f"{usd(attention.spent_today_usd)} spent, {usd(attention.reserved_usd)} reserved"
        text = f"The daily budget of {usd(limit)} is used up ({spent}): tasks that cost money wait."
        found.append(Banner(text, "/guards", "Change the limit"))
    return found


def _count(number: int) -> str:
    return "" if not number else f"{MOST:,}+" if number >= MOST else f"{number:,}"
