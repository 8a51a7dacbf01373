"""People who decide about one dead letter at once, and other changes of it at the same time."""

from asyncio import gather
from typing import Any

import psycopg
import pytest

from lineshaft.engine.engine import Engine
from lineshaft.errors import AlreadyReviewedError, InvalidInputError, InvalidTransitionError
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import DeadLetterFilter
from lineshaft.types.work import Completion, Failure
from tests.races.helpers import DONE, held, race, running, status
from tests.world import ref

END_ROW = "SELECT FROM lineshaft.task_end WHERE id = %s FOR UPDATE"


async def dead(engine: Engine, type_: str = "code") -> str:
    (task,) = await engine.submission.submit([NewTask(type_, max_attempts=1)])
    (claimed,) = await running(engine)
    await engine.work.fail([Failure(ref(claimed), "it broke")])
    return task.id


def by(reviewer: str, resolution: str) -> ResolutionRequest:
    return ResolutionRequest(resolution=resolution, reviewer=reviewer)


def reviews(connection: psycopg.Connection) -> list[tuple[Any, ...]]:
    return connection.execute("SELECT reviewer, resolution FROM lineshaft.review ORDER BY no").fetchall()


@pytest.mark.parametrize("resolution", ["retry", "cancel", "delete"])
async def test_two_reviewers_one_decision(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection, resolution: str
) -> None:
    """R-132: one wins; the other gets an error with the decision."""
    one, two = engines
    task_id = await dead(one)

    with held(dsn, END_ROW, task_id) as holder:
        results = await race(
            connection,
            holder,
            one.dead_letters.resolve(task_id, by("ann", "retry")),
            two.dead_letters.resolve(task_id, by("bob", resolution)),
        )

    (refused,) = [result for result in results if isinstance(result, AlreadyReviewedError)]
    winner, decided = ("bob", resolution) if results[0] is refused else ("ann", "retry")
    assert reviews(connection) == [(winner, decided)]
    assert (refused.reviewer, refused.resolution) == (winner, decided)
    assert winner in str(refused)
    assert status(connection, task_id) == ("READY" if decided == "retry" else "CANCELLED")


async def test_two_reviewers_escalate_once(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """R-132: one alert, not two; the letter stays where it is."""
    one, two = engines
    task_id = await dead(one)

    with held(dsn, END_ROW, task_id) as holder:
        results = await race(
            connection,
            holder,
            one.dead_letters.resolve(task_id, by("ann", "escalate")),
            two.dead_letters.resolve(task_id, by("bob", "escalate")),
        )

    assert [isinstance(result, AlreadyReviewedError) for result in results].count(True) == 1
    assert len(reviews(connection)) == 1
    alerts = connection.execute("SELECT count(*) FROM lineshaft.events WHERE kind = 'alert'").fetchone()
    assert alerts == (1,)
    assert status(connection, task_id) == "DEAD_LETTERED"


async def test_a_review_against_a_retry_by_hand(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """R-122, R-132: revived once, whichever was first."""
    one, two = engines
    task_id = await dead(one)

    with held(dsn, END_ROW, task_id) as holder:
        reviewed, manual = await race(
            connection,
            holder,
            one.dead_letters.resolve(task_id, by("ann", "retry")),
            two.revive.retry(task_id),
        )

    if isinstance(reviewed, AlreadyReviewedError):
        assert (manual, reviewed.reviewer, reviews(connection)) == (Status.READY, None, [(None, "retry")])
        assert "retried manually" in str(reviewed)
    else:
        assert isinstance(manual, InvalidTransitionError)
        assert reviews(connection) == [("ann", "retry")]
    assert connection.execute("SELECT revivals FROM lineshaft.task_live").fetchall() == [(1,)]


async def test_a_new_dependent_against_a_cancel(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """U6: it is cancelled too, or refused; it never waits for what will not come."""
    one, two = engines
    task_id = await dead(one)

    with held(dsn, END_ROW, task_id) as holder:
        cancelled, submitted = await race(
            connection,
            holder,
            one.dead_letters.resolve(task_id, by("ann", "cancel")),
            two.submission.submit([NewTask("after", depends_on=[task_id])]),
        )

    assert cancelled.status is Status.CANCELLED
    if isinstance(submitted, list):
        assert status(connection, submitted[0].id) == "CANCELLED"
    else:
        assert isinstance(submitted, InvalidInputError)


async def test_a_new_dependent_holds_back_the_revival_until_it_is_there(
    engines: tuple[Engine, Engine], dsn: str, connection: psycopg.Connection
) -> None:
    """U6: else the revived task could complete before the new edge is there to be counted down."""
    one, _ = engines
    task_id = await dead(one)
    with psycopg.connect(dsn) as slow:
        # A submission that has seen the dead letter, and takes its time.
        slow.execute(
            "SELECT id FROM lineshaft.task_end WHERE id = %s AND status = 'DEAD_LETTERED' FOR KEY SHARE",
            [task_id],
        )
        results = await race(connection, slow, one.dead_letters.resolve(task_id, by("ann", "retry")))

    assert results[0].status is Status.READY
    (after,) = await one.submission.submit([NewTask("after", depends_on=[task_id])])
    (claimed,) = await running(one)
    await one.work.complete([Completion(ref(claimed), DONE)])
    assert status(connection, after.id) == "READY"


async def test_two_bulk_decisions_share_the_work(
    engines: tuple[Engine, Engine], connection: psycopg.Connection
) -> None:
    """R-132: each letter is decided once; the other decision is reported as too late."""
    one, two = engines
    # Of ten types: a breaker would hold back the rest of one.
    expected = {await dead(one, f"type{n}") for n in range(10)}

    results = await gather(
        one.dead_letters.resolve_all(DeadLetterFilter(), by("ann", "delete")),
        two.dead_letters.resolve_all(DeadLetterFilter(), by("bob", "delete")),
    )

    decided = [task_id for result in results for task_id in result.resolved]
    assert (len(decided), set(decided)) == (10, expected)
    assert {refusal.code for result in results for refusal in result.refused} <= {AlreadyReviewedError.code}
    assert len(reviews(connection)) == 10
