"""`lineshaft events`."""

import argparse
import json
import time
from typing import TYPE_CHECKING

from lineshaft.cli.connection import add_flags, connect
from lineshaft.cli.output import as_json, moment
from lineshaft.cli.usage import positive
from lineshaft.errors import UnavailableError

if TYPE_CHECKING:
    from lineshaft.client.blocking import SyncLineshaft
    from lineshaft.types import Event, EventPage

#: Between reads, while nothing happens.
_PAUSE_SEC = 0.5
_PAGE = 500


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "events",
        help="show events; --follow waits for new ones",
        description="Show events in order, one per line; with --json one JSON object per line.",
    )
    command.add_argument(
        "--follow",
        action="store_true",
        help="wait for new events until Ctrl-C; if the server restarts, continue where it stopped",
    )
    command.add_argument(
        "--after",
        metavar="CURSOR",
        help="start after this event; 'now': only new events (default: the first)",
    )
    command.add_argument("--task", dest="task_id", metavar="ID", help="only events of this task")
    command.add_argument("--dag", dest="dag_id", metavar="ID", help="only events of this DAG")
    command.add_argument(
        "--kind", action="append", metavar="KIND", help="only this kind, such as task.completed; repeatable"
    )
    command.add_argument("--limit", type=positive, metavar="N", help="stop after N events")
    add_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        cursor, left = args.after, args.limit
        while True:
            page = _read(shaft, args, cursor, _PAGE if left is None else min(left, _PAGE))
            for event in page.items:
                _show(event, as_json_lines=args.json)
            if left is not None:
                left -= len(page.items)
                if left <= 0:
                    return 0
            cursor = page.next_cursor
            if page.items or not page.caught_up:
                continue
            if not args.follow:
                return 0
            time.sleep(_PAUSE_SEC)


def _read(shaft: "SyncLineshaft", args: argparse.Namespace, cursor: str | None, limit: int) -> "EventPage":
    while True:
        try:
            return shaft.read_events(
                cursor, task_id=args.task_id, dag_id=args.dag_id, kinds=args.kind, limit=limit
            )
        except UnavailableError:
            # The server was available when the client was opened, so it is being restarted.
            if not args.follow:
                raise
            time.sleep(_PAUSE_SEC)


def _show(event: "Event", *, as_json_lines: bool) -> None:
    if as_json_lines:
        print(as_json(event), flush=True)
        return
    about = filter(None, (event.task_id, event.dag_id, event.agent_id))
    data = "" if event.data is None else " " + json.dumps(event.data, ensure_ascii=False)[:200]
    print(f"{moment(event.at)}  {event.kind:<22}  {' '.join(about)}{data}", flush=True)
