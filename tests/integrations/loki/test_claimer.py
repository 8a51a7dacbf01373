"""The shell claimer: document 000's protocol on files alone, without its faults."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lineshaft.errors import InvalidInputError, NotFoundError
from lineshaft.integrations.loki.claimer import Claimer
from lineshaft.integrations.loki.folder import Folder, UnreadableFileError
from lineshaft.integrations.loki.locks import locked
from lineshaft.integrations.loki.records import instant
from tests.cli.conftest import Cli, cli
from tests.integrations.loki.readers import by_id, places, put, queue

__all__ = ["cli"]
REPORT = {"why": "asked", "what": "done", "tradeoffs": "none"}
RESULT = {"output": "done", "decisionReport": REPORT}


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": name,
        "type": "x",
        "payload": {"n": name},
        "claimedBy": None,
        "priority": 5,
        "maxRetries": 3,
    } | fields


@pytest.fixture
def root(tmp_path: Path) -> Path:
    Folder(tmp_path).create()
    return tmp_path


def claimed(root: Path, **fields: Any) -> str | None:
    found = Claimer(root).claim("a1", **fields)
    return None if found is None else found["id"]


def later(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def test_a_claim_moves_the_most_urgent_record(root: Path) -> None:
    """R-053, R-061, R-165."""
    put(
        root,
        "pending",
        [record("low", priority="low"), record("first", priority=8), record("second", priority="high")],
    )

    assert [claimed(root) for _ in range(4)] == ["first", "second", "low", None]
    found = by_id(root, "in-progress")["first"]
    assert (found["claimedBy"], found["status"]) == ("a1", "in_progress")
    assert instant(found["claimedAt"]) is not None
    assert queue(root, "pending") == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "a"),
        ({"type": "y"}, None),
        ({"claimedBy": "other"}, None),
        ({"availableAt": later(3600)}, None),
        ({"availableAt": later(-1)}, "a"),
        ({"availableAt": (datetime.now(UTC) + timedelta(hours=1)).timestamp()}, None),
        ({"dependencies": ["done"]}, "a"),
        ({"dependencies": ["done", "missing"]}, None),
        ({"dependencies": 5}, None),
        ({"dependencies": [["done"]]}, None),
        ({"id": 5}, None),
    ],
)
def test_what_may_be_claimed(root: Path, fields: dict[str, Any], expected: str | None) -> None:
    """R-052, R-054, R-056; F-8, F-11."""
    put(root, "completed", [record("done")])
    put(root, "pending", [record("a", **fields)])

    assert claimed(root, types=["x"]) == expected


@pytest.mark.parametrize("wrong", ["5", "null", '"text"', "[]", '{"id": "big", "type": "x", "n": 1e999}'])
def test_what_is_not_a_record_stays_and_stops_no_claim(root: Path, wrong: str) -> None:
    path = root / "queue/pending.json"
    path.write_text(f'[{wrong}, {{"id": "a", "type": "x"}}]')

    assert claimed(root) == "a"
    assert path.read_text().split() == f"[ {wrong} ]".split()


@pytest.mark.parametrize(
    "fields",
    [
        {"retries": "x"},
        {"retries": [1]},
        {"retries": 10**4300 - 1},
        {"backoffSeconds": 1e300},
        {"backoffSeconds": -5},
    ],
)
def test_numbers_that_make_no_sense_do_not_keep_a_failure_from_being_reported(
    root: Path, fields: dict[str, Any]
) -> None:
    put(root, "pending", [record("a", **fields)])
    claimed(root)

    ended = Claimer(root).fail("a", "boom")

    assert ended.queue == ("dead-letter" if isinstance(fields.get("retries"), int) else "pending")


@pytest.mark.parametrize("name", ["PAUSE", "STOP"])
def test_nothing_is_claimed_while_paused(root: Path, name: str) -> None:
    put(root, "pending", [record("a")])
    (root / name).touch()

    assert claimed(root) is None
    (root / name).unlink()
    assert claimed(root) == "a"


@pytest.mark.parametrize(
    ("state", "open_for_sec", "busy", "expected"),
    [
        ("closed", None, False, "a"),
        ("open", 0, False, None),
        ("open", 0, True, None),
        ("open", 61, False, "a"),
        ("half-open", None, False, "a"),
        ("half-open", None, True, None),
    ],
)
def test_breakers_are_obeyed(
    root: Path, state: str, open_for_sec: int | None, busy: bool, expected: str | None
) -> None:
    """R-055, R-181; F-1: a half-open breaker without a probe isn't stuck."""
    breaker = {"state": state} | ({} if open_for_sec is None else {"openedAt": later(-open_for_sec)})
    (root / "state/orchestrator.json").write_text(json.dumps({"circuitBreakers": {"x": breaker}}))
    put(root, "pending", [record("a")])
    if busy:
        put(root, "in-progress", [record("probe")])

    assert claimed(root) == expected


def test_the_pause_of_a_breaker_is_configured(root: Path) -> None:
    (root / "config").mkdir()
    (root / "config/circuit-breakers.yaml").write_text(
        "defaults: {halfOpenAfter: 10}\noverrides: {y: {halfOpenAfter: 99}}"
    )
    state = {kind: {"state": "open", "openedAt": later(-30)} for kind in "xy"}
    (root / "state/orchestrator.json").write_text(json.dumps({"circuitBreakers": state}))
    put(root, "pending", [record("a", type="y"), record("b")])

    assert claimed(root) == "b"
    assert claimed(root) is None


def test_a_result_needs_a_decision_report(root: Path) -> None:
    """R-090, R-093."""
    put(root, "pending", [record("a"), record("b")])
    claimer = Claimer(root)
    for name in "ab":
        assert claimed(root) == name

    assert claimer.complete("a", RESULT).queue == "completed"
    assert claimer.complete("b", {"output": "done"}).queue == "pending"

    done, again = by_id(root, "completed")["a"], by_id(root, "pending")["b"]
    assert (done["status"], done["result"]) == ("completed", {"status": "success"} | RESULT)
    assert again["lastError"]["status"] == "incomplete"
    assert (again["retries"], again["claimedBy"], again["status"]) == (1, None, "pending")


def test_a_failure_is_retried_and_then_a_dead_letter(root: Path) -> None:
    """R-110, R-111, R-112, R-121; F-7, F-9, F-12: three attempts, waits of 60 and 120 s."""
    put(root, "pending", [record("a", backoffSeconds=60)])
    claimer = Claimer(root)
    waits = []
    for _ in range(2):
        assert claimed(root) == "a"
        before = datetime.now(UTC)
        claimer.fail("a", "it broke")
        found = by_id(root, "pending")["a"]
        due = instant(found["availableAt"])
        assert due is not None
        assert due >= before + timedelta(seconds=found["backoffSeconds"])
        waits.append(found["backoffSeconds"])
        assert claimed(root) is None, "it waits"
        put(root, "pending", [found | {"availableAt": None}])
    assert claimed(root) == "a"
    assert claimer.fail("a", "it broke again").queue == "dead-letter"

    assert waits == [60, 120]
    found = by_id(root, "dead-letter")["a"]
    assert (found["retries"], found["lastError"], found["status"]) == (3, "it broke again", "failed")


def test_a_rate_limit_uses_no_attempt(root: Path) -> None:
    """U13, R-210, R-212."""
    put(root, "pending", [record("a", maxRetries=1)])
    assert claimed(root) == "a"

    Claimer(root).fail("a", "429 Too Many Requests, retry after 30 s")

    assert by_id(root, "pending")["a"].get("retries", 0) == 0
    assert json.loads((root / "signals/RATE_LIMITED").read_text())["wait"] == 30


def test_the_name_that_marks_records_that_are_held_back_is_no_agents(root: Path) -> None:
    put(root, "pending", [record("a")])

    with pytest.raises(InvalidInputError, match="Take another one"):
        Claimer(root).claim("lineshaft")


def test_what_nobody_holds_can_not_be_ended(root: Path) -> None:
    """F-15."""
    with pytest.raises(NotFoundError, match="no task a in"):
        Claimer(root).fail("a", "x")
    put(root, "in-progress", [record("a")])
    with pytest.raises(InvalidInputError, match="lineshaft loki fail"):
        Claimer(root).complete("a", RESULT | {"status": "failed"})
    assert places(root) == {"a": ["in-progress"]}


def test_a_file_that_is_not_json_is_left_alone(root: Path) -> None:
    put(root, "pending", [record("a")])
    (root / "queue/in-progress.json").write_text("{broken")

    with pytest.raises(UnreadableFileError):
        claimed(root)
    assert (root / "queue/in-progress.json").read_text() == "{broken"
    assert [item["id"] for item in queue(root, "pending")] == ["a"]


def test_claimers_never_take_the_same_record(root: Path) -> None:
    """R-050."""
    put(root, "pending", [record(f"t{number}") for number in range(24)])

    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(lambda number: Claimer(root).claim(f"a{number}"), range(24)))

    assert sorted(found["id"] for found in taken if found) == sorted(f"t{number}" for number in range(24))


def test_the_commands(root: Path, cli: Cli, tmp_path: Path) -> None:
    put(root, "pending", [record("a"), record("b", type="y")])
    result = tmp_path / "result.json"
    result.write_text(json.dumps(RESULT))

    assert cli("loki", "claim", str(root), "--agent", "a1", "--type", "y", "--type", "z").json["id"] == "b"
    assert cli("loki", "claim", str(root), "--agent", "a1", "--type", "y").code == 2
    assert cli("loki", "claim", str(root), "--agent", "a1").json["id"] == "a"
    assert cli("loki", "complete", str(root), "b", "--result", str(result)).out == "b is in completed.json.\n"
    assert cli("loki", "fail", str(root), "a", "--error", "no luck").out == "a is in pending.json: no luck\n"
    assert cli("loki", "claim", "/nowhere", "--agent", "a1").code == 1
    assert places(root) == {"a": ["pending"], "b": ["completed"]}


def test_the_exit_code_of_a_lock_that_is_not_free(
    root: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-064."""
    put(root, "pending", [record("a")])
    monkeypatch.setattr(Claimer.__init__, "__kwdefaults__", {"wait_sec": 0.05, "wrapper": False})

    with locked(root):
        said = cli("loki", "claim", str(root), "--agent", "a1")

    assert (said.code, "queue.lock" in said.err) == (1, True)


def test_a_shell_needs_no_database(root: Path) -> None:
    put(root, "pending", [record("a")])
    run = subprocess.run(
        [sys.executable, "-m", "lineshaft", "loki", "claim", str(root), "--agent", "sh"],
        env={"PATH": "/usr/bin", "LINESHAFT_DATABASE_URL": "postgresql://nowhere.invalid/x"},
        capture_output=True,
        check=True,
    )
    assert json.loads(run.stdout)["claimedBy"] == "sh"
