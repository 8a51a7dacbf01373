"""One task: why it isn't running, what happened, what came out, and at what price."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from urllib.parse import quote

from markupsafe import Markup
from msgspec import Struct
from starlette.responses import RedirectResponse, Response

from lineshaft.dashboard.pages.task_files import artifacts_of
from lineshaft.dashboard.rendering import ago, moment, short
from lineshaft.dashboard.timeline import ICONS, timeline
from lineshaft.dashboard.visit import Pages, View, Visit
from lineshaft.engine.feed.event_query import LAST, EventQuery
from lineshaft.engine.read.relatives import MOST_CANCELLED, MOST_RELATIVES
from lineshaft.errors import NotFoundError
from lineshaft.model.printable import printable
from lineshaft.model.states import Status
from lineshaft.types import FailedAttempt, Pause, Reason, ReasonCode, Task, Why
from lineshaft.types.changes import LIMITS

pages = Pages()

_MOST_EVENTS, _EVENTS_PER_READ = 100, 500
#: Inputs whose values are shown, not only linked.
_MOST_INPUTS = 5
#: Other tasks whose events change what is said about this one.
_MOST_TOPICS = 50
_RETRIED = frozenset({Status.DEAD_LETTERED, Status.CANCELLED, Status.RETRYING})


@pages.page("/tasks/{id}")
async def task(visit: Visit) -> View | Response:
    return await task_view(visit)


async def task_view(visit: Visit) -> View | Response:
    name = visit.path["id"]
    engine = visit.engine
    found = await engine.read.tasks_by_id([name])
    if not found:
        return await _elsewhere(visit, name)
    (one,) = found
    why = await engine.read.why(name)
    attempts = await engine.read.attempts(name, outputs=False)
    relatives = await engine.read.relatives(name)
    last = f"{LAST}{_MOST_EVENTS}"
    events = await EventQuery(visit.service.events, _EVENTS_PER_READ, name).after(last)
    pauses = await engine.read.pauses() if one.status is Status.READY else []
    now = engine.database.now["now"] or datetime.now(UTC)
    only = visit.query.get("attempt")
    drawn = timeline(
        one,
        attempts,
        relatives.steps,
        events.items,
        now,
        only=int(only) if only.isascii() and only.isdigit() and len(only) < 10 else None,  # noqa: PLR2004
        collapse=visit.query.get("gaps") != "shown",
    )
    context = {
        "task": one,
        "why": why,
        "reasons": [_explained(reason, one, why, pauses) for reason in why.reasons],
        "attempts": attempts,
        "holder": attempts[-1] if attempts and one.status in _HELD else None,
        "share": progress_share(one.progress),
        "timeline": drawn,
        "icons": ICONS,
        "failure": _failure(one),
        "relatives": relatives,
        "most_relatives": MOST_RELATIVES,
        "cancelled_with": _cancelled_with(relatives.cancelled_with),
        "events": list(reversed(events.items)),
        "most_events": _MOST_EVENTS,
        "awaited_signal": await engine.waits.awaited(name) if one.status is Status.PENDING else None,
        "signals": await engine.waits.signals(name),
        "artifacts": await artifacts_of(visit, one),
        "inputs": await _inputs(visit, one),
        "can_retry": one.status in _RETRIED,
        "can_rerun": one.status is Status.COMPLETED,
        "can_cancel": not one.status.ended,
        "changes": _changes(one),
        "form": visit.form,
    }
    topics = [f"task:{name}" for name in (one.id, *one.blocked_by[: _MOST_TOPICS - 1])]
    return View(
        "task.html",
        one.title,
        context,
        topics=frozenset(topics),
        # Heartbeats, and guards that hold it back, are not events of the task.
        refresh_sec=None if one.status.ended else 2.0 if one.status in _HELD else 5.0,
    )


_HELD = frozenset({Status.CLAIMED, Status.RUNNING})


async def _elsewhere(visit: Visit, name: str) -> Response:
    """A short id leads to the task that it means."""
    found = await visit.engine.read.find_ids(name, "task")
    if len(found) != 1:
        several = f" {len(found)} ids begin like this: {', '.join(found[:5])}." if found else ""
        raise NotFoundError(f"There is no task {printable(name)[:100]!r}.{several}")
    return RedirectResponse(f"/tasks/{quote(found[0], safe='')}", 303, headers={"Cache-Control": "no-store"})


# Why.


class Explained(Struct, frozen=True):
    code: ReasonCode
    sentence: Markup
    since: datetime | None = None
    #: What changes it: a label and a page.
    link: tuple[str, str] | None = None
    #: The type whose pause ends it; `*`: all.
    paused: str | None = None
    retry: bool = False


_LINKS = {
    ReasonCode.BREAKER_OPEN: ("Guards", "/guards"),
    ReasonCode.SLOWDOWN: ("Guards", "/guards"),
    ReasonCode.ACCOUNT_CLOSED: ("Guards", "/guards"),
    ReasonCode.LOCK_HELD: ("Locks", "/guards"),
    ReasonCode.NO_CAPABLE_AGENT: ("Agents", "/agents"),
    ReasonCode.NO_AFFORDABLE_AGENT: ("Agents", "/agents"),
    ReasonCode.AGENTS_FULL: ("Agents", "/agents"),
    ReasonCode.DAILY_BUDGET: ("Costs", "/costs"),
}


def _explained(reason: Reason, one: Task, why: Why, pauses: Sequence[Pause]) -> Explained:
    code = reason.code
    link = _LINKS.get(code)
    since: datetime | None = None
    paused: str | None = None
    if code is ReasonCode.PAUSED:
        # In the order of the reasons.
        number = [each for each in why.reasons if each.code is code].index(reason)
        pausing = sorted((pause for pause in pauses if pause.type in {"*", one.type}), key=lambda p: p.type)
        if number < len(pausing):
            paused, since = pausing[number].type, pausing[number].since
    elif code is ReasonCode.DAG_BUDGET:
        link = ("DAG and its budget", f"/dags/{quote(one.dag_id, safe='')}")
    elif code is ReasonCode.WAITING_APPROVAL:
        link = ("Decide", f"/approvals/{quote(one.id, safe='')}")
    elif code in {ReasonCode.DEAD_LETTERED, ReasonCode.UPSTREAM_DEAD_LETTERED}:
        own = f"/{quote(one.id, safe='')}" if code is ReasonCode.DEAD_LETTERED else ""
        link = ("Decide" if own else "Dead letters", f"/dead-letters{own}")
    elif code in {ReasonCode.NO_CAPABLE_AGENT, ReasonCode.NO_AFFORDABLE_AGENT, ReasonCode.AGENTS_FULL}:
        since = one.ready_at
    elif code is ReasonCode.QUOTA and reason.quota:
        link = ("Quota", f"/quotas/{quote(reason.quota, safe='')}")
    elif code is ReasonCode.BLOCKED_BY_DEPENDENCY:
        since = one.created_at
    retry = code in {ReasonCode.WAITING_RETRY, ReasonCode.CANCELLED, ReasonCode.DEAD_LETTERED}
    return Explained(code, sentence(reason.detail), since, link, paused, retry)


_PARTS = re.compile(
    r"(?P<id>\b(?:task|dag)_[0-9A-HJKMNP-TV-Z]{26}\b)|(?P<time>\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)"
)
_MOST_SENTENCE = 2_000


def sentence(text: str) -> Markup:
    """Text with links for ids and times that the page's script shows."""
    found = Markup()
    at = 0
    text = printable(text[:_MOST_SENTENCE])
    for part in _PARTS.finditer(text):
        found += text[at : part.start()]
        at = part.end()
        if name := part["id"]:
            folder = "dags" if name.startswith("dag_") else "tasks"
            found += Markup('<a href="/{}/{}">{}</a>').format(folder, name, short(name))
        else:
            time = datetime.fromisoformat(part["time"])
            found += Markup("{} ({})").format(moment(time), ago(time))
    return found + text[at:]


_SHARES = {"percent": 100.0, "percentage": 100.0, "fraction": 1.0, "progress": None, "share": 1.0}


def progress_share(report: object) -> float | None:
    """How much of the work is done, from 0 to 1, if a progress report says so."""
    if isinstance(report, Mapping):
        done, total = _number(report.get("done", report.get("current"))), _number(report.get("total"))
        if done is not None and total:
            return _share(done, total)
        for name, whole in _SHARES.items():
            if (value := _number(report.get(name))) is not None:
                return _share(value, whole)
        return None
    value = _number(report)
    return None if value is None else _share(value, None)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _share(value: float, whole: float | None) -> float | None:
    """Without a whole, a number up to 1 is a share and one up to 100 a percentage."""
    share = value / (whole or (1.0 if value <= 1 else 100.0))
    return share if 0 <= share <= 1 else None


def _cancelled_with(count: int) -> str:
    if not count:
        return "No other task is cancelled with it."
    many = f"{count:,} or more" if count >= MOST_CANCELLED else f"{count:,}"
    return f"It also cancels {many} other task{'' if count == 1 else 's'}: its children and dependents."


# The last error.


class FailureDetails(Struct, frozen=True):
    attempt: FailedAttempt | None
    category: str | None
    #: Such as ValueError; empty: the error doesn't begin with one.
    kind: str
    message: str
    #: Frames of the user's own code, and everything.
    own_frames: str
    traceback: str

    @property
    def copied(self) -> str:
        head = f"{self.kind}: {self.message}" if self.kind else self.message
        return printable(f"{head}\n\n{self.traceback}" if self.traceback else head)


_KIND = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Warning|Exit|Interrupt|Timeout)):\s*(.*)", re.DOTALL)
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line \d+')
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|<frozen ")


def _failure(one: Task) -> FailureDetails | None:
    """The last error, unless the task succeeded after it."""
    if one.status is Status.COMPLETED or not (one.failure_history or one.failure_reason):
        return None
    last = one.failure_history[-1] if one.failure_history else None
    error = one.failure_reason or (last.error if last else "")
    traceback = (last.traceback if last else None) or ""
    found = _KIND.fullmatch(error)
    kind, message = (found[1], found[2]) if found else ("", error)
    category = one.failure_category or (last.category if last else None)
    return FailureDetails(last, category, kind, message, own_frames(traceback), traceback)


def own_frames(traceback: str) -> str:
    """The frames of a Python traceback that are not of libraries; empty: there are none, or all are."""
    frames: list[tuple[bool, list[str]]] = []
    for line in traceback.splitlines():
        if frame := _FRAME.match(line):
            frames.append((_LIBRARY.search(frame["file"]) is None, [line]))
        elif frames and line.startswith("    "):
            frames[-1][1].append(line)
    own = [line for is_own, lines in frames if is_own for line in lines]
    return "\n".join(own) if own and len(own) < sum(len(lines) for _, lines in frames) else ""


# Inputs.


class Input(Struct, frozen=True):
    #: The same tasks may be an input under several names.
    names: list[str]
    tasks: list[Task]
    more: int


async def _inputs(visit: Visit, one: Task) -> list[Input]:
    sources: dict[tuple[str, ...], list[str]] = {}
    for name, ids in one.inputs.items():
        sources.setdefault((ids,) if isinstance(ids, str) else tuple(ids), []).append(name)
    wanted = list(dict.fromkeys(name for ids in sources for name in ids))[:_MOST_INPUTS]
    tasks = {each.id: each for each in await visit.engine.read.tasks_by_id(wanted)}
    return [
        Input(names, [tasks[each] for each in ids if each in tasks], sum(each not in tasks for each in ids))
        for ids, names in sources.items()
    ]


# What can be changed.


class Change(Struct, frozen=True):
    """A field that can be changed, with its present value as text."""

    name: str
    label: str
    value: str
    hint: str = ""
    type: str = "text"


def _changes(one: Task) -> list[Change]:
    """What can be changed in its state."""

    def text(value: object) -> str:
        return (
            "" if value is None else f"{value.normalize():f}" if isinstance(value, Decimal) else f"{value:g}"
        )

    deadline = "" if one.deadline is None else one.deadline.astimezone(UTC).isoformat(timespec="seconds")
    fields = [
        Change("priority", "Priority", str(one.priority), "from 0, first, to 100", "number"),
        Change("deadline", "Deadline", deadline, "2030-01-31T09:00:00Z; empty: none"),
        Change("tags", "Tags", ", ".join(one.tags), "separated by commas"),
        Change("max_attempts", "Attempts at most", str(one.max_attempts), "", "number"),
        Change("max_cost_usd", "Cost of an attempt at most, USD", text(one.max_cost_usd), "empty: no limit"),
        Change(
            "max_total_cost_usd",
            "Cost of all attempts at most, USD",
            text(one.max_total_cost_usd),
            "empty: no limit",
        ),
        Change("max_duration_sec", "Duration of an attempt at most, seconds", text(one.max_duration_sec)),
    ]
    if one.status is Status.DEAD_LETTERED:
        return [field for field in fields if field.name in LIMITS]
    if one.status is Status.CANCELLED and one.expire_at_deadline:
        return [field for field in fields if field.name == "deadline"]
    return [] if one.status.ended else fields
