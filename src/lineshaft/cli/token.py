"""`lineshaft token`: tokens of the HTTP API."""

import argparse
import sys
from typing import TYPE_CHECKING

from lineshaft.cli.actions import print_done, print_items
from lineshaft.cli.connection import add_flags, connect
from lineshaft.cli.ids import ambiguous
from lineshaft.cli.output import Id, When, print_facts, print_json, usd
from lineshaft.cli.usage import UsageError, dollars
from lineshaft.errors import NotFoundError
from lineshaft.model.short_ids import matches
from lineshaft.saved_token import save_token
from lineshaft.settings import Settings

if TYPE_CHECKING:
    from lineshaft.types import Token

_FIRST = """\
This is the first token. From now on every call over HTTP needs one, on this
machine too, also after all are revoked (LINESHAFT_AUTH=off lifts this on
loopback). Agents and clients that call over HTTP without a token are refused.
Give each its own, and start it again:
  lineshaft token create --name NAME --scope agent --agent ID
  LINESHAFT_TOKEN=… lineshaft agent …
Or, for all on this machine: lineshaft token create --save
Agents and clients on the database need none.
"""
SCOPES = ("read", "submit", "agent", "operate", "admin")


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "token",
        help="create, list and revoke tokens of the HTTP API",
        description="Create, list and revoke bearer tokens. Each scope includes those before it: read, "
        "submit (submit tasks), agent (work on tasks), operate (cancel, retry, pause, approve), admin "
        "(tokens).",
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    create = actions.add_parser(
        "create", help="create a token", description="Create a token. It is shown only once."
    )
    create.add_argument("--name", required=True, help="the owner, shown in the list")
    create.add_argument("--scope", required=True, choices=SCOPES, help="what the token may do")
    create.add_argument(
        "--agent",
        dest="agent_id",
        metavar="ID",
        help="with the scope agent: register, claim and work only as this agent",
    )
    create.add_argument(
        "--budget",
        type=dollars,
        dest="budget_usd",
        metavar="USD",
        help="with --agent: the agent's budget, in place of the one that it declares when it registers",
    )
    create.add_argument(
        "--save",
        action="store_true",
        help="also write the token to LINESHAFT_HOME/token, readable only by you: clients and commands on "
        "this machine then use it unless LINESHAFT_TOKEN is set",
    )
    create.set_defaults(run=create_)
    listing = actions.add_parser(
        "list", help="list tokens", description="List all tokens, without their secrets."
    )
    listing.set_defaults(run=list_)
    revoke = actions.add_parser(
        "revoke",
        help="revoke a token",
        description="Revoke a token. Servers reject it from the next request on.",
    )
    revoke.add_argument(
        "which",
        metavar="ID-OR-NAME",
        help="a token's id or its short form, or a name: all tokens of that name",
    )
    revoke.add_argument(
        "--pause-sources",
        action="store_true",
        help="also pause the sources that the token has put or changed last; those of a token that is bound "
        "to an agent always pause",
    )
    revoke.set_defaults(run=revoke_)
    for action in (create, listing, revoke):
        add_flags(action)


def create_(args: argparse.Namespace) -> int:
    if args.agent_id is not None and args.scope != "agent":
        raise UsageError("--agent needs --scope agent.")
    if args.budget_usd is not None and args.agent_id is None:
        raise UsageError("--budget is the budget of one agent: use --agent ID too.")
    with connect(args, create=True) as shaft:
        if not shaft.tokens():
            print(_FIRST, file=sys.stderr)
        made = shaft.create_token(args.name, args.scope, agent_id=args.agent_id, budget_usd=args.budget_usd)
    if args.json:
        print_json(made)
    else:
        facts = [("Id", made.id), ("Name", made.name), ("Scope", made.scope)]
        if made.agent_id is not None:
            facts.append(("Agent", made.agent_id))
        if made.budget_usd is not None:
            facts.append(("Budget", f"{usd(made.budget_usd)} USD"))
        print_facts([*facts, ("Token", made.token)])
        print("\nSave the token now: it is not shown again. Clients read it from LINESHAFT_TOKEN.")
    if args.save:
        path = save_token(Settings.load().home, made.token)
        print(f"Saved in {path}: clients and commands with this LINESHAFT_HOME use it.", file=sys.stderr)
    return 0


def list_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        tokens = shaft.tokens()
    return print_items(
        args,
        tokens,
        ("TOKEN", "NAME", "SCOPE", "AGENT", "BUDGET USD", "CREATED", "REVOKED"),
        lambda token: (
            Id(token.id),
            token.name,
            token.scope,
            token.agent_id,
            None if token.budget_usd is None else usd(token.budget_usd),
            When(token.created_at),
            When(token.revoked_at),
        ),
        empty=f"No tokens in {args.place}. Create one with 'lineshaft token create --name NAME --scope "
        "SCOPE'.",
    )


def revoke_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        in_force = [token for token in shaft.tokens() if token.revoked_at is None]
        found = [token for token in in_force if args.which in {token.id, token.name}]
        if not found:
            found = [token for token in in_force if matches("token", args.which, token.id)]
            if len(found) > 1:
                raise ambiguous(args.which, [token.id for token in found])
        if not found:
            raise NotFoundError(f"There is no token in force with id or name {args.which!r}.")
        which = args.which if args.which == found[0].name else found[0].id
        shaft.revoke_token(which, pause_sources=args.pause_sources)
    paused = [name for token in found if _pauses(args, token) for name in token.sources]
    running = [name for token in found if not _pauses(args, token) for name in token.sources]
    lines = [f"Revoked {token.id} ({token.name})." for token in found]
    if paused:
        lines.append(f"Paused its sources: {', '.join(paused)}. 'lineshaft sources resume NAME' resumes one.")
    if running:
        lines.append(
            f"Sources that it has put or changed last go on: {', '.join(running)}. 'lineshaft sources pause "
            "NAME' pauses one; --pause-sources would have paused all of them."
        )
    report = {
        "revoked": [token.id for token in found],
        "sources_paused": paused,
        "sources_running": running,
    }
    return print_done(args, report, "\n".join(lines))


def _pauses(args: argparse.Namespace, token: "Token") -> bool:
    return args.pause_sources or token.agent_id is not None
