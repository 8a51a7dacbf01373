"""`lineshaft up`: database, API, dashboard and background duties in one process."""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lineshaft import __version__
from lineshaft.cli.connection import place
from lineshaft.cli.output import Verbatim, add_json_flag, print_facts, print_json
from lineshaft.cli.usage import port
from lineshaft.settings import Settings

if TYPE_CHECKING:
    from lineshaft.server.server import Server
    from lineshaft.server.service import Service


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "up",
        help="start database, API, dashboard and background duties in one process",
        description="Start the database (LINESHAFT_DATABASE_URL, or an embedded one), migrate it to the "
        "schema of this version, serve the HTTP API and the dashboard, and run the background duties. "
        "Several processes can share a database, each with its own port. SIGTERM or Ctrl-C stops it.",
    )
    command.add_argument("--host", help="the address to listen on (default: LINESHAFT_HOST, or 127.0.0.1)")
    command.add_argument(
        "--port",
        type=port,
        help="the port to listen on (default: LINESHAFT_PORT, or 8001); 0: any free port",
    )
    command.add_argument(
        "--no-duties",
        action="store_true",
        help="only serve the API and the dashboard; another process must run the duties",
    )
    add_json_flag(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    serve(
        lambda server, dsn, applied: _announce(args, server, dsn, applied),
        host=args.host,
        port=args.port,
        duties=not args.no_duties,
    )
    return 0


#: Called with the server, the DSN of its database, and the migrations that were applied.
Announce = Callable[["Server", str, Sequence[str]], None]


def serve(
    announce: Announce,
    *,
    host: str | None = None,
    port: int | None = None,
    duties: bool = True,
) -> None:
    """Serve until SIGTERM or Ctrl-C. `host` and `port` are used in place of the settings."""
    import asyncio  # noqa: PLC0415 - with all that follows, slow to import

    from lineshaft import logs  # noqa: PLC0415
    from lineshaft.engine.postgres import migrate  # noqa: PLC0415
    from lineshaft.engine.postgres.location import database  # noqa: PLC0415
    from lineshaft.server.framework.connections import RepeatedLines  # noqa: PLC0415
    from lineshaft.server.server import Server, listen, new_event_loop  # noqa: PLC0415
    from lineshaft.server.service import Service  # noqa: PLC0415

    settings = Settings.load()
    settings = replace(settings, host=host or settings.host)
    logs.configure(settings.log_format, settings.log_level)
    logging.getLogger("asyncio").addFilter(RepeatedLines())
    with contextlib.ExitStack() as resources:
        # First: a port that is in use is the most likely mistake.
        bound = listen(settings.host, settings.port if port is None else port)
        resources.callback(bound.close)
        settings = replace(settings, port=bound.getsockname()[1])
        dsn = resources.enter_context(database(settings))
        applied = [str(migration) for migration in migrate.up(dsn, sessions=settings.sessions)]
        service = Service(dsn, settings)
        server = Server(service, bound, duties=duties)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_serve(server, lambda: announce(server, dsn, applied)))


async def _serve(server: "Server", on_ready: Callable[[], None]) -> None:
    import asyncio  # noqa: PLC0415
    import signal  # noqa: PLC0415

    _allow_many_connections()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
    await server.run(on_ready)


def _allow_many_connections() -> None:
    """Raise the limit of open files: every waiting agent holds a connection, and the usual limit is 1024."""
    import resource  # noqa: PLC0415

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems report a limit that they don't accept.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def url_of(settings: Settings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"


def _announce(args: argparse.Namespace, server: "Server", dsn: str, applied: Sequence[str]) -> None:
    from lineshaft.engine.postgres.inspection import with_search_path  # noqa: PLC0415 - brings the driver

    settings = server.service.settings
    url = url_of(settings)
    embedded = settings.database_url is None
    duties = [duty.name for duty in server.duties]
    shown = with_search_path(dsn)
    if args.json:
        print_json(
            {
                "url": url,
                "pid": os.getpid(),
                "version": __version__,
                "database": {"kind": "embedded", "home": str(settings.home), "dsn": shown}
                if embedded
                else {"kind": "configured"},
                "migrations_applied": list(applied),
                "duties": duties,
                "tokens_required": server.service.needs_tokens,
                "first_token_code": server.service.take_first_token_code(),
            }
        )
    else:
        home = f'embedded PostgreSQL in {settings.home}\nlook inside: lineshaft sql, or psql "{shown}"'
        print_facts(
            [
                ("Lineshaft", f"{__version__}, process {os.getpid()}"),
                (
                    "Database",
                    Verbatim(home) if embedded else place(settings),
                ),
                ("Schema", f"applied {', '.join(applied)}" if applied else "up to date"),
                ("Duties", ", ".join(duties) or "none (--no-duties)"),
                ("Tokens", _about_tokens(server.service)),
                ("Dashboard", f"{url}/"),
                ("API", f"{url}/v1 (reference: {url}/docs)"),
                ("Stop", "Ctrl-C or SIGTERM"),
            ]
        )
    sys.stdout.flush()


def _about_tokens(service: "Service") -> str:
    create = "lineshaft token create --name NAME --scope SCOPE"
    if (code := service.take_first_token_code()) is not None:
        return (
            "required: this system doesn't show which account calls. Create the first one within an hour:\n"
            f"LINESHAFT_URL={url_of(service.settings)} LINESHAFT_TOKEN={code} {create}"
        )
    if service.needs_tokens:
        return f"required: {create}"
    if service.settings.auth == "off":
        return "off (LINESHAFT_AUTH=off): every account of this machine may call everything"
    return (
        "not required until the first one is created: programs of this account may call everything, also "
        "a proxy that runs under it"
    )
