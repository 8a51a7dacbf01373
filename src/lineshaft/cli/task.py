"""`lineshaft task` and `lineshaft why`: look at tasks, and change what becomes of them."""

import argparse
import json
from typing import Any

from lineshaft.cli.api import add_flags, connect, segment
from lineshaft.cli.output import moment, print_facts, print_json, print_table, usd

_FILTERS = ("status", "type", "dag_id", "parent_id", "agent_id", "tag", "created_by", "q")


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "task", help="list, show, cancel, retry and change tasks", description="Tasks."
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser(
        "list",
        help="list tasks",
        description="Lists tasks, newest first. A filter given twice means any of them.",
    )
    for name in _FILTERS:
        flag = "--search" if name == "q" else f"--{name.replace('_', '-')}"
        listing.add_argument(flag, dest=name, action="append", metavar=name.upper())
    listing.add_argument("--order", choices=("created_at", "priority"), default="created_at")
    listing.add_argument("--limit", type=int, default=50, metavar="N", help="how many at the most (50)")
    listing.add_argument("--all", action="store_true", help="all of them, however many")
    listing.set_defaults(run=list_)
    show = actions.add_parser("show", help="show everything about a task", description="Shows a task.")
    show.set_defaults(run=show_)
    cancel = actions.add_parser(
        "cancel", help="cancel a task and what depends on it", description="Cancels a task."
    )
    cancel.add_argument("--reason", default="cancelled on the command line")
    cancel.add_argument("--no-cascade", action="store_true", help="leave what depends on it waiting")
    cancel.set_defaults(run=cancel_)
    retry = actions.add_parser(
        "retry",
        help="revive a dead letter or a cancelled task, or end a back-off",
        description="From DEAD_LETTERED or CANCELLED it starts anew; from RETRYING it is due at once.",
    )
    retry.set_defaults(run=retry_)
    change = actions.add_parser(
        "change", help="change priority, deadline or tags", description="Changes a task that has not ended."
    )
    change.add_argument("--priority", type=int)
    change.add_argument("--deadline", metavar="TIME", help="ISO-8601, or 'none'")
    change.add_argument("--tag", nargs="*", dest="tags", metavar="TAG", help="all its tags from now on")
    change.set_defaults(run=change_)
    why = actions.add_parser("why", help="tell why a task isn't running", description="As 'lineshaft why'.")
    top = commands.add_parser(
        "why", help="tell why a task isn't running", description="Every reason why a task isn't running."
    )
    for action in (show, cancel, retry, change, why, top):
        action.add_argument("id", metavar="TASK", help="its id")
    for action in (why, top):
        action.set_defaults(run=why_)
    for action in (listing, show, cancel, retry, change, why, top):
        add_flags(action)


def list_(args: argparse.Namespace) -> int:
    query = {name: getattr(args, name) for name in _FILTERS} | {"order": args.order}
    with connect(args) as api:
        tasks = list(api.pages("/v1/tasks", query, most=None if args.all else args.limit))
    if args.json:
        print_json(tasks)
        return 0
    print_table(
        ("TASK", "STATUS", "TYPE", "TITLE", "PRIO", "TRIES", "AGENT", "USD", "CREATED"),
        [
            (
                task["id"],
                task["status"],
                task["type"],
                task["title"][:40],
                _priority(task),
                f"{task['attempts']}/{task['max_attempts']}",
                (task["claim"] or {}).get("agent_id"),
                usd(task["cost_usd"]),
                moment(task["created_at"]),
            )
            for task in tasks
        ],
        empty="There are no such tasks. 'lineshaft submit TYPE' makes one.",
    )
    return 0


def _priority(task: dict[str, Any]) -> str:
    effective = task["effective_priority"]
    return str(task["priority"]) if effective is None else f"{effective:.1f}"


def show_(args: argparse.Namespace) -> int:
    with connect(args) as api:
        task = api.get(f"/v1/tasks/{segment(args.id)}")
    if args.json:
        print_json(task)
    else:
        print_task(task)
    return 0


def print_task(task: dict[str, Any]) -> None:
    claim = task["claim"] or {}
    facts = [
        ("Task", task["id"]),
        ("Title", task["title"]),
        ("Type", task["type"]),
        ("Status", task["status"] + (f" (waits for its {task['parked']})" if task["parked"] else "")),
        ("Priority", f"{task['priority']}, now {_priority(task)} ({task['tier'] or 'ended'})"),
        ("DAG", task["dag_id"]),
        ("Parent", task["parent_id"] or ""),
        ("Waits for", ", ".join(task["blocked_by"])),
        ("Blocked", task["blocked_reason"] or ""),
        ("Agent", claim.get("agent_id") or ""),
        ("Model", task["model"] or ""),
        ("Attempts", f"{task['attempts']} of {task['max_attempts']} used"),
        ("Retry at", moment(task["retry_at"])),
        ("Run at", moment(task["run_at"])),
        ("Deadline", moment(task["deadline"])),
        ("Lock", task["lock_key"] or ""),
        ("Cost", f"{usd(task['cost_usd'])} USD"),
        ("Created", " by ".join(filter(None, (moment(task["created_at"]), task["created_by"])))),
        ("Started", moment(task["started_at"])),
        ("Completed", moment(task["completed_at"])),
        ("Cancelled", " ".join(filter(None, (moment(task["cancelled_at"]), task["cancel_reason"])))),
        ("Failure", " · ".join(filter(None, (task["failure_category"], task["failure_reason"])))),
        ("Tags", ", ".join(task["tags"])),
        ("Spec", json.dumps(task["spec"], indent=2, ensure_ascii=False)),
        ("Progress", "" if task["progress"] is None else json.dumps(task["progress"], ensure_ascii=False)),
        ("Output", "" if task["output"]["data"] is None else _pretty(task["output"]["data"])),
    ]
    print_facts([(name, value) for name, value in facts if value])
    if task["failure_history"]:
        print()
        print_failures(task["failure_history"])


def print_failures(history: list[dict[str, Any]]) -> None:
    """What went wrong, attempt by attempt."""
    print_table(
        ("ATTEMPT", "AGENT", "CATEGORY", "SEC", "USD", "ERROR"),
        [
            (
                failure["attempt"],
                failure["agent"],
                failure["category"],
                failure["duration_sec"],
                usd(failure["cost_usd"]),
                (failure["error"] or "")[:100],
            )
            for failure in history
        ],
        empty="It has no failed attempts.",
    )


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _told(args: argparse.Namespace, task: dict[str, Any]) -> int:
    if args.json:
        print_json(task)
    else:
        print_facts([("Task", task["id"]), ("Status", task["status"])])
    return 0


def cancel_(args: argparse.Namespace) -> int:
    with connect(args) as api:
        body = {"reason": args.reason, "cascade": not args.no_cascade}
        return _told(args, api.post(f"/v1/tasks/{segment(args.id)}/cancel", body))


def retry_(args: argparse.Namespace) -> int:
    with connect(args) as api:
        return _told(args, api.post(f"/v1/tasks/{segment(args.id)}/retry"))


def change_(args: argparse.Namespace) -> int:
    body: dict[str, Any] = {}
    if args.priority is not None:
        body["priority"] = args.priority
    if args.deadline is not None:
        body["deadline"] = None if args.deadline == "none" else args.deadline
    if args.tags is not None:
        body["tags"] = args.tags
    with connect(args) as api:
        return _told(args, api.call("PATCH", f"/v1/tasks/{segment(args.id)}", body=body))


def why_(args: argparse.Namespace) -> int:
    with connect(args) as api:
        why = api.get(f"/v1/tasks/{segment(args.id)}/why")
        status = api.get(f"/v1/tasks/{segment(args.id)}")["status"]
    if args.json:
        print_json(why)
    elif why["reasons"]:
        print(f"{args.id} is {status}.")
        print_facts([(reason["code"], reason["detail"]) for reason in why["reasons"]])
    elif why["runnable"]:
        print(f"{args.id} is {status}: nothing is in its way, the next free agent takes it in its turn.")
    else:
        print(f"{args.id} is {status}: there is nothing to wait for.")
    return 0
