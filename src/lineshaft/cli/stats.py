"""`lineshaft stats`."""

import argparse
import sys
import time
from typing import TYPE_CHECKING

from lineshaft.cli.artifact import size
from lineshaft.cli.connection import add_flags, connect
from lineshaft.cli.output import moment, print_facts, print_json, print_styled, print_table, relative, usd
from lineshaft.cli.usage import seconds

if TYPE_CHECKING:
    from lineshaft.types import Stats, Waiting


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "stats",
        help="show queue depth, what tasks wait for, throughput and spending",
        description="Show queue depth, what tasks wait for, throughput and spending. Figures marked with ~ "
        "are estimated from a sample.",
    )
    command.add_argument(
        "--watch",
        type=seconds,
        nargs="?",
        const=2.0,
        metavar="SEC",
        help="repeat every SEC seconds (default: 2)",
    )
    add_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        while True:
            stats = shaft.stats()
            waiting = None if args.json else shaft.waiting()
            if args.watch is not None and sys.stdout.isatty() and not args.json:
                print_styled("\033[H\033[2J", end="")
            if waiting is None:
                print_json(stats)
            else:
                _show(stats, waiting, args.place)
            if args.watch is None:
                return 0
            sys.stdout.flush()
            time.sleep(args.watch)


def _show(stats: "Stats", waiting: "Waiting", place: str) -> None:
    facts = [
        ("As of", f"{moment(stats.as_of)}, {place}"),
        ("Oldest ready", relative(stats.oldest_ready_at) or "none"),
        ("Spent today", f"{usd(stats.spend_today_usd)} USD"),
    ]
    if stats.artifacts.contents:
        estimated = "" if stats.artifacts.exact else "~"
        facts.append(("Artifacts", f"{estimated}{size(stats.artifacts.bytes)}"))
    if stats.paused:
        facts.append(("Paused", ", ".join("all types" if name == "*" else name for name in stats.paused)))
    print_facts(facts)
    print()
    rows = [
        (row.status, row.tier, ("" if row.exact else "~") + str(row.count))
        for row in stats.depth
        if row.count
    ]
    print_table(("STATUS", "TIER", "TASKS"), rows, empty="No tasks. Submit one with 'lineshaft submit TYPE'.")
    if waiting.reasons:
        print()
        reasons = [
            (
                (reason.code or "runnable").replace("_", " "),
                ("" if reason.exact else "~") + str(reason.count),
                relative(reason.oldest_at),
                ", ".join(reason.types),
            )
            for reason in waiting.reasons
        ]
        print_table(("WAITS FOR", "TASKS", "OLDEST", "TYPES"), reasons, empty="")
    print()
    print_table(
        ("PERIOD", "COMPLETED", "CANCELLED", "DEAD-LETTERED"),
        [
            (
                name.replace("_", " "),
                *(
                    f"{'' if figures.exact else '>'}{count}"
                    for count in (figures.completed, figures.cancelled, figures.dead_lettered)
                ),
            )
            for name, figures in stats.throughput.items()
        ],
        empty="",
    )
