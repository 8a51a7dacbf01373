"""Figures about the whole queue, in milliseconds whatever its size.

No figure takes longer as the history grows. Each is exact up to a bound; beyond it, it is an estimate and
marked as such:

- Live tasks: exact up to `MOST`. Beyond, held, RETRYING and READY tasks are counted by their own indexes,
  each exact up to `MOST`; the rest is extrapolated from a random sample of pages.
- Ended tasks: from a sample of pages; exact while the table has no more than `PAGES`. Tasks that ended badly
  are counted by their index, exact up to `MOST`.
- Throughput: counted by index, exact up to `MOST_ENDS` in a window; beyond, it is at least that.
- Artifacts: exact up to `MOST` contents; beyond, extrapolated from those.
- Money: the row of the day, which limits spending too; exact.
- The oldest READY task: exact if the count of READY tasks is; otherwise the oldest of all rows that were
  read.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from msgspec import Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.guards import read_pauses
from lineshaft.engine.read.snapshot import Reader, Row
from lineshaft.model.priority import TIER_ENDS, Tier
from lineshaft.model.states import ENDED, Status
from lineshaft.types import ArtifactUsage, Depth, Stats, Throughput

#: Figures are exact up to this many rows.
MOST = 10_000
#: Pages of a larger table that are sampled.
PAGES = 250
#: Ends in a window that are counted.
MOST_ENDS = 1_000_000

_SQL = catalog.load(__name__)
_BOUNDS = [end for end, _ in TIER_ENDS]
_TIERS = [*(name for _, name in TIER_ENDS), Tier.BACKGROUND]
#: Statuses that depth_indexed counts completely, with its sources for them.
_INDEXED = {
    Status.CLAIMED: {"held"},
    Status.RUNNING: {"held"},
    Status.RETRYING: {"due"},
    Status.READY: {"ready", "wants_lock", "wants_money", "wants_quota", "wants_turn"},
}


class Bounds(Struct, frozen=True):
    """How much is read. Tests use small values."""

    most: int = MOST
    pages: int = PAGES
    ends: int = MOST_ENDS

    def percent(self, table_pages: int) -> float:
        """The share of a table to sample."""
        return 100.0 if table_pages <= self.pages else 100.0 * self.pages / table_pages


async def read_stats(reader: Reader, bounds: Bounds) -> Stats:
    (sizes,) = await reader.rows(_SQL["table_sizes"], most=bounds.most + 1)
    live, oldest, oldest_exact = await _live_depth(reader, bounds, sizes)
    as_of: datetime = sizes["now"]
    limits = {"upto": as_of, "most": bounds.ends + 1}
    minute = await reader.send(_SQL["ends_since"], since=as_of - timedelta(minutes=1), **limits)
    hour = await reader.send(_SQL["ends_since"], since=as_of - timedelta(hours=1), **limits)
    today = await reader.send(_SQL["spend_today"])
    usage = await reader.send(_SQL["artifact_usage"], most=bounds.most + 1)
    ended = await _ended_depth(reader, bounds, sizes["ended_pages"])
    (spend,) = await today.fetchall()
    depth = [*live, *ended]
    return Stats(
        as_of=as_of,
        depth=depth,
        by_status=_by_status(depth),
        oldest_ready_at=oldest,
        oldest_ready_sec=None if oldest is None else max((as_of - oldest).total_seconds(), 0.0),
        oldest_ready_exact=oldest_exact,
        throughput={
            "last_minute": _throughput(60.0, await minute.fetchall(), bounds),
            "last_hour": _throughput(3600.0, await hour.fetchall(), bounds),
        },
        spend_today_usd=spend["spent_usd"],
        artifacts=_usage(await usage.fetchall(), bounds),
        paused=[pause.type for pause in await read_pauses(reader)],
        by_status_estimated=list(dict.fromkeys(item.status for item in depth if not item.exact)),
    )


def _usage(rows: Sequence[Row], bounds: Bounds) -> ArtifactUsage:
    (row,) = rows
    counted, exact = row["contents"], row["contents"] <= bounds.most
    contents = counted if exact else max(counted, row["estimate"])
    return ArtifactUsage(contents, row["bytes"] if exact else row["bytes"] * contents // counted, exact)


def _by_status(depth: Iterable[Depth]) -> dict[Status, int]:
    counts: Counter[Status] = Counter()
    for item in depth:
        counts[item.status] += item.count
    return dict(counts)


async def _live_depth(
    reader: Reader, bounds: Bounds, sizes: Row
) -> tuple[list[Depth], datetime | None, bool]:
    if sizes["live_rows"] <= bounds.most:
        rows = await reader.rows(_SQL["depth_counted"], tiers=_BOUNDS)
        return _depths(_sums(rows), exact=frozenset(Status)), _oldest(rows), True
    percent = bounds.percent(sizes["live_pages"])
    by_index = await reader.send(_SQL["depth_indexed"], most=bounds.most + 1, tiers=_BOUNDS)
    by_sample = await reader.send(_SQL["depth_sampled"], percent=percent, tiers=_BOUNDS)
    first = await reader.send(_SQL["oldest_of_first"])
    indexed, sampled = await by_index.fetchall(), await by_sample.fetchall()
    totals: Counter[str] = Counter()
    for row in indexed:
        totals[row["source"]] += row["n"]
    exact = frozenset(
        status for status, sources in _INDEXED.items() if all(totals[name] <= bounds.most for name in sources)
    )
    seen = _sums(indexed)
    estimated = {place: round(n * 100 / percent) for place, n in _sums(sampled).items()}
    # At least as many as were counted.
    figures = {place: max(estimated.get(place, 0), seen.get(place, 0)) for place in {*estimated, *seen}}
    figures = {place: n for place, n in figures.items() if place[0] not in exact}
    figures |= {place: n for place, n in seen.items() if place[0] in exact}
    everything = percent == 100  # noqa: PLR2004 - percent
    depths = _depths(figures, exact=frozenset(Status) if everything else exact)
    oldest = _oldest([*indexed, *sampled, *await first.fetchall()])
    return depths, oldest, everything or Status.READY in exact


async def _ended_depth(reader: Reader, bounds: Bounds, table_pages: int) -> list[Depth]:
    percent = bounds.percent(table_pages)
    sample = await reader.send(_SQL["ended_sampled"], percent=percent)
    badly = await reader.send(_SQL["ended_badly_counted"], most=bounds.most + 1)
    everything = percent == 100  # noqa: PLR2004 - percent
    found = {row["status"]: round(row["n"] * 100 / percent) for row in await sample.fetchall()}
    exact = set(ENDED) if everything else set()
    for row in await badly.fetchall():
        if everything or row["n"] <= bounds.most:
            exact.add(Status(row["status"]))
            found[row["status"]] = found.get(row["status"], 0) if everything else row["n"]
    return [
        Depth(status, None, found[status], status in exact)
        for status in Status
        if status in ENDED and found.get(status)
    ]


_Place = tuple[Status, int]


def _sums(rows: Iterable[Row]) -> Mapping[_Place, int]:
    sums: Counter[_Place] = Counter()
    for row in rows:
        sums[Status(row["status"]), row["tier"]] += row["n"]
    return sums


def _depths(figures: Mapping[_Place, int], *, exact: frozenset[Status]) -> list[Depth]:
    order = list(Status)
    places = sorted(figures, key=lambda place: (order.index(place[0]), place[1]))
    return [Depth(s, _TIERS[t], figures[s, t], s in exact) for s, t in places if figures[s, t]]


def _oldest(rows: Iterable[Row]) -> datetime | None:
    return min((row["oldest"] for row in rows if row["oldest"] is not None), default=None)


def _throughput(window_sec: float, rows: Sequence[Row], bounds: Bounds) -> Throughput:
    (counts,) = rows
    exact = all(count <= bounds.ends for count in counts.values())
    bad = counts["cancelled"] + counts["dead_lettered"]
    completed = max(counts["ended"] - bad, 0)
    return Throughput(window_sec, completed, counts["cancelled"], counts["dead_lettered"], exact)
