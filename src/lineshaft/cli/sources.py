"""`lineshaft sources`: schedules, webhooks and other rules that create work."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineshaft.cli.actions import Actions, add_action, print_done, print_items, print_result
from lineshaft.cli.connection import collect, connect
from lineshaft.cli.output import moment, pretty, print_facts, print_json
from lineshaft.cli.usage import UsageError, json_value, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lineshaft.types import Source, SourceChange


_SIGNS = {"create": "+", "change": "~", "remove": "-", "unchanged": "="}


def add_to(commands: Actions) -> None:
    command = commands.add_parser(
        "sources",
        help="schedules, webhooks and other sources of work",
        description="Sources create tasks, DAGs or goals when something happens: at the ticks of a schedule, "
        "or when a webhook is called.",
    )
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = add_action(actions, "list", "list sources, with when each fires next", list_)
    listing.add_argument("--kind", help="only this kind: schedule, webhook, files, event or observer")
    _named(add_action(actions, "show", "show a source", show))
    apply = add_action(
        actions,
        "apply",
        "make the sources of a file those of the installation",
        apply_,
        "Show what a YAML file changes, ask, and apply it. Only sources that came from a file of this name "
        "are removed.",
    )
    apply.add_argument("file", metavar="FILE", type=Path, help="a YAML file with a list 'sources'")
    apply.add_argument("--yes", action="store_true", help="don't ask")
    apply.add_argument("--dry-run", action="store_true", help="only show what would change")
    put = add_action(
        actions, "put", "create or replace a source", put_, "Create or replace a source from its definition."
    )
    _named(put)
    put.add_argument("definition", metavar="JSON", help="the definition, or @FILE with JSON or YAML")
    put.add_argument(
        "--if-version",
        type=positive,
        metavar="N",
        help="only if it still has this version ('sources show'): don't overwrite what others changed",
    )
    fire = _named(add_action(actions, "fire", "fire a source now", fire_))
    fire.add_argument("--event", metavar="JSON", help="the event for its template")
    fire.add_argument("--dry-run", action="store_true", help="only show the tasks that it would create")
    _named(add_action(actions, "pause", "pause a source until it is resumed", pause))
    _named(add_action(actions, "resume", "resume a paused source", resume))
    history = _named(add_action(actions, "history", "show what became of its events, newest first", history_))
    history.add_argument("--limit", type=positive, default=20, metavar="N", help="how many (default: 20)")
    _named(add_action(actions, "rm", "delete a source and its history; its work stays", remove))


def _named(action: argparse.ArgumentParser) -> argparse.ArgumentParser:
    action.add_argument("name", metavar="NAME")
    return action


def list_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        items, _ = collect(
            lambda limit, cursor: shaft.sources.list(kind=args.kind, limit=limit, cursor=cursor)
        )
    return print_items(
        args,
        items,
        ("NAME", "KIND", "WHEN", "ENABLED", "NEXT", "LAST", "OUTCOME", "OPEN"),
        lambda source: (
            source.name,
            source.kind,
            _when(source),
            source.is_enabled,
            moment(source.next_at),
            moment(source.last_fired_at),
            source.last_outcome,
            source.open_tasks,
        ),
        empty="No sources. Create one with 'lineshaft sources put' or 'lineshaft sources apply'.",
        optional=("OPEN", "LAST"),
    )


def _when(source: "Source") -> str:
    if source.kind == "schedule":
        if source.cron:
            return source.cron if source.timezone == "UTC" else f"{source.cron} {source.timezone}"
        return f"every {source.every_sec:g} s" if source.every_sec else ""
    return f"/hooks/{source.name}" if source.kind == "webhook" else ""


def show(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        return print_result(args, shaft.sources.get(args.name), _show)


def _show(source: "Source") -> None:
    facts = [
        ("Name", source.name),
        ("Kind", f"{source.kind}, from {source.origin}"),
        ("When", _when(source)),
        ("Enabled", "yes" if source.is_enabled else "no"),
        ("Doesn't fire", f"{source.fault}." if source.fault else ""),
        ("Next", moment(source.next_at)),
        ("Last", f"{moment(source.last_fired_at)} {source.last_outcome}" if source.last_outcome else ""),
        ("Open tasks", str(source.open_tasks)),
        ("Changed", f"{moment(source.updated_at)}{f' by {source.updated_by}' if source.updated_by else ''}"),
        ("Version", str(source.version)),
    ]
    rest = {
        name: value
        for name, value in source.definition().items()
        if name not in {"name", "kind", "enabled"} and value is not None
    }
    print_facts([(name, value) for name, value in facts if value])
    print(pretty(rest))


def apply_(args: argparse.Namespace) -> int:
    from lineshaft.sources import file  # noqa: PLC0415 - slow to import

    sources, origin = file.read(args.file), file.origin_of(args.file)
    with connect(args, create=not args.dry_run) as shaft:
        plan = shaft.sources.apply(sources, origin=origin, dry_run=True)
        changes = [each for each in plan if each.change != "unchanged"]
        if not args.json:
            _print_changes(plan)
        if changes and not args.dry_run:
            if not args.yes:
                _ask(args)
            plan = shaft.sources.apply(sources, origin=origin)
    if args.json:
        print_json({"changes": plan, "applied": bool(changes) and not args.dry_run})
    return 0


def _ask(args: argparse.Namespace) -> None:
    if args.json or not sys.stdin.isatty():
        raise UsageError("Nothing was applied. Use --yes to apply these changes without a question.")
    if input("Apply these changes? [y/N] ").strip().lower() not in {"y", "yes"}:
        raise UsageError("Nothing was applied.")


def _print_changes(changes: "Sequence[SourceChange]") -> None:
    if all(each.change == "unchanged" for each in changes):
        print("Nothing to change.")
        return
    for each in changes:
        if each.change == "unchanged":
            continue
        print(f"{_SIGNS.get(each.change, each.change)} {each.name}")
        for field, (before, after) in each.fields.items():
            print(f"    {field}: {_short(before)} → {_short(after)}")


def _short(value: Any) -> str:
    import json  # noqa: PLC0415

    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:99]}…"  # noqa: PLR2004 - for people


def put_(args: argparse.Namespace) -> int:
    import msgspec  # noqa: PLC0415 - slow to import

    from lineshaft.types import NewSource  # noqa: PLC0415
    from lineshaft.types.problems import invalid_input  # noqa: PLC0415

    try:
        source = msgspec.convert({**_definition(args.definition), "name": args.name}, NewSource)
    except msgspec.ValidationError as error:
        raise invalid_input(error) from None
    with connect(args, create=True) as shaft:
        return print_result(args, shaft.sources.put(source, version=args.if_version), _show)


def _definition(text: str) -> dict[str, Any]:
    import msgspec  # noqa: PLC0415

    from lineshaft.sources import file  # noqa: PLC0415

    if text.startswith("@"):
        path = Path(text[1:])
        try:
            found = file.decode_yaml(path.read_bytes())
        except OSError as error:
            raise UsageError(f"Can't read {path}: {error.strerror}.") from None
        except (msgspec.DecodeError, ValueError):
            raise UsageError(f"{path} is neither JSON nor YAML.") from None
    else:
        found = json_value("JSON", text)
    if not isinstance(found, dict):
        raise UsageError('The definition must be an object, such as {"kind": "schedule", …}.')
    return found


def fire_(args: argparse.Namespace) -> int:
    event = None if args.event is None else json_value("--event", args.event)
    if event is not None and not isinstance(event, dict):
        raise UsageError("--event must be a JSON object.")
    with connect(args) as shaft:
        fired = shaft.sources.fire(args.name, event, dry_run=args.dry_run)
    if args.json or args.dry_run:
        print_json(fired)
    else:
        ids = fired.task_ids if isinstance(fired.task_ids, list) else []
        made = f"{fired.outcome}: {' '.join(ids)}" if ids else str(fired.outcome)
        print(f"{made}{f' ({fired.error})' if fired.error else ''}")
    return 1 if fired.outcome == "failed" else 0


def pause(args: argparse.Namespace) -> int:
    return _enable(args, enabled=False)


def resume(args: argparse.Namespace) -> int:
    return _enable(args, enabled=True)


def _enable(args: argparse.Namespace, *, enabled: bool) -> int:
    from lineshaft.types import SourceFields  # noqa: PLC0415 - slow to import

    with connect(args) as shaft:
        source = shaft.sources.patch(args.name, SourceFields(enabled=enabled))
    state = f"resumed; next: {moment(source.next_at)}" if source.next_at else "resumed"
    return print_done(args, source, f"{source.name}: {state if enabled else 'paused'}")


def history_(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        items, _ = collect(
            lambda limit, cursor: shaft.sources.firings(args.name, limit=limit, cursor=cursor), args.limit
        )
    return print_items(
        args,
        items,
        # One or the other: on a narrow terminal, three columns would hide the end of the error.
        ("AT", "OUTCOME", "WORK OR ERROR"),
        lambda firing: (
            moment(firing.at),
            firing.outcome,
            firing.error or firing.dag_id or " ".join(firing.task_ids),
        ),
        empty="It has not fired yet.",
    )


def remove(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        shaft.sources.delete(args.name)
    return print_done(args, {"deleted": args.name}, f"Deleted {args.name}.")
