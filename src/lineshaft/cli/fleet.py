"""`lineshaft agents`: who works, and with what."""

import argparse
from typing import Any

from lineshaft.cli.api import add_flags, connect, segment
from lineshaft.cli.output import moment, print_facts, print_json, print_table, usd


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "agents", help="list agents, drain them, add to their budgets", description="Agents."
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list agents", description="Lists agents.")
    listing.set_defaults(run=list_)
    show = actions.add_parser("show", help="show an agent", description="Shows an agent.")
    show.set_defaults(run=show_)
    change = actions.add_parser(
        "change", help="change an agent's limits", description="Changes an agent's status, slots or money."
    )
    change.add_argument("--status", choices=("active", "draining"), help="draining: it takes nothing new")
    change.add_argument("--slots", type=int, dest="max_concurrent_tasks", metavar="N")
    change.add_argument("--add-budget", type=float, dest="add_budget_usd", metavar="USD")
    change.set_defaults(run=change_)
    for action in (show, change):
        action.add_argument("id", metavar="AGENT")
    for action in (listing, show, change):
        add_flags(action)


def list_(args: argparse.Namespace) -> int:
    with connect(args) as api:
        agents = list(api.pages("/v1/agents", {}, most=None))
    if args.json:
        print_json(agents)
        return 0
    print_table(
        ("AGENT", "STATUS", "BUSY", "LEFT USD", "TYPES", "CAPABILITIES", "LAST HEARTBEAT"),
        [
            (
                agent["id"],
                agent["status"],
                f"{agent['current_tasks']}/{agent['max_concurrent_tasks']}",
                "unlimited" if agent["budget_remaining_usd"] is None else usd(agent["budget_remaining_usd"]),
                "any" if agent["types"] is None else agent["types"],
                agent["capabilities"],
                moment(agent["last_heartbeat"]),
            )
            for agent in agents
        ],
        empty="No agent has registered yet. docs/agents.md shows how to write one; "
        "'lineshaft agent --exec COMMAND' makes one of any program.",
    )
    return 0


def show_(args: argparse.Namespace) -> int:
    with connect(args) as api:
        _show(args, api.get(f"/v1/agents/{segment(args.id)}"))
    return 0


def change_(args: argparse.Namespace) -> int:
    names = ("status", "max_concurrent_tasks", "add_budget_usd")
    body = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    with connect(args) as api:
        _show(args, api.call("PATCH", f"/v1/agents/{segment(args.id)}", body=body))
    return 0


def _show(args: argparse.Namespace, agent: dict[str, Any]) -> None:
    if args.json:
        print_json(agent)
        return
    budget = "unlimited"
    if agent["budget_usd"] is not None:
        budget = f"{usd(agent['budget_remaining_usd'])} of {usd(agent['budget_usd'])} USD left"
    print_facts(
        [
            ("Agent", agent["id"]),
            ("Status", f"{agent['status']}, last heard of {moment(agent['last_heartbeat'])}"),
            ("Busy", f"{agent['current_tasks']} of {agent['max_concurrent_tasks']} slots"),
            ("Budget", f"{budget}; {usd(agent['spent_usd'])} spent, {usd(agent['reserved_usd'])} reserved"),
            ("Types", "any" if agent["types"] is None else ", ".join(agent["types"])),
            ("Capabilities", ", ".join(agent["capabilities"]) or "none"),
            ("Models", ", ".join(agent["models_available"]) or "any"),
        ]
    )
