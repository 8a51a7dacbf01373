"""Commands list without an action, decide on dead letters by filter, and name types that no agent serves."""

from pathlib import Path

import psycopg
import pytest
from psycopg.types.json import Jsonb

from lineshaft import NewTask, SyncLineshaft
from lineshaft.cli.main import _choices, parser
from lineshaft.errors import InvalidInputError
from tests.cli.conftest import Cli
from tests.cli.test_queue import work

LISTS = sorted(name for name, command in _choices(parser()).items() if "list" in _choices(command))


@pytest.mark.parametrize("noun", LISTS)
def test_a_command_without_an_action_lists(cli: Cli, noun: str) -> None:
    short, whole = cli(noun), cli(noun, "list")
    assert short.code == whole.code == 0
    assert short.out == whole.out
    assert cli(noun, "--json").out == cli(noun, "list", "--json").out


def test_the_commands_that_list() -> None:
    assert {"agents", "task", "dag", "dlq", "sources", "breakers", "token", "types"} <= set(LISTS)


def test_help_is_still_that_of_the_command(cli: Cli) -> None:
    assert "usage: lineshaft agents [-h] ACTION" in cli("agents", "--help").out


def failed(cli: Cli, dsn: str, type_: str, error: str) -> str:
    cli("submit", type_)
    return work(dsn, error=error, category="auth_failure")


def status(cli: Cli, task: str) -> str:
    return str(cli("task", "show", task, "--json").json["status"])


def test_dead_letters_are_decided_about_by_filter(cli: Cli, dsn: str) -> None:
    orders = failed(cli, dsn, "code", "no such table: orders")
    timeout = failed(cli, dsn, "code", "too late")
    people = failed(cli, dsn, "mail", "no such table: people")

    like = ("--type", "code", "--error-like", "NO SUCH table", "--since", "1h")
    tried = cli("dlq", "retry", *like, "--dry-run")
    assert (tried.code, tried.out.split("\n")[:2]) == (0, [orders, "Matching: 1 task."])
    assert [letter["task_id"] for letter in cli("dlq", *like, "--json").json] == [orders]
    assert cli("dlq", "retry", *like).code == 0
    assert [status(cli, task) for task in (orders, timeout, people)] == [
        "READY",
        "DEAD_LETTERED",
        "DEAD_LETTERED",
    ]
    assert cli("task", "retry", "--error-like", "too late").code == 0
    assert cli("dlq", "resolve", "--resolution", "cancel", "--since", "2000-01-01T00:00:00Z").code == 0
    assert [status(cli, task) for task in (timeout, people)] == ["READY", "CANCELLED"]


@pytest.mark.parametrize(
    "command", [("dlq", "retry"), ("task", "retry"), ("dlq", "resolve", "--resolution", "delete")]
)
def test_neither_nothing_nor_both_are_meant(cli: Cli, dsn: str, command: tuple[str, ...]) -> None:
    task = failed(cli, dsn, "code", "x")
    for arguments in ((), (task, "--type", "code")):
        refused = cli(*command, *arguments)
        assert (refused.code, "either tasks, or filters" in refused.err) == (2, True)
    assert status(cli, task) == "DEAD_LETTERED"


def test_a_type_that_nobody_serves_is_said(cli: Cli, dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "dag.json"
    file.write_text('{"title": "d", "tasks": [{"key": "a", "type": "resaerch"}]}')
    for arguments in (("resaerch",), ("--file", str(file)), ("resaerch", "--json")):
        assert "No active agent takes tasks of type 'resaerch'" in cli("submit", *arguments).err
    assert cli("submit", "sign-off", "--capability", "human").err == ""
    cli("submit", "x")
    work(dsn)  # An agent that takes every type.
    assert cli("submit", "resaerch").err == ""


def test_a_task_shows_the_artifacts_of_its_output(cli: Cli, dsn: str, connection: psycopg.Connection) -> None:
    cli("submit", "x")
    task = work(dsn)
    refs = ["artifact:artifact_01ARZ3NDEKTSV4RRFFQ69G5FAV", "artifact:artifact_01ARZ3NDEKTSV4RRFFQ69G5FAW"]
    connection.execute("UPDATE lineshaft.task_end SET artifacts = %s WHERE id = %s", [Jsonb(refs), task])
    assert set(refs) <= set(cli("task", "show", task).out.split())


def test_the_retry_policy_of_a_task_may_be_a_dict(dsn: str) -> None:
    with SyncLineshaft(dsn) as shaft:
        task = shaft.submit(NewTask("x", retry={"strategy": "fixed"}))  # type: ignore[arg-type]
        assert shaft.get(task.id).retry.strategy == "fixed"
        for wrong in ({"strateg": "fixed"}, {"strategy": "fixed", "initial_delay_sec": "long"}, 5):
            with pytest.raises(InvalidInputError, match="retry: must be a RetrySpec, or an object"):
                shaft.submit(NewTask("x", retry=wrong))  # type: ignore[arg-type]
