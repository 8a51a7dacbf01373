"""`lineshaft migrate`: bring the database to this version's schema, or tell how far it is."""

import argparse
from typing import TYPE_CHECKING

from lineshaft.cli.output import add_json_flag, print_facts, print_json
from lineshaft.settings import Settings

if TYPE_CHECKING:
    from lineshaft.engine.postgres.migrate import Migration


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "migrate",
        help="bring the database to this version's schema",
        description="Brings the database to this version's schema. Safe to run any number of times, from any "
        "number of machines at once, and while agents are at work. The database is LINESHAFT_DATABASE_URL, "
        "else the embedded one.",
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, run, about in (
        ("up", up, "apply what is pending"),
        ("status", status, "list all migrations; exit code 1 if any is pending"),
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
        print(f"Applied {len(applied)}. The database is up to date.")
    else:
        print("Nothing to apply: the database is up to date.")
    return 0


def status(args: argparse.Namespace) -> int:
    from lineshaft.engine.postgres import migrate  # noqa: PLC0415
    from lineshaft.engine.postgres.location import database  # noqa: PLC0415

    with database(Settings.load()) as dsn:
        statuses = migrate.status(dsn)
    if args.json:
        print_json(
            [
                {"version": s.version, "name": s.name, "state": s.state, "applied_at": s.applied_at}
                for s in statuses
            ]
        )
    else:
        print_facts(
            [
                (
                    f"{s.version:04d} {s.name}",
                    f"{s.state} {s.applied_at.isoformat(timespec='seconds') if s.applied_at else ''}",
                )
                for s in statuses
            ]
        )
    return 0 if all(s.state is migrate.State.APPLIED for s in statuses) else 1


def verify(args: argparse.Namespace) -> int:
    from lineshaft.engine.postgres import describe, migrate  # noqa: PLC0415
    from lineshaft.engine.postgres.location import database  # noqa: PLC0415

    with database(Settings.load()) as dsn:
        unsettled = [s for s in migrate.status(dsn) if s.state is not migrate.State.APPLIED]
        # Before all migrations ran, a difference means nothing.
        drift = "" if unsettled else describe.drift(dsn)
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
        print("Run 'lineshaft migrate up'.")
    elif drift:
        print(f"The database differs from the schema that its migrations made:\n\n{drift}")
        print("Somebody changed it by hand. Undo that; lines with - are missing, lines with + are too many.")
    else:
        print("The database has exactly the expected schema.")
    return 1 if unsettled or drift else 0
