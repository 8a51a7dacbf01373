"""How many tasks wait for which reason, in milliseconds whatever their number.

Tasks of one lane can be claimed by the same agents, so `why` is asked once for each lane instead of once for
each task. Counts are exact up to a bound, as those of `stats`. Beyond it, delayed tasks and those that wait
for a lock, a quota or the budget of their DAG are counted by their own indexes, each exact up to the bound;
the rest is extrapolated from a random sample of pages.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime

from msgspec import Struct, field

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.snapshot import Reader, Row
from lineshaft.engine.read.stats import Bounds
from lineshaft.engine.read.why import distinct_profiles, explain, read_agents_and_models
from lineshaft.model.states import Status
from lineshaft.types import ReasonCode
from lineshaft.types.waiting import Waiting, WaitingReason

#: Types of a reason that are named.
_TYPES = 20
#: Dead letters, the newest, below which blocked tasks are counted.
_DEAD_LETTERS = 1_000
_EVERYTHING = 100.0

_SQL = catalog.load(__name__)
#: States whose reason doesn't depend on agents and guards, with the status of their tasks.
_STATES = {
    "blocked": (ReasonCode.BLOCKED_BY_DEPENDENCY, Status.PENDING),
    "below_dead_letter": (ReasonCode.UPSTREAM_DEAD_LETTERED, Status.PENDING),
    "scheduled": (ReasonCode.SCHEDULED, Status.PENDING),
    "sleeping": (ReasonCode.SLEEPING, Status.PENDING),
    "waiting_signal": (ReasonCode.WAITING_SIGNAL, Status.PENDING),
    "retrying": (ReasonCode.WAITING_RETRY, Status.RETRYING),
    "lock": (ReasonCode.LOCK_HELD, Status.READY),
    "dag_budget": (ReasonCode.DAG_BUDGET, Status.READY),
    "quota": (ReasonCode.QUOTA, Status.READY),
}
#: The words name agents, of which only some are looked at.
_NAMES_AGENTS = {ReasonCode.NO_AFFORDABLE_AGENT, ReasonCode.AGENTS_FULL}


class _Group(Struct):
    """Tasks of one lane in one state."""

    lane_id: int
    state: str
    count: int
    exact: bool
    oldest: datetime | None
    due: datetime | None
    first_id: str | None


class _Sum(Struct):
    """What is known of one reason so far."""

    types: Counter[str] = field(default_factory=Counter)
    statuses: set[Status] = field(default_factory=set)
    count: int = 0
    exact: bool = True
    oldest: datetime | None = None
    due: datetime | None = None
    detail: str | None = None
    largest: int = 0

    def add(self, types: Sequence[str], status: Status, group: _Group, detail: str | None = None) -> None:
        for name in types:
            self.types[name] += group.count
        self.statuses.add(status)
        self.count += group.count
        self.exact = self.exact and group.exact
        self.oldest = _earliest(self.oldest, group.oldest)
        self.due = _earliest(self.due, group.due)
        if group.count > self.largest:
            self.largest, self.detail = group.count, detail


async def read_waiting(reader: Reader, bounds: Bounds) -> Waiting:
    (size,) = await reader.rows(_SQL["table_size"], most=bounds.most + 1)
    await reader.send(_SQL["plan_by_index"])
    gated = await reader.send(_SQL["gates"], most=bounds.most + 1, types=_TYPES)
    below = await reader.send(_SQL["below_dead_letters"], most=bounds.most + 1, dead=_DEAD_LETTERS + 1)
    groups = await _groups(reader, bounds, size)
    groups = _below_dead_letters(groups, await below.fetchall(), bounds)
    await _date(reader, groups)
    lane_ids = sorted({group.lane_id for group in groups})
    found = await reader.send(_SQL["lanes"], ids=lane_ids)
    models, agents = await read_agents_and_models(reader)
    lanes = {int(row["id"]): row for row in await found.fetchall()}
    profiles = distinct_profiles(agents)
    sums: dict[ReasonCode | None, _Sum] = {}
    for group in groups:
        lane = lanes[group.lane_id]
        if group.state in _STATES:
            code, status = _STATES[group.state]
            sums.setdefault(code, _Sum()).add([lane["type"]], status, group)
        else:
            first = next(iter(explain(lane, [], models, profiles).reasons), None)
            detail = None if first is None or first.code in _NAMES_AGENTS else first.detail
            reason = sums.setdefault(None if first is None else first.code, _Sum())
            reason.add([lane["type"]], Status.READY, group, detail)
    for row in await gated.fetchall():
        code = ReasonCode.GATE_BUDGET if row["lacks_money"] else ReasonCode.WAITING_GATE
        code = ReasonCode.WAITING_APPROVAL if row["by_person"] else code
        group = _Group(0, "gate", row["n"], row["n"] <= bounds.most, row["oldest"], None, None)
        sums.setdefault(code, _Sum()).add(row["types"] or [], Status.VALIDATING, group)
    largest = sorted(sums.items(), key=lambda item: (-item[1].count, item[0] or ""))
    return Waiting(
        as_of=size["now"], reasons=[_reason(code, total) for code, total in largest if total.count]
    )


async def _groups(reader: Reader, bounds: Bounds, size: Row) -> list[_Group]:
    if size["live_rows"] <= bounds.most:
        return [_group(row) for row in await reader.rows(_SQL["counted"])]
    percent = bounds.percent(size["live_pages"])
    by_index = await reader.send(_SQL["indexed"], most=bounds.most + 1)
    by_sample = await reader.send(_SQL["sampled"], percent=percent)
    indexed = await by_index.fetchall()
    counted: Counter[str] = Counter()
    for row in indexed:
        counted[row["source"]] += row["n"]
    return [
        *(_group(row, exact=counted[row["source"]] <= bounds.most) for row in indexed),
        *(_group(row, percent) for row in await by_sample.fetchall()),
    ]


def _group(row: Row, percent: float = _EVERYTHING, *, exact: bool = True) -> _Group:
    return _Group(
        row["lane_id"],
        row["state"],
        round(row["n"] * _EVERYTHING / percent),
        exact and percent == _EVERYTHING,
        row["oldest"],
        row["due"],
        row["first_id"],
    )


def _below_dead_letters(groups: list[_Group], rows: Iterable[Row], bounds: Bounds) -> list[_Group]:
    """Blocked tasks that wait for a decision about a dead letter are a group of their own."""
    found = list(rows)
    few = all(row["dead"] <= _DEAD_LETTERS for row in found)
    exact = few and sum(row["n"] for row in found) <= bounds.most
    blocked = {group.lane_id: group for group in groups if group.state == "blocked"}
    for row in found:
        if (group := blocked.get(row["lane_id"])) is not None:
            group.count = max(group.count - row["n"], 0)
            group.exact = group.exact and exact
    return [
        *(group for group in groups if group.count),
        *(
            _Group(row["lane_id"], "below_dead_letter", row["n"], exact, None, None, row["first_id"])
            for row in found
        ),
    ]


async def _date(reader: Reader, groups: Iterable[_Group]) -> None:
    """Tasks that were never READY wait since their submission."""
    undated = {group.first_id: group for group in groups if group.oldest is None and group.first_id}
    for row in await reader.rows(_SQL["created"], ids=list(undated)):
        undated[row["id"]].oldest = row["created_at"]


def _reason(code: ReasonCode | None, total: _Sum) -> WaitingReason:
    return WaitingReason(
        code=code,
        count=total.count,
        exact=total.exact,
        oldest_at=total.oldest,
        next_at=total.due,
        types=[name for name, _ in total.types.most_common(_TYPES)],
        statuses=sorted(total.statuses),
        detail=total.detail,
    )


def _earliest(one: datetime | None, other: datetime | None) -> datetime | None:
    return min((at for at in (one, other) if at is not None), default=None)
