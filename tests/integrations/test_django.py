"""`lineshaft.integrations.django`, in a real project (django_project/) on a real PostgreSQL."""

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.conftest import superuser

PROJECT = Path(__file__).parent / "django_project"

pytestmark = pytest.mark.slow("a Django project in its own processes")


def manage(dsn: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    parts = conninfo_to_dict(superuser(dsn))
    database = {f"DATABASE_{name.upper()}": str(parts[name]) for name in ("host", "user")}
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")},
        **database,
        "DATABASE_NAME": str(parts["dbname"]),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "manage.py", *arguments]
    return subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_tests_of_a_project(dsn: str) -> None:
    """Commit, rollback, on_commit, ATOMIC_REQUESTS, asynchronous views, TestCase and other databases."""
    run = manage(dsn, "test", "--noinput", "-v", "1")

    assert run.returncode == 0, run.stderr
    assert "Ran 9 tests" in run.stderr


WORK = """
from django.core.management import CommandError, call_command
call_command("migrate", verbosity=0)
from lineshaft import NewTask
from lineshaft.integrations.django import close, open_shaft, submit
from shop.agents import count, mail
from shop.models import Order
mailed = submit(mail.new(order=Order.objects.create(title="Gears").id))
counted = submit(count.new())
call_command("lineshaft_agent", "shop.agents:agent", until_idle=True)
assert mailed.result(60) == "Gears" and counted.result(60) == 1
assert Order.objects.get().mailed
discovered = submit(count.new())
call_command("lineshaft_agent", until_idle=True)
assert discovered.result(60) == 1
for name in ("shop.agents", "shop.nothing:agent", "shop.agents:nothing", "shop.agents:Order"):
    try:
        call_command("lineshaft_agent", name)
    except CommandError as error:
        assert error.returncode == 2, name
        print(error)
    else:
        raise AssertionError(name)
close()
"""


def test_agents_with_django(empty_dsn: str) -> None:
    """`manage.py migrate` creates the schema; handlers of both kinds use models."""
    run = manage(empty_dsn, "shell", "-c", WORK)

    assert run.returncode == 0, run.stderr
    for words in (
        "must be MODULE:AGENT",
        "Module 'shop.nothing' was not found in",
        "has no 'nothing'. agents.py has: agent.",
        "is of type ModelBase, not an Agent. agents.py has: agent.",
    ):
        assert words in run.stdout
    with psycopg.connect(superuser(empty_dsn)) as connection:
        found = connection.execute(
            "SELECT count(*) FROM lineshaft.tasks WHERE status = 'COMPLETED'"
        ).fetchone()
    assert found == (3,)

    failed = manage(empty_dsn, "lineshaft_agent", "shop.nowhere:agent")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert "CommandError: Module 'shop.nowhere' was not found in" in failed.stderr
