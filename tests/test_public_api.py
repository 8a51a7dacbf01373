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
