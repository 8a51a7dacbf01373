"""Every command that takes an id takes its short form."""

import pytest

from lineshaft.model.short_ids import short_id
from tests.cli.conftest import Cli
from tests.cli.test_queue import work


def test_short_forms(cli: Cli, dsn: str) -> None:
    one, two = (cli("submit", "x", "--json").json for _ in range(2))
    task, dag = short_id(one["id"]), short_id(one["dag_id"])

    assert cli("task", "show", task, "--json").json["id"] == one["id"]
    assert cli("task", "change", task, "--priority", "3", "--tag", "a", "--json").json["tags"] == ["a"]
    assert cli("task", "change", task, "--no-tags", "--json").json["tags"] == []
    assert cli("why", task.lower(), "--json").json["task_id"] == one["id"]
    after = cli("submit", "y", "--depends-on", task, "--dag-id", dag, "--json").json
    assert (after["depends_on"], after["dag_id"]) == ([one["id"]], one["dag_id"])
    assert cli("task", "list", "--dag-id", dag, "--json").json[0]["id"] == after["id"]
    assert cli("dag", "show", dag, "--json").json["dag"]["id"] == one["dag_id"]
    assert cli("dag", "budget", dag, "--ceiling", "5", "--json").json["budget_ceiling_usd"] == 5
    assert one["id"] in cli("events", "--task", task, "--limit", "1").out
    assert one["dag_id"] in cli("events", "--dag", dag).out
    assert cli("task", "cancel", short_id(two["id"]), "--json").json["status"] == "CANCELLED"
    failed = work(dsn, error="no access", category="auth_failure")
    assert failed == one["id"]
    assert cli("dlq", "show", task, "--json").json["task_id"] == failed
    assert "dlq show" not in cli("dlq", "list").err
    retried = cli("dlq", "retry", task, "--reviewer", "ann", "--note", "fixed", "--json")
    assert [each["status"] for each in retried.json] == ["READY"]
    work(dsn)
    assert cli("task", "result", task).json == {"answer": 42}
    assert cli("wait", task, short_id(two["id"]), "--json").json[0]["id"] == one["id"]
    assert cli("dag", "cancel", dag, "--json").json["status"] in {"cancelled", "completed"}
    person = cli("submit", "ask", "--capability", "human", "--json").json["id"]
    assert cli("approvals", "approve", short_id(person), "--data", "7", "--json").json["id"] == person
    end = cli("task", "show", "zzzz")
    assert (end.code, "use all of it, such as J8K2M3N4-ZZZZ" in end.err) == (1, True)
    token = cli("token", "create", "--name", "ci", "--scope", "read", "--json").json["id"]
    assert cli("token", "revoke", short_id(token), "--json").json["revoked"] == [token]


def test_what_means_several_changes_nothing(cli: Cli) -> None:
    ids = [cli("submit", "x", "--json").json["id"] for _ in range(2)]

    said = cli("task", "cancel", "task_01")

    assert said.code == 1
    assert said.err.startswith("lineshaft: 'task_01' means several ids: ")
    assert all(name in said.err for name in ids)
    assert {task["status"] for task in cli("task", "list", "--json").json} == {"READY"}


def test_a_task_and_its_own_dag_are_one_thing_to_wait_for(cli: Cli, dsn: str) -> None:
    task = cli("submit", "x", "--json").json["id"]
    work(dsn)

    said = cli("wait", short_id(task))

    assert (said.code, f"Waiting for {task}" in said.err) == (0, True)


@pytest.mark.parametrize(
    "words", [("--wait", "x"), ("x", "--wait"), ("--wait", "60", "x"), ("--tag", "t", "x")]
)
def test_flags_may_come_before_the_type(cli: Cli, dsn: str, words: tuple[str, ...]) -> None:
    cli("submit", "x", "--idempotency-key", "k")
    work(dsn)

    said = cli("submit", *words, "--idempotency-key", "k")

    assert (said.code, "COMPLETED" in said.out) == (0, True)


def test_waiting_for_a_dag(cli: Cli, dsn: str) -> None:
    dag = cli("submit", "x", "--json").json["dag_id"]
    work(dsn)

    assert cli("wait", dag, "--json").json["status"] == "completed"
