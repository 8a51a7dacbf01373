"""`lineshaft approvals`: what waits for a person's word, or work."""

import argparse
import getpass
import json
from typing import Any

from lineshaft.cli.api import add_flags, connect, segment
from lineshaft.cli.output import moment, print_facts, print_json, print_table
from lineshaft.errors import InvalidInputError


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "approvals",
        help="list what waits for a person, approve or refuse it",
        description="Outputs that wait to be approved, and tasks that are a person's to do.",
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list what waits", description="Lists what waits for a person.")
    listing.set_defaults(run=list_)
    approve = actions.add_parser(
        "approve", help="approve an output, or hand in an answer", description="Approves."
    )
    approve.add_argument("--data", metavar="JSON", help="the answer, where the task itself is a person's")
    approve.set_defaults(run=approve_)
    refuse = actions.add_parser(
        "refuse", help="refuse it; the note goes to the next attempt", description="Refuses."
    )
    refuse.set_defaults(run=refuse_)
    for action in (approve, refuse):
        action.add_argument("id", metavar="TASK")
        action.add_argument("--note", default="", help="why")
        action.add_argument("--reviewer", help="who decides (the account's name)")
    for action in (listing, approve, refuse):
        add_flags(action)


def list_(args: argparse.Namespace) -> int:
    with connect(args) as api:
        items = list(api.pages("/v1/approvals", {}, most=None))
    if args.json:
        print_json(items)
        return 0
    print_table(
        ("TASK", "KIND", "TYPE", "TITLE", "SINCE"),
        [
            (
                item["task"]["id"],
                item["kind"],
                item["task"]["type"],
                item["task"]["title"][:50],
                moment(item["since"]),
            )
            for item in items
        ],
        empty="Nothing waits for you.",
    )
    return 0


def approve_(args: argparse.Namespace) -> int:
    body: dict[str, Any] = {"approve": True}
    if args.data is not None:
        try:
            body["data"] = json.loads(args.data)
        except ValueError as error:
            raise InvalidInputError(f"--data must be JSON: {error}.") from None
    return _decide(args, body)


def refuse_(args: argparse.Namespace) -> int:
    return _decide(args, {"approve": False})


def _decide(args: argparse.Namespace, body: dict[str, Any]) -> int:
    body |= {"note": args.note, "reviewer": args.reviewer or getpass.getuser()}
    with connect(args) as api:
        task = api.post(f"/v1/approvals/{segment(args.id)}", body)
    if args.json:
        print_json(task)
    else:
        print_facts([("Task", task["id"]), ("Status", task["status"])])
    return 0
