"""The navigation, with what needs a person, and the banners above every page."""

from typing import NamedTuple

from lineshaft.dashboard.rendering import usd
from lineshaft.types import Attention
from lineshaft.types.attention import MOST


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
        Link("/quotas", "Quotas"),
        Link("/sources", "Sources"),
        Link("/costs", "Costs", _count(attention.disputed_tasks), "disputed costs to decide"),
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
