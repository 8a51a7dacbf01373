"""`lineshaft dlq`: what failed for good, and what a person decides about it."""

import argparse
import getpass
import json
import sys
from typing import Any

from lineshaft.cli.api import Api, ApiError, add_flags, connect, segment
from lineshaft.cli.output import moment, print_facts, print_json, print_table, usd
from lineshaft.cli.task import print_failures
from lineshaft.errors import InvalidInputError

RESOLUTIONS = ("retry", "modify_and_retry", "cancel", "delete", "escalate")
_CHOICES = {"r": "retry", "m": "modify_and_retry", "c": "cancel", "d": "delete", "e": "escalate"}


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "dlq", help="list, show, resolve and review dead letters", description="Dead letters."
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser(
        "list", help="list what waits for a person", description="Lists dead letters."
    )
    listing.add_argument("--type")
    listing.add_argument("--category")
    listing.add_argument("--contains", dest="error_contains", metavar="TEXT", help="text in the error")
    listing.add_argument("--poison", action="store_true", help="only poison pills")
    listing.add_argument("--reviewed", action="store_true", help="those that were decided about instead")
    listing.add_argument("--limit", type=int, default=50, metavar="N")
    listing.set_defaults(run=list_)
    show = actions.add_parser(
        "show", help="show one with its whole history", description="Shows a dead letter."
    )
    show.add_argument("id", metavar="TASK")
    show.set_defaults(run=show_)
    resolve = actions.add_parser(
        "resolve",
        help="decide about one or several",
        description="Decides about dead letters: retry, modify_and_retry (with --spec), cancel, delete "
        "(hidden, never lost) or escalate.",
    )
    resolve.add_argument("ids", nargs="+", metavar="TASK")
    resolve.add_argument("--resolution", required=True, choices=RESOLUTIONS)
    resolve.add_argument("--spec", metavar="JSON", help="the new spec, with modify_and_retry")
    resolve.add_argument("--not-before", metavar="TIME", help="ISO-8601: retry it then")
    resolve.set_defaults(run=resolve_)
    review = actions.add_parser(
        "review", help="go through them one by one", description="Shows one after the other and asks."
    )
    review.set_defaults(run=review_)
    for action in (resolve, review):
        action.add_argument("--reviewer", default=None, help="who decides (the account's name)")
        action.add_argument("--note", default="", help="why; kept with the decision")
    for action in (listing, show, resolve, review):
        add_flags(action)


def list_(args: argparse.Namespace) -> int:
    query = {
        "type": args.type,
        "category": args.category,
        "error_contains": args.error_contains,
        "poison_pill": "true" if args.poison else None,
        "reviewed": "true" if args.reviewed else "false",
    }
    with connect(args) as api:
        letters = list(api.pages("/v1/dead-letters", query, most=args.limit))
    if args.json:
        print_json(letters)
        return 0
    print_table(
        ("TASK", "TYPE", "SINCE", "CATEGORY", "USD", "POISON", "ERROR"),
        [
            (
                letter["task_id"],
                letter["type"],
                moment(letter["dead_lettered_at"]),
                letter["category"],
                usd(letter["total_cost_usd"]),
                letter["poison_pill"],
                letter["error"][:70],
            )
            for letter in letters
        ],
        empty="There are no dead letters: nothing waits for you.",
    )
    return 0


def show_(args: argparse.Namespace) -> int:
    with connect(args) as api:
        letter = api.get(f"/v1/dead-letters/{segment(args.id)}")
    if args.json:
        print_json(letter)
    else:
        _print(letter)
    return 0


def _print(letter: dict[str, Any]) -> None:
    decided = letter["resolution"]
    print_facts(
        [
            ("Task", f"{letter['task_id']} ({letter['status']})"),
            ("Title", letter["title"]),
            ("Type", letter["type"]),
            ("Since", moment(letter["dead_lettered_at"])),
            ("Error", f"{letter['category']}: {letter['error']}"),
            ("Poison", "yes: several agents failed at it" if letter["poison_pill"] else "no"),
            ("Cost", f"{usd(letter['total_cost_usd'])} USD in all"),
            ("Decided", f"{decided} by {letter['reviewer']}" if decided else "not yet"),
            ("Spec", json.dumps(letter["spec"], indent=2, ensure_ascii=False)),
        ]
    )
    print()
    print_failures(letter["failure_history"])


def resolve_(args: argparse.Namespace) -> int:
    if (args.spec is not None) != (args.resolution == "modify_and_retry"):
        raise InvalidInputError("--spec goes with --resolution modify_and_retry, and is needed there.")
    decision = _decision(args, args.resolution, args.note)
    if args.spec is not None:
        decision["spec"] = _spec(args.spec)
    if args.not_before is not None:
        decision["not_before"] = args.not_before
    failed = 0
    answers = []
    with connect(args) as api:
        for name in args.ids:
            try:
                answers.append(api.post(f"/v1/dead-letters/{segment(name)}/resolve", decision))
            except ApiError as error:
                failed += 1
                print(f"{name}: {error}", file=sys.stderr)
    if args.json:
        print_json(answers)
    else:
        print_table(("TASK", "STATUS"), [(task["id"], task["status"]) for task in answers], empty="")
    return 1 if failed else 0


def _decision(args: argparse.Namespace, resolution: str, note: str) -> dict[str, Any]:
    return {"resolution": resolution, "reviewer": args.reviewer or getpass.getuser(), "note": note}


def _spec(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"The spec must be JSON: {error}.") from None


def review_(args: argparse.Namespace) -> int:
    if args.json or not sys.stdin.isatty():
        raise InvalidInputError(
            "A review asks questions: run it in a terminal, or use 'lineshaft dlq resolve'."
        )
    with connect(args) as api:
        letters = list(api.pages("/v1/dead-letters", {"reviewed": "false"}, most=None))
        if not letters:
            print("There are no dead letters: nothing waits for you.")
        for number, letter in enumerate(letters, 1):
            print(f"\n{number} of {len(letters)}")
            _print(letter)
            if not _ask(api, args, letter):
                break
    return 0


def _ask(api: Api, args: argparse.Namespace, letter: dict[str, Any]) -> bool:
    """False: no more for today."""
    while True:
        answer = input(
            "\n[r]etry, [m]odify and retry, [c]ancel, [d]elete, [e]scalate, [s]kip, [q]uit: "
        ).strip()[:1]
        if answer in {"q", "s"}:
            return answer == "s"
        if answer not in _CHOICES:
            continue
        try:
            decision = _decision(args, _CHOICES[answer], input("Why (kept with the decision): ") or args.note)
            if answer == "m":
                decision["spec"] = _spec(input("The new spec, as JSON: "))
            task = api.post(f"/v1/dead-letters/{segment(letter['task_id'])}/resolve", decision)
        except (ApiError, InvalidInputError) as error:
            print(f"That was refused: {error}")
            continue
        print(f"{task['id']} is {task['status']}.")
        return True
