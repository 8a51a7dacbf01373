"""`lineshaft demo`: a small fleet at work, in under a minute; nothing is left behind without `--keep`."""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineshaft.cli import up
from lineshaft.cli.connection import connect
from lineshaft.cli.output import print_table, print_text, usd
from lineshaft.errors import LineshaftError
from lineshaft.settings import CONFIG_VARIABLE, PREFIX, Settings

if TYPE_CHECKING:
    from lineshaft.client.blocking import SyncLineshaft
    from lineshaft.server.server import Server
    from lineshaft.types import Event, NewTask

_LONGEST_SEC = 55.0
_PAUSE_SEC = 0.2
_COLUMNS, _INDENT = 80, " " * 9
TITLE = "Landing page for client X"
TASKS: list[dict[str, Any]] = [
    {"type": "research", "title": "Research competitors", "spec": {"prompt": "client X"}},
    {"type": "design", "title": "Design a wireframe"},
    {"type": "implement", "title": "Implement the page"},
    {"type": "synthesize", "title": "Synthesize requirements", "depends_on": ["research", "design"]},
    {"type": "deploy", "title": "Test & deploy", "depends_on": ["synthesize", "implement"]},
]
#: Events that are shown.
_MESSAGES = {
    "task.started": "starts",
    "task.completed": "is done",
    "task.retry_scheduled": "failed and will be retried",
    "task.rate_limited": "was rate limited; it waits without using an attempt",
    "task.dead_lettered": "failed permanently and needs a person",
    "task.resolved": "was resolved",
    "dag.completed": "is complete",
}


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "demo",
        help="watch a small fleet of agents build a landing page and survive failures",
        description="Start a separate database, submit a DAG of five tasks and let five simulated agents, "
        "each a process, work on it. One agent is killed, one is rate limited, one returns an invalid "
        "output, one needs a person. Ends automatically in under a minute. With --keep on a terminal it then "
        "serves the dashboard until Ctrl-C.",
    )
    command.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the data in DIR, and show it in the dashboard"
    )
    command.set_defaults(run=run, url=None)


def run(args: argparse.Namespace) -> int:
    with _home(args.keep) as home:
        settings = _own_settings(home)
        print("Starting an embedded PostgreSQL …", flush=True)
        with connect(args, create=True) as shaft, _fleet():
            started = time.monotonic()
            made = shaft.submit_dag(TITLE, _tasks(), budget_ceiling_usd=2, created_by="agent:orchestrator")
            ids = {task.id: str(TASKS[number]["title"]) for number, task in enumerate(made.tasks.values())}
            print(f"Submitted '{TITLE}': {len(ids)} tasks in one transaction.\n", flush=True)
            _watch(shaft, made.id, ids, started)
            _summary(shaft, made.id, ids, time.monotonic() - started)
        print()
        if args.keep is None:
            print_text("To keep its data and look around in the dashboard: lineshaft demo --keep DIR")
        else:
            look_around(home, settings)
    return 0


def look_around(home: Path, variables: str) -> None:
    """Show what was left: on a terminal in the dashboard, until Ctrl-C."""
    print_text(f"The data is kept in {home}. Look around with these commands:")
    print(f"  export {variables}")
    print("  lineshaft task list; lineshaft dag list; lineshaft events")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(f"  lineshaft up   # the dashboard: {up.url_of(Settings.load())}/")
        return
    # The table and the address stay on the screen: only warnings are logged.
    os.environ[f"{PREFIX}LOG_LEVEL"] = "warning"
    up.serve(_open_dashboard, port=0)
    print_text(f"Stopped. The data is in {home}.")


def _open_dashboard(server: "Server", _dsn: str, _applied: Sequence[str]) -> None:
    address = f"{up.url_of(server.service.settings)}/"
    print(f"\nDashboard  {address}\nStop       Ctrl-C", flush=True)
    if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        # In a thread: it may wait for the browser.
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


@contextlib.contextmanager
def _home(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="lineshaft-demo-") as folder:
            yield Path(folder)


def _own_settings(home: Path) -> str:
    """Remove all settings, so that neither the demo nor its agents use a real database.

    Returns the variables with which a command uses the demo's database, for a shell.
    """
    config = home / "demo.toml"
    config.touch()  # instead of a lineshaft.toml in the working directory
    given = [name for name in os.environ if name.startswith(PREFIX)]
    for name in given:
        del os.environ[name]
    own = {CONFIG_VARIABLE: str(config), f"{PREFIX}HOME": str(home)}
    os.environ.update(own)
    shown = dict.fromkeys(sorted(given), "") | own
    return " ".join(f"{name}={shlex.quote(value) if value else ''}" for name, value in shown.items())


def _tasks() -> "list[NewTask]":
    from lineshaft.types import NewTask, OutputContract, RetrySpec  # noqa: PLC0415 - slow to import

    limits: dict[str, Any] = {
        "retry": RetrySpec(strategy="fixed", initial_delay_sec=0.5, jitter=False),
        "max_cost_usd": 0.5,
        "max_duration_sec": 30,
    }
    page = OutputContract(
        type="json",
        validation="json-schema",
        validation_schema={"type": "object", "required": ["html"]},
    )
    return [
        NewTask(**task, key=task["type"], **limits, output=page if task["type"] == "implement" else None)
        for task in TASKS
    ]


@contextlib.contextmanager
def _fleet() -> Iterator[None]:
    from lineshaft.cli.demo_agents import FLEET  # noqa: PLC0415 - slow to import

    module = "lineshaft.cli.demo_agents"
    processes = [
        subprocess.Popen(  # noqa: S603 - our own module, by this very Python
            [sys.executable, "-m", module, name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for name in FLEET
    ]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _watch(shaft: "SyncLineshaft", dag_id: str, titles: Mapping[str, str], started: float) -> None:
    cursor = None
    while True:
        page = shaft.read_events(cursor, dag_id=dag_id)
        cursor = page.next_cursor
        for event in page.items:
            _show(event, titles, time.monotonic() - started)
            if event.kind == "task.dead_lettered" and event.task_id is not None:
                _resolve(shaft, event.task_id)
        if any(event.kind == "dag.completed" for event in page.items):
            return
        if time.monotonic() - started > _LONGEST_SEC:
            raise LineshaftError(
                f"The demo has not ended after {_LONGEST_SEC:g} s: this machine is very busy. Run it again "
                "with --keep DIR, then use 'lineshaft task list' and 'lineshaft why TASK'."
            )
        if not page.items:
            time.sleep(_PAUSE_SEC)


def _show(event: "Event", titles: Mapping[str, str], after_sec: float) -> None:
    message = _MESSAGES.get(event.kind)
    if message is None:
        return
    about = titles.get(event.task_id or "", "The DAG")
    agent = f" ({event.agent_id})" if event.agent_id else ""
    data = event.data or {}
    cause = "" if event.kind == "task.resolved" else data.get("error") or data.get("reason") or ""
    text = f"{about} {message}{agent}{f': {cause}' if cause else ''}"
    lines = textwrap.wrap(text, _COLUMNS - len(_INDENT), break_on_hyphens=False)
    print(f"{after_sec:5.1f} s  " + f"\n{_INDENT}".join(lines), flush=True)


def _resolve(shaft: "SyncLineshaft", task_id: str) -> None:
    """The decision of a person."""
    from lineshaft.types import Resolution  # noqa: PLC0415 - slow to import

    note = "renewed the deploy key"
    shaft.resolve(task_id, Resolution.RETRY, reviewer="demo", note=note)
    print(f"{_INDENT}You review its history and decide: retry it ({note})")


def _summary(shaft: "SyncLineshaft", dag_id: str, ids: Mapping[str, str], seconds: float) -> None:
    rows = []
    for task_id, title in ids.items():
        task, attempts, steps = shaft.get(task_id), shaft.attempts(task_id), shaft.steps(task_id)
        failures = [a.category or a.outcome for a in attempts[:-1]]
        agents = dict.fromkeys(a.agent_id or "" for a in attempts)
        rows.append(
            (
                *(title, task.status, len(attempts), ", ".join(agents), ", ".join(failures)),
                *(len(steps), usd(task.cost_usd)),
            )
        )
    print()
    print_table(
        ("TASK", "STATUS", "CLAIMS", "AGENTS", "FAILURES", "STEPS", "USD"),
        rows,
        empty="",
        optional=("CLAIMS", "STEPS", "STATUS"),
    )
    dag = shaft.get_dag(dag_id)
    text = (
        f"{dag.status.capitalize()} in {seconds:.1f} s for {usd(dag.spent_usd)} USD. One agent was killed in "
        "the middle of its work: the steps it had finished and paid for were not repeated. Every step is a "
        "row that you can query."
    )
    print("\n" + textwrap.fill(text, _COLUMNS))
