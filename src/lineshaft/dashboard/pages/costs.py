"""Costs: what was spent, by day, type, model, agent and DAG, each table also as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import date
from decimal import Decimal
from typing import Any

from starlette.responses import Response

from lineshaft.dashboard.charts import ChartBar, bars
from lineshaft.dashboard.rendering import usd
from lineshaft.dashboard.visit import Pages, Values, View, Visit
from lineshaft.errors import NotFoundError
from lineshaft.types import Costs
from lineshaft.types.costs import DEFAULT_DAYS, MOST_DAYS, CostLine, HourCosts

pages = Pages()

_PERIODS = (1, 7, 30, 90, MOST_DAYS)
_FIGURES = (
    "cost_usd",
    "attempts",
    "failed",
    "failed_cost_usd",
    "retries",
    "retry_cost_usd",
    "unpriced",
    "tokens_input",
    "tokens_output",
)
#: A table: its columns, and the field of `Costs` with its rows.
_TABLES = {
    "day": ("day", "spent_usd", *_FIGURES),
    "type": ("key", *_FIGURES),
    "model": ("key", *_FIGURES),
    "agent": ("key", *_FIGURES),
    "dag": ("id", "title", "status", "created_at", "spent_usd", "budget_ceiling_usd"),
    "hour": ("at", "cost_usd", "attempts"),
}


@pages.page("/costs")
async def costs(visit: Visit) -> View:
    found = await _read(visit)
    return View(
        "costs.html",
        "Costs",
        {
            "costs": found,
            "spent": _spent(found),
            "days": _days(visit.query),
            "periods": _PERIODS,
            "by_day": bars("Spent by day", _day_bars(found)),
            "by_hour": bars(
                "Cost of attempts that ended in each hour of today",
                _hour_bars(found.today.hours),
            ),
            "tables": _tables(found),
        },
        topics=frozenset({"task.completed", "task.failed", "task.dead_lettered", "limits.changed"}),
        at_most_every_sec=5.0,
        refresh_sec=30.0,
    )


@pages.page("/costs/{table}.csv")
async def costs_csv(visit: Visit) -> Response:
    """One of the tables, complete."""
    name = visit.path["table"]
    if name not in _TABLES:
        raise NotFoundError(f"There is no table {name!r}. There are {', '.join(_TABLES)}.")
    found = await _read(visit)
    rows: Sequence[Any] = found.today.hours if name == "hour" else getattr(found, f"by_{name}")
    columns = _TABLES[name]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([_cell(getattr(row, column)) for column in columns] for row in rows)
    return Response(
        text.getvalue().encode(),
        media_type="text/csv; charset=utf-8",
        headers={
            "Content-Disposition": f'attachment; filename="lineshaft-costs-by-{name}.csv"',
            "X-Content-Type-Options": "nosniff",
        },
    )


def _spent(found: Costs) -> Decimal | None:
    """What was booked on these days, as the figure of today; None: only some tasks are asked for."""
    booked = [day.spent_usd for day in found.by_day if day.spent_usd is not None]
    return None if len(booked) < len(found.by_day) else sum(booked, Decimal(0))


async def _read(visit: Visit) -> Costs:
    query = visit.query
    return await visit.engine.read.costs(
        days=_days(query),
        type=query.get("type") or None,
        model=query.get("model") or None,
        agent_id=query.get("agent") or None,
    )


def _days(query: Values) -> int:
    """A bad value is dropped."""
    text = query.get("days")
    return int(text) if text.isdecimal() and 1 <= int(text[:9]) <= MOST_DAYS else DEFAULT_DAYS


def _tables(found: Costs) -> Iterable[tuple[str, str, Sequence[CostLine]]]:
    """The name of the filter, the heading, and the rows."""
    return (
        ("type", "Type", found.by_type),
        ("model", "Model", found.by_model),
        ("agent", "Agent", found.by_agent),
    )


def _day_bars(found: Costs) -> list[ChartBar]:
    """A bar for each day of the period, also for those without costs."""
    days = {day.day: day for day in found.by_day}
    drawn = []
    for ordinal in range(found.since.toordinal(), found.today.day.toordinal() + 1):
        each = date.fromordinal(ordinal)
        if (day := days.get(each)) is None:
            drawn.append(ChartBar((), f"{each}: nothing"))
            continue
        total = day.cost_usd if day.spent_usd is None else day.spent_usd
        lost = min(day.failed_cost_usd, total)
        parts = (("spent", float(total - lost)), ("lost", float(lost)))
        drawn.append(ChartBar(parts, f"{each}: {usd(total)}, of which {usd(lost)} in failed attempts"))
    return drawn


def _hour_bars(hours: Sequence[HourCosts]) -> list[ChartBar]:
    """A bar for each hour of the day, also for those to come."""
    drawn = [ChartBar((), f"{hour:02}:00 UTC: nothing yet") for hour in range(24)]
    for hour in hours:
        drawn[hour.at.hour] = ChartBar(
            (("spent", float(hour.cost_usd)),),
            f"{hour.at:%H}:00 UTC: {usd(hour.cost_usd)}, {hour.attempts} attempts",
        )
    return drawn


def _cell(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula gets an apostrophe."""
    if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t", "\r"}:
        return f"'{value}"
    return value
