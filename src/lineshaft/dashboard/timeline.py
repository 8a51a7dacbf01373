"""The timeline of a task: waiting, attempts, their steps and gates, as lanes of bars on one axis.

Waiting takes most of the time of many tasks, so long waits are drawn short unless the whole is wanted.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal

from msgspec import Struct, field

from lineshaft.dashboard.rendering import duration
from lineshaft.engine.read.relatives import Recorded
from lineshaft.model.states import Status
from lineshaft.types import Attempt, Event, Task

#: Lanes of attempts; earlier ones are counted.
MOST_ATTEMPTS = 20
#: A wait that is longer than this share of all work is drawn as long as that.
_LONGEST_WAIT = 0.2
#: Percent of the width: shorter bars could not be seen.
_NARROWEST = 0.4
_TICKS = 4
_TOP, _LANE, _BAR_AT = 20, 44, 22
#: The state whose icon and colour an outcome has.
ICONS = {
    "running": Status.RUNNING,
    "validating": Status.VALIDATING,
    "completed": Status.COMPLETED,
    "failed": Status.FAILED,
    "rate_limited": Status.RETRYING,
    "released": Status.READY,
    "waiting": Status.PENDING,
    "cancelled": Status.CANCELLED,
}


class Span(Struct, frozen=True):
    """Something that took time."""

    #: wait, attempt, step or gate.
    kind: str
    label: str
    begin: datetime
    end: datetime
    #: It has not ended.
    open: bool = False
    cost_usd: Decimal | None = None
    #: How the attempt ended, if it is one.
    outcome: str = ""
    note: str = ""
    epoch: int = 0

    @property
    def seconds(self) -> float:
        return max((self.end - self.begin).total_seconds(), 0.0)


class TimelineBar(Struct, frozen=True):
    span: Span
    x: str
    width: str
    #: The wait is drawn shorter than it was.
    collapsed: bool


class TimelineLane(Struct, frozen=True):
    span: Span
    bars: list[TimelineBar]
    #: From the top, in pixels.
    y: int

    @property
    def bar_y(self) -> int:
        return self.y + _BAR_AT


class Tick(Struct, frozen=True):
    x: str
    label: str
    #: Where its text begins: start, middle or end.
    anchor: str


class Timeline(Struct, frozen=True):
    lanes: list[TimelineLane]
    ticks: list[Tick]
    height: int
    #: The same as a table.
    spans: list[Span]
    #: Earlier attempts that are not shown.
    earlier: int = 0
    #: The attempt that is shown alone, by its epoch.
    only: int | None = None
    #: Some wait is drawn shorter than it was.
    collapsed: bool = False
    attempts: list[Span] = field(default_factory=list)


class _Axis:
    """Places on the axis, in percent of its width; long waits take less of it than their time."""

    def __init__(self, pieces: Sequence[Span], *, collapse: bool) -> None:
        work = sum(piece.seconds for piece in pieces if piece.kind != "wait")
        longest = work * _LONGEST_WAIT if collapse and work else None
        self._places: list[tuple[datetime, datetime, float, float]] = []
        self.collapsed: set[int] = set()
        at = 0.0
        for number, piece in enumerate(pieces):
            shown = piece.seconds
            if longest is not None and piece.kind == "wait" and shown > longest:
                shown = longest
                self.collapsed.add(number)
            self._places.append((piece.begin, piece.end, at, shown))
            at += shown
        self._whole = at or 1.0

    def place(self, moment: datetime) -> float:
        found = 0.0
        for begin, end, at, shown in self._places:
            if moment < begin:
                break
            real = (end - begin).total_seconds()
            share = min((moment - begin).total_seconds() / real, 1.0) if real > 0 else 1.0
            found = (at + share * shown) / self._whole * 100
        return min(max(found, 0.0), 100.0)

    def moment(self, percent: float) -> datetime:
        wanted = percent / 100 * self._whole
        for begin, end, at, shown in self._places:
            if wanted <= at + shown:
                share = (wanted - at) / shown if shown else 0.0
                return begin + (end - begin) * max(share, 0.0)
        return self._places[-1][1]

    def bar(self, span: Span, *, collapsed: bool = False) -> TimelineBar:
        x, end = self.place(span.begin), self.place(span.end)
        width = max(end - x, _NARROWEST)
        return TimelineBar(span, _percent(min(x, 100 - width)), _percent(width), collapsed)


def timeline(
    task: Task,
    attempts: Sequence[Attempt],
    steps: Sequence[Recorded],
    events: Iterable[Event],
    now: datetime,
    *,
    only: int | None = None,
    collapse: bool = True,
) -> Timeline:
    """`only`: the epoch of one attempt to be shown alone; an unknown one is ignored."""
    known = list(events)
    shown = list(attempts)[-MOST_ATTEMPTS:]
    pairs = [(attempt, _attempt_span(attempt, task, now)) for attempt in shown]
    inner = {attempt.epoch: _inside(attempt, span, steps, known) for attempt, span in pairs}
    if only in inner:
        return _one(next(span for attempt, span in pairs if attempt.epoch == only), inner[only], pairs)
    earlier = len(attempts) - len(shown)
    pieces: list[Span] = []
    lanes: list[tuple[Span, list[Span]]] = []
    before = attempts[-len(shown) - 1] if earlier else None
    at = task.created_at if before is None else before.ended_at or before.claimed_at
    for attempt, span in pairs:
        waits = _waits(task, before, (at, span.begin), known, revival=attempt.revival)
        pieces += [*waits, span]
        lanes.append((span, [*waits, span, *inner[attempt.epoch]]))
        before, at = attempt, span.end
    if task.ended_at is None and not (pairs and pairs[-1][1].open):
        rest = _waits(task, before, (at, now), known, revival=task.revivals, is_open=True)
        pieces += rest
        lanes += [(wait, [wait]) for wait in rest]
    if not pieces:
        # It ended without an attempt.
        whole = Span("wait", "Without an attempt", task.created_at, task.ended_at or now)
        pieces, lanes = [whole], [(whole, [whole])]
    return _drawn(pieces, lanes, collapse=collapse, earlier=earlier, attempts=[span for _, span in pairs])


def _one(span: Span, inside: list[Span], pairs: Sequence[tuple[Attempt, Span]]) -> Timeline:
    """One attempt alone, with a lane for each of its steps and gates."""
    lanes = [(span, [span]), *((part, [part]) for part in inside)]
    return _drawn(
        [span], lanes, collapse=False, earlier=0, attempts=[each for _, each in pairs], only=span.epoch
    )


def _drawn(
    pieces: Sequence[Span],
    lanes: Sequence[tuple[Span, list[Span]]],
    *,
    collapse: bool,
    earlier: int,
    attempts: list[Span],
    only: int | None = None,
) -> Timeline:
    axis = _Axis(pieces, collapse=collapse)
    short = {id(pieces[number]) for number in axis.collapsed}
    drawn = [
        TimelineLane(
            span, [axis.bar(part, collapsed=id(part) in short) for part in parts], _TOP + number * _LANE
        )
        for number, (span, parts) in enumerate(lanes)
    ]
    first = pieces[0].begin
    ticks = []
    for number in range(_TICKS + 1):
        percent = number * 100 / _TICKS
        label = duration((axis.moment(percent) - first).total_seconds()) if number else "0"
        anchor = "start" if not number else "end" if number == _TICKS else "middle"
        ticks.append(Tick(_percent(percent), label, anchor))
    spans = [part for _, parts in lanes for part in parts]
    return Timeline(
        drawn, ticks, _TOP + len(drawn) * _LANE, spans, earlier, only, bool(axis.collapsed), attempts
    )


def _attempt_span(attempt: Attempt, task: Task, now: datetime) -> Span:
    end = attempt.ended_at
    is_open = end is None and task.ended_at is None
    note = ": ".join(filter(None, (attempt.category, attempt.error)))
    again = f", started again {attempt.revival} times" if attempt.revival > 1 else ", started again"
    return Span(
        "attempt",
        f"Attempt {attempt.number}{again if attempt.revival else ''}",
        attempt.claimed_at,
        max(end or task.ended_at or now, attempt.claimed_at),
        is_open,
        attempt.cost_usd,
        attempt.outcome,
        note,
        attempt.epoch,
    )


def _inside(attempt: Attempt, span: Span, steps: Sequence[Recorded], events: Iterable[Event]) -> list[Span]:
    """Steps from the end of the one before, and the time at gates."""
    found: list[Span] = []
    at = attempt.started_at or attempt.claimed_at
    for step in steps:
        if step.epoch == attempt.epoch:
            end = min(max(step.recorded_at, at), span.end)
            found.append(Span("step", step.name, min(at, end), end, cost_usd=step.cost_usd))
            at = end
    gate = next(
        (
            event.at
            for event in events
            if event.kind == "task.validating" and event.epoch == attempt.epoch and event.at < span.end
        ),
        None,
    )
    if gate is not None:
        found.append(Span("gate", "Gates", max(gate, span.begin), span.end, span.open))
    return found


def _waits(
    task: Task,
    before: Attempt | None,
    within: tuple[datetime, datetime],
    events: Iterable[Event],
    *,
    revival: int,
    is_open: bool = False,
) -> list[Span]:
    """What a task waited for between two attempts: first until it was READY, then in the queue."""
    begin, end = within
    if end <= begin and not is_open:
        return []
    end = max(end, begin)
    ready = [event.at for event in events if event.kind == "task.ready" and begin <= event.at <= end]
    if before is None and task.ready_at is not None and begin <= task.ready_at <= end:
        ready = [task.ready_at]
    if is_open and task.status is not Status.READY:
        ready = []
    blocked_until = ready[-1] if ready else end if is_open and task.status is not Status.READY else begin
    spans = [
        Span("wait", _why_blocked(before, revival), begin, blocked_until, is_open and blocked_until == end),
        Span("wait", "In the queue", blocked_until, end, is_open),
    ]
    return [span for span in spans if span.seconds > 0]


def _why_blocked(before: Attempt | None, revival: int) -> str:
    if before is None:
        return "Waiting for other tasks or its time"
    if revival > before.revival:
        return "Until it was started again"
    return "Waiting for its retry" if before.outcome in {"failed", "rate_limited"} else "Waiting"


def _percent(value: float) -> str:
    return f"{value:.3f}%"
