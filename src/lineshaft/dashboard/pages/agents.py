"""Agents: is capacity there, and is it used? Processes, budgets, and what an operator changes."""

from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from msgspec import Struct

from lineshaft.dashboard.command_lines import command_line, element_id, segment
from lineshaft.dashboard.visit import Done, Pages, View, Visit
from lineshaft.engine.read.agent_history import SEARCHED
from lineshaft.errors import InvalidInputError
from lineshaft.model.instance_names import short_names
from lineshaft.model.printable import printable
from lineshaft.types import AgentInfo, InstanceInfo, ReasonCode
from lineshaft.types.waiting import WaitingReason

pages = Pages()

STATUSES = ("active", "draining", "offline")
_UNSERVED = (ReasonCode.NO_CAPABLE_AGENT, ReasonCode.NO_AFFORDABLE_AGENT)
_PAGE = 50
_TASKS = 20
#: Types with their defaults; 'lineshaft types' shows all.
_TYPES = 200
#: Without a heartbeat for so many intervals: one may be late because a machine is busy.
_OVERDUE_INTERVALS = 2.0
_LONGEST_HOURS = 24 * 30


class AgentEntry(Struct, frozen=True):
    """An agent as the list shows it."""

    agent: AgentInfo
    now: datetime
    #: What it spends an hour, by the last minutes; None: nothing, or not known.
    usd_per_hour: Decimal | None = None

    @property
    def address(self) -> str:
        return f"/agents/{segment(self.agent.id)}"

    @property
    def element_id(self) -> str:
        return element_id(self.agent.id)

    @property
    def live(self) -> list[InstanceInfo]:
        return [each for each in self.agent.instances if each.status != "offline"]

    @property
    def versions(self) -> list[str]:
        """What the live processes run; without one, what the last one ran."""
        shown = self.live or self.agent.instances[:1]
        return list(dict.fromkeys(each.version for each in shown if each.version is not None))

    @property
    def is_overdue(self) -> bool:
        return any(self.is_late(each) for each in self.live)

    def is_late(self, instance: InstanceInfo) -> bool:
        silent_sec = (self.now - instance.last_heartbeat).total_seconds()
        return instance.status != "offline" and silent_sec > _OVERDUE_INTERVALS * max(
            instance.heartbeat_interval_sec, instance.poll_interval_sec
        )

    @property
    def used(self) -> Decimal:
        """The used part of its budget, 0 to 1."""
        budget = self.agent.budget_usd
        if not budget:
            return Decimal(1)
        return min((self.agent.spent_usd + self.agent.reserved_usd) / budget, Decimal(1))

    @property
    def hours_left(self) -> float | None:
        """Until the budget is used up, as it spends now; None: not known, or very long."""
        left = self.agent.budget_remaining_usd
        if left is None or left <= 0 or not self.usd_per_hour:
            return None
        hours = float(left / self.usd_per_hour)
        return hours if hours < _LONGEST_HOURS else None

    def named_instances(self) -> list[tuple[str, InstanceInfo]]:
        names = short_names([each.instance for each in self.agent.instances])
        return [
            (name or f"incarnation {each.incarnation}", each)
            for name, each in zip(names, self.agent.instances, strict=True)
        ]

    def command(self, *words: str) -> str | None:
        return command_line("agents", words[0], self.agent.id, *words[1:])


def _now(visit: Visit) -> datetime:
    now: datetime = visit.engine.database.now["now"] or datetime.now(UTC)
    return now


@pages.page("/agents")
async def agents(visit: Visit) -> View:
    wanted = [status for status in visit.query.all("status") if status in STATUSES]
    page = await visit.engine.fleet.page(status=wanted, limit=_PAGE, cursor=visit.query.get("cursor") or None)
    now = _now(visit)
    rates = await _rates(visit, page.items)
    rows = [AgentEntry(agent, now, rates.get(agent.id)) for agent in page.items]
    context = {
        "rows": rows,
        "next_cursor": page.next_cursor,
        "statuses_of_agents": STATUSES,
        "wanted": wanted,
        "slots": sum(row.agent.max_concurrent_tasks for row in rows if row.agent.status == "active"),
        "busy": sum(row.agent.current_tasks for row in rows),
        "unserved": await _unserved(visit),
        "types": (await visit.engine.task_types.page(limit=_TYPES, cursor=None)).items,
    }
    return View("agents.html", "Agents", context, refresh_sec=5.0)


async def _rates(visit: Visit, agents: Sequence[AgentInfo]) -> dict[str, Decimal]:
    """What agents with a budget spend an hour."""
    limited = [agent.id for agent in agents if agent.budget_usd is not None]
    return await visit.engine.read.spending_rates(limited) if limited else {}


async def _unserved(visit: Visit) -> list[WaitingReason]:
    """Work that no agent can take: none is able to, or none can pay for it."""
    waiting = await visit.shared.waiting.get(recent=visit.is_open)
    return [reason for reason in waiting.reasons if reason.code in _UNSERVED]


@pages.page("/agents/{id:path}")
async def agent(visit: Visit) -> View:
    return await _agent_view(visit)


async def _agent_view(visit: Visit) -> View:
    agent_id = visit.path["id"]
    found = await visit.engine.fleet.read(agent_id)
    ids = [task_id for each in found.instances for task_id in each.task_ids]
    running = await visit.engine.read.tasks_by_id(ids[:_TASKS])
    context: dict[str, Any] = {
        "row": AgentEntry(found, _now(visit), (await _rates(visit, [found])).get(agent_id)),
        "agent": found,
        "running": running,
        "more_running": max(len(ids) - len(running), 0),
        "recent": await visit.engine.read.recent_claims(agent_id, limit=_TASKS),
        "searched": SEARCHED,
    }
    topics = frozenset({f"agent:{agent_id}"})
    return View("agent.html", f"Agent {printable(agent_id[:100])}", context, topics=topics, refresh_sec=2.0)


# What an operator changes.


async def _changed(visit: Visit, message: str, **changes: Any) -> Done:
    agent_id, reason = visit.path["id"], visit.form.get("reason") or None
    await visit.engine.fleet.patch(agent_id, **changes, reason=reason)
    return Done(f"/agents/{segment(agent_id)}", message.format(agent_id))


@pages.action("/agents/{id:path}/drain", refused=_agent_view)
async def drain(visit: Visit) -> Done:
    return await _changed(
        visit, "{} takes no more work. It finishes the tasks that it holds.", status="draining"
    )


@pages.action("/agents/{id:path}/activate", refused=_agent_view)
async def activate(visit: Visit) -> Done:
    return await _changed(visit, "{} takes work again.", status="active")


@pages.action("/agents/{id:path}/budget", refused=_agent_view)
async def set_budget(visit: Visit) -> Done:
    amount = visit.form.get("budget_usd")
    total = None if amount.lower() in {"", "unlimited"} else amount
    return await _changed(visit, "The budget of {} was changed.", budget_usd=total)


@pages.action("/agents/{id:path}/add-budget", refused=_agent_view)
async def add_budget(visit: Visit) -> Done:
    amount = visit.form.get("add_budget_usd")
    return await _changed(visit, "The budget of {} was raised.", add_budget_usd=amount)


@pages.action("/agents/{id:path}/slots", refused=_agent_view)
async def slots(visit: Visit) -> Done:
    given = visit.form.get("max_concurrent_tasks")
    if given and not (given.isascii() and given.isdigit() and len(given) < 10):  # noqa: PLR2004 - of an int
        fault = f"must be a whole number, or empty for what each process declares, got {given[:50]!r}"
        raise InvalidInputError(errors=[("max_concurrent_tasks", fault)])
    return await _changed(
        visit, "The slots of {} were changed.", max_concurrent_tasks=int(given) if given else None
    )


@pages.action("/agents/{id:path}/delete", refused=_agent_view)
async def delete(visit: Visit) -> Done:
    agent_id, reason = visit.path["id"], visit.form.get("reason") or None
    await visit.engine.fleet.delete(agent_id, reason=reason)
    return Done("/agents", f"Agent {agent_id} was deleted. Its history, budget and spend are kept.")
