"""`lineshaft costs`, and corrections of what tasks have cost."""

import argparse
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

from lineshaft.cli.connection import add_flags, connect
from lineshaft.cli.ids import task_id
from lineshaft.cli.output import Id, moment, print_facts, print_json, print_note, print_table, usd
from lineshaft.cli.usage import UsageError, positive

if TYPE_CHECKING:
    from lineshaft.client.blocking import SyncLineshaft
    from lineshaft.types import CostFigures, CostLine, Costs, Task

_BY = ("day", "type", "model", "agent", "dag")


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "costs",
        help="show and correct what tasks cost",
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
    actions = command.add_subparsers(title="actions", metavar="ACTION")
    correct = actions.add_parser(
        "correct",
        help="correct what a task has cost",
        description="Correct what a task has cost. The difference is booked today: on the task, its agents, "
        "its DAG and the day. What is disputed is decided with it.",
    )
    correct.add_argument("--to", required=True, metavar="USD", help="what the task has cost")
    correct.set_defaults(run=correct_)
    accept = actions.add_parser(
        "accept",
        help="count what is disputed of a task's cost",
        description="Accept what the claims of a task reported beyond their ceilings: it counts from now on.",
    )
    accept.set_defaults(run=accept_)
    refuse = actions.add_parser(
        "refuse",
        help="never count what is disputed of a task's cost",
        description="Refuse what the claims of a task reported beyond their ceilings: it never counts.",
    )
    refuse.set_defaults(run=refuse_)
    for action in (correct, accept, refuse):
        action.add_argument("id", metavar="TASK", help="the id of the task, or its short form")
        action.add_argument(
            "--reason", required=True, metavar="TEXT", help="why, for the event that is recorded"
        )
        add_flags(action)


def correct_(args: argparse.Namespace) -> int:
    try:
        amount = Decimal(args.to)
    except InvalidOperation:
        raise UsageError(f"--to must be an amount of dollars, got {args.to!r}.") from None
    return _decide(args, lambda shaft, task: shaft.correct_cost(task, amount, reason=args.reason))


def accept_(args: argparse.Namespace) -> int:
    return _decide(args, lambda shaft, task: shaft.correct_cost(task, disputed="accept", reason=args.reason))


def refuse_(args: argparse.Namespace) -> int:
    return _decide(args, lambda shaft, task: shaft.correct_cost(task, disputed="refuse", reason=args.reason))


def _decide(args: argparse.Namespace, decide: "Callable[[SyncLineshaft, str], Task]") -> int:
    with connect(args) as shaft:
        task = decide(shaft, task_id(shaft, args.id))
    if args.json:
        print_json(task)
    else:
        print_facts([("Task", task.id), ("Cost", f"{usd(task.cost_usd)} USD")])
    return 0


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
    if costs.disputed:
        print()
        rows = [
            (Id(task.id), task.type, task.agent_id, usd(task.cost_usd), usd(task.disputed_usd))
            for task in costs.disputed
        ]
        print_table(("TASK", "TYPE", "AGENT", "COST", "DISPUTED"), rows, empty="")
        print_note(
            "What is disputed was reported beyond the ceiling of a claim, and counts nowhere. Decide with "
            "'lineshaft costs accept TASK', 'refuse TASK' or 'correct TASK --to USD'."
        )
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
        ("Last hour", f"{usd(today.last_hour_usd)} USD, in attempts that ended"),
    ]
    if costs.disputed_usd:
        facts.append(("Disputed", f"{usd(costs.disputed_usd)} USD, not counted"))
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
