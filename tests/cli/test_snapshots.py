"""What each command prints on terminals of 80 and 120 columns and into a pipe.

`REWRITE_SNAPSHOTS=1 .venv/bin/python -m pytest tests/cli/test_snapshots.py` writes the files in `snapshots/`.
Look at the difference before you commit it.
"""

import asyncio
import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lineshaft import SyncLineshaft
from lineshaft.cli.main import COMMANDS, main, parser
from lineshaft.cli.output import display_width
from lineshaft.model.short_ids import short_id
from tests.cli.dataset import (
    CANCELLED,
    CHECK,
    COLLECT,
    DEAD,
    DONE,
    PERSON,
    RETRYING,
    RUNNING,
    SCHEDULED,
    WRITE,
    fill,
)

FOLDER = Path(__file__).parent / "snapshots"
DAG = "DAG"
S = short_id
#: Commands that change nothing. DAG stands for the id of the DAG.
READING: dict[str, list[Sequence[str]]] = {
    "task": [
        ("task", "list"),
        ("task", "list", "--status", "RUNNING"),
        ("task", "list", "--type", "unknown"),
        ("task", "list", "--limit", "2"),
        ("task", "show", S(DONE)),
        ("task", "show", S(RUNNING)),
        ("task", "show", S(DEAD)),
        ("task", "show", S(SCHEDULED)),
        ("task", "show", "01M7NE37SB"),
        ("task", "show", "unknown"),
        ("task", "result", S(DONE)),
        ("task", "result", S(SCHEDULED)),
        ("task", "lst"),
        ("task", "list", "--statsu", "READY"),
        ("tsak",),
    ],
    "why": [
        ("why", S(name))
        for name in (DONE, RUNNING, DEAD, CANCELLED, SCHEDULED, PERSON, RETRYING, COLLECT, CHECK)
    ],
    "wait": [
        ("wait", S(DONE)),
        ("wait", S(DONE), S(CANCELLED)),
        ("wait", S(DEAD)),
        ("wait", WRITE, "--timeout", "0.01"),
    ],
    "dag": [
        ("dag", "list"),
        ("dag", "list", "--all"),
        ("dag", "show", DAG),
        ("dag", "show", DAG, "--mermaid"),
        ("dag", "show", DAG, "--svg", "unknown/dag.svg"),
        ("dag", "show", "unknown"),
    ],
    "costs": [
        *(("costs", "--by", by) for by in ("type", "model", "agent", "dag")),
        ("costs", "--days", "0"),
    ],
    "dlq": [("dlq", "list"), ("dlq", "list", "--reviewed"), ("dlq", "show", S(DEAD)), ("dlq", "review")],
    "agents": [
        ("agents", "list"),
        ("agents", "list", "--type", "code", "--status", "active"),
        ("agents", "list", "--search", "unknown"),
        ("agents", "show", "coder"),
    ],
    "guards": [
        ("approvals", "list"),
        ("breakers", "list"),
        ("locks", "list"),
        ("slowdowns", "list"),
        ("quotas", "list"),
        ("quotas", "show", "large"),
        ("quotas", "show", "customers"),
        ("quotas", "show", "unknown"),
        ("limits",),
        ("types", "list"),
        ("types", "show", "write"),
        ("token", "list"),
    ],
    "events": [
        ("events", "--tail", "12"),
        ("events", "--task", S(RUNNING)),
        ("events", "--dag", DAG),
        ("events", "--from-start", "--limit", "4"),
        ("events", "--since", "1h", "--kind", "task.started"),
        ("events", "--tail", "501"),
    ],
    "database": [
        ("stats",),
        ("migrate", "status"),
        ("sql", "--no-psql", "SELECT id, status, title FROM tasks WHERE status = 'READY' ORDER BY id"),
    ],
}
#: Commands that change something, each called once, on a terminal of 80 columns.
CHANGING: list[Sequence[str]] = [
    ("submit",),
    ("submit", "--tag", "x", "write", "--idempotency-key", "k"),
    ("submit", "write", "--idempotency-key", "k"),
    ("submit", "write", "--priority", "101"),
    ("task", "change", S(COLLECT), "--priority", "3", "--no-tags"),
    ("task", "cancel", S(SCHEDULED)),
    ("task", "retry", S(RETRYING)),
    ("costs", "correct", S(DONE), "--to", "0.02", "--reason", "cents"),
    ("costs", "accept", S(DONE), "--reason", "as billed"),
    ("costs", "refuse", "unknown", "--reason", "as billed"),
    ("task", "cancel-matching", "--type", "write", "--dry-run"),
    ("task", "retry-matching", "--status", "CANCELLED", "--type", "mail"),
    ("dlq", "retry", S(DEAD), "unknown", "--reviewer", "ann"),
    ("dlq", "resolve", S(DEAD), "--resolution", "retry"),
    ("approvals", "approve", S(PERSON), "--data", "7", "--reviewer", "ann"),
    ("dag", "budget", DAG, "--add", "2.5"),
    ("dag", "cancel", DAG),
    ("agents", "change", "coder", "--status", "draining"),
    ("agents", "rm", "researcher"),
    ("breakers", "open", "mail"),
    ("breakers", "reset", "mail"),
    ("locks", "release", "doc:42"),
    ("slowdowns", "end", "model:large"),
    ("pause", "mail"),
    ("resume",),
    ("limits", "set", "--daily-budget", "20"),
    ("quotas", "set", "mails", "type:mail", "--max-running", "3", "--rate", "60/60"),
    ("quotas", "set", "large", "model:large", "--rate", "1.5/3600", "--unit", "usd", "--reason", "cheaper"),
    ("quotas", "set", "mails", "type:mail", "--rate", "60"),
    ("quotas", "set", "mails", "type:*:x"),
    ("quotas", "set", "mails", "type:mail", "--unit", "usd"),
    ("quotas", "delete", "customers"),
    ("quotas", "delete", "customers"),
    ("types", "set", "write", "--max-cost", "0.5", "--max-attempts", "2"),
    ("types", "set", "write"),
    ("token", "create", "--name", "bot", "--scope", "agent", "--agent", "coder"),
    ("token", "revoke", "ci"),
    ("artifact", "list"),
    ("artifact", "put", "sources.yaml"),
    ("artifact", "list"),
    ("artifact", "get", "artifact_unknown"),
    ("artifact", "rm", "artifact_unknown"),
    ("sources", "list"),
    ("sources", "apply", "sources.yaml", "--dry-run"),
    ("sources", "apply", "sources.yaml", "--yes"),
    ("sources", "put", "hourly", '{"kind": "schedule", "every_sec": 3600, "template": {"goal": "Tidy up"}}'),
    ("sources", "put", "often", '{"kind": "schedule", "every_sec": 0, "template": {"goal": "${now"}}'),
    ("sources", "list"),
    ("sources", "show", "weekly"),
    ("sources", "fire", "weekly", "--dry-run"),
    ("sources", "fire", "weekly"),
    ("sources", "fire", "issues", "--event", '{"issue": {"number": "high"}}'),
    ("sources", "history", "weekly"),
    ("sources", "history", "issues"),
    ("sources", "pause", "weekly"),
    ("sources", "list", "--kind", "schedule"),
    ("sources", "resume", "weekly"),
    ("sources", "rm", "hourly"),
    ("sources", "rm", "hourly"),
    ("task", "rerun", S(CANCELLED)),
    ("task", "rerun", S(DONE), "--downstream"),
    ("task", "signal", S(CANCELLED), "approved"),
]
SOURCES = """
sources:
  - name: weekly
    kind: schedule
    cron: "0 9 * * MON"
    timezone: America/Argentina/Buenos_Aires
    template: {task: {type: report, title: "Week of ${event.tick}"}}
  - name: issues
    kind: webhook
    verify: {scheme: github, secret_env: LINESHAFT_HOOK_GITHUB}
    template: {task: {type: triage, title: "${event.issue.title}", priority: "${event.issue.number}"}}
"""


class Terminal(io.TextIOWrapper):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def text(self) -> str:
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode()


@pytest.fixture
def shared(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All commands use one connection: opening one for each of them would take most of the time."""
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)
    monkeypatch.setenv("LINESHAFT_ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.delenv("LINESHAFT_URL", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    with SyncLineshaft(dsn, max_connections=2) as shaft:

        @contextlib.contextmanager
        def opened(*_args: Any, **_options: Any) -> Iterator[SyncLineshaft]:
            yield shaft

        monkeypatch.setattr("lineshaft.client.blocking.SyncLineshaft", opened)
        yield
    monkeypatch.undo()
    time.tzset()


def call(
    monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], *, columns: int | None, colour: bool = False
) -> str:
    """What a person sees: both streams, and the exit code if it isn't 0; `columns` None: in a pipe."""
    out, err = (Terminal(is_terminal=columns is not None) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", str(columns or 80))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        if colour:
            patch.delenv("NO_COLOR", raising=False)
        else:
            patch.setenv("NO_COLOR", "1")
        try:
            code = main(arguments)
        except SystemExit as exit_:  # argparse
            code = int(exit_.code or 0)
    text = out.text() + err.text()
    # Messages of argparse differ between versions of Python.
    text = re.sub(r"usage: .*?(?=\nlineshaft)", "usage: …", text, flags=re.DOTALL)
    return text + (f"[exit code {code}]\n" if code else "")


def normalised(text: str, dag_id: str) -> str:
    """The same text with fixed times and ids of the same length."""
    for name, replaced in ((dag_id, "dag_01" + "D" * 24), (short_id(dag_id), "DDDDDDDD-DDDD")):
        text = text.replace(name, replaced)
    text = re.sub(r"\d{4}-\d\d-\d\d([T ])\d\d:\d\d:\d\d", r"2026-01-01\g<1>00:00:00", text)
    text = re.sub(r"^\d\d:\d\d:\d\d", "00:00:00", text, flags=re.MULTILINE)
    text = re.sub(r"(task|token|artifact)_01(?!M7NE37SB1NE956YSAMN)\w{24}", r"\g<1>_01" + "N" * 24, text)
    text = re.sub(r"\b(?!M7NE37SB-)[0-9A-Z]{8}-[0-9A-Z]{4}\b(?<!DDDD)", "NNNNNNNN-NNNN", text)
    text = re.sub(r"lsh_\S+", "lsh_…", text)
    text = re.sub(r"(?<=00:00:00)\.\d+", "", text)
    # What was made just before, on a busy machine.
    text = re.sub(r"\b(?:\d{1,2}s|\dm) ago", "now", text)
    # On the day before, at night.
    text = re.sub(r"(Spent today +|Today \(UTC\) +).*", r"\g<1>…", text)
    # Of the running task, whose line is wrapped.
    return re.sub(r"\b9\d{3}\b", "9000", text)


def check(name: str, text: str) -> None:
    path = FOLDER / f"{name}.txt"
    if os.environ.get("REWRITE_SNAPSHOTS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"see the docstring of {Path(__file__).name}"


def without_colours(text: str) -> str:
    return re.sub(r"\033\[[\d;]*m", "", text)


@pytest.mark.slow("calls every command")
@pytest.mark.usefixtures("shared")
def test_what_commands_print(dsn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sources.yaml").write_text(SOURCES)
    dag_id = asyncio.run(fill(dsn))

    def shown(arguments: Sequence[str], **options: Any) -> str:
        given = [dag_id if word == DAG else word for word in arguments]
        return normalised(call(monkeypatch, given, **options), dag_id)

    for group, commands in READING.items():
        parts = []
        for arguments in commands:
            narrow, wide = (shown(arguments, columns=width) for width in (80, 120))
            piped = shown(arguments, columns=None)
            assert "\033" not in narrow + wide + piped, arguments
            assert_fits(narrow, 80)
            assert_fits(wide, 120)
            parts.append(_section(arguments, narrow, wide, piped))
        check(group, "\n".join(parts))
    for arguments in (("task", "list"), ("dag", "show", DAG), ("breakers", "list")):
        bright = shown(arguments, columns=80, colour=True)
        assert "\033[" in bright
        assert without_colours(bright) == shown(arguments, columns=80)
    changed = [f"$ lineshaft {' '.join(each)}\n{shown(each, columns=80)}" for each in CHANGING]
    check("changing", "\n".join(changed))


def _section(arguments: Sequence[str], narrow: str, wide: str, piped: str) -> str:
    text = f"$ lineshaft {' '.join(arguments)}\n{narrow}"
    if wide != narrow:
        text += f"--- 120 columns\n{wide}"
    if piped not in {narrow, wide}:
        text += f"--- pipe\n{piped}"
    return text


def assert_fits(text: str, columns: int) -> None:
    """JSON and commands to copy are never wrapped; none of these is too long here."""
    assert [line for line in text.splitlines() if display_width(line) > columns] == []


def test_each_command_that_prints_is_here() -> None:
    called = {
        arguments[:2] for commands in (*READING.values(), CHANGING) for arguments in map(tuple, commands)
    }
    called |= {arguments[:1] for arguments in called}
    elsewhere = {
        # Run as processes by other tests.
        *(
            ("up",),
            ("demo",),
            ("agent",),
            ("doctor",),
            ("watch",),
            ("completion",),
            ("migrate", "up"),
            ("migrate", "verify"),
        ),
        ("limits", "show"),
        ("task", "why"),
        ("approvals", "reject"),
        # On folders: tests/integrations/loki.
        *(("loki", name) for name in ("import", "export", "mirror", "claim", "complete", "fail")),
        ("loki",),
    }

    assert set(_commands(parser())) - called - elsewhere == set()


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    subparsers = command._subparsers
    if subparsers is None or path[:1] == ("limits",):
        yield path
    for action in subparsers._group_actions if subparsers is not None else ():
        for name, below in action.choices.items():
            yield from _commands(below, (*path, name))


@pytest.mark.slow("shows the help of every command")
def test_all_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert COMMANDS
    for path in _commands(parser()):
        assert_fits(call(monkeypatch, [*path, "--help"], columns=80), 80)
