"""The state machine of a task."""

from collections import Counter

import pytest

from lineshaft.errors import InvalidInputError
from lineshaft.model.states import (
    ENDED,
    LIVE,
    TRANSIENT,
    TRANSITIONS,
    Status,
    TaskOperation,
)

MOVES = {(t.source, t.operation): t for t in TRANSITIONS}


def walk(start: Status, *operations: TaskOperation) -> Status:
    for operation in operations:
        start = MOVES[start, operation].target
    return start


def test_there_are_eleven_states() -> None:
    """R-030."""
    assert {*LIVE, *ENDED, *TRANSIENT} == set(Status)
    assert len(Status) == len(LIVE) + len(ENDED) + len(TRANSIENT) == 11


def test_an_operation_leads_from_a_state_to_exactly_one_other() -> None:
    counts = Counter((t.source, t.operation) for t in TRANSITIONS)

    assert [pair for pair, n in counts.items() if n > 1] == []
    assert {t.operation for t in TRANSITIONS} == set(TaskOperation)


def test_the_happy_path() -> None:
    """R-031, R-032."""
    end = walk(
        Status.CREATED,
        TaskOperation.JOIN_DAG,
        TaskOperation.UNBLOCK,
        TaskOperation.CLAIM,
        TaskOperation.START,
        TaskOperation.SUBMIT_OUTPUT,
        TaskOperation.ACCEPT,
    )

    assert end is Status.COMPLETED


@pytest.mark.parametrize(
    ("source", "operation"),
    [
        (Status.CLAIMED, TaskOperation.EXPIRE),
        (Status.RUNNING, TaskOperation.EXPIRE),
        (Status.VALIDATING, TaskOperation.EXPIRE),
        (Status.VALIDATING, TaskOperation.REJECT),
    ],
)
def test_every_failed_attempt_is_retried_or_dead_lettered(source: Status, operation: TaskOperation) -> None:
    """R-033, R-034, R-035, F-19."""
    assert walk(source, operation, TaskOperation.SCHEDULE_RETRY, TaskOperation.PROMOTE) is Status.READY
    assert walk(source, operation, TaskOperation.DEAD_LETTER) is Status.DEAD_LETTERED


@pytest.mark.parametrize("source", sorted(LIVE))
def test_a_task_that_has_not_ended_can_be_cancelled(source: Status) -> None:
    """R-036."""
    assert MOVES[source, TaskOperation.CANCEL].event == "task.cancelled"


@pytest.mark.parametrize("source", sorted(Status))
def test_only_people_move_an_ended_task(source: Status) -> None:
    """R-040: a dead letter can be revived or cancelled, a cancelled task revived, a completed one rerun."""
    out = {t.operation for t in TRANSITIONS if t.source is source}

    if source is Status.COMPLETED:
        assert out == {TaskOperation.RERUN}
    elif source is Status.CANCELLED:
        assert out == {TaskOperation.REVIVE}
    elif source is Status.DEAD_LETTERED:
        assert out == {TaskOperation.REVIVE, TaskOperation.CANCEL}
    else:
        assert out


def test_from_every_state_a_task_can_still_end() -> None:
    """An end can be reached from every state."""
    for source in Status:
        reached, todo = {source}, [source]
        while todo:
            here = todo.pop()
            new = {t.target for t in TRANSITIONS if t.source is here} - reached
            reached |= new
            todo += new
        assert reached & ENDED, source


def test_states_are_read_in_any_case_and_others_rejected() -> None:
    """U4, F-32."""
    assert Status.parse("dead_lettered") is Status.DEAD_LETTERED
    with pytest.raises(InvalidInputError, match=r"Unknown task state 'DONE'.*COMPLETED"):
        Status.parse("DONE")
