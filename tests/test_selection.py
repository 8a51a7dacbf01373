"""Which tests a run executes: what `make test` leaves out, `make check` runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import one_of_each_major

ROOT = Path(__file__).parents[1]
FOLDER = "tests/engine/guards"
FILE = f"{FOLDER}/test_late_spending.py"
#: A test with a database and many parameters.
PARAMETRISED = "test_what_a_stale_claim_reports_is_booked_once"
SLOW = "test_ten_thousand_tasks_on_one_document_hide_nothing"

pytestmark = pytest.mark.slow("starts pytest several times")


def pytest_says(*options: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-n", "0", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def collected(*options: str) -> list[str]:
    """The names of the tests that a run with these options would execute."""
    said = pytest_says("--collect-only", "-q", *options)
    return [line.partition("::")[2].partition("[")[0] for line in said if "::" in line]


def test_a_folder_runs_with_first_parameters_and_without_slow_tests() -> None:
    tests = collected(FOLDER)

    assert tests.count(PARAMETRISED) == 1
    assert SLOW not in tests


def test_a_full_run_leaves_out_nothing() -> None:
    tests = collected("--full", FOLDER)

    assert tests.count(PARAMETRISED) > 10
    assert SLOW in tests


def test_a_file_that_is_named_runs_whole() -> None:
    assert collected(FILE) == collected("--full", FILE)


def test_versions_that_are_asked_for_are_not_left_out() -> None:
    assert collected("--postgres", "all", FOLDER).count(PARAMETRISED) == len(one_of_each_major())


def test_integrations_with_databases_run_where_they_are_named() -> None:
    socket = "test_a_socket_needs_a_token_that_may_read"

    assert socket in collected("tests/integrations/officeplane")
    assert socket not in collected()


def test_the_order_of_arguments_changes_no_fixture() -> None:
    """Pytest collects the folders again after a file beside them, and forgets their conftests."""
    breakers = f"{FOLDER}/test_breakers.py"

    said = pytest_says("--fixtures-per-test", f"{FOLDER}/test_limits.py", "tests/test_ids.py", breakers)

    assert [line for line in said if line.startswith(f"rules -- {breakers}:")]
