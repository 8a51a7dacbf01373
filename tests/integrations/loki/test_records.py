"""Records of queue files and the tasks that they are."""

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lineshaft.errors import InvalidInputError
from lineshaft.integrations.loki import records
from lineshaft.integrations.loki.records import (
    base_of,
    current,
    instant,
    is_record,
    new_task,
    priority_number,
    record_of,
    shown_priority,
    stored_priority,
    wait_after,
)
from lineshaft.model.priority import tier
from lineshaft.model.states import Status
from lineshaft.model.tasks import policy, resolve
from lineshaft.types import ClaimInfo, Task, TaskOutput, TokensUsed
from tests.examples import examples
from tests.server.test_documents import document

NOW = datetime(2026, 2, 8, 9, 30, tzinfo=UTC)


def task_of(new: Any, **fields: Any) -> Task:
    """What a submission of this task would be read as."""
    row = resolve(new)
    values: dict[str, Any] = {
        **dict.fromkeys(Task.__struct_fields__),
        "id": new.id or "task_1",
        "dag_id": "dag_1",
        "type": row.type,
        "title": row.title,
        "spec_json": msgspec.Raw(row.spec),
        "inputs": {},
        "preset": row.preset,
        "status": Status.READY,
        "priority": row.priority,
        "depends_on": list(new.depends_on),
        "blocked_by": [],
        "max_attempts": row.max_attempts,
        "attempts": 0,
        "retry": policy(None if row.retry is None else msgspec.json.decode(row.retry), row.preset),
        "max_duration_sec": row.max_duration_sec,
        "claim": ClaimInfo(None, None, None, 30.0, 0),
        "output": TaskOutput(require_decision_report=row.require_decision_report),
        "failure_history": [],
        "cost_usd": Decimal(0),
        "tokens_used": TokensUsed(),
        "created_at": NOW,
        "run_at": row.run_at,
        "idempotency_key": row.idempotency_key,
        "surface_json": msgspec.Raw(msgspec.json.encode(new.surface)),
        "progress_json": msgspec.Raw(b"null"),
        "disputed_usd": Decimal(0),
        "duplicate": msgspec.UNSET,
        "mismatch": msgspec.UNSET,
    }
    return Task(**values | fields)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abcxyz", min_size=1, max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
_OBJECTS = st.dictionaries(st.text("abcxyz", min_size=1, max_size=4), _JSON, max_size=4)
#: Names that are not fields of a record.
_FOREIGN = st.dictionaries(st.text("xyz_", min_size=2, max_size=6).map("x{}".format), _JSON, max_size=4)
_KNOWN = st.fixed_dictionaries(
    {
        "id": st.from_regex(r"[a-zA-Z0-9][\w.-]{0,20}", fullmatch=True).filter(str.isascii),
        "payload": _OBJECTS,
    },
    optional={
        "type": st.sampled_from(["eng-backend", "ops-devops", "review"]),
        "priority": st.integers(1, 10),
        "idempotencyKey": st.text("abcdef0123456789", min_size=8, max_size=64),
        "dependencies": st.lists(st.from_regex(r"t[0-9]{1,4}", fullmatch=True), max_size=3, unique=True),
        "createdAt": st.datetimes(timezones=st.just(UTC)).map(lambda at: at.isoformat()),
        "timeout": st.integers(1, 86_400),
        "maxRetries": st.integers(1, 20),
        "backoffSeconds": st.integers(1, 600),
        "acceptance_criteria": st.lists(st.text("abc ", max_size=9), max_size=3),
        "notes": st.none() | st.text("abc", max_size=9),
    },
)


@settings(max_examples=examples(300), deadline=None)
@given(known=_KNOWN, foreign=_FOREIGN)
def test_a_record_survives_a_round_trip(known: dict[str, Any], foreign: dict[str, Any]) -> None:
    """R-006, R-026: everything that was sent is there again; unknown fields too."""
    record = foreign | known

    again = record_of(task_of(new_task(record)))

    assert {name: again[name] for name in record} == record
    # And it is the same task when it is read again.
    second, first = new_task(again), new_task(record)
    assert (second.spec, second.priority, second.idempotency_key) == (
        first.spec,
        first.priority,
        first.idempotency_key,
    )
    assert (second.max_attempts or 3, second.max_duration_sec or 3600) == (
        first.max_attempts or 3,
        first.max_duration_sec or 3600,
    )
    assert record_of(task_of(second)) == again


@pytest.mark.parametrize(
    ("word", "number"),
    [("critical", 10), ("High", 8), ("medium", 5), ("normal", 5), ("low", 3), ("7", 7), (4.0, 4)],
)
def test_priorities_are_read_as_words_and_numbers_and_written_as_numbers(word: Any, number: int) -> None:
    record = {"id": "a", "payload": {}, "priority": word}

    assert priority_number(word) == number
    assert record_of(task_of(new_task(record)))["priority"] == number


@pytest.mark.parametrize("value", [0, 11, -1, "urgent", 5.5, True, [], "²", "99999999999999999999"])
def test_a_priority_out_of_range_is_refused(value: Any) -> None:
    """U1."""
    with pytest.raises(InvalidInputError, match="from 1 to 10") as refused:
        new_task({"payload": {}, "priority": value})
    assert [place for place, _ in refused.value.errors] == ["priority"]


def test_priorities_are_converted_into_the_matching_tier() -> None:
    """U1: never stored as they are."""
    stored = {number: stored_priority(number) for number in range(1, 11)}

    assert stored == {10: 5, 9: 15, 8: 25, 7: 35, 6: 45, 5: 55, 4: 65, 3: 75, 2: 85, 1: 95}
    assert all(shown_priority(value) == number for number, value in stored.items())
    assert [shown_priority(value) for value in (0, 9, 10, 50, 89, 99, 100)] == [10, 10, 9, 5, 2, 1, 1]
    tiers = {number: str(tier(value)) for number, value in stored.items()}
    assert tiers == {10: "critical"} | dict.fromkeys((9, 8), "high") | dict.fromkeys(
        (7, 6, 5), "normal"
    ) | dict.fromkeys((4, 3), "low") | dict.fromkeys((2, 1), "background")


def test_the_original_priority_is_written_until_it_changes() -> None:
    task = task_of(new_task({"id": "a", "payload": {}, "priority": 9}))

    assert record_of(task)["priority"] == 9
    assert record_of(msgspec.structs.replace(task, priority=95))["priority"] == 1


def test_the_key_is_derived_from_type_and_payload() -> None:
    """F-14, U8: not from the payload alone, and the same in every process."""
    one = new_task({"type": "a", "payload": {"x": 1, "y": [2]}})
    same = new_task({"type": "a", "payload": {"y": [2], "x": 1}, "priority": 3, "id": "other"})
    other = new_task({"type": "b", "payload": {"x": 1, "y": [2]}})
    own = new_task({"type": "a", "payload": {"x": 1, "y": [2]}, "idempotencyKey": "mine"})

    assert one.idempotency_key == same.idempotency_key
    assert len(str(one.idempotency_key)) == 64
    assert len({one.idempotency_key, other.idempotency_key, own.idempotency_key}) == 3
    assert own.idempotency_key == "mine"


def test_the_record_of_000_is_a_task() -> None:
    """R-006, R-015, R-016, R-017, R-119."""
    record = document("000-task")

    row = resolve(new := new_task(record))

    assert is_record(record)
    assert (row.preset, row.priority, row.max_attempts, row.max_duration_sec) == ("loki", 15, 3, 3600)
    assert json.loads(row.spec) == document("000-payload")
    assert (row.idempotency_key, row.require_decision_report, row.run_at) == (
        "hash-of-task-content",
        True,
        None,
    )
    left_out = {"result", "claimedBy"}
    again = record_of(task_of(new))
    assert {name: again[name] for name in record if name not in left_out} == {
        name: record[name] for name in record if name not in left_out
    }


def test_every_field_of_both_vocabularies_is_written() -> None:
    record = record_of(task_of(new_task({"id": "a", "payload": {}})))

    assert list(record) == [
        *("id", "title", "description", "type", "priority", "status", "source", "payload", "dependencies"),
        *("idempotencyKey", "createdAt", "created_at", "claimedBy", "claimedAt", "startedAt", "completedAt"),
        *("cancelledAt", "cancelReason", "timeout", "retries", "maxRetries", "backoffSeconds", "availableAt"),
        *("lastError", "acceptance_criteria", "notes", "logs", "result"),
    ]
    assert record["created_at"] == "2026-02-08T09:30:00Z"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"task_id": "t1", "error_summary": "it broke", "attempts": [{}, {}]}, ("t1", "task", "it broke", 2)),
        ({"id": "t2", "task_data": {"type": "x", "payload": {"a": 1}}}, ("t2", "x", None, 0)),
        (
            {"task_data": {"id": "t3", "type": "x", "description": "do it"}, "error_summary": "e"},
            ("t3", "x", "e", 0),
        ),
    ],
)
def test_older_records_are_read(record: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = current(record)

    new = new_task(record)
    assert (new.id, new.type, found.get("lastError"), found.get("retries", 0)) == expected


def test_records_without_a_payload_are_described_by_their_text() -> None:
    new = new_task(
        {"id": "a", "title": "Fix it", "description": "Fix the header", "acceptance_criteria": ["green"]}
    )

    assert new.title == "Fix it"
    assert new.spec == {"title": "Fix it", "description": "Fix the header", "acceptance_criteria": ["green"]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2026-02-08T09:30:00Z", NOW),
        ("2026-02-08T10:30:00+01:00", NOW),
        ("2026-02-08T09:30:00", NOW),
        (NOW.timestamp(), NOW),
        ("soon", None),
        (None, None),
        (True, None),
        (1e300, None),
    ],
)
def test_times_are_read_in_iso_and_as_seconds(value: Any, expected: datetime | None) -> None:
    """F-11: jq's `now` writes an epoch number."""
    assert instant(value) == expected


@pytest.mark.parametrize("failures", range(1, 8))
def test_the_back_off_is_computed_from_a_base_that_does_not_change(failures: int) -> None:
    """F-7: 60, 120, 240, 480 …, where 000's own formula has 60, 120, 480, 3840. R-112."""
    series = [60, 120, 240, 480, 960, 1920, 3600]

    assert wait_after(60, failures) == series[failures - 1]
    task = task_of(
        new_task({"id": "a", "payload": {}, "backoffSeconds": 60, "maxRetries": 9}), attempts=failures
    )
    record = record_of(task)
    assert (record["backoffSeconds"], record["retries"], record["maxRetries"]) == (
        series[failures - 1],
        failures,
        9,
    )
    if failures < 7:  # the cap hides the base
        assert base_of(record) == 60


def test_what_an_imported_record_has_used_up_counts() -> None:
    new = new_task({"id": "a", "payload": {}, "retries": 2, "maxRetries": 3, "backoffSeconds": 120})

    row = resolve(new)
    assert row.max_attempts == 1
    assert policy(json.loads(row.retry or b"{}"), "loki").initial_delay_sec == 240
    written = record_of(task_of(new))
    assert (written["retries"], written["maxRetries"], written["backoffSeconds"]) == (2, 3, 120)


def test_an_incomplete_decision_report_is_shown_as_such() -> None:
    """R-093."""
    task = task_of(
        new_task({"id": "a", "payload": {}}), failure_reason="incomplete_decision_report: why missing"
    )

    assert record_of(task)["lastError"] == {
        "status": "incomplete",
        "error": "incomplete_decision_report: why missing",
    }


@pytest.mark.parametrize(
    ("status", "queue", "name"),
    [
        ("READY", "pending", "pending"),
        ("RETRYING", "pending", "pending"),
        ("CLAIMED", "in-progress", "in_progress"),
        ("VALIDATING", "in-progress", "in_progress"),
        ("COMPLETED", "completed", "completed"),
        ("DEAD_LETTERED", "dead-letter", "failed"),
        ("CANCELLED", "cancelled", "cancelled"),
    ],
)
def test_each_state_has_a_file_and_a_status(status: str, queue: str, name: str) -> None:
    """U4."""
    task = task_of(new_task({"id": "a", "payload": {}}), status=Status(status))

    assert (records.queue_of(task), record_of(task)["status"]) == (queue, name)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"payload": "text"}, "payload"),
        ({"dependencies": "a"}, "dependencies"),
        ({"maxRetries": -1}, "maxRetries"),
        ({"maxRetries": 1.5}, "maxRetries"),
        ({"timeout": "long"}, "timeout"),
        ({"backoffSeconds": -5}, "backoffSeconds"),
        ({"availableAt": "soon"}, "availableAt"),
        ({"retries": True}, "retries"),
    ],
)
def test_what_is_wrong_is_reported_in_the_records_own_names(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        new_task({"payload": {}} | fields)
    assert [name for name, _ in refused.value.errors] == [place]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "x", "payload": {}}, True),
        ({"type": "x", "spec": {}, "maxRetries": 1}, False),
        ({"type": "x", "priority": 5}, False),
        ([], False),
    ],
)
def test_records_are_told_from_tasks(given: Any, expected: bool) -> None:
    assert is_record(given) is expected
