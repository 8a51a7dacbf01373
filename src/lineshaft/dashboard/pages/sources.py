"""Sources: what fires next, what became of the last firing, and what an event would do."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice, takewhile
from typing import Any

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from lineshaft.dashboard.command_lines import command_line, element_id, segment
from lineshaft.dashboard.rendering import duration
from lineshaft.dashboard.spec_compare import changed
from lineshaft.dashboard.visit import Done, Pages, View, Visit
from lineshaft.engine.sources.firing import DryRun, Occasion, tick_event
from lineshaft.errors import InvalidInputError, InvalidTransitionError, LineshaftError, NotFoundError
from lineshaft.model.printable import printable
from lineshaft.operations.sources import check_verification
from lineshaft.sources import ticks
from lineshaft.sources.cron_words import in_words
from lineshaft.sources.definition import Definition, checked
from lineshaft.sources.file import name_on
from lineshaft.types import Scope
from lineshaft.types.problems import invalid_input
from lineshaft.types.sources import NewSource, ShownFields, Source, SourceFields, SourceKind, definition_of
from lineshaft.types.written import read_written

pages = Pages()

_PAGE = 50
_FIRINGS = 20
_DAY = timedelta(days=1)
#: Schedules in the strip of the next day, and ticks of each that are drawn one by one.
_STRIPS = 20
_TICKS = 48
_UPCOMING = 5
_CONFLICT = 409
_MINUTES = 1_440
#: Characters of a definition or an event in a form: more than a source may have.
_MAX_WRITTEN = 1 << 20
_TOPICS = frozenset({"source.created", "source.changed", "source.deleted", "source.fired"})
#: Where a new source of each kind starts.
_EXAMPLES: Mapping[SourceKind, str] = {
    SourceKind.SCHEDULE: """\
kind: schedule
cron: "0 9 * * MON"
timezone: Europe/Berlin
template:
  task:
    type: report
    title: Week of ${event.tick}
""",
    SourceKind.WEBHOOK: """\
kind: webhook
verify:
  scheme: github
  secret_env: LINESHAFT_HOOK_GITHUB
when: event.action == 'opened'
template:
  task:
    type: review
    title: Review ${event.repository.full_name}#${event.number}
""",
    SourceKind.FILES: """\
kind: files
root: /srv/inbox
patterns: ["**/*.csv"]
on: [added, modified]
template:
  task:
    type: import
    spec:
      path: ${event.path}
""",
    SourceKind.EVENT: """\
kind: event
on: [dag.completed]
when: event.dag.title == 'data pipeline'
template:
  task:
    type: report
    title: Report of ${event.dag.id}
""",
    SourceKind.OBSERVER: """\
kind: observer
group_by: type
failure_rate: 0.4
min_attempts: 10
template:
  task:
    type: refactor
    title: ${event.group} fails in ${event.failures} of ${event.attempts} attempts
""",
}
#: An event of each kind to start a dry run with.
_EVENTS: Mapping[SourceKind, Mapping[str, Any]] = {
    SourceKind.WEBHOOK: {
        "action": "opened",
        "number": 17,
        "repository": {"full_name": "example/site"},
        "headers": {"x-github-event": "pull_request"},
    },
    SourceKind.FILES: {
        "path": "orders.csv",
        "root": "/srv/inbox",
        "change": "added",
        "digest": "0" * 64,
        "size": 1234,
    },
    SourceKind.EVENT: {
        "kind": "dag.completed",
        "at": "2026-01-01T00:00:00Z",
        "task_id": None,
        "dag_id": "dag_1",
        "dag": {"id": "dag_1", "title": "data pipeline"},
        "data": {},
    },
    SourceKind.OBSERVER: {
        "group": "import",
        "attempts": 20,
        "failures": 9,
        "failure_rate": 0.45,
        "cost_usd": 1.5,
        "task_ids": [],
        "errors": [],
    },
}


def rule(source: ShownFields, kind: SourceKind, name: str) -> str:
    """When a source fires, in words."""
    if kind is SourceKind.SCHEDULE:
        if isinstance(source.every_sec, float | int):
            return f"every {duration(source.every_sec)}"
        words = in_words(source.cron or "") or f"cron {source.cron}"
        return f"{words}, {source.timezone}"
    if kind is SourceKind.WEBHOOK:
        scheme = source.verify.scheme if source.verify is not UNSET else "none"
        how = "without a signature" if scheme == "none" else f"signed ({scheme})"
        return f"POST /hooks/{name}, {how}"
    on = source.on or []
    if kind is SourceKind.FILES:
        return f"a file {', '.join(source.patterns or [])} in {source.root} is {' or '.join(on)}"
    if kind is SourceKind.EVENT:
        return f"on {', '.join(on)}"
    rate, window = float(source.failure_rate or 0), float(source.window_sec or 0)
    return (
        f"{rate:.0%} of at least {source.min_attempts} attempts by {source.group_by} fail in "
        f"{duration(window)}"
    )


class SourceEntry(Struct, frozen=True):
    source: Source

    @property
    def address(self) -> str:
        return f"/sources/{segment(self.source.name)}"

    @property
    def element_id(self) -> str:
        return element_id(self.source.name)

    @property
    def rule(self) -> str:
        source = self.source
        return rule(source, source.kind, source.name) if source.kind.is_known else f"kind {source.kind}"

    def command(self, word: str, *more: str) -> str | None:
        return command_line("sources", word, self.source.name, *more)


class Strip(Struct, frozen=True):
    """When a schedule fires in the next day."""

    row: SourceEntry
    times: list[datetime]
    #: From 0 to 1440, in minutes.
    places: list[str]
    #: More than are drawn: it fires all the time.
    is_dense: bool


def _now(visit: Visit) -> datetime:
    now: datetime = visit.engine.database.now["now"] or datetime.now(UTC)
    return now


@lru_cache(maxsize=2_000)
def _cron_times(cron: str, timezone: str, hour: datetime) -> tuple[datetime, ...]:
    """From this hour on for a day and an hour. Finding ticks is slow, so each hour is computed once."""
    end = hour + _DAY + timedelta(hours=1)
    found = takewhile(
        lambda tick: tick <= end, ticks.Cron(cron, timezone).onwards(hour - timedelta(seconds=1))
    )
    return tuple(islice(found, 2 * _TICKS))


def _strips(rows: Sequence[SourceEntry], now: datetime) -> list[Strip]:
    soon = [row for row in rows if row.source.next_at is not None and row.source.next_at <= now + _DAY]
    soon.sort(key=lambda row: (row.source.next_at, row.source.name))
    return [_strip(row, now) for row in soon[:_STRIPS]]


def _strip(row: SourceEntry, now: datetime) -> Strip:
    source = row.source
    definition = Definition(_as_new(source))
    if isinstance(source.cron, str):
        hour = now.replace(minute=0, second=0, microsecond=0)
        found = (definition.due_at(tick) for tick in _cron_times(source.cron, source.timezone or "UTC", hour))
        times = [time for time in found if now < time <= now + _DAY]
    else:
        onwards = definition.upcoming(source.created_at, now)
        times = list(islice(takewhile(lambda time: time <= now + _DAY, onwards), _TICKS + 1))
    is_dense = len(times) > _TICKS
    places = [] if is_dense else [f"{(time - now).total_seconds() / 60:.1f}" for time in times]
    return Strip(row, times, places, is_dense)


def _as_new(source: Source) -> NewSource:
    return msgspec.convert(source.definition(), NewSource)


@pages.page("/sources")
async def sources(visit: Visit) -> View:
    kind = visit.query.get("kind")
    page = await visit.engine.sources.find(
        kind=kind or None, limit=_PAGE, cursor=visit.query.get("cursor") or None
    )
    rows = [SourceEntry(source) for source in page.items]
    context = {
        "rows": rows,
        "next_cursor": page.next_cursor,
        "kinds": list(SourceKind),
        "kind": kind,
        "strips": await asyncio.to_thread(_strips, rows, _now(visit)),
        "most_strips": _STRIPS,
        "most_ticks": _TICKS,
        "minutes": _MINUTES,
    }
    return View("sources.html", "Sources", context, topics=_TOPICS, at_most_every_sec=1.0, refresh_sec=5.0)


# Before the page of a source.
@pages.page("/sources/new", Scope.OPERATE)
async def new_source(visit: Visit) -> View:
    return _new_view(visit.query.get("kind"))


def _new_view(kind: str = "", *, name: str = "", definition: str = "", event: str = "") -> View:
    chosen = SourceKind(kind) if kind in tuple(SourceKind) else SourceKind.SCHEDULE
    context = {
        "kind": chosen,
        "kinds": list(SourceKind),
        "source_name": name,
        "definition": definition or _EXAMPLES[chosen],
        "event": event or _written_event(_EVENTS.get(chosen) or tick_event(datetime.now(UTC))),
        "dry": None,
    }
    return View("source_new.html", "New source", context)


@pages.page("/sources/{name:path}")
async def source(visit: Visit) -> View:
    return await _source_view(visit)


async def _source_view(visit: Visit, *, definition: str = "", event: str = "") -> View:
    name = visit.path["name"]
    found = await visit.engine.sources.get(name)
    firings = await visit.engine.sources.firings(
        name, limit=_FIRINGS, cursor=visit.query.get("cursor") or None
    )
    now = _now(visit)
    compiled = Definition(_as_new(found))
    times = await asyncio.to_thread(
        lambda: list(islice(compiled.upcoming(found.created_at, now), _UPCOMING)) if found.next_at else []
    )
    context = {
        "row": SourceEntry(found),
        "source": found,
        "firings": firings.items,
        "next_cursor": firings.next_cursor,
        "times": times,
        "definition": definition or written(found.definition()),
        "event": event or _written_event(_first_event(visit, found)),
        # The version that the person began to edit, also after a dry run or a fault.
        "version": visit.form.get("version") or found.version,
        "differences": None,
        "dry": None,
    }
    return View(
        "source.html",
        f"Source {printable(name[:100])}",
        context,
        topics=_TOPICS,
        at_most_every_sec=1.0,
        refresh_sec=5.0,
    )


def written(definition: Mapping[str, Any]) -> str:
    """A definition as YAML, for an editor. Its name is in the address, and the pause has its own button."""
    kept = {
        name: value
        for name, value in definition.items()
        if name not in {"name", "enabled"} and value is not None
    }
    if "verify" in kept:
        kept["verify"] = {name: value for name, value in kept["verify"].items() if value is not None}
    text = msgspec.yaml.encode(kept).decode()
    # Characters that can't be seen are escaped, which JSON can do without a change of the value.
    return text if printable(text) == text else json.dumps(kept, indent=2)


def _first_event(visit: Visit, found: Source) -> Mapping[str, Any]:
    """What the dry run starts with: for a schedule, the tick of a past firing or the next one."""
    if found.kind is not SourceKind.SCHEDULE:
        return _EVENTS.get(found.kind, {})
    if tick := visit.query.get("tick"):
        return {"tick": tick[:100], "missed": 0}
    return tick_event(found.next_at or _now(visit))


def _written_event(event: Mapping[str, Any]) -> str:
    return json.dumps(event, indent=2, ensure_ascii=False)


# What a form has.


def _entered_source(name: str, text: str) -> NewSource:
    """Raises InvalidInputError."""
    _check_length("definition", text)
    given = read_written(text, "The definition")
    if not isinstance(given, dict):
        raise InvalidInputError(errors=[("definition", "must have fields, such as kind and template")])
    name_on(given)
    if given.get("name", name) != name:
        raise InvalidInputError(
            errors=[("name", f"is {given['name']!r} in the definition, but {name!r} here")]
        )
    try:
        return msgspec.convert({**given, "name": name}, NewSource)
    except msgspec.ValidationError as error:
        raise invalid_input(error) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(errors=[("definition", f"can't be read: {type(error).__name__}")]) from None


def _entered_event(text: str) -> dict[str, Any] | None:
    """None: the event of a source that is fired without one. Raises InvalidInputError."""
    if not text:
        return None
    _check_length("event", text)
    try:
        event = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInputError(errors=[("event", f"is not valid JSON: {error}")]) from None
    if not isinstance(event, dict):
        raise InvalidInputError(errors=[("event", "must be a JSON object")])
    return event


def _check_length(name: str, text: str) -> None:
    if len(text) > _MAX_WRITTEN:
        raise InvalidInputError(errors=[(name, f"must have at most {_MAX_WRITTEN} characters")])


async def _tried(visit: Visit, name: str) -> DryRun:
    given = _entered_source(name, visit.form.get("definition"))
    return await visit.engine.firings.dry_run(given, _entered_event(visit.form.get("event")))


def _entered(visit: Visit) -> dict[str, str]:
    return {field: visit.form.get(field)[:_MAX_WRITTEN] for field in ("definition", "event")}


# Actions. Those of a new source come before those of a source.


@pages.action("/sources/new/try", Scope.OPERATE, changes=False)
async def try_new(visit: Visit) -> View:
    name = visit.form.get("name")
    view = _new_view(visit.form.get("kind"), name=name, **_entered(visit))
    try:
        return view.with_context(dry=await _tried(visit, name))
    except LineshaftError as error:
        return view.refused(error)


@pages.action("/sources/new", Scope.OPERATE)
async def create(visit: Visit) -> Done | View:
    name = visit.form.get("name")
    try:
        given = _entered_source(name, visit.form.get("definition"))
        check_verification(given.verify)
        made = await visit.engine.sources.create(given)
    except LineshaftError as error:
        return _new_view(visit.form.get("kind"), name=name, **_entered(visit)).refused(error)
    return Done(SourceEntry(made).address, f"Source {made.name} was created.")


@pages.action("/sources/{name:path}/try", Scope.OPERATE, changes=False)
async def try_out(visit: Visit) -> View:
    view = await _source_view(visit, **_entered(visit))
    try:
        return view.with_context(dry=await _tried(visit, visit.path["name"])).still()
    except NotFoundError:
        raise
    except LineshaftError as error:
        return view.refused(error)


@pages.action("/sources/{name:path}/save", Scope.OPERATE)
async def save(visit: Visit) -> Done | View:
    name = visit.path["name"]
    view = await _source_view(visit, **_entered(visit))
    try:
        given = _entered_source(name, visit.form.get("definition"))
        check_verification(given.verify)
        version = visit.form.number("version")
        stored, _ = await visit.engine.sources.put(given, version=None if version is None else int(version))
    except InvalidTransitionError:
        return await _changed_by_another(visit)
    except LineshaftError as error:
        return view.refused(error)
    return Done(SourceEntry(stored).address, f"Source {name} was changed.")


async def _changed_by_another(visit: Visit) -> View:
    """What is stored now beside what was entered. Saving again replaces what was shown, and only that."""
    view = await _source_view(visit, **_entered(visit))
    stored: Source = view.context["source"]
    given = _entered_source(stored.name, visit.form.get("definition"))
    theirs, yours = (
        {name: value for name, value in definition.items() if name != "enabled"}
        for definition in (stored.definition(), definition_of(checked(given)))
    )
    shown = view.with_context(version=stored.version, differences=changed(theirs, yours))
    return replace(shown.still(), status=_CONFLICT)


@pages.action("/sources/{name:path}/fire", Scope.OPERATE)
async def fire(visit: Visit) -> Done | View:
    name = visit.path["name"]
    try:
        event = _entered_event(visit.form.get("event"))
    except InvalidInputError as error:
        return (await _source_view(visit)).refused(error)
    occasion = None if event is None else Occasion(event)
    fired = await visit.engine.firings.fire(name, occasion, by_hand=True)
    made = len(fired.task_ids or [])
    what = f"{made} {'task' if made == 1 else 'tasks'}" if made else "no work"
    why = f" {fired.error}" if fired.error else ""
    return Done(f"/sources/{segment(name)}", f"It fired: {fired.outcome}, {what}.{why}")


@pages.action("/sources/{name:path}/pause", Scope.OPERATE)
async def pause(visit: Visit) -> Done:
    return await _enable(visit, enabled=False)


@pages.action("/sources/{name:path}/resume", Scope.OPERATE)
async def resume(visit: Visit) -> Done:
    return await _enable(visit, enabled=True)


async def _enable(visit: Visit, *, enabled: bool) -> Done:
    name = visit.path["name"]
    await visit.engine.sources.patch(name, SourceFields(enabled=enabled))
    message = "It fires again." if enabled else "It doesn't fire until it is resumed."
    return Done(f"/sources/{segment(name)}", message)


@pages.action("/sources/{name:path}/delete", Scope.OPERATE)
async def delete(visit: Visit) -> Done:
    name = visit.path["name"]
    await visit.engine.sources.delete(name)
    return Done("/sources", f"Source {name} and its history were deleted. Its work stays.")
