"""`lineshaft wait`, and the waiting of `lineshaft submit --wait`."""

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lineshaft.cli.connection import add_flags, connect
from lineshaft.cli.ids import task_or_dag_id
from lineshaft.cli.output import Id, id_for_people, print_facts, print_json, print_note, print_table
from lineshaft.cli.usage import seconds
from lineshaft.cli.why import summary
from lineshaft.errors import LineshaftError, UnavailableError

if TYPE_CHECKING:
    from lineshaft.client.blocking import SyncLineshaft
    from lineshaft.types import Dag, Task

DEFAULT_SEC = 3600.0
#: How long to wait in silence.
_SILENT_SEC = 5.0
#: DAGs have their statuses in lower case.
_DONE = frozenset({"COMPLETED", "completed"})


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "wait",
        help="wait until tasks or DAGs have ended",
        description="Wait until tasks or DAGs have ended, and print how. After five seconds it says what "
        "they are waiting for. Exit code 0 if all have completed.",
    )
    command.add_argument("ids", nargs="+", metavar="ID", help="ids of tasks or DAGs, or short forms")
    command.add_argument(
        "--timeout",
        type=seconds,
        default=DEFAULT_SEC,
        metavar="SEC",
        help=f"at most so long (default: {DEFAULT_SEC:g})",
    )
    add_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with connect(args) as shaft:
        ids = [task_or_dag_id(shaft, text) for text in args.ids]
        return wait(shaft, ids, args.timeout, as_json=args.json)


def wait(shaft: "SyncLineshaft", ids: Sequence[str], timeout_sec: float, *, as_json: bool) -> int:
    """Print the ids at once, and after five seconds what they wait for; returns 0 if all have completed."""
    deadline = time.monotonic() + timeout_sec
    ended: list[Task | Dag] = []
    for name in ids:
        print_note(f"Waiting for {name}")
    for name in ids:
        try:
            ended.append(_wait_for_one(shaft, name, deadline))
        except TimeoutError:
            many = f" ({len(ended)} of {len(ids)} have)" if len(ids) > 1 else ""
            look = "dag show" if name.startswith("dag_") else "why"
            raise LineshaftError(
                f"{name} has not ended after {timeout_sec:g} s{many}; it goes on. 'lineshaft {look} {name}' "
                "shows what it waits for."
            ) from None
    if as_json:
        print_json(ended[0] if len(ids) == 1 else ended)
    elif len(ended) == 1:
        _print_one(ended[0])
    else:
        print_table(("ID", "STATUS"), [(Id(each.id), each.status) for each in ended], empty="")
    return 0 if all(each.status in _DONE for each in ended) else 1


def _wait_for_one(shaft: "SyncLineshaft", name: str, deadline: float) -> "Task | Dag":
    noted = ""
    while True:
        left = max(deadline - time.monotonic(), 0)
        try:
            return shaft.wait(name, min(left, _SILENT_SEC))
        except TimeoutError:
            if left <= _SILENT_SEC:
                raise
        try:
            now = _state(shaft, name)
        except UnavailableError as error:
            # It comes back, or the time is over.
            now = f"{error} Still waiting."
        if now != noted:
            print_note(f"{id_for_people(name)}: {now}")
            noted = now


def _state(shaft: "SyncLineshaft", name: str) -> str:
    if name.startswith("dag_"):
        dag = shaft.get_dag(name)
        counts = ", ".join(f"{count} {status}" for status, count in dag.counts.items())
        return f"it is {dag.status} ({counts})."
    return summary(shaft.why(name))


def _print_one(ended: "Task | Dag") -> None:
    from lineshaft.types import Task  # noqa: PLC0415 - slow to import

    if not isinstance(ended, Task):
        print_facts([("DAG", ended.id), ("Status", ended.status)])
        return
    facts = [("Task", ended.id), ("Status", ended.status)]
    failure = ": ".join(filter(None, (ended.failure_category, ended.failure_reason)))
    if failure or ended.cancel_reason:
        facts.append(("Reason", failure or ended.cancel_reason or ""))
    print_facts(facts)
    if ended.status in _DONE:
        print_json(ended.output.data)
