"""`lineshaft watch`: watches the folders of file sources on this machine."""

import argparse
import os
import socket
from typing import TYPE_CHECKING

from lineshaft.cli.usage import UsageError
from lineshaft.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "watch",
        help="watch the folders of file sources on this machine",
        description="Watch the folders of file sources on this machine. A watcher needs the database of the "
        "installation (LINESHAFT_DATABASE_URL, or the embedded one of this folder), not only its server. "
        "'lineshaft up' does so too where LINESHAFT_SOURCE_FOLDERS is set; this is for other machines. "
        "SIGTERM or Ctrl-C stops it.",
    )
    command.add_argument(
        "--folder",
        action="append",
        metavar="DIR",
        help="a folder that sources may watch; may be repeated (default: LINESHAFT_SOURCE_FOLDERS)",
    )
    command.add_argument(
        "--name",
        default=socket.gethostname(),
        help="what this watcher has seen is remembered under this name (default: the name of the host)",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import asyncio  # noqa: PLC0415 - with all that follows, slow to import

    from lineshaft import logs  # noqa: PLC0415
    from lineshaft.cli.connection import require_database  # noqa: PLC0415
    from lineshaft.engine.postgres.location import database  # noqa: PLC0415

    settings = Settings.load()
    if settings.url is not None and settings.database_url is None:
        raise UsageError(
            f"LINESHAFT_URL is {settings.url}, but a watcher needs the database of that installation. Set "
            "LINESHAFT_DATABASE_URL and unset LINESHAFT_URL, or run 'lineshaft watch' on a machine that "
            "reaches the database and the files."
        )
    require_database(settings)
    folders = [os.path.abspath(folder) for folder in args.folder or settings.source_folders]  # noqa: PTH100 - keeps links
    if not folders:
        raise UsageError("Nothing to watch. Use --folder DIR, or set LINESHAFT_SOURCE_FOLDERS.")
    logs.configure(settings.log_format, settings.log_level)
    with database(settings) as dsn:
        asyncio.run(_watch(dsn, folders, args.name))
    return 0


async def _watch(dsn: str, folders: "Sequence[str]", name: str) -> None:
    import asyncio  # noqa: PLC0415
    import signal  # noqa: PLC0415

    from lineshaft.duties import loop  # noqa: PLC0415
    from lineshaft.duties.file_watcher import FileWatcher  # noqa: PLC0415
    from lineshaft.engine.engine import Engine  # noqa: PLC0415

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Engine(dsn, max_connections=3) as engine:
        await loop.run(FileWatcher(engine.file_sources, folders, name), stop)
