"""`lineshaft approvals`: outputs and tasks that wait for a person."""

import argparse

from lineshaft.cli.actions import add_reviewer, print_items, reviewer
from lineshaft.cli.connection import add_flags, collect, connect
from lineshaft.cli.ids import task_id
from lineshaft.cli.output import Id, When
from lineshaft.cli.task import own_title, print_status
from lineshaft.cli.usage import json_value


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "approvals",
        help="list, approve and reject what waits for a person",
        description="List, approve and reject outputs that wait for approval and tasks that need a person.",
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser(
        "list", help="list what waits for a person", description="List what waits for a person, oldest first."
    )
    listing.set_defaults(run=list_)
    approve = actions.add_parser(
        "approve",
        help="approve an output, or complete a task that needs a person",
        description="Approve an output, or complete a task that needs a person with --data as its output.",
    )
    approve.add_argument("--data", metavar="JSON", help="the output of a task that needs a person")
    approve.set_defaults(run=approve_)
    reject = actions.add_parser(
        "reject",
        help="reject an output, or decline a task that needs a person",
        description="Reject an output: the attempt fails, and the next attempt sees the note. A task that "
        "needs a person becomes a dead letter.",
    )
    reject.set_defaults(run=reject_)
    for action in (approve, reject):
        action.add_argument("id", metavar="TASK", help="the id of the task, or its short form")
        action.add_argument("--note", default="", help="the reason")
        add_reviewer(action)
    for action in (listing, approve, reject):
        add_flags(action)


def list_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        items, _ = collect(lambda limit, cursor: shaft.approvals(limit=limit, cursor=cursor))
    return print_items(
        args,
        items,
        ("TASK", "KIND", "TYPE", "TITLE", "SINCE"),
        lambda item: (
            Id(item.task.id),
            item.kind,
            item.task.type,
            own_title(item.task.type, item.task.title),
            When(item.since),
        ),
        empty=f"Nothing waits for a person in {args.place}.",
    )


def approve_(args: argparse.Namespace) -> int:
    data = None if args.data is None else json_value("--data", args.data)
    with connect(args) as shaft:
        task = shaft.approve(task_id(shaft, args.id), reviewer=reviewer(args), note=args.note, data=data)
    return print_status(args, task)


def reject_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        task = shaft.reject(task_id(shaft, args.id), reviewer=reviewer(args), note=args.note)
    return print_status(args, task)
