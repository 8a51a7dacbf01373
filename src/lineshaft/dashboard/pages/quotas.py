"""Quotas: what runs, what is used, who waits, and what an operator changes."""

from collections.abc import Mapping
from decimal import Decimal

from msgspec import Struct

from lineshaft.dashboard.command_lines import command_line, element_id, segment
from lineshaft.dashboard.visit import Done, Pages, View, Visit
from lineshaft.errors import InvalidInputError, LineshaftError, NotFoundError
from lineshaft.operations.quotas import NewRate, SetQuota
from lineshaft.types import Quota, RateUnit, Scope

pages = Pages()

_PAGE = 50
_TOPICS = frozenset({"quota.changed"})
_FIELDS = ("name", "match", "max_running", "max_waiting", "amount", "unit", "per_sec", "weight", "keys")


class QuotaEntry(Struct, frozen=True):
    """A quota with what its row needs."""

    quota: Quota

    @property
    def address(self) -> str:
        return f"/quotas/{segment(self.quota.name)}"

    @property
    def edit(self) -> str:
        return f"/quotas/edit:{segment(self.quota.name)}"

    @property
    def element_id(self) -> str:
        return element_id(self.quota.name)

    @property
    def is_each(self) -> bool:
        """Whether its limits are for each of several keys."""
        return self.quota.each and self.quota.match.endswith("*")

    @property
    def used(self) -> float:
        """The used part of its rate, 0 to 1: of the key that used most."""
        rate = self.quota.rate
        return 0.0 if rate is None else min(float(self.quota.used) / float(rate.amount), 1.0)


@pages.page("/quotas")
async def quotas(visit: Visit) -> View:
    page = await visit.engine.quotas.page(limit=_PAGE, cursor=visit.query.get("cursor") or None)
    context = {
        "rows": [QuotaEntry(quota) for quota in page.items],
        "next_cursor": page.next_cursor,
    }
    return View("quotas.html", "Quotas", context, topics=_TOPICS, refresh_sec=5.0)


# Before the page of a quota. Without a name: a new one.


@pages.page("/quotas/edit:{name:path}", Scope.OPERATE)
async def edit(visit: Visit) -> View:
    name = visit.path["name"]
    if not name:
        return _form_view(name, {"unit": str(RateUnit.TASKS), "weight": "1", "keys": "each"})
    return _form_view(name, _values((await visit.engine.quotas.details(name)).quota))


def _form_view(name: str, values: Mapping[str, str]) -> View:
    context = {
        "quota_name": name,
        "address": f"/quotas/edit:{segment(name)}",
        "back": f"/quotas/{segment(name)}" if name else "/quotas",
        "values": {field: values.get(field, "") for field in (*_FIELDS, "reason")},
        "units": list(RateUnit),
    }
    return View("quota_edit.html", f"Change quota {name}" if name else "New quota", context)


def _values(quota: Quota) -> dict[str, str]:
    """A quota as the form has it."""
    values: dict[str, object] = {
        "name": quota.name,
        "match": quota.match,
        "max_running": quota.max_running,
        "max_waiting": quota.max_waiting,
        "unit": RateUnit.TASKS,
        "weight": f"{quota.weight:g}",
        "keys": "each" if quota.each else "shared",
    }
    if quota.rate is not None:
        amount = Decimal(str(quota.rate.amount)).normalize()
        values |= {"amount": f"{amount:f}", "unit": quota.rate.unit, "per_sec": f"{quota.rate.per_sec:g}"}
    return {name: "" if value is None else str(value) for name, value in values.items()}


@pages.page("/quotas/{name}")
async def quota(visit: Visit) -> View:
    details = await visit.engine.quotas.details(visit.path["name"])
    name = details.quota.name
    context = {
        "row": QuotaEntry(details.quota),
        "details": details,
        "delete_command": command_line("quotas", "delete", name),
    }
    return View("quota.html", f"Quota {name}", context, topics=_TOPICS, refresh_sec=2.0)


# What an operator changes.


@pages.action("/quotas/edit:{name:path}")
async def change(visit: Visit) -> Done | View:
    form, name = visit.form, visit.path["name"]
    try:
        made = await visit.engine.quotas.set(_entered(visit, name), reason=form.get("reason") or None)
    except LineshaftError as error:
        entered = {field: form.get(field)[:2_000] for field in (*_FIELDS, "reason")}
        return _form_view(name, entered).refused(error)
    verb = "was changed" if name else "is set"
    return Done(QuotaEntry(made).address, f"Quota {made.name} {verb}. It applies from the next claim.")


def _entered(visit: Visit, name: str) -> SetQuota:
    form = visit.form
    amount, per_sec = form.number("amount"), form.number("per_sec")
    if (amount is None) != (per_sec is None):
        missing = "amount" if amount is None else "per_sec"
        raise InvalidInputError(errors=[(missing, "a rate needs both an amount and its seconds")])
    rate = None
    if amount is not None and per_sec is not None:
        rate = NewRate(amount=Decimal(form.get("amount")), unit=form.get("unit"), per_sec=per_sec)
    return SetQuota(
        name=name or form.get("name"),
        match=form.get("match"),
        each=form.get("keys") != "shared",
        max_running=_whole(form.number("max_running")),
        max_waiting=_whole(form.number("max_waiting")),
        rate=rate,
        weight=form.number("weight") or 0.0,
    )


def _whole(number: float | None) -> int | None:
    """As entered: what isn't a whole number is refused with the others."""
    return number if number is None or not number.is_integer() else int(number)  # type: ignore[return-value]


@pages.action("/quotas/delete:{name:path}")
async def delete(visit: Visit) -> Done:
    name = visit.path["name"]
    try:
        await visit.engine.quotas.delete(name, reason=visit.form.get("reason") or None)
    except NotFoundError:
        return Done("/quotas", "Nothing to change: it was deleted already.")
    return Done("/quotas", f"Quota {name} was deleted. What waited for it can be claimed.")
