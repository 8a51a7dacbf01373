"""`lineshaft token`: who may call a server that others can reach."""

import argparse
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from lineshaft.cli.output import add_json_flag, print_facts, print_json
from lineshaft.settings import Settings

if TYPE_CHECKING:
    from lineshaft.engine.tokens import Tokens
    from lineshaft.types import Token

T = TypeVar("T")
SCOPES = ("read", "submit", "agent", "operate", "admin")


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "token",
        help="make, list and revoke the tokens of the HTTP API",
        description="Makes, lists and revokes bearer tokens. Scopes, each with those before it: read (look), "
        "submit (give work), agent (do work), operate (cancel, retry, pause, approve), admin.",
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    make = actions.add_parser("create", help="make a token; it is shown once", description="Makes a token.")
    make.add_argument("--name", required=True, help="whose it is, for the list")
    make.add_argument("--scope", required=True, choices=SCOPES, help="what it may do")
    make.set_defaults(run=create)
    show = actions.add_parser("list", help="list all tokens", description="Lists tokens, never the secret.")
    show.set_defaults(run=list_)
    end = actions.add_parser(
        "revoke",
        help="end a token; servers refuse it from the next request on",
        description="Ends a token. Servers refuse it from the next request on.",
    )
    end.add_argument("which", metavar="ID-OR-NAME", help="its id, or a name: all tokens of that name")
    end.set_defaults(run=revoke)
    for action in (make, show, end):
        add_json_flag(action)


def create(args: argparse.Namespace) -> int:
    made = _with_tokens(lambda tokens: tokens.create(args.name, args.scope))
    if args.json:
        print_json({"id": made.id, "name": made.name, "scope": made.scope, "token": made.token})
    else:
        print_facts([("Id", made.id), ("Name", made.name), ("Scope", made.scope), ("Token", made.token)])
        print("\nKeep it now: it is not shown again. Send it as 'Authorization: Bearer TOKEN'.")
    return 0


def list_(args: argparse.Namespace) -> int:
    found = _with_tokens(lambda tokens: tokens.all())
    if args.json:
        print_json([_as_json(token) for token in found])
    elif found:
        print_facts([(token.id, f"{token.scope:<8}  {token.name}{_state(token)}") for token in found])
    else:
        print("There are none. Make one: lineshaft token create --name NAME --scope SCOPE")
    return 0


def revoke(args: argparse.Namespace) -> int:
    revoked = _with_tokens(lambda tokens: tokens.revoke(args.which))
    if args.json:
        print_json([_as_json(token) for token in revoked])
    else:
        for token in revoked:
            print(f"Revoked {token.id} ({token.name}).")
    return 0


def _state(token: "Token") -> str:
    if token.revoked_at is None:
        return ""
    return f"  (revoked {token.revoked_at.isoformat(timespec='seconds')})"


def _as_json(token: "Token") -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "scope": token.scope,
        "created_at": token.created_at,
        "revoked_at": token.revoked_at,
    }


def _with_tokens(work: "Callable[[Tokens], Awaitable[T]]") -> T:
    import asyncio  # noqa: PLC0415 - with all that follows, slow to import

    from lineshaft.engine.postgres import migrate  # noqa: PLC0415
    from lineshaft.engine.postgres.database import Database  # noqa: PLC0415
    from lineshaft.engine.postgres.location import database  # noqa: PLC0415
    from lineshaft.engine.tokens import Tokens  # noqa: PLC0415

    async def run(dsn: str) -> T:
        async with Database(dsn, max_connections=1) as opened:
            return await work(Tokens(opened))

    settings = Settings.load()
    with database(settings) as dsn:
        if settings.database_url is None:
            # The embedded database is ours to migrate: a token may be the first thing that anybody makes.
            migrate.up(dsn)
        return asyncio.run(run(dsn))
