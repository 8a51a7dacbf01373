"""What people do with one task: retry, rerun, cancel, change, correct its cost, end a pause of its type."""

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import quote

from msgspec import UNSET

from lineshaft.dashboard.pages.task import task_view
from lineshaft.dashboard.rendering import usd
from lineshaft.dashboard.visit import Done, Pages, Values, Visit
from lineshaft.errors import InvalidInputError
from lineshaft.model.printable import printable
from lineshaft.types import CostCorrection, Disputed, TaskChange
from lineshaft.types.request import MAX_REASON
from lineshaft.types.waits import NewSignal

pages = Pages()

_REASON = 1_000


def _here(visit: Visit) -> str:
    return f"/tasks/{quote(visit.path['id'], safe='')}"


@pages.action("/tasks/{id}/retry", refused=task_view)
async def retry(visit: Visit) -> Done:
    status = await visit.engine.revive.retry(visit.path["id"])
    return Done(_here(visit), f"Retried: the task is {status}.")


@pages.action("/tasks/{id}/rerun", refused=task_view)
async def rerun(visit: Visit) -> Done:
    form = visit.form
    status = await visit.engine.rerun.rerun(
        visit.path["id"],
        downstream=form.get("downstream") == "yes",
        cancel_running=form.get("cancel_running") == "yes",
        forget_steps=form.get("forget_steps", "yes") == "yes",
        reason=form.get("reason")[:_REASON] or None,
    )
    return Done(_here(visit), f"Runs again: the task is {status}.")


@pages.action("/tasks/{id}/cancel", refused=task_view)
async def cancel(visit: Visit) -> Done:
    reason = visit.form.get("reason")[:_REASON] or f"cancelled by {visit.actor}"
    cascade = visit.form.get("cascade", "yes") == "yes"
    cancelled = await visit.engine.cancel.cancel(visit.path["id"], reason, cascade=cascade)
    others = len(cancelled) - 1
    if others < 0:
        return Done(_here(visit), "The task was cancelled before.")
    more = f" and {others:,} other{'' if others == 1 else 's'}" if others else ""
    return Done(_here(visit), f"Cancelled the task{more}.")


@pages.action("/tasks/{id}/resume")
async def resume(visit: Visit) -> Done:
    name = visit.form.get("type")
    resumed = await visit.engine.pauses.resume(None if name == "*" else name)
    what = "everything" if name == "*" else f"type {printable(name)[:100]!r}"
    return Done(_here(visit), f"Resumed {what}." if resumed else f"There was no pause of {what} any more.")


@pages.action("/tasks/{id}/signal", refused=task_view)
async def send_signal(visit: Visit) -> Done:
    form = visit.form
    data = form.get("data").encode(errors="replace") or b"null"
    sent = await visit.engine.waits.signal(visit.path["id"], NewSignal(form.get("signal"), data))
    return Done(_here(visit), f"Sent the signal {printable(sent.name)[:100]}.")


@pages.action("/tasks/{id}/change", refused=task_view)
async def change(visit: Visit) -> Done:
    changes = _changes(visit.form)
    if not changes:
        return Done(_here(visit), "Nothing was changed: every field has its old value.")
    await visit.engine.edit.edit(visit.path["id"], TaskChange(**changes))
    return Done(_here(visit), f"Changed {', '.join(sorted(changes))}.")


@pages.action("/tasks/{id}/cost", refused=task_view)
async def correct_cost(visit: Visit) -> Done:
    await visit.engine.corrections.correct(visit.path["id"], _correction(visit.form, visit.actor))
    (task,) = await visit.engine.read.tasks_by_id([visit.path["id"]])
    return Done(_here(visit), f"The cost is {usd(task.cost_usd)}.")


def _correction(form: Values, actor: str | None) -> CostCorrection:
    reason = form.get("reason")[:MAX_REASON] or f"decided by {actor}"
    decision = form.get("disputed")
    if decision:
        if decision not in set(Disputed):
            raise InvalidInputError(
                errors=[("disputed", f"must be accept or refuse, got {decision[:100]!r}")]
            )
        return CostCorrection(reason=reason, disputed=Disputed(decision))
    try:
        return CostCorrection(reason=reason, cost_usd=Decimal(form.get("cost_usd")))
    except InvalidOperation:
        fault = f"must be an amount in US dollars, got {form.get('cost_usd')[:100]!r}"
        raise InvalidInputError(errors=[("cost_usd", fault)]) from None


def _changes(form: Values) -> dict[str, Any]:
    """The fields that a person changed: those that differ from what the form showed."""
    changes: dict[str, Any] = {}
    faults: list[tuple[str, str]] = []
    entered = dict(form.pairs())
    for name, read in _READ.items():
        text = entered.get(name)
        if text is None or text == entered.get(f"was_{name}"):
            continue
        try:
            changes[name] = read(text)
        except (ValueError, InvalidOperation):
            faults.append((name, f"must be {_MUST_BE[name]}, got {text[:100]!r}"))
    if faults:
        raise InvalidInputError(errors=faults)
    return {name: value for name, value in changes.items() if value is not UNSET}


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
