"""`lineshaft dag`: look at DAGs, as trees, change what they may cost, and cancel them."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from lineshaft.cli.api import add_flags, connect, segment
from lineshaft.cli.output import moment, print_facts, print_json, print_table, usd


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("dag", help="list, show, fund and cancel DAGs", description="DAGs.")
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list DAGs", description="Lists DAGs, newest first.")
    listing.add_argument("--limit", type=int, default=50, metavar="N", help="how many at the most (50)")
    listing.set_defaults(run=list_)
    show = actions.add_parser(
        "show", help="show a DAG as a tree", description="Shows a DAG, as a tree with states."
    )
    show.set_defaults(run=show_)
    cancel = actions.add_parser(
        "cancel", help="cancel what has not ended of a DAG", description="Cancels a DAG."
    )
    cancel.add_argument("--reason", default="cancelled on the command line")
    cancel.set_defaults(run=cancel_)
    budget = actions.add_parser(
        "budget",
        help="change what a DAG may cost",
        description="Changes the ceiling of a DAG. What it can afford now is to be had at once.",
    )
    sum_ = budget.add_mutually_exclusive_group(required=True)
    sum_.add_argument("--add", type=float, metavar="USD", help="more than before")
    sum_.add_argument("--ceiling", type=float, metavar="USD", help="this much in all")
    sum_.add_argument("--no-ceiling", action="store_true", help="no limit")
    budget.set_defaults(run=budget_)
    for action in (show, budget, cancel):
        action.add_argument("id", metavar="DAG", help="its id")
    for action in (listing, show, budget, cancel):
        add_flags(action)


def list_(args: argparse.Namespace) -> int:
    with connect(args) as api:
        dags = list(api.pages("/v1/dags", {}, most=args.limit))
    if args.json:
        print_json(dags)
        return 0
    print_table(
        ("DAG", "STATUS", "TITLE", "TASKS", "DONE", "USD", "CREATED"),
        [
            (
                dag["id"],
                dag["status"],
                dag["title"][:40],
                len(dag["tasks"]),
                dag["counts"].get("COMPLETED", 0),
                usd(dag["spent_usd"]),
                moment(dag["created_at"]),
            )
            for dag in dags
        ],
        empty="There are no DAGs. 'lineshaft submit --file dag.yaml' makes one.",
    )
    return 0


def show_(args: argparse.Namespace) -> int:
    with connect(args) as api:
        dag = api.get(f"/v1/dags/{segment(args.id)}")
        tasks = {task["id"]: task for task in api.pages("/v1/tasks", {"dag_id": dag["id"]}, most=None)}
    if args.json:
        print_json({"dag": dag, "tasks": list(tasks.values())})
        return 0
    money = f"{usd(dag['spent_usd'])} USD spent"
    if dag["budget_ceiling_usd"] is not None:
        money += f", {usd(dag['reserved_usd'])} reserved, of {usd(dag['budget_ceiling_usd'])}"
    counts = ", ".join(f"{n} {status}" for status, n in sorted(dag["counts"].items()))
    print_facts(
        [
            ("DAG", dag["id"]),
            ("Title", dag["title"]),
            ("Status", dag["status"]),
            ("Tasks", counts),
            ("Money", money),
        ]
    )
    print()
    print_table(("TASK", "STATUS", "TRIES", "AGENT", "ID"), _tree(tasks), empty="It has no tasks.")
    return 0


def _tree(tasks: dict[str, Any]) -> Iterator[Sequence[object]]:
    """Each task once, below the first of those it waits for; the others are named."""
    below: dict[str | None, list[str]] = {}
    for name, task in sorted(tasks.items()):
        upstream = [other for other in task["depends_on"] if other in tasks]
        below.setdefault(upstream[0] if upstream else None, []).append(name)
    stack = [(name, "", last) for name, last in _marked(below.get(None, []))]
    seen: set[str] = set()
    while stack:
        name, indent, is_last = stack.pop(0)
        if name in seen:
            continue
        seen.add(name)
        task = tasks[name]
        others = [tasks[other]["title"] for other in task["depends_on"][1:] if other in tasks]
        after = f" (and after {', '.join(others[:3])}{'…' if len(others) > 3 else ''})" if others else ""  # noqa: PLR2004
        is_root = not any(other in tasks for other in task["depends_on"])
        branch = "" if is_root else ("└─ " if is_last else "├─ ")
        yield (
            f"{indent}{branch}{task['title'][:50]}{after}",
            task["status"],
            f"{task['attempts']}/{task['max_attempts']}",
            (task["claim"] or {}).get("agent_id"),
            name,
        )
        deeper = indent + (("   " if is_last else "│  ") if branch else "")
        stack = [(child, deeper, last) for child, last in _marked(below.get(name, []))] + stack


def _marked(names: list[str]) -> list[tuple[str, bool]]:
    return [(name, number == len(names) - 1) for number, name in enumerate(names)]


def budget_(args: argparse.Namespace) -> int:
    change = {"budget_ceiling_usd": args.ceiling} if args.add is None else {"add_budget_usd": args.add}
    with connect(args) as api:
        dag = api.call("PATCH", f"/v1/dags/{segment(args.id)}", body=change)
    if args.json:
        print_json(dag)
    else:
        ceiling = dag["budget_ceiling_usd"]
        print_facts(
            [
                ("DAG", dag["id"]),
                ("Ceiling", "none" if ceiling is None else f"{usd(ceiling)} USD"),
                ("Spent", f"{usd(dag['spent_usd'])} USD"),
                ("Reserved", f"{usd(dag['reserved_usd'])} USD"),
            ]
        )
    return 0


def cancel_(args: argparse.Namespace) -> int:
    with connect(args) as api:
        dag = api.post(f"/v1/dags/{segment(args.id)}/cancel", {"reason": args.reason})
    if args.json:
        print_json(dag)
    else:
        print_facts([("DAG", dag["id"]), ("Status", dag["status"])])
    return 0
