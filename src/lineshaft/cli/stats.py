"""`lineshaft stats`: how much waits, how long, how much gets done, and what it costs."""

import argparse
import sys
import time
from typing import Any

from lineshaft.cli.api import add_flags, connect
from lineshaft.cli.output import moment, print_facts, print_json, print_table, usd


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "stats",
        help="show depth, throughput and spend; with --watch, again and again",
        description="Shows what waits and what gets done. Figures of large queues are sampled: ~ marks them.",
    )
    command.add_argument(
        "--watch", type=float, nargs="?", const=2.0, metavar="SEC", help="again every so many seconds (2)"
    )
    add_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with connect(args) as api:
        while True:
            stats = api.get("/v1/stats")
            if args.watch is not None and sys.stdout.isatty() and not args.json:
                print("\033[H\033[2J", end="")
            if args.json:
                print_json(stats)
            else:
                show(stats)
            if args.watch is None:
                return 0
            sys.stdout.flush()
            time.sleep(args.watch)


def show(stats: dict[str, Any]) -> None:
    waiting = stats["oldest_ready_sec"]
    facts = [
        ("As of", moment(stats["as_of"])),
        ("Oldest ready", "nothing waits" if waiting is None else f"{waiting:.0f} s"),
        ("Spent today", f"{usd(stats['spend_today_usd'])} USD"),
    ]
    if stats["paused"]:
        facts.append(("Paused", ", ".join("everything" if name == "*" else name for name in stats["paused"])))
    print_facts(facts)
    print()
    rows = [
        (row["status"], row["tier"], ("" if row["exact"] else "~") + str(row["count"]))
        for row in stats["depth"]
        if row["count"]
    ]
    print_table(("STATUS", "TIER", "TASKS"), rows, empty="There are no tasks yet: 'lineshaft submit TYPE'.")
    print()
    print_table(
        ("LAST", "COMPLETED", "CANCELLED", "DEAD"),
        [
            (name, figures["completed"], figures["cancelled"], figures["dead_lettered"])
            for name, figures in stats["throughput"].items()
        ],
        empty="",
    )
