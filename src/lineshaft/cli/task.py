"""`lineshaft task` and `lineshaft why`."""

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from lineshaft.cli.actions import counted, print_done, print_items, print_result
from lineshaft.cli.connection import add_flags, collect, connect
from lineshaft.cli.ids import dag_id, task_id, task_ids
from lineshaft.cli.letter_filters import add_letter_filters, check_letters, matching_letters
from lineshaft.cli.output import (
    Id,
    Verbatim,
    When,
    actor_of,
    id_for_people,
    moment_and_age,
    pretty,
    print_facts,
    print_json,
    print_table,
    usd,
)
from lineshaft.cli.usage import UsageError, json_value, positive, time_value
from lineshaft.cli.why import print_why, summary
from lineshaft.errors import LineshaftError

if TYPE_CHECKING:
    from lineshaft.client.blocking import SyncLineshaft
    from lineshaft.types import Attempt, Event, FailedAttempt, ForEachInfo, MatchedTasks, Task, TaskFilters

#: Statuses of a task in an attempt that is not counted in `attempts` yet.
_IN_ATTEMPT = frozenset({"CLAIMED", "RUNNING", "VALIDATING"})
#: Tasks that it waits for and are named.
_MOST_NAMED = 20
#: The results of steps that are shown whole.
_MOST_STEPS = 20
#: Kinds of events of what people do to a task; `task show` names the last of them.
_ACTS = (
    "task.changed",
    "task.replaced",
    "task.ready",
    "task.cancelled",
    "task.resolved",
    "approval.decided",
    "lock.expired",
    "cost.corrected",
)
_MOST_ACTS = 20
_FILTERS = ("status", "type", "dag_id", "parent_id", "agent_id", "tag", "created_by", "q")


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "task",
        help="list, show, cancel, retry, rerun, signal and change tasks",
        description="List, show, cancel, retry, rerun, signal and change tasks.",
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
        "RETRYING task is due at once. With filters instead of a task: all dead letters that match.",
    )
    retry.add_argument("id", nargs="?", metavar="TASK", help="the id of the task, or its short form")
    add_letter_filters(retry)
    retry.add_argument("--dry-run", action="store_true", help="only list the tasks that would be retried")
    add_flags(retry)
    retry.set_defaults(run=retry_)
    rerun = actions.add_parser(
        "rerun",
        help="run a completed task again",
        description="Run a COMPLETED task again. Its output is kept with its attempt. Tasks that depend on "
        "it and haven't begun wait for it again.",
    )
    rerun.add_argument(
        "--downstream",
        action="store_true",
        help="completed, dead-lettered and cancelled tasks that depend on it run again too, after it",
    )
    rerun.add_argument(
        "--cancel-running",
        action="store_true",
        help="stop tasks that depend on it and are running; they run again after it",
    )
    rerun.add_argument(
        "--keep-steps",
        action="store_true",
        help="keep recorded steps and checkpoints; by default they run again",
    )
    rerun.add_argument("--reason", help="for the history of the task")
    rerun.set_defaults(run=rerun_)
    _add_signal(actions)
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
    tags = change.add_mutually_exclusive_group()
    tags.add_argument("--tag", action="append", dest="tags", metavar="TAG", help="the new tags; repeatable")
    tags.add_argument("--no-tags", action="store_const", const=[], dest="tags", help="remove all tags")
    change.set_defaults(run=change_)
    result = actions.add_parser(
        "result",
        help="print the output of a task",
        description="Print the output of a COMPLETED task as JSON. Otherwise it is an error that says why "
        "there is no output.",
    )
    result.set_defaults(run=result_)
    help_ = "explain what a task is waiting for or doing"
    why = actions.add_parser("why", help=help_, description=_WHY)
    top = commands.add_parser("why", help=help_, description=_WHY)
    for action in (why, top):
        action.set_defaults(run=why_)
    for action in (show, result, cancel, rerun, change, why, top):
        action.add_argument("id", metavar="TASK", help="the id of the task, or its short form")
        add_flags(action)


_WHY = "Explain what a task is waiting for, what it is doing, or how it ended."


def _add_signal(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    signal = actions.add_parser(
        "signal",
        help="send a signal that a task waits for, now or later",
        description="Send a signal to a task that has not ended. It is kept until the task receives it with "
        "ctx.wait_for, which it does once.",
    )
    signal.add_argument("id", metavar="TASK", help="the id of the task, or its short form")
    signal.add_argument("name", metavar="NAME", help="the name of the signal")
    signal.add_argument("--data", metavar="JSON", help="what the task receives; at most 64 KiB")
    signal.add_argument("--key", help="the idempotency key: with one that was used, nothing is sent again")
    add_flags(signal)
    signal.set_defaults(run=signal_)


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
    with connect(args) as shaft:
        filters = _resolved(shaft, args)
        tasks, more = collect(
            lambda limit, cursor: shaft.list(**filters, order=args.order, limit=limit, cursor=cursor),
            None if args.all else args.limit,
        )
    return print_items(
        args,
        tasks,
        ("TASK", "STATUS", "TYPE", "TITLE", "PRIO", "TRIES", "AGENT", "USD", "CREATED"),
        lambda task: (
            Id(task.id),
            task.status,
            task.type,
            own_title(task.type, task.title),
            _priority(task),
            tries(task),
            task.claim.agent_id,
            usd(task.cost_usd) if task.cost_usd else "",
            When(task.created_at),
        ),
        empty=f"No tasks in {args.place}. Submit one with 'lineshaft submit TYPE'."
        if not filters
        else f"No tasks match these filters in {args.place}.",
        optional=("PRIO", "USD", "AGENT", "TRIES"),
        more=more,
        hint="--all lists all.",
    )


def _resolved(shaft: "SyncLineshaft", args: argparse.Namespace) -> "TaskFilters":
    """The filters that were given, with whole ids."""
    filters: TaskFilters = {name: given for name in _FILTERS if (given := getattr(args, name))}  # type: ignore[assignment]  # names of the filters
    if args.dag_id:
        filters["dag_id"] = [dag_id(shaft, text) for text in args.dag_id]
    if args.parent_id:
        filters["parent_id"] = task_ids(shaft, args.parent_id)
    return filters


def own_title(type_: str | None, title: str | None) -> str:
    """The title, unless it only repeats the type."""
    return "" if title is None or title == type_ else title


def tries(task: "Task") -> str:
    """The number of the current or last attempt, such as `1 of 3`."""
    if task.is_batch:
        return ""
    counted = task.status not in _IN_ATTEMPT and (task.status != "COMPLETED" or task.claim.claimed_at is None)
    return f"{task.attempts if counted else task.attempts + 1} of {task.max_attempts}"


def _priority(task: "Task") -> str:
    return "" if task.effective_priority is None else f"{task.effective_priority:.0f}"


def show_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        task = shaft.get(task_id(shaft, args.id))
        if args.json:
            print_json(task)
            return 0
        attempts, steps = shaft.attempts(task.id), shaft.steps(task.id)
        acts = _acts(shaft, task.id)
    print_task(task, attempts[-1] if attempts else None)
    if steps:
        print()
        _print_steps(steps)
    if task.failure_history:
        print()
        print_failures(task.failure_history)
    if acts:
        print()
        _print_acts(acts)
    return 0


def _acts(shaft: "SyncLineshaft", task: str) -> "list[Event]":
    """What people did to it, as far as events are kept."""
    page = shaft.read_events(None, task_id=task, kinds=_ACTS, limit=500)
    return [event for event in page.items if actor_of(event)]


def _print_acts(acts: "Sequence[Event]") -> None:
    print_table(
        ("BY HAND", "BY", "WHEN", "REASON"),
        [
            (event.kind, actor_of(event), When(event.at), event.data.get("reason") or event.data.get("note"))
            for event in acts[-_MOST_ACTS:]
        ],
        empty="",
    )


def print_task(task: "Task", attempt: "Attempt | None" = None) -> None:
    """`attempt`: the current or last one."""
    output, large = task.output.data, task.output.data_ref
    waits_for = ", ".join(id_for_people(name) for name in task.blocked_by[:_MOST_NAMED])
    if len(task.blocked_by) > _MOST_NAMED:
        waits_for += f" and {len(task.blocked_by) - _MOST_NAMED} more"
    facts = [
        ("Task", task.id),
        ("Title", own_title(task.type, task.title)),
        ("Type", task.type),
        ("Status", task.status + (f" (waits for {task.parked})" if task.parked else "")),
        ("Priority", _priorities(task)),
        ("DAG", task.dag_id),
        ("Parent", task.parent_id or ""),
        ("For each", "" if task.for_each is None else _list_of(task.for_each)),
        ("Item", "" if task.index is None else Verbatim(f"{task.index}: {_compact(task.item)}")),
        ("Waits for", waits_for),
        ("Blocked", task.blocked_reason or ""),
        ("Agent", task.claim.agent_id or ""),
        ("Model", task.model or ""),
        ("Account", (attempt and attempt.account) or ""),
        ("Version", (attempt and attempt.version) or ""),
        ("Tries", tries(task)),
        ("Retry at", moment_and_age(task.retry_at)),
        ("Run at", moment_and_age(task.run_at)),
        ("Deadline", moment_and_age(task.deadline)),
        ("Lock", ", ".join(_locks(task))),
        ("Quota keys", ", ".join(task.quota_keys)),
        ("Cost", f"{usd(task.cost_usd)} USD" if task.cost_usd else ""),
        ("Disputed", f"{usd(task.disputed_usd)} USD, not counted" if task.disputed_usd else ""),
        ("Created", " by ".join(filter(None, (moment_and_age(task.created_at), task.created_by)))),
        ("Token", task.created_by_token or ""),
        ("Started", moment_and_age(task.started_at)),
        ("Completed", moment_and_age(task.completed_at)),
        ("Cancelled", ": ".join(filter(None, (moment_and_age(task.cancelled_at), task.cancel_reason)))),
        ("Failure", ": ".join(filter(None, (task.failure_category, task.failure_reason)))),
        ("Tags", ", ".join(task.tags)),
        ("Spec", pretty(task.spec) if task.spec else ""),
        ("Progress", "" if task.progress is None else _compact(task.progress)),
        ("Output", "" if output is None else pretty(output)),
        ("Output", "" if large is None else f"{large} ({task.output.size} bytes)"),
        ("Artifacts", "\n".join(task.output.artifacts)),
    ]
    print_facts([(name, value) for name, value in facts if value])


def _list_of(for_each: "ForEachInfo") -> str:
    at_once = "" if for_each.concurrency is None else f", {for_each.concurrency} at once"
    return f"item of {for_each.over}, at most {for_each.max}{at_once}"


def _locks(task: "Task") -> list[str]:
    if task.lock_key is not None:
        return [task.lock_key]
    return [f"{lock.key} (shared)" if lock.shared else lock.key for lock in task.lock_keys]


def _priorities(task: "Task") -> str:
    now = task.effective_priority
    if now is None:
        return str(task.priority)
    return f"{task.priority} ({task.tier})" + (f", now {now:.1f}" if round(now) != task.priority else "")


def _compact(value: object) -> Verbatim:
    return Verbatim(json.dumps(value, ensure_ascii=False))


def _print_steps(steps: "dict[str, Any]") -> None:
    rows = [(name, _compact(result)) for name, result in list(steps.items())[:_MOST_STEPS]]
    print_table(("STEP", "RESULT"), rows, empty="")
    if len(steps) > _MOST_STEPS:
        print(f"… and {len(steps) - _MOST_STEPS} more steps.")


def result_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        task = shaft.get(task_id(shaft, args.id), full=True)
        if task.status != "COMPLETED":
            raise LineshaftError(f"{task.id} has no output: {summary(shaft.why(task.id))}")
    print_json(task.output.data)
    return 0


def print_failures(history: "Sequence[FailedAttempt]") -> None:
    print_table(
        ("TRY", "AGENT", "VERSION", "CATEGORY", "SEC", "USD", "ERROR"),
        [
            (
                failure.attempt,
                failure.agent,
                failure.version,
                failure.category,
                f"{failure.duration_sec:.1f}",
                usd(failure.cost_usd) if failure.cost_usd else "",
                failure.error,
            )
            for failure in history
        ],
        empty="No failed attempts.",
        optional=("VERSION", "SEC", "USD"),
    )
    for failure in reversed(history):
        if failure.traceback:
            print(f"\nTraceback of attempt {failure.attempt}:\n{failure.traceback.rstrip()}")
            return


def print_status(args: argparse.Namespace, task: "Task") -> int:
    return print_result(args, task, lambda task: print_facts([("Task", task.id), ("Status", task.status)]))


def cancel_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        name = task_id(shaft, args.id)
        return print_status(args, shaft.cancel(name, args.reason, cascade=not args.no_cascade))


def retry_(args: argparse.Namespace) -> int:
    from lineshaft.types import MatchedTasks  # noqa: PLC0415 - slow to import

    check_letters(args, ids=args.id is not None)
    with connect(args) as shaft:
        if args.id is not None and not args.dry_run:
            return print_status(args, shaft.retry(task_id(shaft, args.id)))
        found = [args.id] if args.id else [letter.task_id for letter in matching_letters(shaft, args)[0]]
        names = [task_id(shaft, name) for name in found]
        if not args.dry_run:
            for name in names:
                shaft.retry(name)
    return _print_matched(args, MatchedTasks(names, len(names)), "Retried")


def rerun_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        task = shaft.rerun(
            task_id(shaft, args.id),
            downstream=args.downstream,
            cancel_running=args.cancel_running,
            forget_steps=not args.keep_steps,
            reason=args.reason,
        )
    return print_status(args, task)


def signal_(args: argparse.Namespace) -> int:
    data = None if args.data is None else json_value("--data", args.data)
    with connect(args) as shaft:
        name = task_id(shaft, args.id)
        sent = shaft.signal(name, args.name, data, idempotency_key=args.key)
    done = "It was sent before" if sent.duplicate else "Sent"
    return print_done(args, sent, f"{done}: signal {sent.name} to task {name}.")


def cancel_matching_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        found = shaft.cancel_matching(args.reason, dry_run=args.dry_run, **_filters(shaft, args))
    return _print_matched(args, found, "Cancelled")


def retry_matching_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        found = shaft.retry_matching(dry_run=args.dry_run, **_filters(shaft, args))
    return _print_matched(args, found, "Retried")


def _filters(shaft: "SyncLineshaft", args: argparse.Namespace) -> "TaskFilters":
    filters = _resolved(shaft, args)
    if not filters:
        raise UsageError("Give at least one filter, such as --status or --type.")
    return filters


def _print_matched(args: argparse.Namespace, matched: "MatchedTasks", done: str) -> int:
    lines = [*matched.ids, f"{'Matching' if args.dry_run else done}: {counted(matched.count)}."]
    return print_done(args, matched, "\n".join(lines))


def change_(args: argparse.Namespace) -> int:
    from msgspec import UNSET  # noqa: PLC0415 - slow to import

    limits = (args.max_cost, args.max_total_cost, args.max_attempts, args.max_duration)
    if all(given is None for given in (args.priority, args.deadline, args.tags, *limits)):
        raise UsageError("Nothing to change: use --priority, --deadline, --tag or a limit.")
    deadline = UNSET if args.deadline is None else _deadline(args.deadline)
    with connect(args) as shaft:
        task = shaft.change(
            task_id(shaft, args.id),
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
        return print_result(args, shaft.why(task_id(shaft, args.id)), print_why)
