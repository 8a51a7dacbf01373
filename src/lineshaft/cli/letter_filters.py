"""The dead letters that filters of a command mean: of `dlq list`, and of decisions about many at once."""

import argparse
from typing import TYPE_CHECKING, Any

from lineshaft.cli.connection import collect
from lineshaft.cli.usage import UsageError, time_or_age

if TYPE_CHECKING:
    from lineshaft.client.blocking import SyncLineshaft
    from lineshaft.types import DeadLetter

_FILTERS = ("type", "category", "error_like", "poison", "since")


def add_letter_filters(action: argparse.ArgumentParser) -> None:
    action.add_argument("--type", metavar="TYPE", help="only this type")
    action.add_argument("--category", metavar="CATEGORY", help="only this category of failure")
    action.add_argument("--error-like", "--contains", metavar="TEXT", help="part of the error")
    action.add_argument("--poison", action="store_true", help="only poison pills")
    action.add_argument(
        "--since",
        type=time_or_age,
        metavar="TIME",
        help="only what failed since then: an age such as 2h, or a time in ISO 8601",
    )


def has_letter_filters(args: argparse.Namespace) -> bool:
    return any(getattr(args, name) for name in _FILTERS)


def check_letters(args: argparse.Namespace, *, ids: bool) -> None:
    """Either tasks or filters: nothing at all must not mean every dead letter."""
    if ids == has_letter_filters(args):
        raise UsageError(
            "Give either tasks, or filters: --type, --category, --error-like, --poison, --since."
        )


def matching_letters(
    shaft: "SyncLineshaft", args: argparse.Namespace, most: int | None = None, *, reviewed: bool = False
) -> "tuple[list[DeadLetter], bool]":
    """The newest first, and whether there are more than `most`."""
    filters: dict[str, Any] = {
        "type": args.type or (),
        "category": args.category or (),
        "error_contains": args.error_like,
        "poison_pill": args.poison or None,
        "reviewed": reviewed,
    }
    letters, more = collect(
        lambda limit, cursor: shaft.dead_letters(**filters, limit=limit, cursor=cursor), most
    )
    if args.since is None:
        return letters, more
    recent = [letter for letter in letters if letter.dead_lettered_at >= args.since]
    return recent, more and len(recent) == len(letters)
