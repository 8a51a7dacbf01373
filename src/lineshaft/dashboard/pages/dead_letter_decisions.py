"""Decisions about dead letters: about one, about one with a changed spec, and about many."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from lineshaft.dashboard.command_lines import element_id, segment
from lineshaft.dashboard.pages.dead_letters import (
    MOST_LETTERS,
    TOPICS,
    WORDS,
    LetterSelection,
    is_open,
    letter_view,
    steps_of,
)
from lineshaft.dashboard.spec_compare import Changed, changed, merge_patch
from lineshaft.dashboard.visit import Done, Pages, Values, View, Visit
from lineshaft.engine.review.dead_letters import MAX_BULK, MAX_COUNTED
from lineshaft.errors import AlreadyReviewedError, InvalidInputError, InvalidTransitionError, LineshaftError
from lineshaft.model.printable import printable
from lineshaft.model.reviews import ALL_STEPS, RETRIES, Resolution, ResolutionRequest
from lineshaft.types import DeadLetter, DeadLetterFilter, Scope, Task

pages = Pages()

#: Letters whose change is shown before it is applied to all.
_CHANGED_SAMPLES = 5
#: A decision about many continues for so long; the rest needs another click.
_LONGEST_SEC = 20.0
_SHOWN_REFUSALS = 3
_CONFLICT = 409


# One letter.


@pages.action("/dead-letters/{task_id}/resolve")
async def resolve(visit: Visit) -> Done | View:
    task_id = visit.path["task_id"]
    try:
        decision = _decision(visit)
        await visit.engine.dead_letters.resolve(task_id, decision)
    except LineshaftError as error:
        return _refused(await letter_view(visit), error)
    resolution = Resolution(decision.resolution)
    message = f"{WORDS[resolution].past} by {visit.actor}."
    if resolution in RETRIES:
        message += await _behind_breakers(visit, [task_id])
    return Done(f"/dead-letters/{segment(task_id)}", message)


def _refused(view: View, error: LineshaftError) -> View:
    """The page with the error; that another person was faster is said as such."""
    shown = view.refused(error)
    if isinstance(error, AlreadyReviewedError | InvalidTransitionError):
        return replace(shown, status=_CONFLICT)
    return shown


# Edit and retry.


class _Edit(Struct, frozen=True):
    """A changed spec: its text, and what it changes."""

    text: str
    changes: list[Changed] = field(default_factory=list)
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
        "steps": await steps_of(visit, found.task_id),
        "is_open": is_open(found),
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
        edited = _Edit(text, changed(found.spec, spec), is_checked=True)
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


@pages.page("/dead-letters/decide", Scope.OPERATE)
async def decide_page(visit: Visit) -> View:
    return await _decide_view(visit, visit.query)


async def _decide_view(visit: Visit, values: Values, change: "_BulkChange | None" = None) -> View:
    wanted, resolution = LetterSelection.of(values), _resolution(values.get("resolution"))
    if not wanted.fields:
        raise InvalidInputError(errors=[("task", "choose dead letters, or open a group, and decide there")])
    letters = visit.engine.dead_letters
    sample = await letters.find(wanted.filter, limit=_CHANGED_SAMPLES)
    open_ones = [found for found in sample.items if is_open(found)]
    tried = values.get("tried")
    context = {
        "wanted": wanted,
        "resolution": resolution,
        "words": WORDS[resolution],
        "is_retry": resolution in RETRIES,
        "count": await letters.count_open(wanted.filter),
        "most_counted": MAX_COUNTED,
        "sample": open_ones,
        "steps": await steps_of(visit, open_ones[0].task_id) if open_ones else [],
        "tried": await _tried(visit, tried) if tried else None,
        "change": change or _BulkChange(values.get("patch")),
        "form": values,
    }
    return View(
        "dead_letter_decide.html",
        f"{WORDS[resolution].verb} dead letters",
        context,
        topics=TOPICS | ({f"task:{tried}"} if tried else frozenset()),
        at_most_every_sec=1.0,
    )


async def _tried(visit: Visit, task_id: str) -> Task | None:
    found = await visit.engine.read.tasks_by_id([task_id])
    return found[0] if found else None


class _BulkChange(Struct, frozen=True):
    """A merge patch for the specs of many letters, and what it changes in some of them."""

    text: str
    samples: list[tuple[DeadLetter, list[Changed]]] = field(default_factory=list)
    is_checked: bool = False

    @property
    def checked(self) -> str:
        """Stands for the text that is shown."""
        return element_id(self.text)


class _DecisionOutcome(Struct):
    """What became of the letters of one decision."""

    decided: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


@pages.action("/dead-letters/decide")
async def decide(visit: Visit) -> Done | View:
    """About all that match, up to the number that the page announced; or about one of them first."""
    wanted = LetterSelection.of(visit.form)
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


async def _after_decision(
    visit: Visit, wanted: LetterSelection, resolution: Resolution, outcome: _DecisionOutcome
) -> Done:
    left = await visit.engine.dead_letters.count_open(wanted.filter)
    message = f"{WORDS[resolution].past} {len(outcome.decided):,}."
    if outcome.refused:
        reasons = "; ".join(reason for _, reason in outcome.refused[:_SHOWN_REFUSALS])
        message += f" {len(outcome.refused):,} could not be decided: {reasons}"
    if resolution in RETRIES:
        message += await _behind_breakers(visit, outcome.decided)
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


async def _behind_breakers(visit: Visit, task_ids: list[str]) -> str:
    """That retried tasks wait all the same: their breaker is open."""
    opened = set((await visit.engine.read.attention()).open_breakers)
    if not opened:
        return ""
    tasks = await visit.engine.read.tasks_by_id(task_ids[:MOST_LETTERS])
    keys = sorted(opened & {task.type for task in tasks})
    if not keys:
        return ""
    which = f"The breaker of {printable(', '.join(keys[:_SHOWN_REFUSALS]))} is open"
    return f" {which}: they wait for its next probe, or until you reset it."


async def _decided_before(visit: Visit, wanted: LetterSelection, outcome: _DecisionOutcome) -> str:
    """Which letters of a selection another person was faster with."""
    seen = {*outcome.decided, *(task_id for task_id, _ in outcome.refused)}
    if visit.form.get("step") == "one" or not wanted.task_ids:
        return ""
    missing = DeadLetterFilter(task_ids=[name for name in wanted.task_ids if name not in seen], hidden=True)
    if not missing.task_ids:
        return ""
    page = await visit.engine.dead_letters.find(missing, limit=MOST_LETTERS)
    who = dict.fromkeys(
        f"{found.reviewer or 'a manual retry'} ({found.resolution})" for found in page.items if found.reviewed
    )
    return f" {len(missing.task_ids):,} had already been decided by {', '.join(who)}." if who else ""


async def _decide_about(
    visit: Visit, wanted: LetterSelection, limit: int, patch: dict[str, Any] | None
) -> _DecisionOutcome:
    """Batch by batch, until `limit` letters were decided about, none is left, or it takes too long."""
    outcome = _DecisionOutcome()
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
    visit: Visit, wanted: LetterSelection, patch: dict[str, Any], most: int
) -> tuple[list[str], list[tuple[str, str]], bool]:
    """Each letter gets its own spec with the same change."""
    page = await visit.engine.dead_letters.find(wanted.filter, limit=min(MOST_LETTERS, most))
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


async def _bulk_change(visit: Visit, wanted: LetterSelection, patch: dict[str, Any]) -> _BulkChange:
    page = await visit.engine.dead_letters.find(wanted.filter, limit=_CHANGED_SAMPLES)
    samples = [(found, changed(found.spec, merge_patch(found.spec, patch))) for found in page.items]
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
