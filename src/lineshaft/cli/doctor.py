"""`lineshaft doctor`: the settings and the database in use, and their problems."""

import argparse
import contextlib
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineshaft import __version__
from lineshaft.cli.connection import collect, place
from lineshaft.cli.limits import disagreements
from lineshaft.cli.output import Verbatim, add_json_flag, print_facts, print_json
from lineshaft.errors import LineshaftError
from lineshaft.settings import CONFIG_FILE, CONFIG_VARIABLE, PREFIX, Settings

if TYPE_CHECKING:
    from lineshaft.embedded import Description
    from lineshaft.types import Limits


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "doctor",
        help="check the settings and the database",
        description="Show which database or server is used and why, and what is wrong with it. Changes "
        "nothing. Exit code 1 if there is a problem.",
    )
    command.add_argument("--start", action="store_true", help="start the embedded PostgreSQL to check it")
    add_json_flag(command)
    command.set_defaults(run=run)


@dataclass(slots=True)
class Findings:
    #: For people, in the order of the output.
    facts: list[tuple[str, str]] = field(default_factory=list)
    #: The same for programs.
    report: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    #: What works, but could work better.
    advice: list[str] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    found = Findings()
    found.facts.append(
        ("Lineshaft", f"{__version__} on Python {platform.python_version()}, {sys.executable}")
    )
    found.report |= {"version": __version__, "python": platform.python_version()}
    try:
        settings = Settings.load()
    except LineshaftError as error:
        found.problems.append(str(error))
    else:
        found.facts.append(("Settings", _settings_source()))
        _check_files(found, settings)
        if settings.url is not None:
            _check_server(found, settings)
        if settings.database_url is not None:
            use = " ('up', 'migrate' and 'sql' use it, not clients)" if settings.url is not None else ""
            found.facts.append(("Database", f"{place(settings)}{use}"))
            found.report["database"] = {"kind": "configured"}
            _check_database(found, settings.database_url, sessions=settings.sessions)
        elif settings.url is None:
            _describe_embedded(found, settings.home, start=args.start)
        _check_redis(found, settings)
    if args.json:
        print_json(found.report | {"problems": found.problems, "advice": found.advice})
    else:
        if found.advice:
            found.facts.append(("Advice", "\n".join(found.advice)))
        found.facts.append(("Problems", "\n".join(found.problems) or "none"))
        print_facts(found.facts)
    return 1 if found.problems else 0


def _settings_source() -> str:
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(named or CONFIG_FILE)
    variables = sorted(name for name in os.environ if name.startswith(PREFIX) and name != CONFIG_VARIABLE)
    file = f"{path.absolute()}" if path.exists() else f"no {path}"
    return f"{file}; {', '.join(variables) or 'no LINESHAFT_ variables'}"


def _check_files(found: Findings, settings: Settings) -> None:
    """Read every file that the settings name, as the server does."""
    from lineshaft.checks.command import read_commands  # noqa: PLC0415 - slow to import
    from lineshaft.engine.guards.rules import breaker_faults  # noqa: PLC0415
    from lineshaft.integrations.notify.config import load  # noqa: PLC0415

    readers: dict[str, Callable[[Path], object]] = {
        "circuit_breakers": breaker_faults,
        "notifications": lambda path: load(path, os.environ),
        "validation_commands": read_commands,
    }
    files = {name: path for name in readers if (path := getattr(settings, name)) is not None}
    for name, path in files.items():
        before = len(found.problems)
        try:
            faults = readers[name](path)
        except LineshaftError as error:
            found.problems.append(str(error))
        else:
            if name == "circuit_breakers" and faults:
                found.problems.append(str(faults))
        state = "is not valid, see below" if len(found.problems) > before else "is valid"
        found.facts.append(("  file", f"{path} ({PREFIX}{name.upper()}) {state}"))
    found.report["files"] = {name: str(path) for name, path in files.items()}


def _describe_embedded(found: Findings, home: Path, *, start: bool) -> None:
    from lineshaft.embedded import EmbeddedServer, describe, find_binaries  # noqa: PLC0415 - slow to import
    from lineshaft.engine.postgres.inspection import with_search_path  # noqa: PLC0415

    about = describe(home)
    binaries = about.running or about.binaries
    fault = _cannot_create(about.home) if about.data_major is None else None
    # With such a fault, the other problems are its consequences.
    found.problems += about.problems if fault is None else [fault]
    found.facts += [
        (
            "Database",
            f"embedded: {binaries}" if binaries else "embedded, but no suitable PostgreSQL was found",
        ),
        ("  reason", about.why or "-"),
        ("  data", _data_line(about)),
        ("  account", _account_line(about)),
        ("  server", _server_line(about)),
        ("  log", f"{about.log}" if about.log.exists() else "none"),
    ]
    others = [str(b) for b in find_binaries() if binaries is None or b.directory != binaries.directory]
    found.facts.append(("  also found", "\n".join(others) or "none"))
    found.report["database"] = {
        "kind": "embedded",
        "home": str(about.home),
        "postgresql": binaries.version if binaries else None,
        "directory": str(binaries.directory) if binaries else None,
        "source": binaries.source if binaries else None,
        "why": about.why,
        "data_major": about.data_major,
        "account": about.account,
        "pid": about.pid,
        "status": about.status or "stopped",
        "log": str(about.log),
    }
    if not found.problems and (start or about.pid is not None):
        try:
            with EmbeddedServer.start(home) as server:
                shown = with_search_path(server.dsn)
                found.facts.append(("  connect", Verbatim(f'lineshaft sql, or psql "{shown}"')))
                found.report["database"]["dsn"] = shown
                _check_database(found, server.dsn, embedded=True)
        except LineshaftError as error:
            found.problems.append(str(error))


def _data_line(about: "Description") -> str:
    made = f"created by PostgreSQL {about.data_major}" if about.data_major else "created at first use"
    return f"{about.data} ({made})"


def _cannot_create(home: Path) -> str | None:
    """Why a new database can't be created there; None: it can."""
    folder = next((each for each in (home, *home.parents) if os.path.exists(each)), home)  # noqa: PTH110 - false for what can't be seen
    if folder.is_dir() and _is_writable(folder):
        return None
    reason = "can't be written to" if folder.is_dir() else "is not a folder"
    return (
        f"There is no database in {home} yet, and it can't be created: {folder} {reason}. Go to another "
        "folder, or set LINESHAFT_HOME, LINESHAFT_DATABASE_URL or LINESHAFT_URL."
    )


def _account_line(about: "Description") -> str:
    if not about.account:
        return "-"
    return f"{about.account} (PostgreSQL refuses to run as root)" if os.geteuid() == 0 else about.account


def _server_line(about: "Description") -> str:
    if about.pid is None:
        return "not running; starts automatically when needed, and stops after its last user"
    return f"process {about.pid}, {about.status}"


def _is_writable(folder: Path) -> bool:
    effective = os.access in os.supports_effective_ids
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=effective)


def _check_database(found: Findings, dsn: str, *, embedded: bool = False, sessions: bool = False) -> None:
    from lineshaft.engine.guards.task_types import read_uncapped  # noqa: PLC0415 - brings the database driver
    from lineshaft.engine.postgres import migrate  # noqa: PLC0415 - brings the database driver
    from lineshaft.engine.postgres.inspection import disputed_tasks  # noqa: PLC0415

    try:
        server = migrate.check_server(dsn, sessions=sessions)
        statuses = migrate.status(dsn)
        found.advice += migrate.advice(dsn)
    except LineshaftError as error:
        found.problems.append(str(error))
        return
    pending = [s for s in statuses if s.state is not migrate.State.APPLIED]
    schema = (
        "up to date" if not pending else "; ".join(f"{s.version:04d} {s.name} is {s.state}" for s in pending)
    )
    # An embedded database is migrated by its next user.
    automatic = embedded and bool(pending) and all(s.state is migrate.State.PENDING for s in pending)
    if automatic:
        schema += "; applied automatically when the database is used"
    found.facts += [("  database", server), ("Schema", schema)]
    found.report["database"] |= {"server": server}
    found.report["schema"] = {s.version: s.state for s in statuses}
    if automatic:
        return
    try:
        migrate.check_ready(dsn)
        _check_limits(found, _read_limits(dsn))
        _check_costs(found, disputed_tasks(dsn))
        found.advice += map(str, read_uncapped(dsn))
    except LineshaftError as error:
        found.problems.append(str(error))


def _read_limits(dsn: str) -> "Limits":
    """Without a client, which would set limits from the settings of this command."""
    import asyncio  # noqa: PLC0415 - slow to import

    from lineshaft.engine.guards.limits import InstallationLimits  # noqa: PLC0415
    from lineshaft.engine.postgres.database import Database  # noqa: PLC0415

    async def read() -> "Limits":
        async with Database(dsn, max_connections=1) as database:
            return await InstallationLimits(database).read()

    return asyncio.run(read())


def _check_limits(found: Findings, limits: "Limits") -> None:
    """Name running servers whose settings disagree: each start of one changes the limits."""
    servers = [f"{server.name}, {server.version}" for server in limits.servers]
    found.facts.append(("  servers", "\n".join(servers) or "none"))
    found.report["servers"] = limits.servers
    found.report["limits_by_hand"] = limits.by_hand
    if limits.by_hand:
        found.facts.append(("  by hand", f"{', '.join(limits.by_hand)} (lineshaft limits)"))
    found.problems += disagreements(limits)


def _check_server(found: Findings, settings: Settings) -> None:
    from lineshaft.client.blocking import SyncLineshaft  # noqa: PLC0415 - slow to import

    found.facts.append(("Server", f"{settings.url} (LINESHAFT_URL); clients use it instead of a database"))
    found.report["server"] = {"url": settings.url, "status": "unavailable"}
    try:
        with SyncLineshaft(settings.url, max_connections=1) as shaft:
            health = shaft.health()
            status = health.status
            with contextlib.suppress(LineshaftError):
                # They need a token where the health of the server doesn't.
                _check_limits(found, shaft.limits())
                _check_costs(found, shaft.attention().disputed_tasks)
                types, _ = collect(lambda limit, cursor: shaft.types(limit=limit, cursor=cursor))
                found.advice += [warning for info in types for warning in info.warnings]
    except LineshaftError as error:
        found.problems.append(str(error))
        return
    found.facts.append(("  status", status))
    found.report["server"]["status"] = status
    if health.wakeup_mode is not None and health.wakeup_mode_since is not None:
        since = health.wakeup_mode_since.isoformat(timespec="seconds")
        found.facts.append(("  wake-ups", f"{health.wakeup_mode} since {since}"))
        found.report["server"]["wakeups"] = {"mode": health.wakeup_mode, "since": since}


def _check_redis(found: Findings, settings: Settings) -> None:
    if settings.redis_url is None:
        needing = {
            "LINESHAFT_REDIS_EVENTS": settings.redis_events,
            "LINESHAFT_OFFICEPLANE_LOCKS": settings.officeplane_locks,
            "LINESHAFT_OFFICEPLANE_SSE": settings.officeplane_sse,
        }
        found.problems += [f"{name} needs LINESHAFT_REDIS_URL." for name, is_on in needing.items() if is_on]
        return
    from lineshaft.integrations.redis.check import check  # noqa: PLC0415 - slow to import

    try:
        place, facts = check(settings.redis_url)
    except LineshaftError as error:
        found.facts.append(("Redis", "doesn't work, see below: PostgreSQL carries wake-ups"))
        found.report["redis"] = {"status": "unavailable"}
        found.problems.append(str(error))
        return
    found.facts.append(("Redis", f"{place}, {facts}"))
    found.report["redis"] = {"status": "ok", "place": place}
    if not settings.sessions:
        found.advice.append(
            "LINESHAFT_REDIS_URL carries no wake-ups with LINESHAFT_POOLER=transaction: agents poll every "
            "second. Use a direct connection to PostgreSQL."
        )


def _check_costs(found: Findings, disputed: int) -> None:
    """`disputed`: the number of tasks with a disputed cost."""
    if disputed:
        found.problems.append(
            f"The cost of {disputed} task{'s' * (disputed > 1)} is disputed: agents reported more than the "
            "ceiling of a claim, and the rest counts nowhere until a person decides. 'lineshaft costs' lists "
            "the tasks; use 'lineshaft costs accept TASK', 'refuse TASK' or 'correct TASK --to USD'."
        )
