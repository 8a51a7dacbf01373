"""`lineshaft agents`."""

import argparse
from typing import TYPE_CHECKING, Any

from lineshaft.cli.actions import print_done, print_items, print_result
from lineshaft.cli.connection import add_flags, add_reason, collect, connect
from lineshaft.cli.output import When, moment_and_age, print_facts, print_table, usd, usd_left
from lineshaft.cli.usage import UsageError, dollars, positive
from lineshaft.model.instance_names import short_names

if TYPE_CHECKING:
    from lineshaft.types import AgentAccount, AgentInfo


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "agents", help="list, show and change agents", description="List, show and change agents."
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list agents", description="List agents.")
    listing.add_argument(
        "--status",
        action="append",
        default=[],
        choices=("active", "draining", "offline"),
        help="only this status; repeatable",
    )
    listing.add_argument("--type", metavar="TYPE", help="only agents that take tasks of this type")
    listing.add_argument("--capability", metavar="NAME", help="only agents with this capability")
    listing.add_argument("--search", metavar="TEXT", help="part of the id")
    listing.set_defaults(run=list_)
    show = actions.add_parser("show", help="show an agent", description="Show an agent.")
    show.set_defaults(run=show_)
    change = actions.add_parser(
        "change",
        help="change status, slots or budget",
        description="Change the status, slots or budget of an agent.",
    )
    change.add_argument(
        "--status",
        default=...,
        choices=("active", "draining", "offline"),
        help="draining, offline: claim nothing new until it is set to active",
    )
    change.add_argument(
        "--slots",
        type=_slots,
        default=...,
        dest="max_concurrent_tasks",
        metavar="N",
        help="tasks at the same time in each process; 'declared': as each declares",
    )
    change.add_argument(
        "--budget",
        type=_budget,
        default=...,
        dest="budget_usd",
        metavar="USD",
        help="a new total budget; 'unlimited': none",
    )
    change.add_argument(
        "--add-budget",
        type=dollars,
        default=...,
        dest="add_budget_usd",
        metavar="USD",
        help="add to the budget",
    )
    change.set_defaults(run=change_)
    remove = actions.add_parser(
        "rm",
        help="delete an agent without live processes",
        description="Delete an agent without live processes. Its history, budget and spend are kept: if it "
        "registers again, it goes on from there.",
    )
    remove.set_defaults(run=remove_)
    for action in (show, change, remove):
        action.add_argument("id", metavar="AGENT", help="the id of the agent")
    for action in (change, remove):
        add_reason(action)
    for action in (listing, show, change, remove):
        add_flags(action)


def _slots(text: str) -> int | None:
    return None if text == "declared" else positive(text)


def _budget(text: str) -> float | None:
    return None if text == "unlimited" else dollars(text)


def list_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        found, _ = collect(lambda limit, cursor: shaft.agents(status=args.status, limit=limit, cursor=cursor))
    agents = [agent for agent in found if _is_wanted(agent, args)]
    return print_items(
        args,
        agents,
        ("AGENT", "STATUS", "PROCESSES", "BUSY", "LEFT USD", "TYPES", "CAPABILITIES", "LAST HEARTBEAT"),
        lambda agent: (
            agent.id,
            agent.status,
            sum(instance.status != "offline" for instance in agent.instances),
            f"{agent.current_tasks} of {agent.max_concurrent_tasks}",
            "" if agent.budget_remaining_usd is None else usd(agent.budget_remaining_usd),
            "any" if agent.types is None else agent.types,
            agent.capabilities,
            When(agent.last_heartbeat),
        ),
        empty=f"No agents match these filters in {args.place}."
        if found or args.status
        else f"No agents in {args.place}. 'lineshaft agent --exec COMMAND --type TYPE' runs any command as "
        "an agent; docs/agents.md shows how to write one in Python.",
        optional=("PROCESSES", "LEFT USD", "CAPABILITIES"),
    )


def _is_wanted(agent: "AgentInfo", args: argparse.Namespace) -> bool:
    return (
        (args.type is None or agent.types is None or args.type in agent.types)
        and (args.capability is None or args.capability in agent.capabilities)
        and (args.search is None or args.search.lower() in agent.id.lower())
    )


def show_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        return print_result(args, shaft.get_agent(args.id), _show)


def change_(args: argparse.Namespace) -> int:
    names = ("status", "max_concurrent_tasks", "budget_usd", "add_budget_usd")
    changes: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not ...}
    if not changes:
        raise UsageError("Nothing to change: use --status, --slots, --budget or --add-budget.")
    with connect(args) as shaft:
        return print_result(args, shaft.change_agent(args.id, **changes, reason=args.reason), _show)


def remove_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        shaft.delete_agent(args.id, reason=args.reason)
    return print_done(
        args, {"id": args.id, "deleted": True}, f"Deleted agent {args.id}. Its history is kept."
    )


def _account(account: "AgentAccount") -> str:
    if account.open:
        return f"{account.name} (open)"
    return f"{account.name} (closed until {moment_and_age(account.until) or 'it is opened'})"


def _show(agent: "AgentInfo") -> None:
    live = [each for each in agent.instances if each.status != "offline"] or agent.instances[:1]
    versions = dict.fromkeys(each.version for each in live if each.version is not None)
    budget = "unlimited"
    if agent.budget_usd is not None and agent.budget_remaining_usd is not None:
        budget = usd_left(agent.budget_remaining_usd, agent.budget_usd)
    print_facts(
        [
            ("Agent", agent.id),
            ("Status", f"{agent.status}, last heartbeat {moment_and_age(agent.last_heartbeat) or 'unknown'}"),
            ("Busy", f"{agent.current_tasks} of {agent.max_concurrent_tasks} slots"),
            ("Budget", f"{budget}; {usd(agent.spent_usd)} spent, {usd(agent.reserved_usd)} reserved"),
            ("Types", "any" if agent.types is None else ", ".join(agent.types)),
            ("Capabilities", ", ".join(agent.capabilities) or "none"),
            ("Models", ", ".join(agent.models_available) or "any"),
            *([("Accounts", ", ".join(map(_account, agent.accounts)))] if agent.accounts else []),
            ("Version", ", ".join(versions) or "not declared"),
        ]
    )
    names = short_names([each.instance for each in agent.instances])
    print()
    print_table(
        ("PROCESS", "STATUS", "BUSY", "VERSION", "STARTED", "LAST HEARTBEAT"),
        [
            (
                name or f"(incarnation {each.incarnation})",
                each.status,
                f"{each.current_tasks} of {each.max_concurrent_tasks}",
                each.version,
                When(each.started_at),
                When(each.last_heartbeat),
            )
            for name, each in zip(names, agent.instances, strict=True)
        ],
        empty="No processes in the last day.",
        optional=("STARTED",),
    )
