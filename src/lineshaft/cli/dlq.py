"""`lineshaft dlq`: dead letters."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from lineshaft.cli.actions import add_reviewer, counted, print_done, print_items, print_result, reviewer
from lineshaft.cli.connection import add_flags, collect, connect
from lineshaft.cli.ids import task_id
from lineshaft.cli.letter_filters import (
    add_letter_filters,
    check_letters,
    has_letter_filters,
    matching_letters,
)
from lineshaft.cli.output import (
    Id,
    When,
    moment_and_age,
    pretty,
    print_facts,
    print_json,
    print_note,
    print_table,
    usd,
)
from lineshaft.cli.task import own_title, print_failures
from lineshaft.cli.usage import UsageError, json_value, positive, time_value
from lineshaft.errors import LineshaftError

if TYPE_CHECKING:
    from lineshaft.client.blocking import SyncLineshaft
    from lineshaft.types import DeadLetter

RESOLUTIONS = ("retry", "modify_and_retry", "cancel", "delete", "escalate")
_CHOICES = {name[0]: name for name in RESOLUTIONS}


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "dlq",
        help="list, show, retry, resolve and review dead letters",
        description="List, show, retry, resolve and review dead letters: tasks that failed permanently.",
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list dead letters", description="List open dead letters.")
    add_letter_filters(listing)
    listing.add_argument("--reviewed", action="store_true", help="resolved dead letters instead of open ones")
    listing.add_argument("--limit", type=positive, default=50, metavar="N", help="at most N (default: 50)")
    listing.set_defaults(run=list_)
    show = actions.add_parser(
        "show", help="show a dead letter", description="Show a dead letter with its whole history."
    )
    show.add_argument("id", metavar="TASK", help="the id of the task, or its short form")
    show.set_defaults(run=show_)
    resolve = actions.add_parser(
        "resolve",
        help="resolve one or more dead letters",
        description="Resolve dead letters, or all open ones that match filters: retry, modify_and_retry "
        "(with --spec), cancel, delete (hides the entry) or escalate.",
    )
    retry = actions.add_parser(
        "retry",
        help="retry one or more dead letters",
        description="Retry dead letters, or all open ones that match filters: short for 'resolve "
        "--resolution retry'.",
    )
    retry.set_defaults(run=resolve_, resolution="retry", spec=None)
    for action in (resolve, retry):
        action.add_argument("ids", nargs="*", metavar="TASK", help="ids of the tasks, or short forms")
        add_letter_filters(action)
        action.add_argument(
            "--dry-run", action="store_true", help="only list the tasks that would be resolved"
        )
        action.add_argument("--not-before", metavar="TIME", help="retry at this time (ISO 8601)")
        forget = action.add_mutually_exclusive_group()
        forget.add_argument(
            "--forget-step",
            action="append",
            dest="forget_steps",
            metavar="NAME",
            help="forget the recorded result of this step, so that the retry runs it again; repeatable",
        )
        forget.add_argument(
            "--forget-steps", choices=("all",), help="forget the recorded results of all steps"
        )
    resolve.add_argument("--resolution", required=True, choices=RESOLUTIONS)
    resolve.add_argument("--spec", metavar="JSON", help="the new spec, for modify_and_retry")
    resolve.set_defaults(run=resolve_)
    review = actions.add_parser(
        "review",
        help="review dead letters one by one",
        description="Show the open dead letters one by one and ask for a resolution.",
    )
    review.set_defaults(run=review_)
    for action in (resolve, retry, review):
        add_reviewer(action)
        action.add_argument("--note", default="", help="the reason, stored with the resolution")
    for action in (listing, show, resolve, retry, review):
        add_flags(action)


def list_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        letters, more = matching_letters(shaft, args, args.limit, reviewed=args.reviewed)
    return print_items(
        args,
        letters,
        ("TASK", "TYPE", "TITLE", "SINCE", "CATEGORY", "USD", "POISON", "ERROR"),
        lambda letter: (
            Id(letter.task_id),
            letter.type,
            own_title(letter.type, letter.title),
            When(letter.dead_lettered_at),
            letter.category,
            usd(letter.total_cost_usd) if letter.total_cost_usd else "",
            "yes" if letter.poison_pill else "",
            letter.error,
        ),
        empty=f"No dead letters in {args.place}.",
        optional=("USD", "POISON", "TITLE", "CATEGORY"),
        more=more,
    )


def show_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        return print_result(args, shaft.get_dead_letter(task_id(shaft, args.id)), _print)


def _print(letter: "DeadLetter") -> None:
    print_facts(
        [
            ("Task", f"{letter.task_id} ({letter.status})"),
            ("Type", " · ".join(filter(None, (letter.type, own_title(letter.type, letter.title))))),
            ("Since", moment_and_age(letter.dead_lettered_at)),
            ("Error", f"{letter.category}: {letter.error}"),
            ("Poison pill", "yes: it failed in several processes" if letter.poison_pill else "no"),
            ("Cost", f"{usd(letter.total_cost_usd)} USD in total"),
            ("Resolution", f"{letter.resolution} by {letter.reviewer}" if letter.resolution else "open"),
            ("Spec", pretty(letter.spec)),
        ]
    )
    print()
    print_failures(letter.failure_history)


def resolve_(args: argparse.Namespace) -> int:
    from lineshaft.types import Resolution  # noqa: PLC0415 - slow to import

    if (args.spec is not None) != (args.resolution == "modify_and_retry"):
        raise UsageError("--resolution modify_and_retry needs --spec, and only it takes one.")
    decision = _decision(args)
    resolution = Resolution(args.resolution)
    resolved, failed = [], 0
    check_letters(args, ids=bool(args.ids))
    with connect(args) as shaft:
        names = args.ids or [letter.task_id for letter in matching_letters(shaft, args)[0]]
        if args.dry_run:
            names = [task_id(shaft, name) for name in names]
            return print_done(args, names, "\n".join([*names, f"Matching: {counted(len(names))}."]))
        for name in names:
            try:
                resolved.append(shaft.resolve(task_id(shaft, name), resolution, **decision))
            except LineshaftError as error:
                failed += 1
                print_note(f"{name}: {error}")
    if has_letter_filters(args):
        print_note(f"Resolved {counted(len(resolved))}.")
    if args.json:
        print_json(resolved)
    elif resolved:
        print_table(("TASK", "STATUS"), [(Id(task.id), task.status) for task in resolved], empty="")
    return 1 if failed else 0


def _decision(args: argparse.Namespace) -> dict[str, Any]:
    decision: dict[str, Any] = {"reviewer": reviewer(args), "note": args.note}
    if args.spec is not None:
        decision["spec"] = json_value("--spec", args.spec)
    if args.not_before is not None:
        decision["not_before"] = time_value("--not-before", args.not_before)
    if args.forget_steps is not None:
        decision["forget_steps"] = args.forget_steps
    return decision


def review_(args: argparse.Namespace) -> int:
    if args.json or not sys.stdin.isatty():
        raise UsageError("A review asks questions: run it in a terminal, or use 'lineshaft dlq resolve'.")
    with connect(args) as shaft:
        letters, _ = collect(
            lambda limit, cursor: shaft.dead_letters(reviewed=False, limit=limit, cursor=cursor)
        )
        if not letters:
            print(f"No dead letters in {args.place}.")
        for number, letter in enumerate(letters, 1):
            print(f"\n{number} of {len(letters)}")
            _print(letter)
            if not _ask(shaft, args, letter):
                break
    return 0


def _ask(shaft: "SyncLineshaft", args: argparse.Namespace, letter: "DeadLetter") -> bool:
    """False: quit."""
    from lineshaft.types import Resolution  # noqa: PLC0415 - slow to import

    while True:
        answer = input(
            "\n[r]etry, [m]odify and retry, [c]ancel, [d]elete, [e]scalate, [s]kip, [q]uit: "
        ).strip()[:1]
        if answer in {"q", "s"}:
            return answer == "s"
        if answer not in _CHOICES:
            continue
        note = input("Reason (stored with the resolution): ") or args.note
        try:
            spec = json_value("The spec", input("New spec (JSON): ")) if answer == "m" else None
            task = shaft.resolve(
                letter.task_id, Resolution(_CHOICES[answer]), reviewer=reviewer(args), note=note, spec=spec
            )
        except LineshaftError as error:
            print(error)
            continue
        print(f"{task.id} is {task.status}.")
        return True
