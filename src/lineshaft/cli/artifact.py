"""`lineshaft artifact`: files that tasks read and write."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lineshaft.cli.actions import print_done, print_items, print_result
from lineshaft.cli.connection import add_flags, collect, connect
from lineshaft.cli.output import When, print_facts, print_json
from lineshaft.cli.usage import UsageError

if TYPE_CHECKING:
    from lineshaft.types import Artifact

_STANDARD = "-"
#: How often progress is shown, and from which size on it is worth it.
_SHOW_EVERY_SEC, _SHOW_FROM_BYTES = 0.2, 4 << 20


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "artifact",
        help="upload, download, list and delete files of tasks",
        description="Upload, download, list and delete files that tasks read and write.",
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    put = actions.add_parser(
        "put",
        help="upload a file",
        description="Upload a file, and print how tasks refer to it.",
        epilog="A task gets it as an input by its reference in spec.context_refs.",
    )
    put.add_argument("file", metavar="FILE", help="the file; - is standard input")
    put.add_argument("--name", help="the name that readers see (default: that of the file)")
    put.add_argument("--type", dest="content_type", help="the media type (default: by the name)")
    put.add_argument("--task", metavar="TASK", help="the task that made it")
    put.set_defaults(run=put_)
    get = actions.add_parser("get", help="download a file", description="Download a file.")
    get.add_argument("ref", metavar="ARTIFACT", help="the id, or artifact:ID")
    get.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where to write it (default: its name here); - is standard output",
    )
    get.add_argument("--force", action="store_true", help="replace a file that exists")
    get.set_defaults(run=get_)
    listing = actions.add_parser("list", help="list files", description="List files, newest first.")
    listing.add_argument("--task", metavar="TASK", help="only those that this task made")
    listing.add_argument("--limit", type=int, default=50, help="how many (default: 50)")
    listing.set_defaults(run=list_)
    remove = actions.add_parser(
        "rm", help="delete files", description="Delete files that no live task refers to."
    )
    remove.add_argument("refs", metavar="ARTIFACT", nargs="+", help="the id, or artifact:ID")
    remove.set_defaults(run=rm_)
    for action in (put, get, listing, remove):
        add_flags(action)


def put_(args: argparse.Namespace) -> int:
    path = None if args.file == _STANDARD else Path(args.file)
    if path is not None and not path.is_file():
        raise UsageError(f"{args.file} is not a file.")
    total = None if path is None else path.stat().st_size
    with connect(args) as shaft, _ProgressLine("Uploading", total) as progress:
        made = shaft.artifacts.put(
            args.name or ("stdin" if path is None else path.name),
            sys.stdin.buffer if path is None else path,
            content_type=args.content_type,
            task=args.task,
            progress=progress.show,
        )
    return print_result(args, made, _show)


def _show(made: "Artifact") -> None:
    facts = [
        ("Reference", made.ref),
        ("Name", made.name),
        ("Size", size(made.size)),
        ("SHA-256", made.sha256),
    ]
    print_facts([*facts, ("Type", made.content_type), *([("Task", made.task_id)] if made.task_id else [])])


def get_(args: argparse.Namespace) -> int:
    from lineshaft.model.file_names import safe_file_name  # noqa: PLC0415 - slow to import

    with connect(args) as shaft:
        found = shaft.artifacts.get(args.ref)
        if args.output == _STANDARD:
            with shaft.artifacts.open(args.ref) as reader:
                for chunk in reader:
                    sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            return 0
        # The name comes from elsewhere: it never leaves this folder.
        target = Path(args.output or safe_file_name(found.name))
        _check_target(target, force=args.force)
        with _ProgressLine("Downloading", found.size) as progress:
            shaft.artifacts.save(args.ref, target, progress=progress.show)
    return print_done(args, {"path": str(target), "artifact": found}, f"{target} ({size(found.size)})")


def _check_target(target: Path, *, force: bool) -> None:
    """The file is replaced when the download is complete, which a device or a pipe must not be."""
    if target.is_dir():
        raise UsageError(f"{target} is a folder. Choose the name of a file with -o.")
    if target.exists() and not target.is_file():
        raise UsageError(f"{target} is not a regular file. Write to standard output with -o -.")
    if target.exists() and not force:
        raise UsageError(f"{target} exists. Choose another name with -o, or replace it with --force.")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is not a folder. Create it, or choose another name with -o.")


def list_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        items, more = collect(
            lambda limit, cursor: shaft.artifacts.list(task=args.task, limit=limit, cursor=cursor), args.limit
        )
    return print_items(
        args,
        items,
        ("ARTIFACT", "NAME", "SIZE", "TYPE", "TASK", "CREATED"),
        lambda item: (
            *(item.id, item.name, size(item.size), item.content_type, item.task_id),
            When(item.created_at),
        ),
        empty="No artifacts.",
        more=more,
    )


def rm_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        for ref in args.refs:
            shaft.artifacts.delete(ref)
            if not args.json:
                print(f"Deleted {ref}.")
    if args.json:
        print_json({"deleted": args.refs})
    return 0


def size(count: int) -> str:
    """Bytes, for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:  # noqa: PLR2004 - of the next unit
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


class _ProgressLine:
    """A line on a terminal that shows how far a large transfer is."""

    def __init__(self, verb: str, total: int | None) -> None:
        self._verb, self._total = verb, total
        self._is_shown = sys.stderr.isatty() and (total is None or total >= _SHOW_FROM_BYTES)
        self._began = self._shown_at = time.monotonic()
        self.show: Callable[[int], None] = self._show

    def _show(self, done: int) -> None:
        now = time.monotonic()
        if not self._is_shown or (now - self._shown_at < _SHOW_EVERY_SEC and done != self._total):
            return
        self._shown_at = now
        share = f" of {size(self._total)} ({done * 100 // self._total} %)" if self._total else ""
        speed = size(int(done / max(now - self._began, 0.001)))
        self._write(f"\r{self._verb} {size(done)}{share}, {speed}/s\x1b[K")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        # Past the stream that escapes control characters of others.
        stream = getattr(sys.stderr, "trusted", sys.stderr)
        stream.write(text)
        stream.flush()
