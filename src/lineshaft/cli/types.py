"""`lineshaft types`."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from lineshaft.cli.connection import add_flags, add_reason, collect, connect
from lineshaft.cli.output import print_facts, print_json, print_table, usd
from lineshaft.cli.usage import UsageError, dollars, positive, seconds

if TYPE_CHECKING:
    from lineshaft.types import TypeInfo

_NAMES = ("max_cost_usd", "max_attempts", "max_duration_sec", "retry", "description")


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "types",
        help="show and set defaults of task types",
        description="List task types with the limits of tasks that leave them out, and their agents.",
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list types", description="List types.")
    listing.set_defaults(run=list_)
    show = actions.add_parser(
        "show", help="show a type", description="Show a type, and where its limits come from."
    )
    show.set_defaults(run=show_)
    change = actions.add_parser(
        "set",
        help="set defaults of a type",
        description="Set defaults of a type. They win over what agents declare; 'none' returns to that. They "
        "apply to new tasks that leave the limit out, and to waiting ones that did.",
    )
    change.set_defaults(run=set_)
    for action in (show, change):
        action.add_argument("type", metavar="TYPE")
    flags: tuple[tuple[str, str, Any, str, str], ...] = (
        ("--max-cost", "max_cost_usd", dollars, "USD", "what an attempt may cost"),
        ("--max-attempts", "max_attempts", positive, "N", "how often a task is tried"),
        ("--max-duration", "max_duration_sec", seconds, "SECONDS", "how long an attempt may take"),
        ("--retry", "retry", _retry, "JSON", 'the retry policy, such as \'{"strategy": "fixed"}\''),
        ("--description", "description", str, "TEXT", "what tasks of this type do"),
    )
    for flag, name, parse, metavar, help_ in flags:
        change.add_argument(flag, dest=name, type=_or_none(parse), default=..., metavar=metavar, help=help_)
    add_reason(change)
    for action in (listing, show, change):
        add_flags(action)


def _or_none(parse: Any) -> Any:
    def parsed(text: str) -> Any:
        return None if text == "none" else parse(text)

    return parsed


def _retry(text: str) -> Any:
    import msgspec  # noqa: PLC0415 - slow to import

    from lineshaft.model.tasks import RetrySpec  # noqa: PLC0415 - as above

    try:
        return msgspec.json.decode(text, type=RetrySpec)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"must be a retry policy as JSON: {error}") from None


def list_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        items, _ = collect(lambda limit, cursor: shaft.types(limit=limit, cursor=cursor))
    if args.json:
        print_json(items)
        return 0
    print_table(
        ("TYPE", "MAX COST", "ATTEMPTS", "DURATION", "RETRY", "AGENTS"),
        [(*_row(info), ", ".join(info.agents)) for info in items],
        empty=f"No types in {args.place}.",
    )
    return 0


def show_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        _show(args, shaft.get_type(args.type))
    return 0


def set_(args: argparse.Namespace) -> int:
    changes: dict[str, Any] = {name: getattr(args, name) for name in _NAMES if getattr(args, name) is not ...}
    if not changes:
        raise UsageError("Nothing to set. 'lineshaft types set --help' lists the defaults.")
    with connect(args, create=True) as shaft:
        _show(args, shaft.set_type(args.type, **changes, reason=args.reason))
    return 0


def _show(args: argparse.Namespace, info: "TypeInfo") -> None:
    if args.json:
        print_json(info)
        return
    names = ("max_cost_usd", "max_attempts", "max_duration_sec", "retry")
    labels = ("Max cost", "Max attempts", "Max duration", "Retry")
    facts = [
        (label, f"{value}{_origin(info, name)}" if value else "no default")
        for label, name, value in zip(labels, names, _row(info)[1:], strict=True)
    ]
    print_facts(
        [
            ("Type", info.type),
            *facts,
            ("Description", info.defaults.description or "-"),
            ("Agents", ", ".join(info.agents) or "none"),
            ("Warnings", "\n".join(info.warnings) or "none"),
        ]
    )


def _origin(info: "TypeInfo", name: str) -> str:
    origin = info.origins.get(name, "")
    return ", set by hand" if origin == "hand" else f", declared by {origin.removeprefix('agent:')}"


def _row(info: "TypeInfo") -> tuple[str, str, str, str, str]:
    limits = info.defaults
    return (
        info.type,
        "" if limits.max_cost_usd is None else f"{usd(limits.max_cost_usd)} USD",
        "" if limits.max_attempts is None else str(limits.max_attempts),
        "" if limits.max_duration_sec is None else f"{limits.max_duration_sec:g} s",
        "" if limits.retry is None else json.dumps(limits.retry),
    )
