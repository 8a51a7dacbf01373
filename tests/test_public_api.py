"""What people import: one screen, complete, and free until it is used."""

import subprocess
import sys

import pytest

import lineshaft


def test_every_name_is_there() -> None:
    for name in lineshaft.__all__:
        assert getattr(lineshaft, name) is not None
    assert lineshaft.__all__ == sorted(lineshaft.__all__)


def test_a_name_that_is_not_says_so() -> None:
    with pytest.raises(AttributeError, match="module 'lineshaft' has no attribute 'Linshaft'"):
        lineshaft.Linshaft  # noqa: B018


def test_importing_it_loads_nothing_heavy() -> None:
    """`lineshaft --version` answers at once."""
    heavy = {"asyncio", "msgspec", "psycopg", "fastapi"}
    code = f"import sys, lineshaft; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"


def test_a_context_shows_what_handlers_use() -> None:
    """What the agent needs is in a separate object."""
    both = {name for name in dir(lineshaft.TaskContext) if not name.startswith("_")}

    assert both == {name for name in dir(lineshaft.SyncTaskContext) if not name.startswith("_")}
    assert both == {
        *("agent_id", "dag_id", "deadline", "epoch", "id", "inputs", "model", "parent_id", "spec"),
        *("time_limit_sec", "title", "type"),
        *("attempt", "last_checkpoint", "last_error", "max_attempts", "previous_attempts", "resume", "steps"),
        *("artifact", "cancelled", "check_cancelled", "log", "progress", "slowdown_until", "spend"),
        *("spent_usd", "checkpoint", "spawn", "state", "step"),
    }
