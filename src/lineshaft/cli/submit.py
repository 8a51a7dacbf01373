"""`lineshaft submit`: one task by flags, or tasks and DAGs from a file."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lineshaft.cli.api import Api, add_flags, connect, segment
from lineshaft.cli.output import print_facts, print_json, print_table
from lineshaft.errors import InvalidInputError

#: Flags that become fields of the task as they are.
_TEXTS = ("title", "deadline", "run_at", "lock_key", "preset", "idempotency_key", "created_by", "parent_id")
_LISTS = ("depends_on", "required_capabilities", "model_preferences", "tags")


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "submit",
        help="submit a task by flags, or tasks and DAGs from a file",
        description="Submits one task of a TYPE; or, with --file, what a JSON or YAML file holds: a task (an "
        "object with 'type'), a list of tasks, or a DAG (an object with 'title' and 'tasks', which may "
        "depend on each other by 'key').",
        epilog="Examples: lineshaft submit research --prompt 'competitors' --max-cost 0.5 · "
        "lineshaft submit --file dag.yaml · cat tasks.json | lineshaft submit --file -",
    )
    command.add_argument("type", nargs="?", metavar="TYPE", help="what kind of task it is")
    command.add_argument("--file", metavar="FILE", help="a JSON or YAML file; - is standard input")
    command.add_argument(
        "--spec", metavar="JSON", help="the task's spec, an object; @FILE reads it from a file"
    )
    command.add_argument("--prompt", help="the same as a spec with this prompt")
    command.add_argument("--title", help="what people see in lists")
    command.add_argument("--priority", type=int, help="0 (first) to 100, 50 if not given")
    command.add_argument("--depends-on", nargs="+", metavar="ID", help="tasks that must be completed before")
    command.add_argument(
        "--capability",
        nargs="+",
        dest="required_capabilities",
        metavar="NAME",
        help="what an agent must be able to do",
    )
    command.add_argument(
        "--model", nargs="+", dest="model_preferences", metavar="NAME", help="models, best first"
    )
    command.add_argument(
        "--max-cost", type=float, dest="max_cost_usd", metavar="USD", help="what an attempt may cost"
    )
    command.add_argument("--max-attempts", type=int, metavar="N")
    command.add_argument(
        "--max-duration",
        type=float,
        dest="max_duration_sec",
        metavar="SEC",
        help="how long an attempt may take",
    )
    command.add_argument("--deadline", metavar="TIME", help="ISO-8601; it is boosted as this comes nearer")
    command.add_argument("--run-at", metavar="TIME", help="ISO-8601; not before then")
    command.add_argument("--lock-key", metavar="KEY", help="one task at a time has this, e.g. doc:42")
    command.add_argument("--tag", nargs="+", dest="tags", metavar="TAG")
    command.add_argument("--preset", choices=("factory", "loki", "officeplane"))
    command.add_argument("--idempotency-key", metavar="KEY", help="the same key again gives the same task")
    command.add_argument("--created-by", metavar="WHO")
    command.add_argument("--parent-id", metavar="ID", help=argparse.SUPPRESS)
    command.add_argument(
        "--wait", type=float, nargs="?", const=3600.0, metavar="SEC", help="wait until it has ended"
    )
    add_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if (args.type is None) == (args.file is None):
        raise InvalidInputError("Give a TYPE, or --file with what to submit; not both.")
    asked = _from_file(args.file) if args.file is not None else _from_flags(args)
    with connect(args) as api:
        if isinstance(asked, list):
            return _submit_many(api, asked, args)
        if "tasks" in asked:
            return _submit_dag(api, asked, args)
        return _submit_one(api, asked, args)


def _from_flags(args: argparse.Namespace) -> dict[str, Any]:
    task = {"type": args.type}
    for name in (*_TEXTS, *_LISTS, "priority", "max_cost_usd", "max_attempts", "max_duration_sec"):
        value = getattr(args, name)
        if value is not None:
            task[name] = value
    if args.spec is not None:
        text = Path(args.spec[1:]).read_text(encoding="utf-8") if args.spec.startswith("@") else args.spec
        try:
            task["spec"] = json.loads(text)
        except ValueError as error:
            raise InvalidInputError(f"--spec must be JSON: {error}.") from None
    if args.prompt is not None:
        task["spec"] = {**task.get("spec", {}), "prompt": args.prompt}
    return task


def _from_file(name: str) -> Any:
    import yaml  # type: ignore[import-untyped]  # noqa: PLC0415 - only for files

    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        # Every JSON file is a YAML file, but its own reader gives better errors and is quicker.
        asked = json.loads(text) if text.lstrip()[:1] in {"{", "["} else yaml.safe_load(text)
    except OSError as error:
        raise InvalidInputError(f"Can't read {name}: {error.strerror or error}.") from None
    except (ValueError, yaml.YAMLError) as error:
        raise InvalidInputError(f"{name} is neither JSON nor YAML: {error}") from None
    if not isinstance(asked, dict | list):
        raise InvalidInputError(
            f"{name} must hold a task, a list of tasks or a DAG, not {type(asked).__name__}."
        )
    return asked


def _submit_one(api: Api, task: dict[str, Any], args: argparse.Namespace) -> int:
    found = api.post("/v1/tasks", task)
    if args.wait is not None:
        return _wait(api, [found["id"]], args)
    if args.json:
        print_json(found)
    else:
        known = " (its key was known: this is the existing task)" if found.get("duplicate") else ""
        print_facts([("Task", found["id"] + known), ("Status", found["status"])])
    return 0


def _submit_many(api: Api, tasks: list[Any], args: argparse.Namespace) -> int:
    found = api.post("/v1/tasks/batch", {"tasks": tasks})
    ids = [item["id"] for item in found["items"]]
    if args.wait is not None:
        return _wait(api, ids, args)
    if args.json:
        print_json(found)
    else:
        known = sum(item["duplicate"] for item in found["items"])
        print(f"Submitted {len(ids)} tasks" + (f", {known} of them known by their key." if known else "."))
    return 0


def _submit_dag(api: Api, dag: dict[str, Any], args: argparse.Namespace) -> int:
    found = api.post("/v1/dags", dag)
    if args.wait is not None:
        return _wait(api, list(found["tasks"].values()), args)
    if args.json:
        print_json(found)
    else:
        print_facts([("DAG", found["dag"]["id"]), ("Status", found["dag"]["status"])])
        print_table(("KEY", "TASK"), sorted(found["tasks"].items()), empty="")
    return 0


def _wait(api: Api, ids: list[str], args: argparse.Namespace) -> int:
    """Until all have ended; 0 if all were completed."""
    import time  # noqa: PLC0415

    deadline = time.monotonic() + args.wait
    open_ones, ended = list(ids), []
    while open_ones:
        tasks = [api.get(f"/v1/tasks/{segment(name)}") for name in open_ones]
        ended += [task for task in tasks if task["status"] in ENDED]
        open_ones = [task["id"] for task in tasks if task["status"] not in ENDED]
        if open_ones and time.monotonic() > deadline:
            raise InvalidInputError(
                f"{len(open_ones)} of {len(ids)} tasks have not ended after {args.wait:g} s. They go on; "
                f"'lineshaft why {open_ones[0]}' tells what the first waits for."
            )
        if open_ones:
            time.sleep(min(0.25, max(deadline - time.monotonic(), 0)))
    if args.json:
        print_json(ended[0] if len(ids) == 1 else ended)
    elif len(ended) == 1:
        (task,) = ended
        print_facts([("Task", task["id"]), ("Status", task["status"])])
        print_json(task["output"]["data"])
    else:
        print_table(("TASK", "STATUS"), [(task["id"], task["status"]) for task in ended], empty="")
    return 0 if all(task["status"] == "COMPLETED" for task in ended) else 1


ENDED = frozenset({"COMPLETED", "CANCELLED", "DEAD_LETTERED"})
