"""`lineshaft dag`."""

import argparse
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lineshaft.cli.actions import print_items, print_result
from lineshaft.cli.connection import add_flags, collect, connect
from lineshaft.cli.ids import dag_id
from lineshaft.cli.output import (
    Id,
    When,
    moment_and_age,
    print_facts,
    print_json,
    print_table,
    usd,
)
from lineshaft.cli.task import tries
from lineshaft.cli.usage import UsageError, dollars, positive

if TYPE_CHECKING:
    from lineshaft.types import Dag, Task
    from lineshaft.types.dags import ListItems

_MOST_NAMED = 3
#: Levels of a tree that are indented: a long chain would be wider than anything can show.
_MOST_INDENTED = 20


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "dag",
        help="list, show and cancel DAGs, and change their budgets",
        description="List, show and cancel DAGs, and change their budgets.",
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list DAGs", description="List DAGs, newest first.")
    listing.add_argument(
        "--limit", type=positive, default=50, metavar="N", help="at most N DAGs (default: 50)"
    )
    listing.add_argument("--all", action="store_true", help="also the DAGs of standalone tasks")
    listing.add_argument(
        "--status", action="append", default=[], metavar="STATUS", help="only this status; repeatable"
    )
    listing.add_argument("--search", default=None, metavar="TEXT", help="part of the title")
    listing.set_defaults(run=list_)
    show = actions.add_parser(
        "show",
        help="show a DAG as a tree or a picture",
        description="Show a DAG as a tree of tasks with their states, or as a picture.",
    )
    form = show.add_mutually_exclusive_group()
    form.add_argument("--svg", metavar="FILE", help="write a picture to FILE; - is standard output")
    form.add_argument("--mermaid", action="store_true", help="print a flowchart for Mermaid")
    show.set_defaults(run=show_)
    cancel = actions.add_parser(
        "cancel", help="cancel a DAG", description="Cancel all tasks of a DAG that have not ended."
    )
    cancel.add_argument("--reason", default="cancelled on the command line")
    cancel.set_defaults(run=cancel_)
    budget = actions.add_parser(
        "budget",
        help="change the budget of a DAG",
        description="Change the budget of a DAG. Tasks that it can afford now become available at once.",
    )
    amount = budget.add_mutually_exclusive_group(required=True)
    amount.add_argument("--add", type=dollars, metavar="USD", help="add to the budget")
    amount.add_argument("--ceiling", type=dollars, metavar="USD", help="set the budget")
    amount.add_argument("--no-ceiling", action="store_true", help="remove the limit")
    budget.set_defaults(run=budget_)
    for action in (show, budget, cancel):
        action.add_argument("id", metavar="DAG", help="the id of the DAG, or its short form")
    for action in (listing, show, budget, cancel):
        add_flags(action)


def list_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        dags, more = collect(
            lambda limit, cursor: shaft.dags(
                status=args.status, q=args.search or (), virtual=args.all, limit=limit, cursor=cursor
            ),
            args.limit,
        )
    return print_items(
        args,
        dags,
        ("DAG", "STATUS", "TITLE", "DONE", "USD", "CREATED"),
        lambda dag: (
            Id(dag.id),
            dag.status,
            dag.title,
            f"{dag.counts.get('COMPLETED', 0)} of {len(dag.tasks)}",
            usd(dag.spent_usd) if dag.spent_usd else "",
            When(dag.created_at),
        ),
        empty=f"No DAGs in {args.place}. Submit one with 'lineshaft submit --file dag.yaml'; --all also "
        "lists standalone tasks.",
        optional=("USD",),
        more=more,
    )


def show_(args: argparse.Namespace) -> int:
    draw = args.svg is not None or args.mermaid
    if draw and args.json:
        raise UsageError("--json can't be combined with --svg or --mermaid.")
    with connect(args) as shaft:
        dag = shaft.get_dag(dag_id(shaft, args.id))
        found, _ = collect(lambda limit, cursor: shaft.list(dag_id=dag.id, limit=limit, cursor=cursor))
    if draw:
        return _draw(dag, sorted(found, key=lambda task: task.id), args)
    if args.json:
        print_json({"dag": dag, "tasks": found})
        return 0
    money = f"{usd(dag.spent_usd)} USD spent"
    if dag.budget_ceiling_usd is not None:
        money += f", {usd(dag.reserved_usd)} reserved, of {usd(dag.budget_ceiling_usd)}"
    print_facts(
        [
            ("DAG", dag.id),
            ("Title", dag.title),
            ("Status", dag.outcome),
            ("Created", " by ".join(filter(None, (moment_and_age(dag.created_at), dag.created_by)))),
            ("Tasks", ", ".join(f"{count} {status}" for status, count in dag.counts.items())),
            ("Cost", money),
        ]
    )
    print()
    tree = _tree(found)
    print_table(
        ("TASK", "STATUS", "TRIES", "AGENT", "ID"), tree, empty="No tasks.", optional=("AGENT", "TRIES")
    )
    return 0


def _draw(dag: "Dag", tasks: "Sequence[Task]", args: argparse.Namespace) -> int:
    from lineshaft import pictures  # noqa: PLC0415 - slow to import

    nodes, edges = pictures.nodes_of(tasks, datetime.now(UTC)), pictures.edges_of(tasks)
    if args.mermaid:
        print(pictures.dag_mermaid(nodes, edges, title=dag.title), end="")
        return 0
    picture = pictures.dag_svg(nodes, edges, title=dag.title) + "\n"
    # Readable in any encoding.
    drawn = picture.encode("ascii", "xmlcharrefreplace")
    if args.svg == "-":
        print(drawn.decode(), end="")
        return 0
    try:
        Path(args.svg).write_bytes(drawn)
    except OSError as error:
        raise UsageError(f"Can't write {args.svg}: {error.strerror}.") from None
    print(f"Wrote {args.svg}.")
    return 0


def _label(task: "Task") -> str:
    """The name that its DAG was written with."""
    return task.key or task.title


def _tree(found: "Sequence[Task]") -> Iterator[Sequence[object]]:
    """Each task once, below the first of its dependencies; the other dependencies are named.

    The children of a list are counted in the line of its task.
    """
    from lineshaft.types.dags import children_of_lists, items_of_lists  # noqa: PLC0415 - slow to import

    in_lists = children_of_lists(found)
    items = items_of_lists(found, in_lists)
    tasks = {task.id: task for task in found if task.id not in in_lists}
    # Without those of other DAGs.
    upstream = {
        name: [other for other in task.depends_on if other in tasks] for name, task in sorted(tasks.items())
    }
    below: dict[str | None, list[str]] = {}
    for name, others in upstream.items():
        below.setdefault(others[0] if others else None, []).append(name)
    # The next one is last.
    stack = [(name, "", last, 0) for name, last in _marked(below.get(None, []))][::-1]
    while stack:
        name, indent, is_last, depth = stack.pop()
        task = tasks[name]
        others = upstream[name][1:]
        named = ", ".join(_label(tasks[other]) for other in others[:_MOST_NAMED])
        named += "…" if len(others) > _MOST_NAMED else ""
        branch = "" if not depth else ("└─ " if is_last else "├─ ")
        level = f"(level {depth + 1}) " if depth > _MOST_INDENTED else ""
        yield (
            f"{indent}{branch}{level}{_label(task)}{_list_of(task, items.get(name))}"
            + (f" (also after {named})" if named else ""),
            task.status,
            tries(task),
            task.claim.agent_id,
            Id(name),
        )
        deeper = indent
        if branch and depth < _MOST_INDENTED:
            deeper += "   " if is_last else "│  "
        children = [(child, deeper, last, depth + 1) for child, last in _marked(below.get(name, []))]
        stack += children[::-1]


def _list_of(task: "Task", items: "ListItems | None") -> str:
    if task.for_each is None:
        return ""
    return f" for each of {task.for_each.over}" + (f": {items}" if items else "")


def _marked(names: list[str]) -> list[tuple[str, bool]]:
    return [(name, number == len(names) - 1) for number, name in enumerate(names)]


def budget_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        if args.add is not None:
            dag = shaft.add_dag_budget(dag_id(shaft, args.id), args.add)
        else:
            dag = shaft.set_dag_budget(dag_id(shaft, args.id), args.ceiling)
    return print_result(args, dag, _show_budget)


def _show_budget(dag: "Dag") -> None:
    ceiling = dag.budget_ceiling_usd
    print_facts(
        [
            ("DAG", dag.id),
            ("Budget", "unlimited" if ceiling is None else f"{usd(ceiling)} USD"),
            ("Spent", f"{usd(dag.spent_usd)} USD"),
            ("Reserved", f"{usd(dag.reserved_usd)} USD"),
        ]
    )


def cancel_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        dag = shaft.cancel_dag(dag_id(shaft, args.id), args.reason)
    return print_result(args, dag, lambda dag: print_facts([("DAG", dag.id), ("Status", dag.status)]))
