"""What people do with one task: retry, cancel, change, and end a pause that holds it back."""

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import quote

from msgspec import UNSET
from starlette.responses import Response

from lineshaft.dashboard.pages.task import task_view
from lineshaft.dashboard.visit import Done, Pages, Values, View, Visit
from lineshaft.errors import InvalidInputError, LineshaftError
from lineshaft.model.printable import printable
from lineshaft.types import TaskChange

pages = Pages()

_REASON = 1_000


async def _refused(visit: Visit, error: LineshaftError) -> View | Response:
    view = await task_view(visit)
    return view.refused(error) if isinstance(view, View) else view


def _here(visit: Visit) -> str:
    return f"/tasks/{quote(visit.path['id'], safe='')}"


@pages.action("/tasks/{id}/retry")
async def retry(visit: Visit) -> Done | View | Response:
    try:
        status = await visit.engine.operations.retry(visit.path["id"])
    except LineshaftError as error:
        return await _refused(visit, error)
    return Done(_here(visit), f"Retried: the task is {status}.")


@pages.action("/tasks/{id}/cancel")
async def cancel(visit: Visit) -> Done | View | Response:
    reason = visit.form.get("reason")[:_REASON] or f"cancelled by {visit.actor}"
    cascade = visit.form.get("cascade", "yes") == "yes"
    try:
        cancelled = await visit.engine.operations.cancel(visit.path["id"], reason, cascade=cascade)
    except LineshaftError as error:
        return await _refused(visit, error)
    others = len(cancelled) - 1
    if others < 0:
        return Done(_here(visit), "The task was cancelled before.")
    more = f" and {others:,} other{'' if others == 1 else 's'}" if others else ""
    return Done(_here(visit), f"Cancelled the task{more}.")


@pages.action("/tasks/{id}/resume")
async def resume(visit: Visit) -> Done:
    name = visit.form.get("type")
    resumed = await visit.engine.operations.resume(None if name == "*" else name)
    what = "everything" if name == "*" else f"type {printable(name)[:100]!r}"
    return Done(_here(visit), f"Resumed {what}." if resumed else f"There was no pause of {what} any more.")


@pages.action("/tasks/{id}/change")
async def change(visit: Visit) -> Done | View | Response:
    try:
        wanted = _wanted_change(visit.form)
        if not wanted:
            return Done(_here(visit), "Nothing was changed: every field has its old value.")
        await visit.engine.operations.change(visit.path["id"], TaskChange(**wanted))
    except LineshaftError as error:
        return await _refused(visit, error)
    return Done(_here(visit), f"Changed {', '.join(sorted(wanted))}.")


def _wanted_change(form: Values) -> dict[str, Any]:
    """The fields that a person changed: those that differ from what the form showed."""
    wanted: dict[str, Any] = {}
    faults: list[tuple[str, str]] = []
    given = dict(form.pairs())
    for name, read in _READ.items():
        text = given.get(name)
        if text is None or text == given.get(f"was_{name}"):
            continue
        try:
            wanted[name] = read(text)
        except (ValueError, InvalidOperation):
            faults.append((name, f"must be {_MUST_BE[name]}, got {text[:100]!r}"))
    if faults:
        raise InvalidInputError(errors=faults)
    return {name: value for name, value in wanted.items() if value is not UNSET}


def _moment(text: str) -> datetime | None:
    if not text:
        return None
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _money(text: str) -> Decimal | None:
    return Decimal(text) if text else None


def _tags(text: str) -> list[str]:
    return [tag for part in text.split(",") if (tag := part.strip())]


_READ: Mapping[str, Any] = {
    "priority": int,
    "deadline": _moment,
    "tags": _tags,
    "max_attempts": int,
    "max_cost_usd": _money,
    "max_total_cost_usd": _money,
    "max_duration_sec": float,
}
_MUST_BE = {
    "priority": "a whole number",
    "deadline": "a time in ISO 8601, such as 2030-01-31T09:00:00Z",
    "tags": "texts separated by commas",
    "max_attempts": "a whole number",
    "max_cost_usd": "an amount in US dollars, or empty",
    "max_total_cost_usd": "an amount in US dollars, or empty",
    "max_duration_sec": "a number of seconds",
}
