"""`lineshaft quotas`."""

import argparse
from typing import TYPE_CHECKING, Any

from lineshaft.cli.actions import Actions, add_action, print_done, print_items, print_result
from lineshaft.cli.connection import add_reason, collect, connect
from lineshaft.cli.output import Id, When, moment_and_age, print_facts, print_table
from lineshaft.cli.usage import UsageError, seconds, whole

if TYPE_CHECKING:
    from decimal import Decimal

    from lineshaft.types import Quota, QuotaDetails, Rate

_UNITS = ("tasks", "requests", "tokens", "usd")


def add_to(commands: Actions) -> None:
    command = commands.add_parser(
        "quotas",
        help="limit how many tasks of a key run at once, and rates",
        description="List quotas: at most so many tasks of a key at once, or so much in a time.",
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    add_action(actions, "list", "list quotas, with what runs and waits", list_)
    show = add_action(actions, "show", "show a quota: who holds it, uses its rate, and waits", show_)
    change = add_action(
        actions,
        "set",
        "set a quota",
        set_,
        "Set a quota, whole: a limit that isn't given is removed. It applies from the next claim; running "
        "tasks count, and none is stopped.",
    )
    delete = add_action(actions, "delete", "delete a quota: what waited for it can be claimed", delete_)
    for action in (show, change, delete):
        action.add_argument("name", metavar="NAME")
    change.add_argument(
        "match",
        metavar="KEY",
        help="which tasks: type:T, model:M, account:A, agent:ID, tag:TAG or one of their quota_keys; "
        "'PREFIX:*' for all keys that begin so",
    )
    change.add_argument("--max-running", type=whole, metavar="N", help="at most N tasks at once")
    change.add_argument(
        "--max-waiting", type=whole, metavar="N", help="refuse submissions while N tasks wait"
    )
    change.add_argument(
        "--rate",
        type=_rate,
        metavar="AMOUNT/SECONDS",
        help="at most so much in any window, as 60/60, of --unit",
    )
    change.add_argument(
        "--unit",
        choices=_UNITS,
        help="what --rate counts: tasks (the default) limits claims, the others what handlers acquire",
    )
    change.add_argument("--shared", action="store_true", help="all matching keys share one limit")
    change.add_argument("--weight", type=float, default=1.0, help="the share of its keys among fair_keys")
    for action in (change, delete):
        add_reason(action)


def _rate(text: str) -> "tuple[Decimal, float]":
    from decimal import Decimal, InvalidOperation  # noqa: PLC0415 - most commands don't need it

    amount, _, per_sec = text.partition("/")
    try:
        return Decimal(amount), seconds(per_sec)
    except (InvalidOperation, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"must be AMOUNT/SECONDS, such as 60/60 for 60 in any minute, got {text!r}"
        ) from None


def list_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        items, _ = collect(lambda limit, cursor: shaft.quotas(limit=limit, cursor=cursor))
    return print_items(
        args,
        items,
        ("NAME", "KEY", "RUNNING", "WAITING", "USED"),
        lambda quota: (
            *(quota.name, quota.match if quota.each else f"{quota.match}, shared"),
            *(
                _of(quota, quota.running, quota.max_running),
                _of(quota, quota.waiting, quota.max_waiting),
                _used(quota),
            ),
        ),
        empty=f"No quotas in {args.place}.",
    )


def show_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        return print_result(args, shaft.get_quota(args.name), _show)


def set_(args: argparse.Namespace) -> int:
    if args.unit is not None and args.rate is None:
        raise UsageError("--unit needs --rate.")
    with connect(args, create=True) as shaft:
        rate = None if args.rate is None else _new_rate(args.rate, args.unit or "tasks")
        quota = shaft.set_quota(
            args.name,
            args.match,
            each=not args.shared,
            max_running=args.max_running,
            max_waiting=args.max_waiting,
            rate=rate,
            weight=args.weight,
            reason=args.reason,
        )
    return print_result(args, quota, lambda known: print_facts(_facts(known)))


def _new_rate(entered: "tuple[Decimal, float]", unit: str) -> "Rate":
    from lineshaft.types import Rate, RateUnit  # noqa: PLC0415 - slow to import

    amount, per_sec = entered
    return Rate(amount, RateUnit(unit), per_sec)


def delete_(args: argparse.Namespace) -> int:
    with connect(args, create=True) as shaft:
        shaft.delete_quota(args.name, reason=args.reason)
    return print_done(args, {"name": args.name, "deleted": True}, f"Deleted quota {args.name}.")


def _show(details: "QuotaDetails") -> None:
    quota = details.quota
    print_facts([*_facts(quota), ("Changed", moment_and_age(quota.changed_at))])
    tables: tuple[tuple[tuple[str, ...], list[tuple[Any, ...]]], ...] = (
        (
            ("KEY", "RUNNING", "WAITING", "USED"),
            [(key.key, key.running, key.waiting, _plain(key.used)) for key in details.keys if key.key],
        ),
        (
            ("HOLDER", "KEY", "AGENT", "SINCE"),
            [(Id(one.task_id), one.key, one.agent_id, When(one.since)) for one in quota.holders],
        ),
        (
            ("USER", "KEY", "AGENT", "AMOUNT", "LAST"),
            [
                (Id(one.task_id), one.key, one.agent_id, _plain(one.amount), When(one.last_at))
                for one in details.users
            ],
        ),
        (
            ("WAITER", "TYPE", "KEY", "READY"),
            [(Id(one.task_id), one.type, one.key, When(one.ready_at)) for one in details.waiters],
        ),
    )
    for columns, rows in tables:
        if rows:
            print()
            print_table(columns, rows, empty="")


def _facts(quota: "Quota") -> list[tuple[str, str]]:
    shared = "" if quota.each else ", shared"
    facts = [
        ("Quota", quota.name),
        ("Key", f"{quota.match}{shared}"),
        ("Running", _of(quota, quota.running, quota.max_running)),
        ("Waiting", _of(quota, quota.waiting, quota.max_waiting)),
    ]
    if quota.rate is not None:
        facts.append(("Used", _used(quota)))
    if quota.weight != 1:
        facts.append(("Weight", f"{quota.weight:g}"))
    return facts


def _of(quota: "Quota", number: int, limit: int | None) -> str:
    if limit is None:
        return f"{number}"
    is_each = quota.each and quota.match.endswith("*")
    return f"{number}, {limit} each" if is_each else f"{number} of {limit}"


def _used(quota: "Quota") -> str:
    rate = quota.rate
    if rate is None:
        return ""
    return f"{_plain(quota.used)} of {_plain(rate.amount)} {rate.unit} in {_window(rate.per_sec)}"


def _window(per_sec: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if per_sec >= length and per_sec % length == 0:
            return f"{per_sec / length:g}{unit}"
    return f"{per_sec:g}s"


def _plain(amount: Any) -> str:
    return f"{float(amount):,.6f}".rstrip("0").rstrip(".")
