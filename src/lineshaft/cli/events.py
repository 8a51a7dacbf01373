"""`lineshaft events`."""

import argparse
import json
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from lineshaft.cli.connection import add_flags, connect
from lineshaft.cli.ids import dag_id, task_id
from lineshaft.cli.output import actor_of, as_json, columns, cut, id_for_people, iso, on_terminal, print_note
from lineshaft.cli.task import own_title
from lineshaft.cli.usage import positive, time_or_age
from lineshaft.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lineshaft.client.blocking import SyncLineshaft
    from lineshaft.types import Event, EventPage

#: Between reads, while nothing happens.
_PAUSE_SEC = 0.5
_PAGE = 500
_TAIL = 50
_KIND_WIDTH = 20


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "events",
        help="show the last events; --follow waits for new ones",
        description="Show events in order, one per line; with --json one JSON object per line. Without "
        f"options: the last {_TAIL}.",
    )
    command.add_argument(
        "--follow",
        action="store_true",
        help="wait for new events until Ctrl-C; if the server restarts, continue where it stopped",
    )
    start = command.add_mutually_exclusive_group()
    start.add_argument(
        "--tail",
        type=_tail,
        metavar="N",
        help=f"start with the last N events, up to {_PAGE} (default: {_TAIL}; with --follow: none)",
    )
    start.add_argument(
        "--since",
        type=time_or_age,
        metavar="TIME",
        help="start at this time: 30s, 10m, 2h or 7d ago, or a time in ISO 8601",
    )
    start.add_argument("--from-start", action="store_true", help="start with the first event")
    start.add_argument("--after", metavar="PLACE", help="start after the event with this cursor")
    command.add_argument("--task", metavar="ID", help="only events of this task")
    command.add_argument("--dag", metavar="ID", help="only events of this DAG")
    command.add_argument(
        "--kind", action="append", metavar="KIND", help="only this kind, such as task.completed; repeatable"
    )
    command.add_argument("--limit", type=positive, metavar="N", help="stop after N events")
    add_flags(command)
    command.set_defaults(run=run)


def _tail(text: str) -> int:
    number = positive(text)
    if number > _PAGE:
        raise argparse.ArgumentTypeError(f"at most {_PAGE}; use --since, got {number}")
    return number


def run(args: argparse.Namespace) -> int:
    shown = 0
    with connect(args) as shaft:
        args.task_id = None if args.task is None else task_id(shaft, args.task)
        args.dag_id = None if args.dag is None else dag_id(shaft, args.dag)
        for event in _events(shaft, args):
            print(as_json(event) if args.json else line(event), flush=True)
            shown += 1
            if shown == args.limit:
                return 0
    if not shown and not args.json:
        print_note(f"No such events in {args.place}.")
    return 0


def _events(shaft: "SyncLineshaft", args: argparse.Namespace) -> "Iterator[Event]":
    cursor = _start(args)
    while True:
        page = _read(shaft, args, cursor)
        for event in page.items:
            # The server starts a little before this time.
            if args.since is None or event.at >= args.since:
                yield event
        cursor = page.next_cursor
        if page.caught_up and not args.follow:
            return
        if page.caught_up and not page.items:
            time.sleep(_PAUSE_SEC)


def _start(args: argparse.Namespace) -> str | None:
    if args.from_start:
        return None
    if args.after is not None:
        return str(args.after)
    if args.since is not None:
        return f"since:{args.since.isoformat()}"
    if args.tail is None and args.follow:
        return "now"
    return f"last:{args.tail or min(args.limit or _TAIL, _PAGE)}"


def _read(shaft: "SyncLineshaft", args: argparse.Namespace, cursor: str | None) -> "EventPage":
    while True:
        try:
            return shaft.read_events(
                cursor, task_id=args.task_id, dag_id=args.dag_id, kinds=args.kind, limit=_PAGE
            )
        except UnavailableError:
            # The server was available when the client was opened, so it is being restarted.
            if not args.follow:
                raise
            time.sleep(_PAUSE_SEC)


def line(event: "Event") -> str:
    """On a terminal as much as fits on a line; in a pipe everything, as name=value."""
    about = event.task_id or event.dag_id or ""
    title = own_title(event.type, event.title)
    actor = actor_of(event)
    if not on_terminal():
        named = {
            "dag": event.dag_id if event.task_id is not None else None,
            "agent": event.agent_id,
            "type": event.type,
            "title": title and json.dumps(title, ensure_ascii=False),
            "by": actor and json.dumps(actor, ensure_ascii=False),
            "data": event.data and json.dumps(event.data, ensure_ascii=False),
        }
        words = " ".join(f"{name}={value}" for name, value in named.items() if value)
        return f"{iso(event.at)}  {event.kind:<{_KIND_WIDTH}}  {about or '-'}  {words}".rstrip()
    what = ": ".join(filter(None, (event.type, title)))
    agent = f"({event.agent_id})" if event.agent_id else ""
    by = f"by {actor}" if actor else ""
    rest = " ".join(filter(None, (id_for_people(about), what, agent, by, _data(event))))
    return cut(f"{_clock(event.at)} {event.kind:<{_KIND_WIDTH}} {rest}", columns())


def _clock(at: datetime) -> str:
    local = at.astimezone()
    is_recent = datetime.now(UTC) - at < timedelta(hours=12)
    return local.strftime("%H:%M:%S" if is_recent else "%Y-%m-%d %H:%M:%S")


def _data(event: "Event") -> str:
    if not isinstance(event.data, dict):
        return "" if event.data is None else json.dumps(event.data, ensure_ascii=False)
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in event.data.items()
        if name not in {"single", "actor"} and value not in (None, "", [], {}, False)
    )
