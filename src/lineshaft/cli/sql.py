"""`lineshaft sql`: the tables and views of the queue."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lineshaft.cli.connection import require_database
from lineshaft.cli.output import add_json_flag, print_json, print_table
from lineshaft.errors import DatabaseError
from lineshaft.settings import Settings

if TYPE_CHECKING:
    from lineshaft.engine.postgres.inspection import Invocation, ReadOnlyConnection

_PROMPT, _CONTINUED = "lineshaft=> ", "lineshaft-> "


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "sql",
        help="look at the tables with SQL",
        description="Open psql on the database of the settings, or the embedded one, or run one statement: "
        "lineshaft sql \"SELECT * FROM tasks WHERE status = 'RUNNING'\". Without psql a small reader takes "
        "statements from standard input, each ended by a semicolon. Transactions are read-only unless you "
        "say SET default_transaction_read_only = off.",
        epilog="Views: tasks, attempts, dags, agents, events. Every column has a comment: \\d+ tasks.",
    )
    command.add_argument("statement", nargs="?", help="a statement to run (default: an interactive session)")
    command.add_argument("--no-psql", action="store_true", help="use the small reader even if there is psql")
    add_json_flag(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lineshaft.engine.postgres import inspection  # noqa: PLC0415 - brings the database driver
    from lineshaft.engine.postgres.location import database  # noqa: PLC0415

    settings = Settings.load()
    require_database(settings)
    with database(settings) as dsn:
        inspection.prepare(dsn, settings)
        # psql keeps a session, which a pooler in transaction mode doesn't have.
        reads = args.no_psql or args.json or not settings.sessions
        program = None if reads else inspection.psql()
        if program is not None:
            return _run_psql(inspection.psql_invocation(program, dsn, args.statement))
        with contextlib.closing(inspection.ReadOnlyConnection(dsn, sessions=settings.sessions)) as reader:
            if args.statement is not None:
                _answer(reader, args.statement, json=args.json)
                return 0
            return _session(reader, json=args.json)


def _run_psql(invocation: "Invocation") -> int:
    # Ctrl-C is for psql, which cancels a statement with it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.run(  # noqa: S603 - a program that was looked up, without a shell
            invocation.arguments, env=os.environ | invocation.environment, check=False
        ).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def _session(reader: "ReadOnlyConnection", *, json: bool) -> int:
    """Each statement in turn. On a terminal it goes on after an error."""
    code = 0
    for statement in _statements():
        try:
            _answer(reader, statement, json=json)
        except DatabaseError as error:
            if not sys.stdin.isatty():
                raise
            print(f"lineshaft: {error}", file=sys.stderr)
            code = 1
    return code


def _statements() -> Iterator[str]:
    lines: list[str] = []
    while True:
        try:
            line = input((_CONTINUED if lines else _PROMPT) if sys.stdin.isatty() else "")
        except EOFError:
            break
        lines.append(line)
        if line.rstrip().endswith(";"):
            yield "\n".join(lines)
            lines = []
    if any(line.strip() for line in lines):
        yield "\n".join(lines)


def _answer(reader: "ReadOnlyConnection", statement: str, *, json: bool) -> None:
    columns, rows = reader.run(statement)
    if json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    elif columns:
        print_table(columns, rows, empty="No rows.")
    else:
        print("Done.")
