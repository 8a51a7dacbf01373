"""Overview: what needs a person, how work flows, and what it costs."""

import asyncio

from lineshaft.dashboard.charts import Bar, bars
from lineshaft.dashboard.visit import EVERYTHING, Pages, View, Visit
from lineshaft.model.priority import Tier
from lineshaft.model.states import Status
from lineshaft.types import Stats
from lineshaft.types.stats import Minute

pages = Pages()


@pages.page("/")
async def overview(visit: Visit) -> View:
    read = visit.engine.read
    stats, throughput, costs, attention, groups = await asyncio.gather(
        read.stats(),
        read.throughput(),
        read.costs(days=1),
        read.attention(),
        visit.engine.dead_letters.groups(limit=3),
    )
    return View(
        "overview.html",
        "Overview",
        {
            "stats": stats,
            "tiers": _by_tier(stats),
            "tier_names": list(Tier),
            "throughput": throughput,
            "chart": bars("Tasks that ended in each minute of the last hour", _bars(throughput.minutes)),
            "last_hour": _sums(throughput.minutes),
            "today": costs.today,
            "needs": attention,
            "groups": groups,
        },
        topics=frozenset({EVERYTHING}),
        at_most_every_sec=2.0,
        refresh_sec=10.0,
    )


def _by_tier(stats: Stats) -> list[tuple[Status, int, dict[Tier, int], bool]]:
    """Each live status with its number of tasks, in all and by tier, and whether it is exact."""
    rows = []
    for status in Status:
        found = [depth for depth in stats.depth if depth.status is status and depth.tier is not None]
        if found:
            tiers = {depth.tier: depth.count for depth in found if depth.tier is not None}
            rows.append((status, sum(tiers.values()), tiers, all(depth.exact for depth in found)))
    return rows


def _bars(minutes: list[Minute]) -> list[Bar]:
    return [
        Bar(
            (
                ("completed", minute.completed),
                ("cancelled", minute.cancelled),
                ("dead", minute.dead_lettered),
            ),
            f"{minute.at:%H:%M} UTC: {minute.completed} completed, {minute.dead_lettered} dead letters, "
            f"{minute.cancelled} cancelled, {minute.failed} failed attempts",
        )
        for minute in minutes
    ]


def _sums(minutes: list[Minute]) -> dict[str, int]:
    return {
        name: sum(getattr(minute, name) for minute in minutes)
        for name in ("completed", "failed", "dead_lettered", "cancelled")
    }
