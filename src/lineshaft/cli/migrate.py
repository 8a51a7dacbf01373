"""`lineshaft migrate`: the schema of the database."""

import argparse
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from lineshaft.cli.connection import require_database
from lineshaft.cli.output import add_json_flag, moment, print_facts, print_json
from lineshaft.errors import LineshaftError
from lineshaft.settings import Settings

if TYPE_CHECKING:
    from lineshaft.engine.postgres.migrate import Migration


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "migrate",
        help="migrate the database to the schema of this version",
        description="Migrate the database of LINESHAFT_DATABASE_URL, or the embedded one, to the schema of "
        "this version. Safe to run repeatedly, from several machines at the same time, and while agents are "
        "working.",
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, run, about in (
        ("up", up, "apply pending migrations"),
        ("status", status, "list migrations; exit code 1 if this version can't use the database as it is"),
        ("verify", verify, "compare the database with the expected schema; exit code 1 if they differ"),
    ):
        action = actions.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        add_json_flag(action)
        action.set_defaults(run=run)


def up(args: argparse.Namespace) -> int:
    from lineshaft.engine.postgres import migrate  # noqa: PLC0415 - brings the database driver
    from lineshaft.engine.postgres.location import database  # noqa: PLC0415

    def show(migration: "Migration") -> None:
        if not args.json:
            print(f"Applying {migration} …", flush=True)

    with database(Settings.load()) as dsn:
        applied = migrate.up(dsn, on_start=show)
    if args.json:
        print_json({"applied": [{"version": m.version, "name": m.name} for m in applied]})
    elif applied:
        print(
            f"Applied {len(applied)} migration{'s' if len(applied) > 1 else ''}. The database is up to date."
        )
    else:
        print("No pending migrations. The database is up to date.")
    return 0


def status(args: argparse.Namespace) -> int:
    from lineshaft.engine.postgres import migrate  # noqa: PLC0415
    from lineshaft.engine.postgres.location import database  # noqa: PLC0415

    settings = Settings.load()
    require_database(settings)
    with database(settings) as dsn:
        statuses = migrate.status(dsn)
    if args.json:
        print_json(
            [
                {"version": s.version, "name": s.name, "state": s.state, "applied_at": _utc(s.applied_at)}
                for s in statuses
            ]
        )
    else:
        print_facts(
            [
                (
                    f"{s.version:04d} {s.name}",
                    f"{s.state} {moment(s.applied_at)}",
                )
                for s in statuses
            ]
        )
    return 0 if all(s.is_usable for s in statuses) else 1


def verify(args: argparse.Namespace) -> int:
    from lineshaft.engine.postgres import describe, migrate  # noqa: PLC0415
    from lineshaft.engine.postgres.location import database  # noqa: PLC0415

    settings = Settings.load()
    require_database(settings)
    with database(settings) as dsn:
        unsettled = [s for s in migrate.status(dsn) if s.state is not migrate.State.APPLIED]
        # A difference means nothing before all migrations are applied.
        drift = "" if unsettled else describe.drift(dsn)
        advice = _advice(dsn) if unsettled else ""
    if args.json:
        print_json(
            {
                "ok": not (unsettled or drift),
                "not_applied": [{"version": s.version, "name": s.name, "state": s.state} for s in unsettled],
                "drift": drift,
            }
        )
    elif unsettled:
        for s in unsettled:
            print(f"Migration {s.version:04d} {s.name} is {s.state}.")
        print(advice)
    elif drift:
        print(f"The database differs from the schema of its migrations:\n\n{drift}")
        print("It was changed by hand. Undo that: lines with - are missing, lines with + are unexpected.")
    else:
        print("The database has the expected schema.")
    return 1 if unsettled or drift else 0


def _advice(dsn: str) -> str:
    """What to do about a database whose schema can't be compared with that of this version."""
    from lineshaft.engine.postgres import migrate  # noqa: PLC0415

    try:
        migrate.check_ready(dsn)
    except LineshaftError as error:
        return str(error)
    return "A newer version has migrated the database. Run 'lineshaft migrate verify' of that version."


def _utc(time: datetime | None) -> datetime | None:
    return None if time is None else time.astimezone(UTC)
