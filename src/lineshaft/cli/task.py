"""`lineshaft task` and `lineshaft why`."""

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from lineshaft.cli.connection import add_flags, collect, connect
from lineshaft.cli.output import age, moment, pretty, print_facts, print_json, print_more, print_table, usd
from lineshaft.cli.usage import UsageError, positive, time_value

if TYPE_CHECKING:
    from lineshaft.types import FailedAttempt, MatchedTasks, Task, TaskFilters

_FILTERS = ("status", "type", "dag_id", "parent_id", "agent_id", "tag", "created_by", "q")


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "task",
        help="list, show, cancel, retry and change tasks",
        description="List, show, cancel, retry and change tasks.",
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_list(actions)
    show = actions.add_parser("show", help="show a task", description="Show everything about a task.")
    show.set_defaults(run=show_)
    cancel = actions.add_parser(
        "cancel",
        help="cancel a task and its dependents",
        description="Cancel a task, its children and every task that depends on it.",
    )
    cancel.add_argument("--reason", default="cancelled on the command line")
    cancel.add_argument("--no-cascade", action="store_true", help="don't cancel tasks that depend on it")
    cancel.set_defaults(run=cancel_)
    for verb, run in (("cancel", cancel_matching_), ("retry", retry_matching_)):
        matching = actions.add_parser(
            f"{verb}-matching",
            help=f"{verb} all tasks that match filters",
            description=f"{verb.capitalize()} all tasks that match these filters. Repeat a filter to match "
            "any of its values.",
        )
        _add_filters(matching)
        if verb == "cancel":
            matching.add_argument("--reason", default="cancelled on the command line")
        matching.add_argument("--dry-run", action="store_true", help="only list the tasks that match")
        add_flags(matching)
        matching.set_defaults(run=run)
    retry = actions.add_parser(
        "retry",
        help="retry a dead letter, a cancelled task or one that waits for its retry",
        description="Retry a task. A DEAD_LETTERED or CANCELLED task starts again with fresh counters; a "
        "RETRYING task is due at once.",
    )
    retry.set_defaults(run=retry_)
    change = actions.add_parser(
        "change",
        help="change priority, deadline, tags or limits",
        description="Change a task that has not ended; or the limits of a dead letter, before it is retried.",
    )
    change.add_argument("--priority", type=int)
    change.add_argument("--max-cost", metavar="USD", help="cost limit of an attempt, or 'none'")
    change.add_argument("--max-total-cost", metavar="USD", help="cost limit of all attempts, or 'none'")
    change.add_argument("--max-attempts", type=int, metavar="N", help="attempts before it is a dead letter")
    change.add_argument("--max-duration", type=float, metavar="SEC", help="time limit of an attempt")
    change.add_argument("--deadline", metavar="TIME", help="ISO 8601, or 'none' to remove it")
    change.add_argument("--tag", nargs="*", dest="tags", metavar="TAG", help="replace all tags")
    change.set_defaults(run=change_)
    help_ = "explain why a task is not running"
    why = actions.add_parser("why", help=help_, description="Explain why a task is not running.")
    top = commands.add_parser("why", help=help_, description="Explain why a task is not running.")
    for action in (why, top):
        action.set_defaults(run=why_)
    for action in (show, cancel, retry, change, why, top):
        action.add_argument("id", metavar="TASK", help="the id of the task")
        add_flags(action)


def _add_list(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = actions.add_parser(
        "list",
        help="list tasks",
        description="List tasks, newest first. Repeat a filter to match any of its values.",
    )
    _add_filters(command)
    command.add_argument("--order", choices=("created_at", "priority"), default="created_at")
    command.add_argument(
        "--limit", type=positive, default=50, metavar="N", help="at most N tasks (default: 50)"
    )
    command.add_argument("--all", action="store_true", help="list all tasks")
    add_flags(command)
    command.set_defaults(run=list_)


def _add_filters(command: argparse.ArgumentParser) -> None:
    for name in _FILTERS:
        flag = "--search" if name == "q" else f"--{name.replace('_', '-')}"
        metavar = "TEXT" if name == "q" else name.upper()
        about = "part of the title" if name == "q" else None
        command.add_argument(flag, dest=name, action="append", default=[], metavar=metavar, help=about)


def list_(args: argparse.Namespace) -> int:
    filters = {name: getattr(args, name) for name in _FILTERS}
    with connect(args) as shaft:
        tasks, more = collect(
            lambda limit, cursor: shaft.list(**filters, order=args.order, limit=limit, cursor=cursor),
            None if args.all else args.limit,
        )
    if args.json:
        print_json(tasks)
        return 0
    print_table(
        ("TASK", "STATUS", "TYPE", "TITLE", "PRIO", "TRIES", "AGENT", "USD", "AGE"),
        [
            (
                task.id,
                task.status,
                task.type,
                task.title[:40],
                _priority(task),
                f"{task.attempts}/{task.max_attempts}",
                task.claim.agent_id,
                usd(task.cost_usd),
                age(task.created_at),
            )
            for task in tasks
        ],
        empty="No tasks. Submit one with 'lineshaft submit TYPE'."
        if not any(filters.values())
        else "No tasks match these filters.",
        optional=("USD", "PRIO", "TRIES", "TYPE"),
    )
    print_more(len(tasks), "--all lists all.", more=more)
    return 0


def _priority(task: "Task") -> str:
    return str(task.priority) if task.effective_priority is None else f"{task.effective_priority:.1f}"


def show_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        task = shaft.get(args.id)
        attempts = [] if args.json else shaft.attempts(args.id)
    if args.json:
        print_json(task)
    else:
        print_task(task, version=attempts[-1].version if attempts else None)
    return 0


def print_task(task: "Task", *, version: str | None = None) -> None:
    """`version`: of the agent of the current or last attempt."""
    output = task.output.data
    facts = [
        ("Task", task.id),
        ("Title", task.title),
        ("Type", task.type),
        ("Status", task.status + (f" (waits for {task.parked})" if task.parked else "")),
        ("Priority", f"{task.priority}, now {_priority(task)} ({task.tier or 'ended'})"),
        ("DAG", task.dag_id),
        ("Parent", task.parent_id or ""),
        ("Waits for", ", ".join(task.blocked_by)),
        ("Blocked", task.blocked_reason or ""),
        ("Agent", task.claim.agent_id or ""),
        ("Model", task.model or ""),
        ("Version", version or ""),
        ("Attempts", f"{task.attempts} of {task.max_attempts} used"),
        ("Retry at", moment(task.retry_at)),
        ("Run at", moment(task.run_at)),
        ("Deadline", moment(task.deadline)),
        ("Lock", task.lock_key or ""),
        ("Cost", f"{usd(task.cost_usd)} USD"),
        ("Created", " by ".join(filter(None, (moment(task.created_at), task.created_by)))),
        ("Token", task.created_by_token or ""),
        ("Started", moment(task.started_at)),
        ("Completed", moment(task.completed_at)),
        ("Cancelled", " ".join(filter(None, (moment(task.cancelled_at), task.cancel_reason)))),
        ("Failure", " · ".join(filter(None, (task.failure_category, task.failure_reason)))),
        ("Tags", ", ".join(task.tags)),
        ("Spec", pretty(task.spec)),
        ("Progress", "" if task.progress is None else json.dumps(task.progress, ensure_ascii=False)),
        ("Output", "" if output is None else pretty(output)),
    ]
    print_facts([(name, value) for name, value in facts if value])
    if task.failure_history:
        print()
        print_failures(task.failure_history)


def print_failures(history: "Sequence[FailedAttempt]") -> None:
    print_table(
        ("ATTEMPT", "AGENT", "VERSION", "CATEGORY", "SEC", "USD", "ERROR"),
        [
            (
                failure.attempt,
                failure.agent,
                failure.version,
                failure.category,
                failure.duration_sec,
                usd(failure.cost_usd),
                failure.error[:100],
            )
            for failure in history
        ],
        empty="No failed attempts.",
        optional=("VERSION",),
    )
    for failure in reversed(history):
        if failure.traceback:
            print(f"\nTraceback of attempt {failure.attempt}:\n{failure.traceback.rstrip()}")
            return


def print_status(args: argparse.Namespace, task: "Task") -> int:
    if args.json:
        print_json(task)
    else:
        print_facts([("Task", task.id), ("Status", task.status)])
    return 0


def cancel_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        return print_status(args, shaft.cancel(args.id, args.reason, cascade=not args.no_cascade))


def retry_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        return print_status(args, shaft.retry(args.id))


def cancel_matching_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        found = shaft.cancel_matching(args.reason, dry_run=args.dry_run, **_filters(args))
    return _print_matched(args, found, "Cancelled")


def retry_matching_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        found = shaft.retry_matching(dry_run=args.dry_run, **_filters(args))
    return _print_matched(args, found, "Retried")


def _filters(args: argparse.Namespace) -> "TaskFilters":
    filters: TaskFilters = {name: given for name in _FILTERS if (given := getattr(args, name))}  # type: ignore[assignment]  # names of the filters
    if not filters:
        raise UsageError("Give at least one filter, such as --status or --type.")
    return filters


def _print_matched(args: argparse.Namespace, found: "MatchedTasks", done: str) -> int:
    if args.json:
        print_json(found)
        return 0
    for name in found.ids:
        print(name)
    print(f"{'Matching' if args.dry_run else done}: {found.count} tasks.")
    return 0


def change_(args: argparse.Namespace) -> int:
    from msgspec import UNSET  # noqa: PLC0415 - slow to import

    limits = (args.max_cost, args.max_total_cost, args.max_attempts, args.max_duration)
    if all(given is None for given in (args.priority, args.deadline, args.tags, *limits)):
        raise UsageError("Nothing to change: use --priority, --deadline, --tag or a limit.")
    deadline = UNSET if args.deadline is None else _deadline(args.deadline)
    with connect(args) as shaft:
        task = shaft.change(
            args.id,
            priority=UNSET if args.priority is None else args.priority,
            deadline=deadline,
            tags=UNSET if args.tags is None else args.tags,
            max_cost_usd=UNSET if args.max_cost is None else _dollars("--max-cost", args.max_cost),
            max_total_cost_usd=UNSET
            if args.max_total_cost is None
            else _dollars("--max-total-cost", args.max_total_cost),
            max_attempts=UNSET if args.max_attempts is None else args.max_attempts,
            max_duration_sec=UNSET if args.max_duration is None else args.max_duration,
        )
    return print_status(args, task)


def _dollars(flag: str, text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        raise UsageError(f"{flag} must be an amount of dollars or 'none', got {text!r}.") from None


def _deadline(text: str) -> datetime | None:
    return None if text == "none" else time_value("--deadline", text)


def why_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        why = shaft.why(args.id)
    if args.json:
        print_json(why)
        return 0
    if why.runnable:
        print(f"{args.id} is {why.status} and runnable: the next free agent claims it in order of priority.")
    elif why.reasons:
        print(f"{args.id} is {why.status}.")
    else:
        print(f"{args.id} is {why.status}: it is not waiting for anything.")
    print_facts([(reason.code, reason.detail) for reason in why.reasons])
    return 0
