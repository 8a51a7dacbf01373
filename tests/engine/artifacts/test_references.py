"""Tasks that refer to artifacts: as inputs and as outputs."""

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from lineshaft.artifacts import open_store
from lineshaft.artifacts.store import Store
from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.errors import InvalidInputError, InvalidTransitionError
from lineshaft.model.reviews import Resolution, ResolutionRequest
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask, OutputContract
from lineshaft.settings import Settings
from lineshaft.types import NewAgent
from lineshaft.types.assignments import assignments
from lineshaft.types.work import ClaimRef, Completion
from tests.engine.artifacts.helpers import content, count, put


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(Settings(artifacts=str(tmp_path)))


def _task(*refs: str, **options: Any) -> NewTask:
    return NewTask("research", spec={"context_refs": list(refs)}, **options)


async def _claim(engine: Engine, n: int = 1) -> Any:
    registered = await engine.fleet.register(NewAgent(id="ann", type="worker", max_concurrent_tasks=100))
    return await engine.claims.claim("ann", registered.incarnation, limit=n, start=True)


def _completion(task: Any, *refs: Any, **options: Any) -> Completion:
    claim = ClaimRef(task.id, task.epoch)
    return Completion(claim, output=b"1", artifacts=json.dumps(refs).encode(), **options)


async def test_inputs_are_metadata_with_a_url(engine: Engine) -> None:
    made = await put(engine, b"x")
    await engine.submission.submit([_task(made.ref)])

    (item,) = assignments(await _claim(engine))

    found = item.inputs[made.ref]
    assert found["url"] == f"/v1/artifacts/{made.id}/content"
    assert (found["id"], found["name"], found["size"], found["sha256"]) == (
        *(made.id, made.name, 1, made.sha256),
    )


@pytest.mark.parametrize("tasks", [1, 60], ids=["insert", "copy"])
async def test_an_unknown_input_is_refused_and_nothing_is_created(
    engine: Engine, connection: psycopg.Connection, tasks: int
) -> None:
    made = await put(engine, b"x")
    new = [_task(made.ref) for _ in range(tasks - 1)] + [_task(made.ref, "artifact:artifact_x")]

    with pytest.raises(InvalidInputError, match="context_refs: unknown artifact 'artifact:artifact_x'"):
        await engine.submission.submit(new)
    with pytest.raises(InvalidInputError, match="unknown artifact"):
        await engine.submission.submit_dag("DAG", [_task("artifact:artifact_x", key="a")])

    assert count(connection, "task") == count(connection, "artifact_ref") == 0


async def test_a_live_task_keeps_its_inputs(engine: Engine, clock: MovableClock) -> None:
    made = await put(engine, b"x")
    (task,) = await engine.submission.submit([_task(made.ref)])

    with pytest.raises(InvalidTransitionError, match=f"task {task.id} refers to it"):
        await engine.artifacts.delete(made.ref)
    clock.advance(10_000)
    assert not (await engine.artifacts.clean_up(older_than_sec=1, limit=10))["artifacts deleted"]
    await engine.cancel.cancel(task.id, "enough")
    await engine.artifacts.delete(made.ref)

    await engine.revive.retry(task.id, delay_sec=0)
    (item,) = assignments(await _claim(engine))
    assert item.inputs == {made.ref: None}


async def test_artifacts_of_an_output_are_kept_with_the_task(engine: Engine, clock: MovableClock) -> None:
    (task,) = await engine.submission.submit([NewTask("research")])
    (held,) = (await _claim(engine)).tasks
    made = await put(engine, b"x", task_id=task.id)
    unused = await put(engine, b"y", task_id=task.id)

    (moved,) = await engine.work.complete([_completion(held, made.ref, "https://example.org/else")])

    assert moved.status is Status.COMPLETED
    found = await engine.read.task(task.id)
    assert found.output.artifacts == [made.ref, "https://example.org/else"]
    clock.advance(10_000)
    assert (await engine.artifacts.clean_up(older_than_sec=1, limit=10))["artifacts deleted"] == 1
    assert await content(engine, made) == b"x"
    assert unused.id not in await engine.artifacts.find([unused.id])
    # With the task goes the reference.
    assert await engine.maintenance.delete_finished(1, 10) == 1
    assert (await engine.artifacts.clean_up(older_than_sec=1, limit=10))["artifacts deleted"] == 1


async def test_an_unknown_artifact_fails_the_attempt(engine: Engine) -> None:
    """And no other one of the same call; also where a gate would check the output."""
    gated = OutputContract(validation="regex", validation_schema="1")
    await engine.submission.submit(
        [
            NewTask("research", max_attempts=1),
            NewTask("research", max_attempts=1),
            NewTask("research", max_attempts=2, output=gated),
        ]
    )
    first, second, third = (await _claim(engine, 3)).tasks
    made = await put(engine, b"x")

    results = await engine.work.complete(
        [
            _completion(first, made.ref),
            _completion(second, "artifact:artifact_x", made.ref),
            _completion(third, "artifact:artifact_y"),
        ]
    )

    assert [moved.status for moved in results] == [Status.COMPLETED, Status.DEAD_LETTERED, Status.RETRYING]
    found = await engine.read.task(second.id)
    assert found.failure_category == "invalid_output"
    assert "output: unknown artifact 'artifact:artifact_x'" in str(found.failure_reason)
    # The call again has the first answer.
    (again,) = await engine.work.complete([_completion(second, "artifact:artifact_x", made.ref)])
    assert again.status is Status.DEAD_LETTERED


async def test_a_fenced_out_attempt_adds_nothing_to_the_output(
    engine: Engine, clock: MovableClock, connection: psycopg.Connection
) -> None:
    (task,) = await engine.submission.submit([NewTask("research")])
    (late,) = (await _claim(engine)).tasks
    lost = await put(engine, b"of the lost attempt", task_id=task.id)
    await engine.fleet.register(NewAgent(id="ann", type="worker"))  # takes the task away
    clock.advance(100_000)
    await engine.maintenance.promote_due(10)
    (held,) = (await _claim(engine)).tasks
    made = await put(engine, b"of the second attempt", task_id=task.id)

    (refused,) = await engine.work.complete([_completion(late, lost.ref)])
    (moved,) = await engine.work.complete([_completion(held, made.ref)])

    assert refused.error is not None
    assert moved.status is Status.COMPLETED
    assert (await engine.read.task(task.id)).output.artifacts == [made.ref]
    assert connection.execute("SELECT artifact_id FROM lineshaft.artifact_ref").fetchall() == [(made.id,)]
    clock.advance(10_000)
    assert (await engine.artifacts.clean_up(older_than_sec=1, limit=10))["artifacts deleted"] == 1


async def test_a_changed_spec_is_checked_too(engine: Engine) -> None:
    made = await put(engine, b"x")
    (task,) = await engine.submission.submit([NewTask("research", max_attempts=1)])
    (held,) = (await _claim(engine)).tasks
    await engine.work.complete([_completion(held, "artifact:artifact_x")])

    def decision(ref: str) -> ResolutionRequest:
        spec = {"context_refs": [ref]}
        return ResolutionRequest(resolution=Resolution.MODIFY_AND_RETRY, reviewer="ann", spec=spec)

    with pytest.raises(InvalidInputError, match="unknown artifact"):
        await engine.dead_letters.resolve(task.id, decision("artifact:artifact_x"))
    await engine.dead_letters.resolve(task.id, decision(made.ref))
    (item,) = assignments(await _claim(engine))
    assert item.inputs[made.ref]["id"] == made.id
