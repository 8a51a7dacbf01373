"""The commands that talk to the queue, each as a person and as a program would call it."""

import asyncio
import getpass
import json
import os
import stat
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from lineshaft import NewTask, SyncLineshaft
from lineshaft.cli.main import COMMANDS, parser
from lineshaft.client.account import account
from lineshaft.engine.engine import Engine
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimRef, Completion, Failure, Spent
from tests.cli.conftest import Cli
from tests.http_server import ServerThread

DAG = """
title: Landing page
budget_ceiling_usd: 5
tasks:
  - {key: research, type: research, title: Research}
  - {key: implement, type: code, title: Implement, depends_on: [research]}
  - {key: test, type: test, title: Test, depends_on: [implement]}
"""


def work(
    dsn: str,
    *,
    error: str | None = None,
    category: str | None = None,
    spent: str | None = None,
    output: bytes = b'{"answer": 42}',
) -> str:
    """An agent does, or fails at, what is next."""

    async def once() -> str:
        async with Engine(dsn, max_connections=2) as engine:
            agent = await engine.fleet.register(NewAgent(id="worker", capabilities=("human",), version="2.1"))
            (task,) = (await engine.claims.claim(agent.id, agent.incarnation, start=True)).tasks
            claim = ClaimRef(task.id, task.epoch)
            used = Spent(None if spent is None else Decimal(spent))
            if error is None:
                await engine.work.complete([Completion(claim, output, spent=used)])
            else:
                await engine.work.fail([Failure(claim, error, category)])
            return task.id

    return asyncio.run(once())


def test_a_task_from_submission_to_its_output(cli: Cli, dsn: str) -> None:
    made = cli(
        "submit", "research", "--prompt", "competitors", "--priority", "10", "--tag", "a", "--json"
    ).json
    assert (made["status"], made["priority"], made["spec"]) == ("READY", 10, {"prompt": "competitors"})
    listed = cli("task", "list", "--type", "research")
    assert made["id"] in listed.out
    assert "READY" in listed.out
    assert "no_capable_agent" in cli("why", made["id"]).out
    work(dsn)
    shown = cli("task", "show", made["id"])
    assert "2.1" in shown.out
    assert "COMPLETED" in shown.out
    assert '"answer": 42' in shown.out
    assert cli("task", "show", made["id"], "--json").json["output"]["data"] == {"answer": 42}


def test_waiting_for_the_end(cli: Cli, dsn: str) -> None:
    made = cli("submit", "x", "--idempotency-key", "k", "--json").json
    late = cli("submit", "x", "--idempotency-key", "k", "--wait", "0.1")
    assert (late.code, made["id"] in late.err) == (1, True)
    work(dsn)
    done = cli("submit", "x", "--idempotency-key", "k", "--wait")
    assert (done.code, "42" in done.out) == (0, True)


def test_a_completed_dag_says_how_many_of_its_tasks_were_cancelled(
    cli: Cli, dsn: str, tmp_path: Path
) -> None:
    (tmp_path / "dag.yaml").write_text(DAG)
    dag = cli("submit", "--file", str(tmp_path / "dag.yaml"), "--json").json["dag"]["id"]
    work(dsn)
    assert cli("dag", "cancel", dag, "--json").json["status"] == "completed"
    assert "Status   completed, 2 of 3 tasks cancelled\n" in cli("dag", "show", dag).out
    assert cli("dag", "show", dag, "--json").json["dag"]["status"] == "completed"


def test_a_dag_from_a_file_as_a_tree(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "dag.yaml").write_text(DAG)
    made = cli("submit", "--file", str(tmp_path / "dag.yaml"), "--json").json
    assert set(made["tasks"]) == {"research", "implement", "test"}
    lines = cli("dag", "show", made["dag"]["id"]).out.splitlines()
    tree = lines[lines.index("") + 2 :]
    assert [line.split("  ")[0] for line in tree[:2]] == ["research", "└─ implement"]
    assert tree[2].startswith("   └─ test")
    assert made["dag"]["id"] in cli("dag", "list").out
    budget = cli("dag", "budget", made["dag"]["id"], "--ceiling", "5")
    assert "5 USD" in budget.out
    more = cli("dag", "budget", made["dag"]["id"], "--add", "2.5", "--json").json
    assert more["budget_ceiling_usd"] == 7.5
    assert "unlimited" in cli("dag", "budget", made["dag"]["id"], "--no-ceiling").out
    cancelled = cli("dag", "cancel", made["dag"]["id"], "--reason", "no longer wanted", "--json").json
    assert cancelled["status"] == "cancelled"


def test_a_list_is_one_line_of_the_tree(cli: Cli, tmp_path: Path, dsn: str) -> None:
    (tmp_path / "dag.yaml").write_text(
        "title: Reviews\ntasks:\n"
        "  - {key: scan, type: scan}\n"
        "  - {key: review, type: review, for_each: {over: scan.answer, max: 7, concurrency: 2}}\n"
        "  - {key: report, type: report, depends_on: [review]}\n"
    )
    made = cli("submit", "--file", str(tmp_path / "dag.yaml"), "--json").json
    name, node = made["dag"]["id"], made["tasks"]["review"]
    assert "review for each of scan.answer " in cli("dag", "show", name).out
    why = cli("why", node).out
    assert f"Waits for the list scan.answer: {made['tasks']['scan']} (READY)" in why
    work(dsn, output=b'{"answer": ["a", "b", "c"]}')

    tree = cli("dag", "show", name).out.splitlines()[-3:]
    assert tree[1].startswith("└─ review for each of scan.answer: 1 PENDING, 2 READY ")
    assert tree[2].startswith("   └─ report ")
    shown = cli("task", "show", node).out
    assert "For each   item of scan.answer, at most 7, 2 at once\n" in shown
    children = cli("task", "list", "--parent-id", node, "--json").json
    last = max(children, key=lambda child: child["index"])
    assert 'Item       2: "c"\n' in cli("task", "show", last["id"]).out
    why = cli("why", last["id"]).out
    assert "Waits for its turn, because at most 2 children of its list run at once: " in " ".join(why.split())
    assert "Waits for its children" in cli("why", node).out


def test_the_tree_of_a_long_chain_stays_narrow(cli: Cli, tmp_path: Path) -> None:
    """Each level was indented further: a chain of thousands was megabytes."""
    other = cli("submit", "x", "--json").json["id"]
    tasks = [{"key": f"k{n}", "type": "x", "depends_on": [f"k{n - 1}"] if n else [other]} for n in range(300)]
    tasks[1]["depends_on"] = [other, "k0"]
    (tmp_path / "dag.json").write_text(json.dumps({"title": "chain", "tasks": tasks}))
    made = cli("submit", "--file", str(tmp_path / "dag.json"), "--json").json
    lines = cli("dag", "show", made["dag"]["id"]).out.splitlines()
    tree = [line.split("  READY")[0].split("  PENDING")[0].rstrip() for line in lines[lines.index("") + 2 :]]
    assert tree[:3] == ["k0", "└─ k1", "   └─ k2"], "its other dependency is in another DAG"
    assert tree[20:22] == [f"{57 * ' '}└─ k20", f"{57 * ' '}└─ (level 22) k21"]
    assert tree[299] == f"{57 * ' '}└─ (level 300) k299"


def test_a_dag_as_a_picture(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "dag.yaml").write_text(DAG)
    made = cli("submit", "--file", str(tmp_path / "dag.yaml"), "--json").json
    name, file = made["dag"]["id"], tmp_path / "dag.svg"
    assert cli("dag", "show", name, "--svg", str(file)).out == f"Wrote {file}.\n"
    picture = file.read_text("ascii")
    assert picture == cli("dag", "show", name, "--svg", "-").out
    assert picture.startswith("<svg ")
    assert all(f'data-task="{task}"' in picture for task in made["tasks"].values())
    flowchart = cli("dag", "show", name, "--mermaid").out
    assert flowchart.startswith("flowchart LR\n")
    assert flowchart.count("==>") == 2
    for wrong in (("--svg", str(tmp_path)), ("--mermaid", "--json"), ("--mermaid", "--svg", "-")):
        assert cli("dag", "show", name, *wrong).code == 2


def test_many_from_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import io  # noqa: PLC0415

    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([{"type": "a"}, {"type": "b"}])))
    assert "Submitted 2 tasks." in cli("submit", "--file", "-").out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("submit",), 2, "Give either a TYPE or --file"),
        (("submit", "x", "--spec", "{"), 2, "--spec must be JSON"),
        (("submit", "x", "--spec", "[]", "--prompt", "p"), 2, "--spec must be a JSON object"),
        (("submit", "x", "--spec", "@/nowhere.json"), 2, "Can't read /nowhere.json"),
        (("submit", "--file", "/nowhere.json"), 2, "Can't read /nowhere.json"),
        (("submit", "x", "--priority", "101"), 2, "priority"),
        (("submit", "x", "--deadline", "soon"), 2, "deadline"),
        (("task", "show", "task_nowhere"), 1, "There is no task task_nowhere"),
        (("task", "change", "task_nowhere"), 2, "Nothing to change"),
        (("task", "change", "task_nowhere", "--deadline", "soon"), 2, "--deadline must be a time"),
        (("task", "list", "--limit", "0"), 2, "must be a whole number above 0"),
        (("why", "task_nowhere"), 1, "There is no task task_nowhere"),
        (("dag", "show", "dag_nowhere"), 1, "There is no DAG dag_nowhere"),
        (("agents", "change", "unknown"), 2, "Nothing to change"),
        (("approvals", "approve", "task_nowhere", "--data", "{"), 2, "--data must be JSON"),
        (("dlq", "resolve", "task_nowhere", "--resolution", "modify_and_retry"), 2, "--spec"),
        (("dlq", "review"), 2, "terminal"),
        (("token", "revoke", "nowhere"), 1, "There is no token in force"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    cli: Cli, arguments: tuple[str, ...], code: int, message: str
) -> None:
    said = cli(*arguments)
    assert (said.code, said.out) == (code, "")
    assert message in said.err
    assert said.err.startswith("usage:") or said.err.count("\n") == 1, said.err
    assert cli("task", "list", "--json").json == []


def test_a_file_with_a_mistake_names_the_place(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "dag.yaml").write_text("title: x\ntasks: [{type: a}, {type: b, priorty: 1}]")
    said = cli("submit", "--file", str(tmp_path / "dag.yaml"))
    assert (said.code, said.err) == (2, "lineshaft: tasks[1].priorty: unknown field\n")


def test_times_of_a_file_may_be_yaml_times(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("type: a\nrun_at: 2099-01-02T03:04:05Z")
    assert cli("submit", "--file", str(tmp_path / "task.yaml"), "--json").json["status"] == "PENDING"


def test_lists_say_that_they_were_cut_off(cli: Cli) -> None:
    for _ in range(3):
        cli("submit", "x")
    said = cli("task", "list", "--limit", "2")
    assert len(said.out.splitlines()) == 3
    assert "Showing the first 2. --all lists all." in said.err
    assert len(cli("task", "list", "--all", "--json").json) == 3


def test_cancel_retry_and_change(cli: Cli) -> None:
    task = cli("submit", "x", "--json").json["id"]
    assert cli("task", "change", task, "--priority", "3", "--tag", "urgent", "--json").json["priority"] == 3
    assert cli("task", "cancel", task, "--reason", "oops", "--json").json["cancel_reason"] == "oops"
    assert cli("task", "retry", task, "--json").json["status"] == "READY"


def test_what_is_submitted_has_its_creator(cli: Cli, tmp_path: Path) -> None:
    """The account, unless another one is given: of tasks, lists of tasks and DAGs."""
    account = f"human:{getpass.getuser()}"
    assert cli("submit", "x", "--json").json["created_by"] == account
    assert cli("submit", "x", "--created-by", "human:ann", "--json").json["created_by"] == "human:ann"
    written = tmp_path / "work.json"
    written.write_text('[{"type": "y"}, {"type": "z", "created_by": "cron:nightly"}]')
    cli("submit", "--file", str(written))
    listed = {task["type"]: task["created_by"] for task in cli("task", "list", "--json").json}
    assert (listed["y"], listed["z"]) == (account, "cron:nightly")
    written.write_text('{"title": "a DAG", "tasks": [{"key": "a", "type": "a"}]}')
    made = cli("submit", "--file", str(written), "--json").json
    assert made["dag"]["created_by"] == account
    assert cli("task", "show", made["tasks"]["a"], "--json").json["created_by"] == account


def test_a_completed_task_is_run_again(cli: Cli, dsn: str) -> None:
    task = cli("submit", "x", "--json").json["id"]
    below = cli("submit", "y", "--depends-on", task, "--json").json["id"]
    work(dsn)
    refused = cli("task", "retry", task)
    assert (refused.code, f"lineshaft task rerun {task}" in refused.err) == (1, True)
    work(dsn)
    again = cli("task", "rerun", task, "--downstream", "--reason", "fixed", "--json").json
    assert (again["status"], again["attempts"]) == ("READY", 0)
    assert cli("task", "show", below, "--json").json["status"] == "PENDING"
    assert "fixed" in cli("task", "show", task).out
    work(dsn)
    work(dsn)
    said = cli("task", "rerun", task, "--keep-steps", "--cancel-running").out
    assert ("READY" in said, cli("task", "show", below, "--json").json["status"]) == (True, "COMPLETED")


def test_dead_letters_are_shown_and_resolved(cli: Cli, dsn: str) -> None:
    assert cli("dlq", "list").out == "No dead letters in the database of LINESHAFT_DATABASE_URL.\n"
    cli("submit", "x")
    task = work(dsn, error="no access", category="auth_failure")
    assert "no access" in cli("dlq", "list").out
    shown = cli("dlq", "show", task).out
    assert "worker" in shown
    assert "2.1" in shown
    resolved = cli(
        "dlq", "resolve", task, "--resolution", "retry", "--reviewer", "ada", "--note", "key renewed"
    )
    assert (resolved.code, "READY" in resolved.out) == (0, True)
    again = cli("dlq", "resolve", task, "--resolution", "retry")
    assert again.code == 1


def test_a_retry_forgets_steps(cli: Cli, dsn: str, connection: psycopg.Connection) -> None:
    cli("submit", "x")
    task = work(dsn, error="other arguments", category="step_mismatch")
    add = (
        "INSERT INTO lineshaft.step (recorded_at, epoch, task_id, name, data) VALUES (now(), 1, %s, %s, '1')"
    )
    for name in ("a", "b", "c"):
        connection.execute(add, (task, name))
    retry = ("dlq", "resolve", task, "--resolution", "retry")

    assert "has no recorded step 'x'" in cli(*retry, "--forget-step", "x").err
    assert cli(*retry, "--forget-step", "a", "--forget-steps", "all").code == 2
    assert cli(*retry, "--forget-step", "a", "--forget-step", "b").code == 0
    assert connection.execute("SELECT name FROM lineshaft.step").fetchall() == [("c",)]
    work(dsn, error="other arguments", category="step_mismatch")
    assert cli(*retry, "--forget-steps", "all").code == 0
    assert connection.execute("SELECT name FROM lineshaft.step").fetchall() == []


def test_guards(cli: Cli, dsn: str) -> None:
    for what in ("breakers", "locks", "slowdowns", "approvals", "agents"):
        empty = cli(what, "list")
        assert (empty.code, empty.out.strip() != "") == (0, True), what
        assert cli(what, "list", "--json").json == []
    assert "open until it is reset" in cli("breakers", "open", "research").out
    assert [b["state"] for b in cli("breakers", "list", "--json").json] == ["open"]
    assert cli("breakers", "reset", "research").code == 0
    assert cli("pause", "research", "--json").json == {"type": "research", "paused": True}
    assert "Paused" in cli("stats").out
    assert cli("resume", "research").code == 0
    person = cli("submit", "sign-off", "--capability", "human", "--json").json["id"]
    assert "waiting_approval" in cli("why", person).out
    assert cli("task", "cancel", person).code == 0
    cli("submit", "x")
    work(dsn)
    changed = cli("agents", "change", "worker", "--add-budget", "5", "--status", "draining", "--json").json
    assert changed["status"] == "draining"


def test_quotas(cli: Cli) -> None:
    assert "No quotas" in cli("quotas").out
    assert cli("quotas", "list", "--json").json == []
    limits = ("--max-running", "3", "--max-waiting", "0", "--rate", "2.5/60", "--unit", "usd", "--shared")
    made = cli("quotas", "set", "customers", "customer:*", *limits, "--weight", "2", "--json").json
    rate = {"amount": 2.5, "unit": "usd", "per_sec": 60}
    assert (made["each"], made["max_running"], made["max_waiting"], made["weight"]) == (False, 3, 0, 2)
    assert made["rate"] == rate
    assert cli("quotas", "--json").json == [made]
    shown = cli("quotas", "show", "customers", "--json").json
    assert shown == {"quota": made, "keys": [], "users": [], "waiters": []}
    assert cli("quotas", "set", "customers", "customer:*", "--json").json["max_running"] is None
    assert cli("quotas", "delete", "customers", "--json").json == {"name": "customers", "deleted": True}
    missing = cli("quotas", "show", "customers")
    assert (missing.code, "There is no quota 'customers'" in missing.err) == (1, True)


def test_what_is_done_by_hand_names_the_account_and_the_reason(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cli("submit", "held", "--json").json
    cli("pause", "held", "--reason", "a new model")
    cli("breakers", "open", "held", "--reason", "it fails")
    cli("breakers", "reset", "held")
    cli("limits", "set", "--daily-budget", "5", "--reason", "a busy day")
    assert f"Type 'held' is paused by {account()}: a new model." in cli("why", made["id"]).out
    cli("task", "change", made["id"], "--priority", "3")
    cli("task", "cancel", made["id"], "--reason", "not needed")

    events = [json.loads(line) for line in cli("events", "--json").out.splitlines()]
    acts = [event for event in events if (event["data"] or {}).get("actor")]
    assert {event["data"]["actor"] for event in acts} == {account()}
    assert [(event["kind"], event["data"].get("reason")) for event in acts] == [
        ("queue.paused", "a new model"),
        ("breaker.opened", "it fails"),
        ("alert", "it fails"),
        ("breaker.closed", None),
        ("limits.changed", "a busy day"),
        ("task.changed", None),
        ("task.cancelled", "not needed"),
    ]
    assert f'by="{account()}" data=' in cli("events", "--kind", "task.cancelled").out
    shown = cli("task", "show", made["id"]).out
    assert [line.split()[:2] for line in shown.splitlines()[-2:]] == [
        ["task.changed", account()],
        ["task.cancelled", account()],
    ]
    assert shown.endswith("not needed\n")
    monkeypatch.setattr("lineshaft.cli.events.on_terminal", lambda: True)
    monkeypatch.setattr("lineshaft.cli.events.columns", lambda: 200)
    assert f"held by {account()} reason not needed\n" in cli("events", "--kind", "task.cancelled").out


def test_a_disputed_cost_is_shown_and_decided(cli: Cli, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)
    first = cli("submit", "dear", "--json").json["id"]
    work(dsn, spent="1000000")
    assert "Disputed   999990 USD, not counted" in cli("task", "show", first).out
    costs = cli("costs")
    assert "999990 USD, not counted" in costs.out
    assert "lineshaft costs accept TASK" in costs.out + costs.err
    doctor = cli("doctor")
    assert doctor.code == 1
    assert "The cost of 1 task is disputed" in doctor.out

    done = cli("costs", "correct", first, "--to", "0.31", "--reason", "cents", "--json").json
    assert (done["cost_usd"], done["disputed_usd"]) == (0.31, 0)
    assert "cost.corrected" in cli("task", "show", first).out
    assert cli("costs", "--json").json["disputed"] == []
    assert cli("doctor").code == 0
    for decision, cost in (("accept", "30"), ("refuse", "10")):
        task = cli("submit", "dear", "--json").json["id"]
        work(dsn, spent="30")
        assert f"{cost} USD" in cli("costs", decision, task, "--reason", "as billed").out
    assert cli("costs", "correct", first, "--to", "much", "--reason", "x").code == 2
    assert cli("costs", "correct", first, "--to", "-1", "--reason", "x").code != 0
    assert cli("costs", "correct", first, "--to", "1").code == 2


def test_events_in_order_and_stats(cli: Cli, dsn: str) -> None:
    task = cli("submit", "x", "--json").json["id"]
    work(dsn)
    lines = [json.loads(line) for line in cli("events", "--task", task, "--json").out.splitlines()]
    assert [event["kind"] for event in lines] == [
        "task.created",
        "task.ready",
        "task.claimed",
        "task.started",
        "task.validating",
        "task.completed",
    ]
    rest = cli("events", "--task", task, "--after", lines[3]["cursor"], "--limit", "1", "--json").out
    assert json.loads(rest)["kind"] == "task.validating"
    assert cli("stats", "--json").json["by_status"]["COMPLETED"] == 1


@pytest.mark.slow("calls every command")
def test_every_command_explains_itself_and_is_completed(cli: Cli) -> None:
    names = parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert names is not None
    script = cli("completion", "bash").out
    for name in names:
        said = cli(name, "--help")
        assert said.code == 0, name
        assert "usage: lineshaft" in said.out
        assert f"        {name})" in script
    assert len(COMMANDS) > 10


def test_approvals(cli: Cli) -> None:
    one, two = [cli("submit", "ask", "--capability", "human", "--json").json["id"] for _ in range(2)]
    assert [item["task"]["id"] for item in cli("approvals", "list", "--json").json] == [one, two]
    assert cli("approvals", "approve", one, "--data", "7", "--json").json["output"]["data"] == 7
    rejected = cli("approvals", "reject", two, "--note", "not mine", "--reviewer", "ann", "--json").json
    assert rejected["failure_reason"] == "human: rejected by ann: not mine"


def test_tokens(cli: Cli) -> None:
    assert "No tokens in the database" in cli("token", "list").out
    made = cli("token", "create", "--name", "ci", "--scope", "submit", "--json").json
    assert set(made) == {"id", "name", "scope", "token"}
    assert made["id"] in cli("token", "list").out
    assert made["token"] not in cli("token", "list").out
    assert cli("token", "revoke", "ci", "--json").json["revoked"] == [made["id"]]
    assert cli("token", "revoke", "ci").code == 1


def test_the_first_token_comes_with_a_notice(cli: Cli) -> None:
    create = ("token", "create", "--name", "ci", "--scope", "submit", "--json")
    first, second = cli(*create), cli(*create)

    assert "From now on every call over HTTP needs one, on this" in first.err
    assert "LINESHAFT_TOKEN" in first.err
    assert first.json["token"], "it isn't mixed with the output"
    assert second.err == ""
    cli("token", "revoke", "ci")
    assert cli(*create).err == "", "revoked ones count"


def test_a_saved_token_is_used_by_clients_on_this_machine(
    cli: Cli, dsn: str, server_thread: ServerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINESHAFT_HOME", str(tmp_path / "home"))
    umask = os.umask(0)
    try:
        made = cli("token", "create", "--name", "me", "--scope", "submit", "--save")
    finally:
        os.umask(umask)
    path = tmp_path / "home" / "token"

    assert made.code == 0
    assert f"Saved in {path}" in made.err
    assert path.read_text().strip() in made.out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with server_thread.serving(dsn) as url:
        assert cli("task", "list", "--url", url).code == 0
        refused = cli("pause", "--url", url)
        assert (refused.code, "has submit" in refused.err) == (1, True)
        with SyncLineshaft(url) as shaft:
            assert shaft.submit(NewTask("x")).id
        monkeypatch.setenv("LINESHAFT_TOKEN", "lsh_other")
        assert cli("task", "list", "--url", url).code == 1, "the variable takes precedence"
        monkeypatch.delenv("LINESHAFT_TOKEN")
        cli("token", "create", "--name", "boss", "--scope", "operate", "--save")
        assert cli("pause", "--url", url).code == 0, "a later one replaces it"
        assert [each.name for each in path.parent.iterdir()] == ["token"]
        path.write_text("two words")
        invalid = cli("task", "list", "--url", url)
        assert (invalid.code, str(path) in invalid.err, "two words" in invalid.err) == (1, True, False)


def test_a_token_that_cant_be_saved_is_printed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LINESHAFT_HOME", str(tmp_path / "file" / "home"))

    made = cli("token", "create", "--name", "me", "--scope", "submit", "--save")

    assert made.code == 1
    assert "can't be saved" in made.err
    assert "lsh_" in made.out


def test_tokens_of_one_agent(cli: Cli) -> None:
    create = ("token", "create", "--name", "w", "--scope", "agent", "--agent", "writer", "--budget", "5")
    made = cli(*create, "--json").json
    assert (made["agent_id"], made["budget_usd"]) == ("writer", 5)
    said = cli(*create).out
    assert "writer" in said
    assert "5 USD" in said
    assert "writer" in cli("token", "list").out
    for scope, flags, fault in (
        ("read", ("--agent", "writer"), "--agent needs --scope agent."),
        ("agent", ("--budget", "5"), "--budget is the budget of one agent: use --agent ID too."),
    ):
        refused = cli("token", "create", "--name", "x", "--scope", scope, *flags)
        assert (refused.code, fault in refused.err) == (2, True), refused


def test_a_server_that_is_not_there(cli: Cli) -> None:
    said = cli("task", "list", "--url", "http://127.0.0.1:1")
    assert said.code == 1
    assert "doesn't answer" in said.err
    assert "lineshaft up" in said.err


def _json(cli: Cli, *arguments: str) -> Any:
    return json.loads(cli(*arguments, "--json").out)


def test_tasks_by_filter(cli: Cli) -> None:
    ids = {_json(cli, "submit", "crawl", "--tag", "t")["id"] for _ in range(2)}

    rehearsed = _json(cli, "task", "cancel-matching", "--tag", "t", "--dry-run")
    cancelled = _json(cli, "task", "cancel-matching", "--tag", "t", "--reason", "outdated")
    retried = cli("task", "retry-matching", "--type", "crawl", "--status", "CANCELLED").out

    assert set(rehearsed["ids"]) == set(cancelled["ids"]) == ids
    assert set(retried.splitlines()[:-1]) == ids
    assert retried.splitlines()[-1] == "Retried: 2 tasks."


def test_limits_by_hand_and_from_the_settings_of_servers(
    cli: Cli, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command sets a limit from its own settings only where there is none; `doctor` changes nothing."""
    monkeypatch.setenv("LINESHAFT_DAILY_BUDGET_USD", "9")
    assert cli("doctor", "--json").json["limits_by_hand"] == []
    assert connection.execute("SELECT daily_budget_usd FROM lineshaft.limits").fetchone() == (None,)
    by_hand = cli("limits", "set", "--daily-budget", "1", "--json").json
    assert (by_hand["daily_budget_usd"], by_hand["by_hand"]) == (1, ["daily_budget_usd"])
    for name, budget in (("a:1", "50"), ("b:2", "40")):
        connection.execute(
            "INSERT INTO lineshaft.server (id, name, version, limits, started_at, seen_at) VALUES"
            " (%s, %s, '1.0', jsonb_build_object('daily_budget_usd', %s::text), clock_timestamp(), now())",
            [name, name, budget],
        )
    differs = "LINESHAFT_DAILY_BUDGET_USD differs: b:2 says 40, a:1 says 50."
    assert f"{differs} daily_budget_usd was set by hand, which counts." in " ".join(cli("limits").out.split())
    doctor = cli("doctor", "--json")
    assert (doctor.code, doctor.json["limits_by_hand"]) == (1, ["daily_budget_usd"])
    assert any(problem.startswith(differs) for problem in doctor.json["problems"])

    back = cli("limits", "set", "--from-settings", "daily_budget_usd", "--from-settings", "velocity_usd")
    assert "Daily budget  40 USD" in back.out
    assert "Set by hand" not in back.out
    assert "No running server has a setting for velocity_usd" in back.err
    assert cli("limits", "set", "--from-settings", "everything").code == 2
    cli("limits", "set", "--daily-budget", "0.1")
    connection.execute("INSERT INTO lineshaft.spend VALUES ((now() AT TIME ZONE 'UTC')::date, 0.4)")
    assert "0.4 USD spent, 0 reserved, over by 0.3 USD, of 0.1 USD" in cli("limits").out


def test_the_limits_of_a_task(cli: Cli) -> None:
    task_id = _json(cli, "submit", "x", "--max-cost", "1")["id"]

    changed = _json(cli, "task", "change", task_id, "--max-cost", "none", "--max-attempts", "7")

    assert (changed["max_cost_usd"], changed["max_attempts"]) == (None, 7)


def test_a_wait_says_after_a_while_what_it_waits_for(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineshaft.cli.wait._SILENT_SEC", 0.05)
    # At the beginning, before the first look and before the second one.
    clock = SimpleNamespace(monotonic=iter((0.0, 0.0, 0.5)).__next__)
    monkeypatch.setattr("lineshaft.cli.wait.time", clock)

    said = cli("submit", "x", "--wait", "0.5")

    task = cli("task", "list", "--json").json[0]["id"]
    lines = said.err.splitlines()
    assert lines[0] == f"Waiting for {task}"
    assert (
        lines[1]
        == f"{task}: it is READY. It needs an active agent for type 'x'. No agent is active: register one."
    )
    assert lines[2].startswith(f"lineshaft: {task} has not ended after 0.5 s; it goes on.")
    assert (said.code, len(lines), said.out) == (1, 3, "")


def test_the_completion_script_of_fish(cli: Cli) -> None:
    script = cli("completion", "fish").out

    assert "        case dlq\n            string split ' ' -- " in script
    assert "complete -c lineshaft -f -a '(__lineshaft_words)'" in script
    assert script.count("case ") > 20


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("tsak", "list"), "unknown command 'tsak'. Did you mean 'lineshaft task'?"),
        (("dlq", "retyr", "x"), "unknown action 'retyr'. Did you mean 'lineshaft dlq retry'?"),
        (("xyzzy",), "unknown command 'xyzzy'. Known: up, demo, "),
    ],
)
def test_a_misspelt_command_gets_a_suggestion(cli: Cli, arguments: tuple[str, ...], hint: str) -> None:
    said = cli(*arguments)

    assert (said.code, hint in said.err) == (2, True), said.err


def test_a_waiting_task_is_replaced(cli: Cli) -> None:
    newest = ("--idempotency-key", "k", "--on-conflict", "replace_waiting")
    task_id = cli("submit", "x", *newest, "--debounce", "60", "--max-wait", "90", "--json").json["id"]
    cli("submit", "x", *newest, "--debounce", "60", "--spec", '{"n": 2}')
    waits = cli("why", task_id)

    again = cli("submit", "x", *newest)
    refused = cli("submit", "x", "--idempotency-key", "k", "--on-conflict", "reject")

    assert "A submission with its idempotency key replaced it at" in waits.out
    assert f"{task_id} (existing task with this idempotency key, replaced)" in again.out
    assert cli("submit", "x", *newest, "--json").json["replaced"] is True
    assert (refused.code, "(on_conflict reject)" in refused.err) == (1, True)
    assert f"task.replaced  {account()}" in cli("task", "show", task_id).out


def test_a_file_replaces_waiting_tasks(cli: Cli, tmp_path: Path) -> None:
    task = {"type": "x", "idempotency_key": "k", "on_conflict": "replace_waiting"}
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([task, {"type": "y"}]))

    assert cli("submit", "--file", str(file)).out == "Submitted 2 tasks.\n"
    said = cli("submit", "--file", str(file))
    listed = cli("submit", "--file", str(file), "--json").json["items"]

    assert said.out == "Submitted 2 tasks, 1 of which replaced waiting ones.\n"
    assert [item["replaced"] for item in listed] == [True, False]


def test_a_signal_is_sent(cli: Cli, dsn: str) -> None:
    task_id = cli("submit", "x", "--json").json["id"]

    sent = cli("task", "signal", task_id, "approved", "--data", '{"by": "ann"}', "--key", "k")
    again = cli("task", "signal", task_id[5:20], "approved", "--key", "k", "--json")
    wrong = cli("task", "signal", task_id, "approved", "--data", "{by: ann}")

    assert sent.out == f"Sent: signal approved to task {task_id}.\n"
    assert again.json["duplicate"] is True
    assert (wrong.code, "--data must be JSON" in wrong.err) == (2, True)
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT name, data->>'by', sender FROM lineshaft.signal").fetchall()
    assert rows == [("approved", "ann", account())]
