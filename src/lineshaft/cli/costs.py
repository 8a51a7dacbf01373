"""`lineshaft costs`."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lineshaft.cli.connection import add_flags, connect
from lineshaft.cli.output import Id, moment, print_facts, print_json, print_note, print_table, usd
from lineshaft.cli.usage import positive

if TYPE_CHECKING:
    from lineshaft.types import CostFigures, CostLine, Costs

_BY = ("day", "type", "model", "agent", "dag")


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "costs",
        help="show what tasks cost",
        description="Show what was spent today, and what attempts cost by day, type, model, agent or DAG. An "
        "attempt counts with its whole cost on the UTC day on which it ended.",
    )
    command.add_argument("--by", choices=_BY, default="day", help="the table to show (default: day)")
    command.add_argument("--days", type=positive, default=7, metavar="N", help="the last N days (default: 7)")
    command.add_argument("--type", metavar="TYPE", help="only attempts of this task type")
    command.add_argument("--model", metavar="MODEL", help="only attempts with this model")
    command.add_argument("--agent", metavar="ID", help="only attempts of this agent")
    add_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        costs = shaft.costs(days=args.days, type=args.type, model=args.model, agent_id=args.agent)
    if args.json:
        print_json(costs)
        return 0
    _today(costs)
    print()
    if args.by == "day":
        days = [(day.day.isoformat(), usd(day.spent_usd), *_figures(day)) for day in costs.by_day]
        print_table(("DAY", "SPENT", *_FIGURES), days, empty=_EMPTY, optional=_OPTIONAL)
    elif args.by == "dag":
        dags = [
            (Id(dag.id), dag.status, usd(dag.spent_usd), usd(dag.budget_ceiling_usd), dag.title)
            for dag in costs.by_dag
        ]
        print_table(("DAG", "STATUS", "SPENT", "BUDGET", "TITLE"), dags, empty="No DAG has cost anything.")
        if not costs.by_dag_exact:
            print_note("There are very many DAGs: only the newest were compared.")
    else:
        lines: Sequence[CostLine] = getattr(costs, f"by_{args.by}")
        rows = [(_NAMES.get(line.key, line.key), *_figures(line)) for line in lines]
        print_table((args.by.upper(), *_FIGURES), rows, empty=_EMPTY, optional=_OPTIONAL)
    if costs.total.unpriced:
        print_note(
            f"{costs.total.unpriced} attempts used tokens and reported no cost: what they cost is unknown."
        )
    return 0


_EMPTY = "No attempt has ended in these days."
_NAMES = {"": "(none)", "*": "(all others)"}
#: A note below the table has the attempts without a price.
_OPTIONAL = ("UNPRICED", "TOKENS IN", "TOKENS OUT")
_FIGURES = ("COST", "ATTEMPTS", "FAILED", "FAILED COST", "UNPRICED", "TOKENS IN", "TOKENS OUT")


def _figures(figures: "CostFigures") -> tuple[str, ...]:
    return (
        usd(figures.cost_usd),
        str(figures.attempts),
        str(figures.failed),
        usd(figures.failed_cost_usd),
        str(figures.unpriced),
        str(figures.tokens_input),
        str(figures.tokens_output),
    )


def _today(costs: "Costs") -> None:
    today = costs.today
    budget = "no limit" if today.daily_budget_usd is None else f"of {usd(today.daily_budget_usd)} USD"
    facts = [
        ("Spent today", f"{usd(today.spent_usd)} USD, {budget}"),
        ("Reserved", f"{usd(today.reserved_usd)} USD"),
        ("Last hour", f"{usd(today.last_hour_usd)} USD"),
    ]
    if today.forecast is None:
        facts.append(("Forecast", "none: fewer than 10 attempts had a cost today"))
    else:
        low, high = usd(today.forecast.low_usd), usd(today.forecast.high_usd)
        facts.append(
            ("Forecast", f"{usd(today.forecast.expected_usd)} USD by midnight UTC ({low} to {high})")
        )
        if today.forecast.budget_reached_at is not None:
            facts.append(("Budget reached", moment(today.forecast.budget_reached_at)))
    print_facts(facts)
