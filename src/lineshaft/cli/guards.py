"""What holds work back, and how to let it go: breakers, locks, slow-downs, pauses."""

import argparse
from typing import Any

from lineshaft.cli.api import add_flags, connect, segment
from lineshaft.cli.output import moment, print_json, print_table


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    breakers = commands.add_parser(
        "breakers", help="list, open and reset circuit breakers", description="Circuit breakers, one a type."
    )
    actions = _with_list(breakers, list_breakers, "Lists the breakers that have counted a failure.")
    _with_key(actions, "open", "block a type until it is reset", open_breaker)
    _with_key(actions, "reset", "close a breaker and forget its failures", reset_breaker)
    locks = commands.add_parser(
        "locks", help="list and release document locks", description="Document locks."
    )
    actions = _with_list(locks, list_locks, "Lists the locks that are held.")
    _with_key(actions, "release", "take a lock from its holder", release_lock)
    slowdowns = commands.add_parser(
        "slowdowns", help="list and end slow-downs after rate limits", description="Slow-downs."
    )
    actions = _with_list(slowdowns, list_slowdowns, "Lists models that are left alone for a while.")
    _with_key(actions, "end", "let agents use a model again at once", end_slowdown)
    for name, help_, run in (
        ("pause", "claim nothing of a type, or nothing at all; what runs goes on", pause),
        ("resume", "end a pause", resume),
    ):
        command = commands.add_parser(name, help=help_, description=help_.capitalize() + ".")
        command.add_argument("type", nargs="?", metavar="TYPE", help="only this type; else everything")
        command.set_defaults(run=run)
        add_flags(command)


def _with_list(command: argparse.ArgumentParser, run: Any, description: str) -> Any:
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list them", description=description)
    listing.set_defaults(run=run)
    add_flags(listing)
    return actions


def _with_key(actions: Any, name: str, help_: str, run: Any) -> None:
    action = actions.add_parser(name, help=help_, description=help_.capitalize() + ".")
    action.add_argument("key", metavar="KEY")
    action.set_defaults(run=run)
    add_flags(action)


def _list(args: argparse.Namespace, path: str) -> list[dict[str, Any]] | None:
    """The items; None when they were printed as JSON."""
    with connect(args) as api:
        items = list(api.pages(path, {}, most=None))
    if args.json:
        print_json(items)
        return None
    return items


def list_breakers(args: argparse.Namespace) -> int:
    found = _list(args, "/v1/breakers")
    if found is not None:
        rows = [
            (b["key"], b["state"], b["failures"], moment(b["opened_at"]), b["probe_task_id"], b["forced"])
            for b in found
        ]
        print_table(
            ("KEY", "STATE", "FAILURES", "OPENED", "PROBE", "BY HAND"),
            rows,
            empty="All breakers are closed, with no failures counted.",
        )
    return 0


def list_locks(args: argparse.Namespace) -> int:
    found = _list(args, "/v1/locks")
    if found is not None:
        rows = [
            (k["key"], k["holder_task_id"], k["agent_id"], k["waiting"], moment(k["expires_at"]))
            for k in found
        ]
        print_table(("KEY", "TASK", "AGENT", "WAITING", "EXPIRES"), rows, empty="No lock is held.")
    return 0


def list_slowdowns(args: argparse.Namespace) -> int:
    found = _list(args, "/v1/slowdowns")
    if found is not None:
        rows = [(s["key"], moment(s["until"]), s["reason"]) for s in found]
        print_table(("KEY", "UNTIL", "REASON"), rows, empty="Nothing is slowed down.")
    return 0


def open_breaker(args: argparse.Namespace) -> int:
    return _act(
        args, "POST", f"/v1/breakers/{segment(args.key)}/open", f"{args.key} is open until it is reset."
    )


def reset_breaker(args: argparse.Namespace) -> int:
    return _act(args, "POST", f"/v1/breakers/{segment(args.key)}/reset", f"{args.key} is closed.")


def release_lock(args: argparse.Namespace) -> int:
    return _act(args, "DELETE", f"/v1/locks/{segment(args.key)}", f"{args.key} is free.")


def end_slowdown(args: argparse.Namespace) -> int:
    return _act(args, "DELETE", f"/v1/slowdowns/{segment(args.key)}", f"{args.key} may be used again.")


def pause(args: argparse.Namespace) -> int:
    what = args.type or "Everything"
    return _act(args, "POST", "/v1/pause", f"{what} is paused. What runs goes on.", _type(args))


def resume(args: argparse.Namespace) -> int:
    return _act(args, "POST", "/v1/resume", f"{args.type or 'Everything'} goes on.", _type(args))


def _type(args: argparse.Namespace) -> dict[str, Any]:
    return {} if args.type is None else {"type": args.type}


def _act(args: argparse.Namespace, method: str, path: str, said: str, body: Any = None) -> int:
    with connect(args) as api:
        answer = api.call(method, path, body=({} if body is None else body) if method == "POST" else None)
    if args.json:
        print_json(answer)
    else:
        print(said)
    return 0
