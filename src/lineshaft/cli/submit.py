"""`lineshaft submit`."""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lineshaft.cli.connection import add_flags, as_person, collect, connect
from lineshaft.cli.ids import dag_id, task_id, task_ids
from lineshaft.cli.output import Id, print_facts, print_json, print_note, print_table
from lineshaft.cli.usage import UsageError, json_value, seconds
from lineshaft.cli.wait import DEFAULT_SEC, wait
from lineshaft.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lineshaft.client.blocking import SyncLineshaft
    from lineshaft.types import NewTask, Task

T = TypeVar("T")

#: Flags that are fields of the task.
_FIELDS = (
    *(
        "title",
        "deadline",
        "expire_at_deadline",
        "run_at",
        "preset",
        "idempotency_key",
        "created_by",
        "parent_id",
        "dag_id",
    ),
    *("depends_on", "required_capabilities", "model_preferences", "quota_keys", "tags"),
    *("priority", "max_cost_usd", "max_attempts", "max_duration_sec", "idempotency_ttl_sec"),
    *("on_conflict", "debounce_sec", "max_wait_sec"),
)
#: Agents that are asked whether they take a type, and types that are named if none does.
_MOST_AGENTS, _MOST_NAMED = 500, 10
#: Characters of a file: far more than one call accepts.
MAX_FILE = 64 << 20


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "submit",
        help="submit a task, or tasks and DAGs from a file",
        description="Submit one task of TYPE; or, with --file, the contents of a JSON or YAML file: a task "
        "(an object with 'type'), a list of tasks, or a DAG (an object with 'title' and 'tasks', which "
        "depend on each other by 'key'). Records of .loki files are tasks too.",
        epilog="Examples: lineshaft submit research --prompt 'competitors' --max-cost 0.5 · "
        "lineshaft submit --file dag.yaml · cat tasks.json | lineshaft submit --file -",
    )
    command.add_argument("type", nargs="?", metavar="TYPE", help="the type of the task")
    command.add_argument("--file", metavar="FILE", help="a JSON or YAML file; - is standard input")
    _add_fields(command)
    command.add_argument(
        "--wait",
        type=_seconds_or_text,
        nargs="?",
        const=DEFAULT_SEC,
        metavar="SEC",
        help=f"wait until all tasks have ended, at most SEC seconds (default: {DEFAULT_SEC:g})",
    )
    add_flags(command)
    command.set_defaults(run=run)


def _add_fields(command: argparse.ArgumentParser) -> None:
    field = command.add_argument
    field("--spec", metavar="JSON", help="the spec, a JSON object; @FILE reads it from a file")
    field("--prompt", help="sets 'prompt' in the spec")
    field("--title", help="the title in lists")
    field("--priority", type=int, help="0 (first) to 100 (last); default: 50")
    field("--depends-on", action="append", metavar="ID", help="a task that must complete first; repeatable")
    field(
        "--capability",
        action="append",
        dest="required_capabilities",
        metavar="NAME",
        help="required of the agent; repeatable",
    )
    field(
        "--model",
        action="append",
        dest="model_preferences",
        metavar="NAME",
        help="a model, the preferred one first; repeatable",
    )
    field("--max-cost", type=float, dest="max_cost_usd", metavar="USD", help="cost limit of an attempt")
    field("--max-attempts", type=int, metavar="N", help="attempts before it becomes a dead letter")
    field(
        "--max-duration", type=float, dest="max_duration_sec", metavar="SEC", help="time limit of an attempt"
    )
    field("--deadline", metavar="TIME", help="ISO 8601; the priority rises as it approaches")
    field(
        "--expire-at-deadline", action="store_true", default=None, help="cancel it when the deadline passes"
    )
    field("--run-at", metavar="TIME", help="ISO 8601; not claimed before")
    field(
        "--lock-key",
        action="append",
        dest="locks",
        metavar="KEY",
        help="one running task per key, such as doc:42; repeatable: it gets all of them or waits",
    )
    field(
        "--shared-lock",
        action="append",
        dest="shared_locks",
        metavar="KEY",
        help="a lock that tasks with --shared-lock have together; repeatable",
    )
    field(
        "--quota-key",
        action="append",
        dest="quota_keys",
        metavar="KEY",
        help="a key for quotas, such as customer:42; repeatable",
    )
    field("--tag", action="append", dest="tags", metavar="TAG", help="a label for filters; repeatable")
    field("--preset", metavar="NAME", help="defaults for retries and limits: factory, loki or officeplane")
    field("--idempotency-key", metavar="KEY", help="submitting the same key again returns the existing task")
    field(
        "--idempotency-ttl",
        type=float,
        dest="idempotency_ttl_sec",
        metavar="SEC",
        help="free the key so long after the task has completed; default: never",
    )
    field(
        "--on-conflict",
        choices=("return", "reject", "replace_waiting", "cancel_running"),
        help="if a task has the key: return it (default), fail, replace it if it waits, or also cancel it if "
        "it runs",
    )
    field(
        "--debounce",
        type=float,
        dest="debounce_sec",
        metavar="SEC",
        help="with replace_waiting: start so long after the last submission",
    )
    field(
        "--max-wait",
        type=float,
        dest="max_wait_sec",
        metavar="SEC",
        help="with --debounce: start at most so long after the first submission",
    )
    field("--created-by", metavar="WHO", help="such as human:ann")
    field("--dag-id", metavar="ID", help="join this DAG")
    field("--parent-id", metavar="ID", help=argparse.SUPPRESS)


def _seconds_or_text(text: str) -> float | str:
    """In `submit --wait research` the type is not a number of seconds."""
    try:
        return seconds(text)
    except argparse.ArgumentTypeError:
        return text


def run(args: argparse.Namespace) -> int:
    if isinstance(args.wait, str):
        if args.type is not None:
            raise UsageError(f"--wait must be a number of seconds above 0, got {args.wait!r}.")
        args.type, args.wait = args.wait, DEFAULT_SEC
    if (args.type is None) == (args.file is None):
        raise UsageError("Give either a TYPE or --file FILE.")
    given = _from_file(args.file) if args.file is not None else _from_flags(args)
    records = _records(given) if args.file is not None else None
    if records is not None:
        return _submit_records(records, args, is_one=isinstance(given, dict) and "tasks" not in given)
    if isinstance(given, list):
        return _submit_many(given, args)
    if "tasks" in given:
        return _submit_dag(given, args)
    return _submit_one(given, args)


def _locks(alone: list[str], shared: list[str]) -> dict[str, Any]:
    if len(alone) == 1 and not shared:
        return {"lock_key": alone[0]}
    locks = [*alone, *({"key": key, "shared": True} for key in shared)]
    return {"lock_keys": locks} if locks else {}


def _from_flags(args: argparse.Namespace) -> dict[str, Any]:
    task = {name: value for name in _FIELDS if (value := getattr(args, name)) is not None}
    task["type"] = args.type
    task |= _locks(args.locks or [], args.shared_locks or [])
    if args.spec is not None:
        text = _read(args.spec[1:]) if args.spec.startswith("@") else args.spec
        task["spec"] = json_value("--spec", text)
    if args.prompt is not None:
        spec = task.get("spec", {})
        if not isinstance(spec, dict):
            raise UsageError("--spec must be a JSON object.")
        task["spec"] = {**spec, "prompt": args.prompt}
    return task


def _read(name: str) -> str:
    try:
        with contextlib.nullcontext(sys.stdin) if name == "-" else Path(name).open(encoding="utf-8") as file:
            text = file.read(MAX_FILE + 1)
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise InvalidInputError(f"Can't read {name}: {cause}.") from None
    if len(text) > MAX_FILE:
        raise InvalidInputError(f"{name} is longer than {MAX_FILE} characters. Submit it in several files.")
    return text


def _from_file(name: str) -> Any:
    from lineshaft.types.documents import unwrapped  # noqa: PLC0415 - slow to import
    from lineshaft.types.written import read_written  # noqa: PLC0415

    given = unwrapped(read_written(_read(name), name))
    if not isinstance(given, dict | list):
        raise InvalidInputError(
            f"{name} must contain a task, a list of tasks or a DAG, not {type(given).__name__}."
        )
    return given


def _records(given: Any) -> list[dict[str, Any]] | None:
    """Records of a `.loki` file, one or a list with or without a wrapper; None: it has other tasks."""
    from lineshaft.integrations.loki.records import is_record  # noqa: PLC0415 - slow to import

    listed = given.get("tasks", [given]) if isinstance(given, dict) else given
    are_records = isinstance(listed, list) and bool(listed) and all(map(is_record, listed))
    return listed if are_records else None


def _submit_records(records: list[dict[str, Any]], args: argparse.Namespace, *, is_one: bool) -> int:
    from lineshaft.cli.records import submit_record  # noqa: PLC0415 - slow to import

    with connect(args, create=True) as shaft:
        made = [submit_record(shaft, record) for record in records]
        if args.wait is not None:
            return wait(shaft, [task.id for task in made], args.wait, as_json=args.json)
    if is_one:
        return _print_one(made[0], args)
    known = [task.duplicate is True for task in made]
    if args.json:
        items = zip(made, known, strict=True)
        print_json({"items": [{"id": task.id, "duplicate": duplicate} for task, duplicate in items]})
    else:
        existed = f", {sum(known)} of which existed already." if any(known) else "."
        print(f"Submitted {len(made)} tasks{existed}")
    return 0


def _created_by(creator: str | None, tasks: "Sequence[NewTask]") -> "list[NewTask]":
    from msgspec.structs import replace  # noqa: PLC0415 - slow to import

    return [replace(task, created_by=task.created_by or creator) for task in tasks]


def _submit_one(given: Any, args: argparse.Namespace) -> int:
    from msgspec import UNSET  # noqa: PLC0415 - slow to import
    from msgspec.structs import replace  # noqa: PLC0415

    from lineshaft.types import NewTask, documents  # noqa: PLC0415

    with connect(args, create=True) as shaft:
        if args.file is None:
            _resolve_ids(shaft, given)
        new = documents.converted(given, NewTask, documents.task)
        made = as_person(lambda creator: shaft.submit(*_created_by(creator, [new])))
        if args.wait is not None:
            return wait(shaft, [made.id], args.wait, as_json=args.json)
        _note_unserved(shaft, [new])
        task = shaft.get(made.id)
    task = replace(
        task,
        duplicate=made.duplicate or UNSET,
        mismatch=made.mismatch or UNSET,
        replaced=made.replaced or UNSET,
    )
    return _print_one(task, args)


def _print_one(task: "Task", args: argparse.Namespace) -> int:
    if args.json:
        print_json(task)
    else:
        note = " (existing task with this idempotency key)" if task.duplicate is True else ""
        if task.replaced is True:
            note = " (existing task with this idempotency key, replaced)"
        print_facts([("Task", task.id + note), ("Status", task.status)])
    return 0


def _note_unserved(shaft: "SyncLineshaft", tasks: "Iterable[NewTask]") -> None:
    """Say which types no active agent takes: a misspelt one would wait without a word."""
    active, more = collect(
        lambda limit, cursor: shaft.agents(status="active", limit=limit, cursor=cursor), _MOST_AGENTS
    )
    if more or any(agent.types is None for agent in active):
        return
    served = {name for agent in active for name in agent.types or ()}
    by_agents = [task.type for task in tasks if "human" not in (task.required_capabilities or ())]
    for name in [name for name in dict.fromkeys(by_agents) if name not in served][:_MOST_NAMED]:
        print_note(
            f"No active agent takes tasks of type {name!r}: they wait until one starts. 'lineshaft types' "
            "lists the types that agents take."
        )


def _resolve_ids(shaft: "SyncLineshaft", given: dict[str, Any]) -> None:
    if "depends_on" in given:
        given["depends_on"] = task_ids(shaft, given["depends_on"])
    if "parent_id" in given:
        given["parent_id"] = task_id(shaft, given["parent_id"])
    if "dag_id" in given:
        given["dag_id"] = dag_id(shaft, given["dag_id"])


def _submit_many(given: list[Any], args: argparse.Namespace) -> int:
    from lineshaft.types import NewTask, documents  # noqa: PLC0415 - slow to import

    with connect(args, create=True) as shaft:
        new = documents.converted(given, list[NewTask], documents.tasks)
        made = as_person(lambda creator: shaft.submit_many(_created_by(creator, new)))
        if args.wait is not None:
            return wait(shaft, [item.id for item in made], args.wait, as_json=args.json)
        _note_unserved(shaft, new)
    if args.json:
        names = ("id", "duplicate", "mismatch", "replaced")
        items = [{name: getattr(item, name) for name in names} for item in made]
        print_json({"items": items})
    else:
        known, replaced = sum(item.duplicate for item in made), sum(item.replaced for item in made)
        notes = [f"{known} of which existed already"] if known else []
        notes += [f"{replaced} of which replaced waiting ones"] if replaced else []
        print(", ".join([f"Submitted {len(made)} tasks", *notes]) + ".")
    return 0


def _submit_dag(given: Any, args: argparse.Namespace) -> int:
    from lineshaft.types import NewDag, documents  # noqa: PLC0415 - slow to import

    new = documents.converted(given, NewDag, documents.dag)
    with connect(args, create=True) as shaft:
        made = as_person(
            lambda creator: shaft.submit_dag(
                new.title,
                _created_by(new.created_by or creator, new.tasks),
                budget_ceiling_usd=new.budget_ceiling_usd,
                created_by=new.created_by or creator,
                idempotency_key=new.idempotency_key,
            )
        )
        ids = {key: task.id for key, task in made.tasks.items()}
        if args.wait is not None:
            return wait(shaft, list(ids.values()), args.wait, as_json=args.json)
        _note_unserved(shaft, new.tasks)
        dag = shaft.get_dag(made.id)
    if args.json:
        print_json({"dag": dag, "tasks": ids, **({"duplicate": True} if made.duplicate else {})})
    else:
        note = " (existing DAG with this idempotency key)" if made.duplicate else ""
        print_facts([("DAG", dag.id + note), ("Status", dag.status)])
        print_table(("KEY", "TASK"), [(key, Id(name)) for key, name in ids.items()], empty="")
    return 0
