"""`lineshaft loki`: `.loki` folders, which swarms of agents share."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineshaft.cli.actions import Actions, add_action, sentence
from lineshaft.cli.connection import collect, connect
from lineshaft.cli.output import add_json_flag, print_json, print_note
from lineshaft.cli.records import submit_record
from lineshaft.cli.usage import UsageError, json_value, positive, whole
from lineshaft.errors import InvalidInputError, LineshaftError

if TYPE_CHECKING:
    from lineshaft.integrations.loki.attempts import Ended
    from lineshaft.integrations.loki.claimer import Claimer
    from lineshaft.integrations.loki.mirror import Options
    from lineshaft.settings import Settings

#: Exit codes of `claim`: the lock isn't free in time; there is nothing to claim.
LOCKED, NOTHING = 1, 2
KEEP, OFFER = 50, 10


def add_to(commands: Actions) -> None:
    about = "work with a .loki folder of queue files: import, export, mirror, claim, complete, fail"
    command = commands.add_parser(
        "loki", help="work with .loki folders of queue files", description=sentence(about)
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    _directory(
        add_action(actions, "import", "make tasks of the records that wait or are in progress", import_)
    )
    export = add_action(actions, "export", "write tasks into the files of a folder", export_)
    _directory(export)
    _wrapper(export)
    export.add_argument(
        "--keep",
        type=positive,
        default=KEEP,
        metavar="N",
        help=f"how many of the newest completed and cancelled tasks to write (default: {KEEP})",
    )
    export.add_argument(
        "--claimable",
        action="store_true",
        help="let programs claim waiting records: only if no agent of Lineshaft takes them too",
    )
    _add_mirror(actions)
    claim = _local(actions, "claim", "take the most urgent record of a folder", claim_)
    claim.description = (
        f"{claim.description} Exit code {LOCKED}: the folder stayed locked for 10 s; {NOTHING}: there is "
        "nothing to claim."
    )
    claim.add_argument("--agent", required=True, metavar="A", help="who claims it")
    claim.add_argument(
        "--type", action="append", default=[], dest="types", metavar="T", help="only of this type; repeatable"
    )
    complete = _local(actions, "complete", "report the result of a claimed record", complete_)
    complete.add_argument("id", metavar="ID")
    complete.add_argument(
        "--result",
        required=True,
        metavar="FILE",
        help='JSON: {"output": …, "decisionReport": {…}}; - is standard input',
    )
    fail = _local(actions, "fail", "report that an attempt at a claimed record failed", fail_)
    fail.add_argument("id", metavar="ID")
    fail.add_argument("--error", required=True, metavar="TEXT", help="what went wrong")


def _add_mirror(actions: Actions) -> None:
    mirror = actions.add_parser(
        "mirror",
        help="keep a folder and the queue alike, in both directions, until Ctrl-C",
        description="Keep a folder and the queue alike, in both directions, until Ctrl-C. It works on the "
        "database of the settings; a server does the same with LINESHAFT_LOKI_DIR.",
    )
    mirror.set_defaults(run=mirror_)
    _directory(mirror)
    _wrapper(mirror)
    mirror.add_argument(
        "--offer",
        type=whole,
        default=OFFER,
        metavar="N",
        help=f"how many tasks programs in the folder may find unclaimed; 0: none (default: {OFFER})",
    )
    mirror.add_argument(
        "--keep",
        type=positive,
        default=KEEP,
        metavar="N",
        help=f"how many of the newest completed and cancelled tasks to show (default: {KEEP})",
    )
    mirror.add_argument(
        "--failed",
        choices=["mirror"],
        help="mirror: write dead letters to failed.json too; otherwise it stays empty",
    )


def _directory(action: argparse.ArgumentParser) -> None:
    action.add_argument("directory", type=Path, metavar="DIR", help="the folder, such as .loki")


def _wrapper(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--wrapper", action="store_true", help='write new files as {"tasks": […]} rather than as a list'
    )


def _local(actions: Actions, name: str, help_: str, run: Any) -> argparse.ArgumentParser:
    """An action on files alone, which uses neither a server nor a database."""
    action = actions.add_parser(name, help=help_, description=sentence(help_))
    action.set_defaults(run=run)
    _directory(action)
    add_json_flag(action)
    return action


# With a queue.


def import_(args: argparse.Namespace) -> int:
    from lineshaft.integrations.loki.folder import Folder  # noqa: PLC0415 - as all below, slow to import
    from lineshaft.integrations.loki.importing import plan  # noqa: PLC0415
    from lineshaft.integrations.loki.records import dependencies_of  # noqa: PLC0415

    folder = Folder(_existing(args.directory))
    with folder.locked():
        planned = plan(folder)
    for key in planned.duplicates:
        print_note(f"Duplicate task detected: {key}")
    left_out, created, ids = list(planned.left_out), 0, dict[str, str]()
    with connect(args, create=True) as shaft:
        for record in planned.records:
            if names := dependencies_of(record):
                record["dependencies"] = [ids.get(name, name) for name in names]
            try:
                task = submit_record(shaft, record)
            except LineshaftError as error:
                left_out.append((str(record.get("id")), str(error)))
                continue
            if task.duplicate is True:
                print_note(f"Duplicate task detected: {task.idempotency_key}")
            created += task.duplicate is not True
            ids[str(record.get("id"))] = task.id
    return _report_import(
        args, created, len(ids) - created + len(planned.duplicates), left_out, planned.workers
    )


def _report_import(
    args: argparse.Namespace, created: int, known: int, left_out: list[tuple[str, str]], workers: list[str]
) -> int:
    if args.json:
        print_json({"created": created, "duplicates": known, "left_out": dict(left_out), "workers": workers})
    else:
        print(f"Imported {created} tasks; {known} existed already, {len(left_out)} were left out.")
    for name, why in left_out:
        print_note(f"{name}: {why}")
    if workers:
        named = ", ".join(sorted(set(workers)))
        print_note(f"Their tasks now wait for any agent, so stop these, who worked on them: {named}.")
    return 0


def export_(args: argparse.Namespace) -> int:
    from lineshaft.integrations.loki.exporting import export  # noqa: PLC0415 - as all below, slow to import
    from lineshaft.integrations.loki.folder import Folder  # noqa: PLC0415
    from lineshaft.integrations.loki.records import QUEUES, queue_of, record_of  # noqa: PLC0415
    from lineshaft.model.states import LIVE, Status  # noqa: PLC0415

    live = [*LIVE, Status.DEAD_LETTERED]
    with connect(args) as shaft:
        tasks, _ = collect(lambda limit, cursor: shaft.list(status=live, limit=limit, cursor=cursor))
        for status in (Status.COMPLETED, Status.CANCELLED):
            read = partial(shaft.list, status=status)
            tasks += collect(lambda limit, cursor: read(limit=limit, cursor=cursor), args.keep)[0]  # noqa: B023 - called at once
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in QUEUES}
    for task in reversed(tasks):
        record = record_of(task)
        if args.claimable and queue_of(task) == "pending":
            record["claimedBy"] = None
        records[queue_of(task)].append(record)
    counts = export(Folder(args.directory, wrapper=args.wrapper), records)
    if args.json:
        print_json(counts)
    else:
        print(
            f"Wrote {len(tasks)} tasks to {args.directory}: "
            + ", ".join(f"{name} {count}" for name, count in counts.items())
            + "."
        )
    return 0


def mirror_(args: argparse.Namespace) -> int:
    import asyncio  # noqa: PLC0415 - as all below, slow to import

    from lineshaft import logs  # noqa: PLC0415
    from lineshaft.integrations.loki.mirror import Options  # noqa: PLC0415
    from lineshaft.settings import Settings  # noqa: PLC0415

    settings = Settings.load()
    if settings.url is not None:
        raise LineshaftError(
            f"A mirror works on the database, and LINESHAFT_URL names the server {settings.url}. Set "
            "LINESHAFT_LOKI_DIR for that server, or unset LINESHAFT_URL."
        )
    logs.configure(settings.log_format, settings.log_level)
    options = Options(offer=args.offer, keep=args.keep, wrapper=args.wrapper, failed=args.failed is not None)
    asyncio.run(_mirror(settings, args.directory.absolute(), options))
    return 0


async def _mirror(settings: "Settings", directory: Path, options: "Options") -> None:
    import asyncio  # noqa: PLC0415 - as all below, slow to import
    import signal  # noqa: PLC0415

    from lineshaft.client.database_backend import DatabaseBackend  # noqa: PLC0415
    from lineshaft.duties import loop  # noqa: PLC0415
    from lineshaft.integrations.loki.mirror import Mirror  # noqa: PLC0415

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    backend = DatabaseBackend(settings, max_connections=4)
    await backend.open()
    try:
        print(f"Mirroring {backend.place} to {directory}. Ctrl-C stops it.", flush=True)
        await loop.run(Mirror(backend.engine, directory, options), stop)
    finally:
        await backend.close()


# On files alone.


def claim_(args: argparse.Namespace) -> int:
    from lineshaft.integrations.loki.locks import FolderLockedError  # noqa: PLC0415 - slow to import

    if not args.agent.strip():
        raise UsageError("--agent must be a name.")
    try:
        record = _claimer(args).claim(args.agent, args.types)
    except FolderLockedError as error:
        print_note(f"lineshaft: {error}")
        return LOCKED
    if record is None:
        return NOTHING
    print_json(record)
    return 0


def complete_(args: argparse.Namespace) -> int:
    text = sys.stdin.read() if args.result == "-" else _text(args.result)
    return _ended(args, _claimer(args).complete(args.id, json_value("--result", text)))


def fail_(args: argparse.Namespace) -> int:
    return _ended(args, _claimer(args).fail(args.id, args.error))


def _ended(args: argparse.Namespace, ended: "Ended") -> int:
    if args.json:
        print_json(ended.record)
    else:
        error = ended.record.get("lastError")
        print(
            f"{args.id} is in {ended.queue}.json"
            + (f": {error}" if error and ended.queue != "completed" else ".")
        )
    return 0


def _claimer(args: argparse.Namespace) -> "Claimer":
    from lineshaft.integrations.loki.claimer import Claimer  # noqa: PLC0415 - slow to import

    return Claimer(_existing(args.directory))


def _existing(directory: Path) -> Path:
    if not directory.is_dir():
        raise LineshaftError(f"There is no folder {directory}. Name the .loki folder itself.")
    return directory


def _text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"Can't read {name}: {getattr(error, 'strerror', None) or error}.") from None
