"""`lineshaft demo`: see it work, in under a minute, and leave nothing behind."""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lineshaft.cli.api import Api, connect, segment
from lineshaft.cli.output import print_table, usd
from lineshaft.errors import LineshaftError
from lineshaft.settings import CONFIG_VARIABLE, PREFIX

_LONGEST_SEC = 55.0
_LOOK_SEC = 0.2
_RETRY = {"strategy": "fixed", "initial_delay_sec": 0.5, "jitter": False}
DAG: dict[str, Any] = {
    "title": "Landing page for client X",
    "budget_ceiling_usd": 2,
    "created_by": "agent:orchestrator",
    "tasks": [
        {
            "key": "research",
            "type": "research",
            "title": "Research competitors",
            "spec": {"prompt": "client X"},
        },
        {"key": "design", "type": "design", "title": "Design a wireframe"},
        {
            "key": "implement",
            "type": "implement",
            "title": "Implement the page",
            "output": {
                "type": "json",
                "validation": "json-schema",
                "validation_schema": {"type": "object", "required": ["html"]},
            },
        },
        {
            "key": "synthesize",
            "type": "synthesize",
            "title": "Synthesize requirements",
            "depends_on": ["research", "design"],
        },
        {
            "key": "deploy",
            "type": "deploy",
            "title": "Test & deploy",
            "depends_on": ["synthesize", "implement"],
        },
    ],
}
#: What is worth a line while it happens.
_TOLD = {
    "task.started": "starts",
    "task.completed": "is done",
    "task.retry_scheduled": "failed, and is tried again",
    "task.rate_limited": "was rate limited; waits, without using an attempt",
    "task.dead_lettered": "needs a person",
    "task.resolved": "was resolved",
    "dag.completed": "is complete",
}


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "demo",
        help="watch a small fleet build a landing page, and survive what goes wrong",
        description="Starts a database of its own, submits a DAG of five tasks and lets five simulated "
        "agents, each a process, work on it. One is killed in the middle, one is rate limited, one hands in "
        "the wrong thing, one needs a person. Ends by itself in under a minute.",
    )
    command.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the data there, to look at afterwards"
    )
    command.set_defaults(run=run, url=None)


def run(args: argparse.Namespace) -> int:
    with _home(args.keep) as home:
        settings = _own_settings(home)
        print("Starting an embedded PostgreSQL …", flush=True)
        with connect(args) as api, _fleet():
            started = time.monotonic()
            made = api.post("/v1/dags", _dag())
            print(f"Submitted '{DAG['title']}': {len(DAG['tasks'])} tasks, as one transaction.\n", flush=True)
            _watch(api, made, started)
            _summary(api, made, time.monotonic() - started)
        if args.keep is not None:
            print(f"\nThe data is in {home}. Look around: {settings} lineshaft task list")
    return 0


@contextlib.contextmanager
def _home(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="lineshaft-demo-") as folder:
            yield Path(folder)


def _own_settings(home: Path) -> str:
    """Forget every setting of this machine: none may lead the demo, or its agents, to a database in use.

    Gives the variables that lead a command here, as a shell takes them.
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


def _dag() -> dict[str, Any]:
    limits = {"retry": _RETRY, "max_cost_usd": 0.5, "max_duration_sec": 30}
    return {**DAG, "tasks": [{**task, **limits} for task in DAG["tasks"]]}


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


def _watch(api: Api, made: dict[str, Any], started: float) -> None:
    dag_id = made["dag"]["id"]
    titles = {made["tasks"][task["key"]]: task["title"] for task in DAG["tasks"]}
    cursor = None
    while True:
        page = api.get("/v1/events", {"dag_id": dag_id, "after": cursor, "limit": 500})
        cursor = page["next_cursor"]
        for event in page["items"]:
            _tell(event, titles, time.monotonic() - started)
            if event["kind"] == "task.dead_lettered":
                _decide(api, event["task_id"], titles)
            if event["kind"] == "dag.completed":
                return
        if time.monotonic() - started > _LONGEST_SEC:
            raise LineshaftError(
                f"The demo has not ended after {_LONGEST_SEC:g} s: this machine is very busy. Run it again "
                "with --keep DIR, and look with 'lineshaft task list' and 'lineshaft why TASK'."
            )
        if not page["items"]:
            time.sleep(_LOOK_SEC)


def _tell(event: dict[str, Any], titles: dict[str, str], after: float) -> None:
    said = _TOLD.get(event["kind"])
    if said is None:
        return
    about = titles.get(event["task_id"] or "", "The DAG")
    by = f" ({event['agent_id']})" if event["agent_id"] else ""
    data = event["data"] or {}
    why = "" if event["kind"] == "task.resolved" else data.get("error") or data.get("reason") or ""
    print(f"{after:5.1f} s  {about} {said}{by}{': ' + str(why)[:90] if why else ''}", flush=True)


def _decide(api: Api, task_id: str, titles: dict[str, str]) -> None:
    """What a person would do at the desk."""
    note = "renewed the deploy key"
    decision = {"resolution": "retry", "reviewer": "demo", "note": note}
    api.post(f"/v1/dead-letters/{segment(task_id)}/resolve", decision)
    print(f"         You look at it, see the whole history, and decide: retry {titles[task_id]!r} ({note})")


def _summary(api: Api, made: dict[str, Any], seconds: float) -> None:
    tasks = [api.get(f"/v1/tasks/{segment(made['tasks'][task['key']])}") for task in DAG["tasks"]]
    rows = []
    for task in tasks:
        attempts = api.get(f"/v1/tasks/{segment(task['id'])}/attempts")["items"]
        mishaps = [f"{a['outcome']}{': ' + a['category'] if a['category'] else ''}" for a in attempts[:-1]]
        steps = api.get(f"/v1/tasks/{segment(task['id'])}/steps")
        rows.append(
            (
                task["title"],
                task["status"],
                len(attempts),
                ", ".join(dict.fromkeys(a["agent_id"] or "" for a in attempts)),
                ", ".join(mishaps),
                len(steps),
                usd(task["cost_usd"]),
            )
        )
    print()
    print_table(("TASK", "STATUS", "CLAIMS", "AGENTS", "WHAT WENT WRONG", "STEPS", "USD"), rows, empty="")
    dag = api.get(f"/v1/dags/{segment(made['dag']['id'])}")
    total = sum(task["cost_usd"] for task in tasks)
    print(
        f"\n{dag['status'].capitalize()} in {seconds:.1f} s for {usd(total)} USD. One agent was killed in "
        "the middle of its work:\nwhat it had finished and paid for was not done again. Every step is a row "
        "that you can query."
    )
