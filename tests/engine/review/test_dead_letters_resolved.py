"""What people decide about dead letters, and what comes of it."""

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from lineshaft.errors import (
    AlreadyExistsError,
    AlreadyReviewedError,
    DependencyNotFoundError,
    InvalidInputError,
    LineshaftError,
    NotFoundError,
)
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from tests.engine.review.test_dead_letters import dead, decision, ids
from tests.world import World, cost, decoded


def event_data(world: World, task_id: str, kind: str = "task.resolved") -> Any:
    query = "SELECT data FROM lineshaft.events WHERE task_id = %s AND kind = %s ORDER BY seq DESC LIMIT 1"
    return world.row(query, task_id, kind)["data"]


async def test_retry(world: World) -> None:
    """R-132, R-133: attempts from zero, the history and its cost kept, who decided and why."""
    task_id = await dead(world)
    world.age(minutes=5)

    letter = await world.engine.dead_letters.resolve(task_id, decision("retry", note="the API is back"))

    assert (letter.status, letter.reviewed, letter.resolution) == ("READY", True, "retry")
    assert (letter.reviewer, letter.note, letter.reviewed_at) == ("ann", "the API is back", world.clock.now())
    assert [(r.resolution, r.reviewer, r.at) for r in letter.reviews] == [("retry", "ann", world.clock.now())]
    assert world.live(task_id)["attempts"] == 0
    assert len(letter.failure_history) == 1
    assert world.kinds(task_id)[-2:] == ["task.resolved", "task.ready"]
    assert event_data(world, task_id) == {
        "resolution": "retry",
        "reviewer": "ann",
        "note": "the API is back",
        "category": "crash",
        "error": "it broke",
    }


async def test_retry_begins_again_with_the_preferred_models(world: World) -> None:
    """R-117: the fallback was for the attempts that are forgotten."""
    agent = await world.agent(models_available=["good", "spare"])
    task_id = await world.one(model_preferences=["good"], fallback_models=["spare"], max_attempts=3)
    models = []
    for _ in range(3):
        world.age(hours=1)
        await world.engine.maintenance.promote_due(10)
        task = await world.take(agent)
        models.append(task.model)
        await world.fail(task)

    await world.engine.dead_letters.resolve(task_id, decision("retry"))

    assert (models, (await world.take(agent)).model) == (["good", "good", "spare"], "good")


async def test_retry_later(world: World) -> None:
    """R-132: wait and retry, at an instant; one that is past is now."""
    agent = await world.agent()
    later, now = await dead(world), await dead(world)
    tomorrow = world.clock.now() + timedelta(days=1)

    letter = await world.engine.dead_letters.resolve(later, decision("retry", not_before=tomorrow))
    past = world.clock.now() - timedelta(days=1)
    await world.engine.dead_letters.resolve(now, decision("retry", not_before=past))

    assert (letter.status, world.waits(later), letter.reviews[0].not_before) == ("PENDING", 86_400, tomorrow)
    assert world.status(now) == "READY"
    await world.complete(await world.take(agent))
    world.age(days=1)
    await world.engine.maintenance.promote_due(10)
    assert (await world.take(agent)).id == later


async def test_modify_and_retry(world: World) -> None:
    """R-132: the agent gets the new spec; the old one and the difference are kept."""
    task_id = await dead(world, spec={"prompt": "a", "depth": 3})

    letter = await world.engine.dead_letters.resolve(
        task_id, decision("modify_and_retry", spec={"prompt": "b", "depth": 3})
    )

    assert letter.spec == {"prompt": "b", "depth": 3}
    (review,) = letter.reviews
    assert review.spec_before == {"prompt": "a", "depth": 3}
    assert review.spec_change == [{"path": "/prompt", "from": "a", "to": "b"}]
    assert event_data(world, task_id)["changed"] == ["/prompt"]
    assert decoded((await world.take()).spec) == {"prompt": "b", "depth": 3}


async def test_limits_in_a_new_spec_count(world: World) -> None:
    """004 §2: as they do at submission; those it doesn't have any more are gone, others stay."""
    limits = {"max_cost_usd": 1, "required_capabilities": ["web"]}
    await world.one(spec={"constraints": limits}, max_attempts=1, model_preferences=["m"])
    agent = await world.agent(capabilities=["web"], models_available=["m"])
    task = await world.take(agent)
    await world.fail(task)

    new = {"constraints": {"max_cost_usd": 2.5, "max_duration_sec": 60}}
    await world.engine.dead_letters.resolve(task.id, decision("modify_and_retry", spec=new))

    row = world.row("SELECT * FROM lineshaft.task")
    assert (row["max_cost_usd"], row["max_duration_sec"]) == (Decimal("2.5"), 60)
    assert (row["required_capabilities"], row["model_preferences"]) == ([], ["m"])
    assert world.live(task.id)["limit_sec"] == 60
    assert (await world.take(await world.agent(models_available=["m"]))).reserved_usd == Decimal("2.5")


async def test_a_new_spec_waits_for_what_it_refers_to(world: World) -> None:
    """R-008: as at submission."""
    agent = await world.agent()
    task_id = await dead(world)
    source = await world.one("source")
    spec = {"context_refs": [f"task:{source}:output"]}

    letter = await world.engine.dead_letters.resolve(task_id, decision("modify_and_retry", spec=spec))

    assert letter.status == "PENDING"
    await world.complete(await world.take(agent), output={"n": 1})
    claim = await world.claims(agent)
    assert [task.id for task in claim.tasks] == [task_id]
    assert decoded(claim.inputs[source]) == {"n": 1}


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({"constraints": {"max_cost_usd": -1}}, InvalidInputError),
        ({"context_refs": "x"}, InvalidInputError),
        ({"context_refs": ["task:task_nobody:output"]}, DependencyNotFoundError),
        ({"text": "\0"}, InvalidInputError),
        ({"text": "x" * (4 << 20)}, InvalidInputError),
        ([1], InvalidInputError),
    ],
)
async def test_a_bad_spec_is_refused_and_nothing_changes(
    world: World, spec: Any, error: type[LineshaftError]
) -> None:
    """R-132: checked like a submission."""
    task_id = await dead(world)
    before = world.everything()

    with pytest.raises(error):
        await world.engine.dead_letters.resolve(task_id, decision("modify_and_retry", spec=spec))

    assert world.everything() == before
    assert world.rows("SELECT * FROM lineshaft.review") == []


async def test_cancel_takes_along_what_waits_for_it(world: World) -> None:
    """R-132, U6, F-16: and the DAG comes to an end."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("a", key="a", max_attempts=1),
        NewTask("b", key="b", depends_on=["a"]),
        NewTask("c", key="c", depends_on=["b"]),
    )
    a, b, c = (found.id for found in dag.tasks.values())
    await world.fail(await world.take(agent), spent=cost("0.5"))
    assert world.statuses([a, b, c]) == ["DEAD_LETTERED", "PENDING", "PENDING"]
    assert world.dag_row(dag.id)["status"] == "failed"

    letter = await world.engine.dead_letters.resolve(a, decision("cancel", note="not needed"))

    assert world.statuses([a, b, c]) == ["CANCELLED"] * 3
    reasons = [world.end(name)["reason"] for name in (a, b, c)]
    assert reasons == ["not needed", f"Parent {a} cancelled", f"Parent {b} cancelled"]
    row = world.dag_row(dag.id)
    assert (row["status"], row["dead_lettered"], row["cancelled"]) == ("cancelled", 0, 3)
    assert world.dag_kinds(dag.id)[-2:] == ["dag.failed", "dag.cancelled"]
    assert world.kinds(a)[-2:] == ["task.resolved", "task.cancelled"]
    assert (letter.resolution, letter.status, letter.total_cost_usd) == (
        "cancel",
        "CANCELLED",
        Decimal("0.5"),
    )
    assert await ids(world) == [a]


async def test_a_dag_of_which_the_rest_is_done_is_completed_by_a_cancel(world: World) -> None:
    """U7: no dead letter is left."""
    agent = await world.agent()
    dag = await world.dag(NewTask("a", key="a", max_attempts=1), NewTask("b", key="b"))
    await world.fail(await world.take(agent, types=["a"]))
    await world.complete(await world.take(agent))
    assert world.dag_row(dag.id)["status"] == "failed"

    await world.engine.dead_letters.resolve(dag.tasks["a"].id, decision("cancel"))

    assert world.dag_row(dag.id)["status"] == "completed"


async def test_cancelling_a_batch_gives_up_its_dead_children_too(world: World) -> None:
    """R-193: one decision, one family."""
    agent = await world.agent()
    batch = await world.one("batch", children=[NewTask("one", max_attempts=1), NewTask("two")])
    await world.fail(await world.take(agent))
    assert await ids(world, reviewed=False, type=["batch", "one"])

    await world.engine.dead_letters.resolve(batch, decision("cancel", note="enough"))

    assert await ids(world, reviewed=False) == []
    letters = (await world.engine.dead_letters.find()).items
    assert {letter.status for letter in letters} == {Status.CANCELLED}
    assert {letter.note for letter in letters} == {"enough"}


async def test_cancelling_a_child_gives_up_its_batch(world: World) -> None:
    """R-193: as cancelling it alive would have."""
    batch = await world.one("batch", children=[NewTask("one", max_attempts=1)])
    child = await world.take()
    await world.fail(child)

    await world.engine.dead_letters.resolve(child.id, decision("cancel"))

    assert world.statuses([child.id, batch]) == ["CANCELLED", "CANCELLED"]
    assert world.end(batch)["reason"] == f"Parent {child.id} cancelled"
    assert await ids(world, reviewed=False) == []


async def test_delete_hides_and_loses_nothing(world: World) -> None:
    """R-131, R-132: out of the lists; still there for who asks."""
    agent = await world.agent()
    task_id = await dead(world)
    dependent = await world.one("after", depends_on=[task_id])

    letter = await world.engine.dead_letters.resolve(task_id, decision("delete", note="nonsense"))

    assert (letter.hidden, letter.status, letter.resolution) == (True, "CANCELLED", "delete")
    assert await ids(world) == []
    assert await ids(world, hidden=True) == [task_id]
    assert len((await world.engine.dead_letters.get(task_id)).failure_history) == 1
    assert world.status(dependent) == "CANCELLED"
    assert await world.claim(agent) == []


async def test_escalate_leaves_it_for_somebody_else(world: World) -> None:
    """R-132: reviewed, alerted, and open for the decision that counts."""
    task_id = await dead(world)

    letter = await world.engine.dead_letters.resolve(task_id, decision("escalate", note="ask legal"))

    assert (letter.status, letter.reviewed, letter.resolution) == ("DEAD_LETTERED", True, "escalate")
    assert world.kinds(task_id)[-2:] == ["task.resolved", "alert"]
    assert event_data(world, task_id, "alert")["alert"] == "HUMAN_REVIEW_NEEDED"
    with pytest.raises(AlreadyReviewedError, match="ann decided escalate"):
        await world.engine.dead_letters.resolve(task_id, decision("escalate", reviewer="bob"))
    final = await world.engine.dead_letters.resolve(task_id, decision("retry", reviewer="bob"))
    assert [(r.resolution, r.reviewer) for r in final.reviews] == [("escalate", "ann"), ("retry", "bob")]
    assert final.status == "READY"


async def test_a_revived_dag_goes_on_where_it_stopped(world: World) -> None:
    """R-133, U6, F-16: what was done stays done, what waited runs."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("a", key="a"),
        NewTask("b", key="b", depends_on=["a"], max_attempts=1),
        NewTask("c", key="c", depends_on=["b"]),
    )
    a, b, c = (found.id for found in dag.tasks.values())
    await world.complete(await world.take(agent))
    await world.fail(await world.take(agent))
    assert world.dag_row(dag.id)["status"] == "failed"
    assert (await world.engine.read.task(c)).blocked_reason == f"Upstream {b} is DEAD_LETTERED"

    await world.engine.dead_letters.resolve(b, decision("retry"))

    assert world.dag_row(dag.id)["status"] == "running"
    for expected in (b, c):
        task = await world.take(agent)
        assert task.id == expected
        await world.complete(task)
    assert world.dag_row(dag.id)["status"] == "completed"
    assert world.kinds(a).count("task.completed") == 1
    assert world.dag_kinds(dag.id)[-3:] == ["dag.failed", "dag.running", "dag.completed"]


async def test_what_is_decided_is_decided(world: World) -> None:
    """R-132: the second reviewer gets the decision of the first."""
    task_id = await dead(world)
    await world.engine.dead_letters.resolve(task_id, decision("cancel"))
    before = world.everything()

    with pytest.raises(
        AlreadyReviewedError, match=r"ann decided cancel at .* and the task is CANCELLED"
    ) as caught:
        await world.engine.dead_letters.resolve(task_id, decision("retry", reviewer="bob"))

    assert (caught.value.code, caught.value.reviewer) == ("invalid_transition", "ann")
    assert caught.value.resolution == "cancel"
    assert world.everything() == before
    with pytest.raises(NotFoundError, match="no dead letter of a task 'task_x'"):
        await world.engine.dead_letters.resolve("task_x", decision("retry"))


async def test_a_dead_letter_whose_key_is_in_use_stays_open(world: World) -> None:
    """U8."""
    task_id = await dead(world, idempotency_key="k")
    await world.one(idempotency_key="k")

    with pytest.raises(AlreadyExistsError, match="'k' is in use"):
        await world.engine.dead_letters.resolve(task_id, decision("retry"))

    assert await ids(world, reviewed=False) == [task_id]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"resolution": "forget"}, "resolution"),
        ({"reviewer": " "}, "reviewer"),
        ({"reviewer": "a\0"}, "reviewer"),
        ({"reviewer": "a" * 201}, "reviewer"),
        ({"note": "\ud800"}, "note"),
        ({"note": "x" * 10_001}, "note"),
        ({"not_before": datetime(2026, 1, 1)}, "not_before"),  # noqa: DTZ001 - without a zone, on purpose
        ({"resolution": "cancel", "not_before": datetime.fromisoformat("2026-01-01T00:00Z")}, "not_before"),
        ({"spec": {}}, "spec"),
        ({"resolution": "modify_and_retry"}, "spec"),
    ],
)
async def test_a_decision_that_makes_no_sense_is_refused(
    world: World, fields: dict[str, Any], place: str
) -> None:
    task_id = await dead(world)

    with pytest.raises(InvalidInputError) as caught:
        await world.engine.dead_letters.resolve(task_id, decision(**{"resolution": "retry", **fields}))

    assert [name for name, _ in caught.value.errors] == [place]
    assert await ids(world, reviewed=False) == [task_id]


async def test_the_diff_of_a_large_spec_is_in_the_table_not_in_the_event(world: World) -> None:
    """Events go to many; they stay small."""
    task_id = await dead(world, spec={f"k{n}": "x" * 1_000 for n in range(100)})
    new = {f"k{n}": "y" for n in range(100)}

    letter = await world.engine.dead_letters.resolve(task_id, decision("modify_and_retry", spec=new))

    assert len(letter.reviews[0].spec_change) == 100
    assert len(msgspec.json.encode(event_data(world, task_id))) < 1_000
