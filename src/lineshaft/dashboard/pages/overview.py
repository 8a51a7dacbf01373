"""Overview: what needs a person, how work flows, and what it costs."""

import asyncio
from collections.abc import Mapping

from lineshaft.dashboard.charts import ChartBar, bars
from lineshaft.dashboard.visit import EVERYTHING, Pages, View, Visit
from lineshaft.model.priority import Tier
from lineshaft.model.states import Status
from lineshaft.types import ReasonCode, Stats
from lineshaft.types.stats import Minute

pages = Pages()

#: Why tasks wait, as people say it.
WORDS: Mapping[ReasonCode | None, str] = {
    None: "can run: the next free agent takes it",
    ReasonCode.BLOCKED_BY_DEPENDENCY: "waits for other tasks",
    ReasonCode.UPSTREAM_DEAD_LETTERED: "a dead letter upstream",
    ReasonCode.WAITING_RETRY: "waits before the next attempt",
    ReasonCode.WAITING_GATE: "its output is being checked",
    ReasonCode.GATE_BUDGET: "no money is left to check its output",
    ReasonCode.WAITING_APPROVAL: "waits for a person",
    ReasonCode.SCHEDULED: "scheduled for later",
    ReasonCode.SLEEPING: "sleeps",
    ReasonCode.WAITING_SIGNAL: "waits for a signal",
    ReasonCode.NO_CAPABLE_AGENT: "no agent can do it",
    ReasonCode.NO_AFFORDABLE_AGENT: "no agent can pay for it",
    ReasonCode.QUOTA: "a quota has no room",
    ReasonCode.DAG_BUDGET: "its DAG has no money left",
    ReasonCode.DAILY_BUDGET: "the daily budget is used up",
    ReasonCode.BREAKER_OPEN: "its breaker is open",
    ReasonCode.LOCK_HELD: "its document is locked",
    ReasonCode.SLOWDOWN: "slowed down after a rate limit",
    ReasonCode.ACCOUNT_CLOSED: "all accounts of its agents are closed",
    ReasonCode.AGENTS_FULL: "all agents that can do it are busy",
    ReasonCode.PAUSED: "paused",
    ReasonCode.DEADLINE_MISSED: "its deadline has passed",
}


@pages.page("/")
async def overview(visit: Visit) -> View:
    read = visit.engine.read
    stats, throughput, costs, attention, waiting, groups = await asyncio.gather(
        read.stats(),
        read.throughput(),
        read.costs(days=1),
        visit.shared.attention.get(recent=visit.is_open),
        visit.shared.waiting.get(recent=visit.is_open),
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
            "waiting": [reason for reason in waiting.reasons if reason.count],
            "words": WORDS,
            "wakeups": visit.service.wakeups,
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


def _bars(minutes: list[Minute]) -> list[ChartBar]:
    return [
        ChartBar(
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
