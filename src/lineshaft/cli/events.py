"""`lineshaft events`: everything that happened, and what happens."""

import argparse
import json
import time
from typing import Any

from lineshaft.cli.api import Api, ApiError, add_flags, connect
from lineshaft.cli.output import as_json, moment
from lineshaft.errors import LineshaftError, UnavailableError

#: Between looks, when nothing has happened.
_PAUSE_SEC = 0.5
#: What a proxy answers while the server is away, and the server while its database is.
_AWAY = frozenset({502, 503, 504})


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "events",
        help="show what happened; with --follow, what happens",
        description="Shows events in order, one a line; with --json one JSON object a line.",
    )
    command.add_argument(
        "--follow",
        action="store_true",
        help="go on with what happens, until Ctrl-C; a server that restarts is waited for",
    )
    command.add_argument("--after", metavar="CURSOR", help="go on behind this event")
    command.add_argument("--task", dest="task_id", metavar="ID")
    command.add_argument("--dag", dest="dag_id", metavar="ID")
    command.add_argument(
        "--kind", action="append", metavar="KIND", help="e.g. task.completed; more than one: any"
    )
    command.add_argument("--limit", type=int, metavar="N", help="stop after so many")
    add_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with connect(args) as api:
        _read(api, args)
    return 0


def _read(api: Api, args: argparse.Namespace) -> None:
    query = {"task_id": args.task_id, "dag_id": args.dag_id, "kind": args.kind}
    cursor, left = args.after, args.limit
    begun = False
    while True:
        limit = 500 if left is None else min(left, 500)
        try:
            page = api.get("/v1/events", {**query, "after": cursor, "limit": limit})
        except LineshaftError as error:
            # One who follows waits for a server that is restarted; one that never answered is a mistake.
            if not (args.follow and begun and _is_away(error)):
                raise
            time.sleep(_PAUSE_SEC)
            continue
        begun = True
        for event in page["items"]:
            _show(event, for_programs=args.json)
        if left is not None:
            left -= len(page["items"])
            if left <= 0:
                return
        cursor = page["next_cursor"]
        if page["items"] or not page["caught_up"]:
            continue
        if not args.follow:
            return
        time.sleep(_PAUSE_SEC)


def _is_away(error: LineshaftError) -> bool:
    return isinstance(error, UnavailableError) or (isinstance(error, ApiError) and error.status in _AWAY)


def _show(event: dict[str, Any], *, for_programs: bool) -> None:
    if for_programs:
        print(as_json(event), flush=True)
        return
    about = [event[name] for name in ("task_id", "dag_id", "agent_id") if event[name]]
    data = "" if event["data"] is None else " " + json.dumps(event["data"], ensure_ascii=False)[:200]
    print(f"{moment(event['at'])}  {event['kind']:<22}  {' '.join(about)}{data}", flush=True)
