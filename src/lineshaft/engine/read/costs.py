"""What tasks cost, from tables that the tally keeps by day and by minute: no read touches the history.

Money is booked when it is spent, and that is exact (`lineshaft.spend`, which limits spending too). By type,
model and agent, an attempt counts with its whole cost on the day on which it ends. So the two differ by what
attempts in progress have spent, and by what ended attempts report late.
"""

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.snapshot import Reader, Row
from lineshaft.engine.read.tally import figures_age_sec
from lineshaft.model.forecast import forecast
from lineshaft.types.costs import (
    CostFigures,
    CostLine,
    Costs,
    DagCosts,
    DayCosts,
    DisputedCost,
    HourCosts,
    TodayCosts,
)

#: Lines of a list.
_LINES = 100
#: DAGs that are listed, and those that are compared.
_DAGS = 20
_DAGS_COMPARED = 10_000

_SQL = catalog.load(__name__)


async def read_costs(
    reader: Reader, *, days: int, type_: str | None, model: str | None, agent_id: str | None
) -> Costs:
    (limits,) = await reader.rows(_SQL["today"])
    now: datetime = limits["now"].astimezone(UTC)
    today = now.date()
    since = today - timedelta(days=days - 1)
    midnight = datetime.combine(today, time(), UTC)
    everything = type_ is None and model is None and agent_id is None
    span = {"since": since, "upto": today}
    await reader.send(_SQL["plan_to_scan"])
    filters = {**span, "type": type_, "model": model, "agent_id": agent_id}
    days_ended = await reader.send(_SQL["days"], **filters)
    lines = await reader.send(_SQL["lines"], **filters, most=_LINES)
    spent = await reader.send(_SQL["spent"], **span)
    hours = await reader.send(_SQL["hours"], since=midnight)
    last_hour = await reader.send(_SQL["last_hour"])
    dags = await reader.send(
        _SQL["dags"],
        since=datetime.combine(since, time(), UTC),
        scanned=_DAGS_COMPARED + 1,
        most=_DAGS,
    )
    disputed = await reader.send(_SQL["disputed"], most=_LINES)
    age_sec = await figures_age_sec(reader)
    found: dict[str, list[Row]] = {"type": [], "model": [], "agent": [], "total": []}
    for row in await lines.fetchall():
        found[row.pop("list")].append(row)
    booked = {row["day"]: row["spent_usd"] for row in await spent.fetchall()}
    (rate,) = await last_hour.fetchall()
    by_dag = await dags.fetchall()
    in_dispute = await disputed.fetchall()
    return Costs(
        as_of=now,
        since=since,
        today=_today(now, limits, booked.get(today, Decimal(0)), await hours.fetchall(), rate),
        total=_figures(found["total"][0]),
        by_day=_days(await days_ended.fetchall(), booked if everything else None),
        by_type=[CostLine(**row) for row in found["type"]],
        by_model=[CostLine(**row) for row in found["model"]],
        by_agent=[CostLine(**row) for row in found["agent"]],
        by_dag=[_dag(row) for row in by_dag if row["spent_usd"]],
        by_dag_exact=not by_dag or by_dag[0]["seen"] <= _DAGS_COMPARED,
        disputed_usd=in_dispute[0]["all_disputed_usd"] if in_dispute else Decimal(0),
        disputed=[
            DisputedCost(**{name: row[name] for name in DisputedCost.__struct_fields__}) for row in in_dispute
        ],
        figures_age_sec=age_sec,
    )


def _today(now: datetime, limits: Row, spent: Decimal, hours: list[Row], rate: Row) -> TodayCosts:
    midnight = datetime.combine(now.date(), time(), UTC)
    known = {row["at"].astimezone(UTC): HourCosts(**row) for row in hours}
    every = [midnight + timedelta(hours=hour) for hour in range(now.hour + 1)]
    return TodayCosts(
        day=now.date(),
        spent_usd=spent,
        reserved_usd=limits["reserved_usd"],
        daily_budget_usd=limits["daily_budget_usd"],
        hours=[known.get(at, HourCosts(at, Decimal(0), 0)) for at in every],
        last_hour_usd=rate["cost_usd"],
        forecast=forecast(
            now=now,
            midnight=midnight + timedelta(days=1),
            spent_usd=spent,
            reserved_usd=limits["reserved_usd"],
            budget_usd=limits["daily_budget_usd"],
            last_hour_usd=rate["cost_usd"],
            last_hour_attempts=rate["attempts"],
            attempts=sum(hour.attempts for hour in known.values()),
        ),
    )


def _figures(row: Row) -> CostFigures:
    return CostFigures(**{name: row[name] for name in CostFigures.__struct_fields__})


_NOTHING = CostFigures(
    attempts=0,
    failed=0,
    retries=0,
    unpriced=0,
    tokens_input=0,
    tokens_output=0,
    cost_usd=Decimal(0),
    failed_cost_usd=Decimal(0),
    retry_cost_usd=Decimal(0),
)


def _days(rows: list[Row], booked: dict[date, Decimal] | None) -> list[DayCosts]:
    ended = {row["day"]: _figures(row) for row in rows}
    days = []
    for day in sorted({*ended, *(booked or ())}):
        figures = ended.get(day, _NOTHING)
        values = {name: getattr(figures, name) for name in CostFigures.__struct_fields__}
        spent = None if booked is None else booked.get(day, Decimal(0))
        days.append(DayCosts(day=day, spent_usd=spent, **values))
    return days


def _dag(row: Row) -> DagCosts:
    return DagCosts(**{name: row[name] for name in DagCosts.__struct_fields__})
