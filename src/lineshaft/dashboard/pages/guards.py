"""Guards: what is held back, until when, and how much waits behind it."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from msgspec import Struct

from lineshaft.dashboard.command_lines import command_line, element_id, segment
from lineshaft.dashboard.visit import Done, Pages, View, Visit
from lineshaft.errors import InvalidInputError, NotFoundError
from lineshaft.types import Breaker, Limits, Lock, Pause, Scope, Slowdown
from lineshaft.types.limits import SETTINGS

pages = Pages()

_PAGE = 50
_DAGS = 20
#: Types that the form suggests.
_SUGGESTED = 200
_ALL_TYPES = "*"
_BREAKER_ORDER = ("open", "half_open", "closed")
_MONEY = ("daily_budget_usd", "velocity_usd", "default_max_cost_usd")
_NUMBERS = ("velocity_window_sec", "crash_cost_fraction", "judge_max_cost_usd")
#: Events after which the page is rendered again.
_TOPICS = frozenset(
    {
        "queue.paused",
        "queue.resumed",
        "breaker.opened",
        "breaker.half_open",
        "breaker.closed",
        "signal.slowdown",
        "lock.expired",
        "limits.changed",
    }
)


class GuardEntry(Struct, frozen=True):
    """A guard with what its button needs."""

    guard: Any
    key: str
    address: str
    command: str | None
    #: One of several with this key.
    holder: str = ""

    @property
    def element_id(self) -> str:
        return element_id(self.key + self.holder)


def _pause_row(pause: Pause) -> GuardEntry:
    words = ["resume"] if pause.type == _ALL_TYPES else ["resume", pause.type]
    return GuardEntry(pause, pause.type, f"/guards/resume:{segment(pause.type)}", command_line(*words))


def _breaker_row(breaker: Breaker) -> GuardEntry:
    address = f"/guards/breakers/reset:{segment(breaker.key)}"
    return GuardEntry(breaker, breaker.key, address, command_line("breakers", "reset", breaker.key))


def _slowdown_row(slowdown: Slowdown) -> GuardEntry:
    address = f"/guards/slowdowns/end:{segment(slowdown.key)}"
    return GuardEntry(slowdown, slowdown.key, address, command_line("slowdowns", "end", slowdown.key))


def _lock_row(lock: Lock) -> GuardEntry:
    address = f"/guards/locks/release:{segment(lock.key)}"
    holder = lock.holder_task_id if lock.shared else ""
    return GuardEntry(lock, lock.key, address, command_line("locks", "release", lock.key), holder)


@pages.page("/guards")
async def guards(visit: Visit) -> View:
    return await _guards_view(visit)


async def _guards_view(visit: Visit) -> View:
    read, query = visit.engine.read, visit.query
    pauses = await read.pauses()
    breakers = await read.breakers(limit=_PAGE, cursor=query.get("breakers") or None)
    slowdowns = await read.slowdowns(limit=_PAGE, cursor=query.get("slowdowns") or None)
    locks = await read.locks(limit=_PAGE, cursor=query.get("locks") or None)
    limits = await visit.engine.limits.read()
    by_state = sorted(breakers.items, key=lambda each: (_BREAKER_ORDER.index(each.state), each.key))
    context = {
        "pauses": [_pause_row(pause) for pause in pauses],
        "all_paused": any(pause.type == _ALL_TYPES for pause in pauses),
        "breakers": [_breaker_row(each) for each in by_state],
        "slowdowns": [_slowdown_row(each) for each in slowdowns.items],
        "locks": [_lock_row(each) for each in locks.items],
        "next_of": {
            "breakers": breakers.next_cursor,
            "slowdowns": slowdowns.next_cursor,
            "locks": locks.next_cursor,
        },
        "short_dags": await read.short_dags(limit=_DAGS),
        "waiting": {
            reason.code: reason
            for reason in (await visit.shared.waiting.get(recent=visit.is_open)).reasons
            if reason.code
        },
        "types": await _known_types(visit),
        "limits": limits,
        "settings": SETTINGS,
        "values": _values(limits),
        "before": _values(limits),
        "day_ends": _day_ends(visit),
    }
    return View("guards.html", "Guards", context, topics=_TOPICS, at_most_every_sec=1.0, refresh_sec=10.0)


async def _known_types(visit: Visit) -> list[str]:
    """Types that agents declare, to choose from."""
    found = await visit.shared.agents.get(recent=visit.is_open)
    return sorted({name for agent in found for name in agent.types or ()})[:_SUGGESTED]


def _values(limits: Limits) -> dict[str, str]:
    """The limits as the form has them."""
    values = {name: _plain(getattr(limits, name)) for name in (*_MONEY, *_NUMBERS)}
    return values | {"velocity_action": limits.velocity_action}


def _plain(value: Decimal | float | None) -> str:
    if value is None:
        return ""
    return f"{value.normalize():f}" if isinstance(value, Decimal) else f"{value:g}"


def _day_ends(visit: Visit) -> datetime:
    now: datetime = visit.engine.database.now["now"] or datetime.now(UTC)
    midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight + timedelta(days=1)


# What an operator changes.


_ENDED = "Nothing to change: it has already ended."


async def _acted(
    visit: Visit, act: Callable[[str | None], Awaitable[Any]], message: str, *, ended: str = _ENDED
) -> Done:
    """Act with the reason of the form.

    `ended`: what a person reads whose guard has ended in the meantime; then `act` is False or NotFoundError.
    """
    try:
        if await act(visit.form.get("reason") or None) is False:
            return Done("/guards", ended)
    except NotFoundError:
        return Done("/guards", ended)
    return Done("/guards", message)


@pages.action("/guards/pause", refused=_guards_view)
async def pause(visit: Visit) -> Done:
    type_ = visit.form.get("type")
    if visit.form.get("what") == "type" and not type_:
        raise InvalidInputError(errors=[("type", "enter the type of task to pause")])
    what = f"Tasks of type {type_} are" if type_ else "All types are"
    return await _acted(
        visit,
        lambda reason: visit.engine.pauses.pause(type_ or None, reason=reason),
        f"{what} paused. Running tasks continue.",
    )


@pages.action("/guards/resume:{type:path}", refused=_guards_view)
async def resume(visit: Visit) -> Done:
    type_ = visit.path["type"]
    what = "all types" if type_ == _ALL_TYPES else f"tasks of type {type_}"
    return await _acted(
        visit, lambda reason: visit.engine.pauses.resume(type_, reason=reason), f"Resumed {what}."
    )


@pages.action("/guards/breakers/open", refused=_guards_view)
async def open_breaker(visit: Visit) -> Done:
    key = visit.form.get("key")
    return await _acted(
        visit,
        lambda reason: visit.engine.breakers.open(key, reason=reason),
        f"Breaker {key} is open until it is reset.",
    )


@pages.action("/guards/breakers/reset:{key:path}", refused=_guards_view)
async def reset_breaker(visit: Visit) -> Done:
    key = visit.path["key"]
    return await _acted(
        visit,
        lambda reason: visit.engine.breakers.reset(key, reason=reason),
        f"Breaker {key} is closed, and its failures are forgotten.",
    )


@pages.action("/guards/slowdowns/end:{key:path}", refused=_guards_view)
async def end_slowdown(visit: Visit) -> Done:
    key = visit.path["key"]
    return await _acted(
        visit,
        lambda reason: visit.engine.slowdowns.end(key, reason=reason),
        f"The slowdown {key} has ended: agents look for work again at once.",
    )


@pages.action("/guards/locks/release:{key:path}", refused=_guards_view)
async def release_lock(visit: Visit) -> Done:
    key, holder = visit.path["key"], visit.form.get("holder") or None
    return await _acted(
        visit,
        lambda reason: visit.engine.locks.release(key, reason=reason, holder=holder),
        f"The lock {key} was released.",
        ended=f"Nothing was changed: the task doesn't hold the lock {key} any more.",
    )


def _before(visit: Visit, limits: Limits) -> dict[str, str]:
    """The limits as the form was filled with them; somebody may have changed them since."""
    sent = dict(visit.form.pairs())
    return {name: sent.get(f"before_{name}", value) for name, value in _values(limits).items()}


@pages.action("/guards/limits", Scope.OPERATE)
async def change_limits(visit: Visit) -> Done | View:
    form = visit.form
    try:
        changes: dict[str, Any] = {name: form.get(name) or None for name in _MONEY}
        for name in _NUMBERS:
            changes[name] = form.number(name)
            if changes[name] is None:
                raise InvalidInputError(errors=[(name, "must not be empty")])  # noqa: TRY301 - as the others
        changes["velocity_action"] = form.get("velocity_action")
        before, returned = _before(visit, await visit.engine.limits.read()), form.all("from_settings")
        await visit.engine.limits.patch(
            # Only what the person changed is set by hand.
            {
                name: value
                for name, value in changes.items()
                if name not in returned and form.get(name) != before[name]
            },
            from_settings=returned,
            reason=form.get("reason") or None,
        )
    except InvalidInputError as error:
        view = await _guards_view(visit)
        entered = {name: form.get(name) for name in (*_MONEY, *_NUMBERS, "velocity_action")}
        context = {
            **view.context,
            "values": entered,
            "before": _before(visit, view.context["limits"]),
            "entered_reason": form.get("reason"),
        }
        return View(view.template, view.title, {**context, "limits_error": error}, status=422)
    return Done("/guards", "The limits were changed. Every process obeys them at once.")
