"""Dead letters: groups by like error, and decisions about them."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
from msgspec import UNSET, Struct, field
from msgspec.structs import replace

from lineshaft.dashboard.command_lines import element_id, segment
from lineshaft.dashboard.spec_compare import MOST_SHOWN, Difference, differences, merge_patch
from lineshaft.dashboard.visit import Done, Pages, Values, View, Visit
from lineshaft.engine.review.dead_letters import MAX_BULK, MAX_COUNTED
from lineshaft.errors import AlreadyReviewedError, InvalidInputError, InvalidTransitionError, LineshaftError
from lineshaft.model.printable import printable
from lineshaft.model.retry import FailureCategory
from lineshaft.model.reviews import ALL_STEPS, RETRIES, Resolution, ResolutionRequest
from lineshaft.model.spec_change import spec_changes
from lineshaft.types import DeadLetter, DeadLetterFilter, Scope, Task
from lineshaft.types.work import SPAWN_STEP

pages = Pages()

#: Groups on the first page.
_GROUPS = 200
#: Letters on a page, which are also those that are compared.
_LETTERS = 50
#: Letters whose change is shown before it is applied to all.
_CHANGED_SAMPLES = 5
#: A decision about many continues for so long; the rest needs another click.
_LONGEST_SEC = 20.0
_SHOWN_REFUSALS = 3
_TOPICS = frozenset({"task.dead_lettered", "task.resolved", "task.cancelled"})
_CONFLICT = 409


class _Words(Struct, frozen=True):
    """How a resolution is called on buttons and in messages."""

    verb: str
    past: str
    consequence: str
    danger: bool = False


WORDS = {
    Resolution.RETRY: _Words(
        "Retry",
        "Retried",
        "A retried task starts again with all its attempts. Recorded steps are kept, unless you forget them.",
    ),
    Resolution.MODIFY_AND_RETRY: _Words(
        "Change and retry",
        "Changed and retried",
        "The spec is changed, and the task starts again with all its attempts.",
    ),
    Resolution.CANCEL: _Words(
        "Cancel",
        "Cancelled",
        "A cancelled task never runs, and the tasks that depend on it are cancelled too.",
        danger=True,
    ),
    Resolution.DELETE: _Words(
        "Delete",
        "Deleted",
        "A deleted dead letter disappears from lists, and its task is cancelled with all that depend on it.",
        danger=True,
    ),
    Resolution.ESCALATE: _Words(
        "Escalate",
        "Escalated",
        "An escalated task stays a dead letter, and an alert asks another person to decide.",
    ),
}


# The list.


@pages.page("/dead-letters")
async def groups(visit: Visit) -> View:
    tab = visit.query.get("tab", "open")
    if tab in {"escalated", "decided"}:
        return await _listed(visit, tab)
    types, categories = visit.query.all("type"), visit.query.all("category")
    letters = visit.engine.dead_letters
    found = await letters.groups(types=types, categories=categories, limit=_GROUPS)
    recent = await letters.recent([group.pattern for group in found], types=types, categories=categories)
    if visit.query.get("order") == "newest":
        found.sort(key=lambda group: group.last_at, reverse=True)
    known = await letters.groups(limit=_GROUPS) if types or categories else found
    rows = []
    for group in found:
        same = _Wanted(pattern=group.pattern, types=tuple(types), categories=tuple(categories))
        rows.append((group, element_id(group.pattern), same.page, recent[group.pattern]))
    context = {
        "groups": rows,
        "total": sum(group.count for group in found),
        "most_groups": _GROUPS,
        "types": sorted({name for group in known for name in group.types} | {*types}),
        "categories": sorted({*FailureCategory} | {*categories}),
        "chosen_type": visit.query.get("type"),
        "chosen_category": visit.query.get("category"),
        "tab": "open",
    }
    return View(
        "dead_letters.html", "Dead letters", context, topics=_TOPICS, at_most_every_sec=2.0, refresh_sec=300.0
    )


async def _listed(visit: Visit, tab: str) -> View:
    """Letters that a person has decided about, newest first."""
    wanted = (
        DeadLetterFilter(resolution=Resolution.ESCALATE)
        if tab == "escalated"
        else DeadLetterFilter(reviewed=True)
    )
    page = await visit.engine.dead_letters.find(
        wanted, limit=_LETTERS, cursor=visit.query.get("cursor") or None
    )
    context = {"letters": page.items, "next_cursor": page.next_cursor, "tab": tab}
    return View("dead_letters_decided.html", "Dead letters", context, topics=_TOPICS, at_most_every_sec=2.0)


@pages.page("/dead-letters/group")
async def group(visit: Visit) -> View:
    wanted = _Wanted.of(visit.query)
    if not wanted.pattern:
        raise InvalidInputError(
            errors=[("pattern", "is required: open a group from the list of dead letters")]
        )
    letters = visit.engine.dead_letters
    page = await letters.find(wanted.filter, limit=_LETTERS, cursor=visit.query.get("cursor") or None)
    context = {
        "wanted": wanted,
        "count": await letters.count_open(wanted.filter),
        "most_counted": MAX_COUNTED,
        "letters": page.items,
        "next_cursor": page.next_cursor,
        "differences": _differences(page.items)[:MOST_SHOWN],
        "words": WORDS,
    }
    return View(
        "dead_letter_group.html",
        "Dead letters with one error",
        context,
        topics=_TOPICS,
        at_most_every_sec=2.0,
    )


def _differences(letters: Sequence[DeadLetter]) -> list[Difference]:
    """What differs between the tasks, and between their last attempts."""
    described = []
    for letter in letters:
        last = letter.failure_history[-1] if letter.failure_history else None
        described.append(
            {
                "type": letter.type,
                "category": letter.category,
                "agent": last and last.agent,
                "version of the agent": last and last.version,
                "spec": letter.spec,
            }
        )
    return differences(described)


@pages.page("/dead-letters/decide", Scope.OPERATE)
async def decide_page(visit: Visit) -> View:
    return await _decide_view(visit, visit.query)


# One letter.


@pages.page("/dead-letters/{task_id}")
async def letter(visit: Visit) -> View:
    return await _letter_view(visit)


async def _letter_view(visit: Visit) -> View:
    task_id = visit.path["task_id"]
    found = await visit.engine.dead_letters.get(task_id)
    context = {
        "letter": found,
        "steps": await _steps(visit, task_id),
        "words": WORDS,
        "is_open": _is_open(found),
        "group_address": _Wanted(pattern=found.pattern).page,
    }
    return View(
        "dead_letter.html", f"Dead letter {found.title}", context, topics=frozenset({f"task:{task_id}"})
    )


def _is_open(letter: DeadLetter) -> bool:
    """Whether a decision is still wanted; an escalated letter wants another one."""
    waiting = letter.resolution in {None, Resolution.ESCALATE}
    return waiting and letter.status == "DEAD_LETTERED"


async def _steps(visit: Visit, task_id: str) -> list[str]:
    return [name for name in await visit.engine.read.steps(task_id) if not name.startswith(SPAWN_STEP)]


@pages.action("/dead-letters/{task_id}/resolve")
async def resolve(visit: Visit) -> Done | View:
    task_id = visit.path["task_id"]
    try:
        decision = _decision(visit)
        await visit.engine.dead_letters.resolve(task_id, decision)
    except LineshaftError as error:
        return _refused(await _letter_view(visit), error)
    past = WORDS[Resolution(decision.resolution)].past
    return Done(f"/dead-letters/{segment(task_id)}", f"{past} by {visit.actor}.")


def _refused(view: View, error: LineshaftError) -> View:
    """The page with the error; that another person was faster is said as such."""
    shown = view.refused(error)
    if isinstance(error, AlreadyReviewedError | InvalidTransitionError):
        return replace(shown, status=_CONFLICT)
    return shown


# Edit and retry.


class _Changed(NamedTuple):
    """A place of a spec with its old and its new value as JSON; None: it isn't there."""

    path: str
    before: str | None
    after: str | None


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[_Changed]:
    return [
        _Changed(change.path, _json_text(change.before), _json_text(change.after))
        for change in spec_changes(before, after)
    ]


def _json_text(value: Any) -> str | None:
    return None if value is UNSET else msgspec.json.encode(value).decode()


class _Edit(Struct, frozen=True):
    """A changed spec: its text, and what it changes."""

    text: str
    changes: list[_Changed] = field(default_factory=list)
    #: Shown, and not sent yet.
    is_checked: bool = False

    @property
    def checked(self) -> str:
        """Stands for the text that is shown."""
        return element_id(self.text)


@pages.page("/dead-letters/{task_id}/edit", Scope.OPERATE)
async def edit_page(visit: Visit) -> View:
    found = await visit.engine.dead_letters.get(visit.path["task_id"])
    return await _edit_view(visit, found, _Edit(_as_text(found.spec_json)))


async def _edit_view(visit: Visit, found: DeadLetter, edit: _Edit) -> View:
    context = {
        "letter": found,
        "edit": edit,
        "steps": await _steps(visit, found.task_id),
        "is_open": _is_open(found),
        "form": visit.form,
    }
    return View("dead_letter_edit.html", f"Edit and retry {found.title}", context)


@pages.action("/dead-letters/{task_id}/edit", changes=lambda form: form.get("step") == "send")
async def edit(visit: Visit) -> Done | View:
    """First shows what the edit changes; sends it when that was confirmed."""
    found = await visit.engine.dead_letters.get(visit.path["task_id"])
    text = visit.form.get("spec")
    try:
        spec = _object("spec", text)
        edited = _Edit(text, _changed(found.spec, spec), is_checked=True)
    except InvalidInputError as error:
        return (await _edit_view(visit, found, _Edit(text))).refused(error)
    if visit.form.get("revival") != str(found.revival):
        fault = (
            "The task was retried and failed again after you opened this page. Its spec may have changed: "
            "compare, and check your change again. Nothing was sent."
        )
        return _refused(await _edit_view(visit, found, edited), InvalidTransitionError(fault))
    # Only what was shown is sent: the text may have been edited again since.
    if visit.form.get("step") != "send" or visit.form.get("checked") != element_id(text):
        return await _edit_view(visit, found, edited)
    try:
        decision = _decision(visit, resolution=Resolution.MODIFY_AND_RETRY, spec=spec)
        await visit.engine.dead_letters.resolve(found.task_id, decision)
    except LineshaftError as error:
        return _refused(await _edit_view(visit, found, edited), error)
    count = len(edited.changes)
    places = f"{count} place{'' if count == 1 else 's'} of the spec"
    return Done(f"/dead-letters/{segment(found.task_id)}", f"Changed {places} and retried.")


# Decisions about many.


class _Wanted(Struct, frozen=True):
    """The letters that a decision is about: a selection, or all with one error."""

    task_ids: tuple[str, ...] = ()
    pattern: str = ""
    types: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Values) -> "_Wanted":
        chosen = tuple(values.all("task"))
        if chosen:
            return cls(task_ids=chosen)
        return cls(
            pattern=values.get("pattern"),
            types=tuple(values.all("type")),
            categories=tuple(values.all("category")),
        )

    @property
    def filter(self) -> DeadLetterFilter:
        if self.task_ids:
            return DeadLetterFilter(task_ids=self.task_ids)
        # Escalated letters are in no group.
        return DeadLetterFilter(
            reviewed=False, pattern=self.pattern, type=self.types, category=self.categories
        )

    @property
    def fields(self) -> list[tuple[str, str]]:
        """As fields of a form or a query."""
        return [
            *(("task", name) for name in self.task_ids),
            *((("pattern", self.pattern),) if self.pattern else ()),
            *(("type", name) for name in self.types),
            *(("category", name) for name in self.categories),
        ]

    @property
    def query(self) -> str:
        return urlencode(self.fields)

    @property
    def without_filter(self) -> "_Wanted":
        return _Wanted(pattern=self.pattern)

    @property
    def page(self) -> str:
        return f"/dead-letters/group?{self.query}" if self.pattern else "/dead-letters"


async def _decide_view(visit: Visit, values: Values, change: "_BulkChange | None" = None) -> View:
    wanted, resolution = _Wanted.of(values), _resolution(values.get("resolution"))
    if not wanted.fields:
        raise InvalidInputError(errors=[("task", "choose dead letters, or open a group, and decide there")])
    letters = visit.engine.dead_letters
    sample = await letters.find(wanted.filter, limit=_CHANGED_SAMPLES)
    open_ones = [found for found in sample.items if _is_open(found)]
    tried = values.get("tried")
    context = {
        "wanted": wanted,
        "resolution": resolution,
        "words": WORDS[resolution],
        "is_retry": resolution in RETRIES,
        "count": await letters.count_open(wanted.filter),
        "most_counted": MAX_COUNTED,
        "sample": open_ones,
        "steps": await _steps(visit, open_ones[0].task_id) if open_ones else [],
        "tried": await _tried(visit, tried) if tried else None,
        "change": change or _BulkChange(values.get("patch")),
        "form": values,
    }
    return View(
        "dead_letter_decide.html",
        f"{WORDS[resolution].verb} dead letters",
        context,
        topics=_TOPICS | ({f"task:{tried}"} if tried else frozenset()),
        at_most_every_sec=1.0,
    )


async def _tried(visit: Visit, task_id: str) -> Task | None:
    found = await visit.engine.read.tasks_by_id([task_id])
    return found[0] if found else None


class _BulkChange(Struct, frozen=True):
    """A merge patch for the specs of many letters, and what it changes in some of them."""

    text: str
    samples: list[tuple[DeadLetter, list[_Changed]]] = field(default_factory=list)
    is_checked: bool = False

    @property
    def checked(self) -> str:
        """Stands for the text that is shown."""
        return element_id(self.text)


class _Outcome(Struct):
    """What became of the letters of one decision."""

    decided: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


@pages.action("/dead-letters/decide")
async def decide(visit: Visit) -> Done | View:
    """About all that match, up to the number that the page announced; or about one of them first."""
    wanted = _Wanted.of(visit.form)
    change: _BulkChange | None = None
    try:
        resolution = _resolution(visit.form.get("resolution"))
        announced = int(visit.form.number("count") or 0)
        patch = None
        if resolution is Resolution.MODIFY_AND_RETRY:
            patch = _object("patch", visit.form.get("patch"))
            change = await _bulk_change(visit, wanted, patch)
            if visit.form.get("step") == "check" or visit.form.get("checked") != element_id(change.text):
                return (await _decide_view(visit, visit.form, change)).still()
        limit = 1 if visit.form.get("step") == "one" else announced
        if limit < 1:
            raise InvalidInputError(errors=[("count", "must be at least 1: no dead letter matches")])
        outcome = await _decide_about(visit, wanted, limit, patch)
    except LineshaftError as error:
        return _refused(await _decide_view(visit, visit.form, change), error)
    return await _after_decision(visit, wanted, resolution, outcome)


async def _after_decision(visit: Visit, wanted: _Wanted, resolution: Resolution, outcome: _Outcome) -> Done:
    left = await visit.engine.dead_letters.count_open(wanted.filter)
    message = f"{WORDS[resolution].past} {len(outcome.decided):,}."
    if outcome.refused:
        reasons = "; ".join(reason for _, reason in outcome.refused[:_SHOWN_REFUSALS])
        message += f" {len(outcome.refused):,} could not be decided: {reasons}"
    message += await _decided_before(visit, wanted, outcome)
    # An escalated letter of a selection still waits for another decision.
    if not left or resolution is Resolution.ESCALATE:
        return Done("/dead-letters", message)
    message += f" {left:,} wait{'s' if left == 1 else ''} for a decision."
    fields = [*wanted.fields, ("resolution", resolution.value)]
    if visit.form.get("patch"):
        fields.append(("patch", visit.form.get("patch")))
    if visit.form.get("step") == "one" and outcome.decided:
        fields.append(("tried", outcome.decided[0]))
    return Done(f"/dead-letters/decide?{urlencode(fields)}", message)


async def _decided_before(visit: Visit, wanted: _Wanted, outcome: _Outcome) -> str:
    """Which letters of a selection another person was faster with."""
    seen = {*outcome.decided, *(task_id for task_id, _ in outcome.refused)}
    if visit.form.get("step") == "one" or not wanted.task_ids:
        return ""
    missing = DeadLetterFilter(task_ids=[name for name in wanted.task_ids if name not in seen], hidden=True)
    if not missing.task_ids:
        return ""
    page = await visit.engine.dead_letters.find(missing, limit=_LETTERS)
    who = dict.fromkeys(
        f"{found.reviewer or 'a manual retry'} ({found.resolution})" for found in page.items if found.reviewed
    )
    return f" {len(missing.task_ids):,} had already been decided by {', '.join(who)}." if who else ""


async def _decide_about(visit: Visit, wanted: _Wanted, limit: int, patch: dict[str, Any] | None) -> _Outcome:
    """Batch by batch, until `limit` letters were decided about, none is left, or it takes too long."""
    outcome = _Outcome()
    until = time.monotonic() + _LONGEST_SEC
    while time.monotonic() < until and len(outcome.decided) < limit:
        most = min(MAX_BULK, limit - len(outcome.decided))
        if patch is None:
            done = await visit.engine.dead_letters.resolve_all(wanted.filter, _decision(visit), limit=most)
            decided, more = done.resolved, done.more
            refused = [(refusal.task_id, refusal.detail) for refusal in done.refused]
        else:
            decided, refused, more = await _change_some(visit, wanted, patch, most)
        outcome.decided += decided
        known = {task_id for task_id, _ in outcome.refused}
        outcome.refused += [refusal for refusal in refused if refusal[0] not in known]
        if not more or not decided:
            break
    return outcome


async def _change_some(
    visit: Visit, wanted: _Wanted, patch: dict[str, Any], most: int
) -> tuple[list[str], list[tuple[str, str]], bool]:
    """Each letter gets its own spec with the same change."""
    page = await visit.engine.dead_letters.find(wanted.filter, limit=min(_LETTERS, most))
    decided: list[str] = []
    refused: list[tuple[str, str]] = []
    for found in page.items:
        decision = _decision(visit, spec=merge_patch(found.spec, patch))
        try:
            await visit.engine.dead_letters.resolve(found.task_id, decision)
        except (InvalidInputError, InvalidTransitionError) as error:
            refused.append((found.task_id, str(error)))
        else:
            decided.append(found.task_id)
    return decided, refused, page.next_cursor is not None


async def _bulk_change(visit: Visit, wanted: _Wanted, patch: dict[str, Any]) -> _BulkChange:
    page = await visit.engine.dead_letters.find(wanted.filter, limit=_CHANGED_SAMPLES)
    samples = [(found, _changed(found.spec, merge_patch(found.spec, patch))) for found in page.items]
    return _BulkChange(visit.form.get("patch"), samples, is_checked=True)


# Forms.


def _resolution(text: str) -> Resolution:
    found = next((known for known in Resolution if known == text), None)
    if found is None:
        raise InvalidInputError(
            errors=[("resolution", f"must be one of {', '.join(Resolution)}, got {text[:100]!r}")]
        )
    return found


def _decision(
    visit: Visit, *, resolution: Resolution | None = None, spec: dict[str, Any] | None = None
) -> ResolutionRequest:
    form = visit.form
    resolution = resolution or _resolution(form.get("resolution"))
    is_retry = resolution in RETRIES
    steps: list[str] | str | None = ALL_STEPS if form.get("forget_all") else form.all("forget") or None
    return ResolutionRequest(
        resolution=resolution.value,
        reviewer=visit.actor,
        note=form.get("reason") or None,
        not_before=_not_before(visit) if is_retry else None,
        spec=spec,
        forget_steps=steps if is_retry else None,
    )


def _not_before(visit: Visit) -> datetime | None:
    """At a time (UTC), or after some minutes; None: now."""
    text = visit.form.get("not_before")
    if text:
        try:
            return datetime.fromisoformat(text).replace(tzinfo=UTC)
        except ValueError:
            raise InvalidInputError(
                errors=[("not_before", f"must be a date and a time, got {text[:100]!r}")]
            ) from None
    minutes = visit.form.number("delay_min")
    if not minutes:
        return None
    now = visit.engine.database.now["now"] or datetime.now(UTC)
    try:
        moment: datetime = now + timedelta(minutes=minutes)
    except (OverflowError, ValueError):
        raise InvalidInputError(errors=[("delay_min", f"is too long, got {minutes}")]) from None
    return moment


def _as_text(spec: msgspec.Raw) -> str:
    """To be edited: characters that could mislead are escaped."""
    return printable(msgspec.json.format(bytes(spec), indent=2).decode())


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text.encode())
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidInputError(errors=[(name, f"must be JSON: {error}")]) from None
    if not isinstance(found, dict):
        raise InvalidInputError(errors=[(name, f"must be a JSON object, got {type(found).__name__}")])
    return found
