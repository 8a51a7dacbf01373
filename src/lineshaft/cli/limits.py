"""`lineshaft limits`."""

import argparse
from typing import TYPE_CHECKING, Any

from lineshaft.cli.actions import print_result
from lineshaft.cli.connection import add_flags, add_reason, connect
from lineshaft.cli.output import print_facts, print_note, usd, usd_left
from lineshaft.cli.usage import UsageError, dollars, seconds

if TYPE_CHECKING:
    from lineshaft.types import Limits

_MOST_SHOWN = 80
_MONEY = {
    "daily_budget_usd": ("--daily-budget", "what all tasks together may cost in a UTC day"),
    "velocity_usd": ("--velocity", "spending more than this within the window stops everything"),
    "default_max_cost_usd": ("--default-max-cost", "what a task without a cost limit reserves"),
}


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "limits",
        help="show and change the limits of the whole installation",
        description="Show and change the limits of the whole installation. Every process obeys them.",
    )
    command.set_defaults(run=show_)
    add_flags(command)
    actions = command.add_subparsers(title="actions", metavar="ACTION")
    show = actions.add_parser("show", help="show the limits", description="Show the limits.")
    show.set_defaults(run=show_)
    change = actions.add_parser(
        "set",
        help="change limits",
        description="Change limits; 'none' removes one. They are in force at once, in every process, "
        "whatever the settings of servers say.",
    )
    for name, (flag, help_) in _MONEY.items():
        change.add_argument(flag, dest=name, type=_amount, default=..., metavar="USD", help=help_)
    change.add_argument(
        "--velocity-window",
        dest="velocity_window_sec",
        type=seconds,
        default=...,
        metavar="SECONDS",
        help="the window of --velocity",
    )
    change.add_argument(
        "--velocity-action",
        dest="velocity_action",
        choices=("stop", "pause"),
        default=...,
        help="stop: running attempts are released too; pause: only claims stop",
    )
    change.add_argument(
        "--crash-cost-fraction",
        dest="crash_cost_fraction",
        type=float,
        default=...,
        metavar="SHARE",
        help="the least share of its reservation that a crashed attempt costs, 0 to 1",
    )
    change.add_argument(
        "--judge-max-cost",
        dest="judge_max_cost_usd",
        type=dollars,
        default=...,
        metavar="USD",
        help="what a run of a gate that costs money reserves, like an attempt",
    )
    change.add_argument(
        "--from-settings",
        dest="from_settings",
        action="append",
        default=[],
        metavar="LIMIT",
        help="return a limit that was set by hand to what the settings of servers say, for example "
        "daily_budget_usd; may be repeated",
    )
    add_reason(change)
    change.set_defaults(run=set_)
    for action in (show, change):
        add_flags(action)


def _amount(text: str) -> float | None:
    return None if text == "none" else dollars(text)


def show_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        return print_result(args, shaft.limits(), _show)


def set_(args: argparse.Namespace) -> int:
    names = (*_MONEY, "velocity_window_sec", "velocity_action", "crash_cost_fraction", "judge_max_cost_usd")
    changes: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not ...}
    if not changes and not args.from_settings:
        raise UsageError("Nothing to change. 'lineshaft limits set --help' lists the limits.")
    with connect(args, create=True) as shaft:
        limits = shaft.change_limits(**changes, from_settings=args.from_settings, reason=args.reason)
    print_result(args, limits, _show)
    for name in args.from_settings:
        if not any(name in server.limits for server in limits.servers):
            print_note(f"No running server has a setting for {name}: it stays until one starts that has.")
    return 0


def _show(limits: "Limits") -> None:
    today = f"{usd(limits.spent_today_usd)} USD spent"
    if limits.daily_budget_usd is not None:
        left = limits.daily_budget_usd - limits.spent_today_usd - limits.reserved_usd
        today += f", {usd(limits.reserved_usd)} reserved, {usd_left(left, limits.daily_budget_usd)}"
    velocity = "no limit"
    if limits.velocity_usd is not None:
        window, action = limits.velocity_window_sec, limits.velocity_action
        velocity = f"{usd(limits.velocity_usd)} USD within {window:g} s, then {action}"
    facts = [
        ("Daily budget", _usd(limits.daily_budget_usd)),
        ("Today (UTC)", today),
        ("Velocity", velocity),
        ("Default cost", _usd(limits.default_max_cost_usd, "none")),
        ("Crash cost", f"{limits.crash_cost_fraction.normalize():f} of the reservation"),
        ("Judge cost", f"{usd(limits.judge_max_cost_usd)} USD reserved for each run of a paid gate"),
    ]
    if limits.by_hand:
        facts.append(("Set by hand", ", ".join(limits.by_hand)))
    if limits.disagreements:
        facts.append(("Servers", "\n".join(disagreements(limits))))
    print_facts(facts)


def disagreements(limits: "Limits") -> list[str]:
    """A sentence for each limit for which running servers have different settings."""
    from lineshaft.types.limits import SETTINGS  # noqa: PLC0415 - slow to import

    return [
        f"{SETTINGS[name]} differs: "
        + ", ".join(f"{server} says {_short(value)}" for server, value in pairs)
        + ". "
        + (
            f"{name} was set by hand, which counts."
            if name in limits.by_hand
            else "The server that starts last wins: give all of them the same value."
        )
        for name, pairs in limits.disagreements.items()
    ]


def _short(value: Any) -> str:
    """Thresholds of breakers are long."""
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"


def _usd(amount: Any, none: str = "no limit") -> str:
    return none if amount is None else f"{usd(amount)} USD"
