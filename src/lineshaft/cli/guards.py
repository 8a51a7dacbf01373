"""Guards: `lineshaft breakers`, `locks`, `slowdowns`, `pause` and `resume`."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from lineshaft.cli.actions import Actions, Run, add_action, print_done, print_items, sentence
from lineshaft.cli.connection import add_reason, collect, connect
from lineshaft.cli.output import Id, When

if TYPE_CHECKING:
    from lineshaft.client.blocking import SyncLineshaft
    from lineshaft.types import Page

    T = TypeVar("T")


def add_to(commands: Actions) -> None:
    about = "list, open and reset circuit breakers"
    actions = _add(commands, "breakers", about, list_breakers)
    _with_key(actions, "open", "open a breaker: block a type, or model:NAME, until it is reset", open_breaker)
    _with_key(actions, "reset", "close a breaker and clear its failures", reset_breaker)
    actions = _add(commands, "locks", "list and release document locks", list_locks)
    _with_key(actions, "release", "take a lock from its holder", release_lock)
    actions = _add(commands, "slowdowns", "list and end slowdowns after rate limits", list_slowdowns)
    _with_key(actions, "end", "let agents use a model again at once", end_slowdown)
    for name, help_, run in (
        ("pause", "stop claims of a type, or of all types; running tasks continue", pause),
        ("resume", "end a pause", resume),
    ):
        command = add_action(commands, name, help_, run)
        command.add_argument("type", nargs="?", metavar="TYPE", help="only this type (default: all)")
        add_reason(command)


def _add(commands: Actions, name: str, help_: str, run: Run) -> Actions:
    command = commands.add_parser(name, help=help_, description=sentence(help_))
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    add_action(actions, "list", f"list {name}", run)
    return actions


def _with_key(actions: Actions, name: str, help_: str, run: Run) -> None:
    action = add_action(actions, name, help_, run)
    action.add_argument("key", metavar="KEY")
    add_reason(action)


def _list(
    args: argparse.Namespace,
    read: "Callable[[SyncLineshaft, int, str | None], Page[T]]",
    columns: tuple[str, ...],
    row: "Callable[[T], tuple[object, ...]]",
    empty: str,
) -> int:
    with connect(args) as shaft:
        items, _ = collect(lambda limit, cursor: read(shaft, limit, cursor))
    return print_items(args, items, columns, row, empty=f"{empty} in {args.place}.")


def list_breakers(args: argparse.Namespace) -> int:
    return _list(
        args,
        lambda shaft, limit, cursor: shaft.breakers(limit=limit, cursor=cursor),
        ("KEY", "STATE", "FAILURES", "OPENED", "PROBE", "BY HAND"),
        lambda b: (
            *(b.key, b.state, b.failures, When(b.opened_at)),
            *(b.probe_task_id and Id(b.probe_task_id), "yes" if b.forced else ""),
        ),
        "All breakers are closed",
    )


def list_locks(args: argparse.Namespace) -> int:
    return _list(
        args,
        lambda shaft, limit, cursor: shaft.locks(limit=limit, cursor=cursor),
        ("KEY", "TASK", "AGENT", "SHARED", "WAITING", "EXPIRES"),
        lambda lock: (
            *(lock.key, Id(lock.holder_task_id), lock.agent_id, "yes" if lock.shared else "", lock.waiting),
            When(lock.expires_at),
        ),
        "No locks",
    )


def list_slowdowns(args: argparse.Namespace) -> int:
    return _list(
        args,
        lambda shaft, limit, cursor: shaft.slowdowns(limit=limit, cursor=cursor),
        ("KEY", "UNTIL", "REASON"),
        lambda slowdown: (slowdown.key, When(slowdown.until), slowdown.reason),
        "No slowdowns",
    )


def open_breaker(args: argparse.Namespace) -> int:
    message = f"Breaker {args.key} is open until it is reset."
    return _act(args, lambda shaft, reason: shaft.open_breaker(args.key, reason=reason), message)


def reset_breaker(args: argparse.Namespace) -> int:
    message = f"Breaker {args.key} is closed."
    return _act(args, lambda shaft, reason: shaft.reset_breaker(args.key, reason=reason), message)


def release_lock(args: argparse.Namespace) -> int:
    message = f"Released lock {args.key}."
    return _act(args, lambda shaft, reason: shaft.release_lock(args.key, reason=reason), message)


def end_slowdown(args: argparse.Namespace) -> int:
    message = f"Ended slowdown {args.key}."
    return _act(args, lambda shaft, reason: shaft.end_slowdown(args.key, reason=reason), message)


def pause(args: argparse.Namespace) -> int:
    message = f"Paused {args.type or 'all types'}. Running tasks continue."
    json = {"type": args.type, "paused": True}
    return _act(args, lambda shaft, reason: shaft.pause(args.type, reason=reason), message, json)


def resume(args: argparse.Namespace) -> int:
    message = f"Resumed {args.type or 'all types'}."
    json = {"type": args.type, "paused": False}
    return _act(args, lambda shaft, reason: shaft.resume(args.type, reason=reason), message, json)


def _act(
    args: argparse.Namespace,
    act: "Callable[[SyncLineshaft, str | None], Any]",
    message: str,
    json: Any = None,
) -> int:
    """`json`: printed instead of the result with --json."""
    with connect(args, create=True) as shaft:
        result = act(shaft, args.reason)
    return print_done(args, result if json is None else json, message)
