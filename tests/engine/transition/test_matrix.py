"""Every state against every operation: a task moves where model/states.py has a row for it, only there."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from lineshaft.errors import LineshaftError
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.states import ENDED, LIVE, TRANSITIONS, Status, TaskOperation
from lineshaft.model.tasks import NewTask, OutputContract
from lineshaft.types.waits import NewSignal, NewSuspension
from lineshaft.types.work import ClaimRef, Completion, Failure, Moved
from tests.world import World, only, ref, release_claims, spawn_children

VISIBLE = sorted(LIVE | ENDED)
TABLE = {(row.source, row.operation): row for row in TRANSITIONS}


@dataclass(frozen=True)
class Subject:
    """A task in a known state, and the claim that its last holder has."""

    world: World
    id: str
    type: str
    status: Status
    agent_id: str

    @property
    def claim(self) -> ClaimRef:
        return ClaimRef(self.id, self.world.task(self.id)["epoch"])


async def make(world: World, status: Status) -> Subject:
    """A task that came into this state by the engine's own hand."""
    agent = await world.agent()
    type_ = status.value
    special: dict[Status, dict[str, Any]] = {
        Status.PENDING: {"run_at": world.clock.now() + timedelta(hours=2)},
        Status.VALIDATING: {"output": OutputContract(validation="human")},
    }
    task_id = await world.one(type_, **special.get(status, {}))
    if status in {Status.CLAIMED, Status.RUNNING, Status.VALIDATING, Status.RETRYING} or status in ENDED:
        task = await world.take(agent, types=[type_], start=status is not Status.CLAIMED)
        match status:
            case Status.VALIDATING | Status.COMPLETED:
                await world.complete(task, "output")
            case Status.RETRYING:
                await world.fail(task)
            case Status.DEAD_LETTERED:
                await world.fail(task, category="auth_failure")
            case Status.CANCELLED:
                await world.engine.cancel.cancel(task_id, "no")
            case _:
                pass
    assert world.status(task_id) == status
    return Subject(world, task_id, type_, status, agent.id)


async def start(task: Subject) -> Status:
    return only(await task.world.engine.work.start([task.claim])).unwrap()


async def complete(task: Subject) -> Status:
    return only(await task.world.engine.work.complete([Completion(task.claim, b'"output"')])).unwrap()


async def fail(task: Subject) -> Status:
    return only(await task.world.engine.work.fail([Failure(task.claim, "it broke")])).unwrap()


async def fail_for_good(task: Subject) -> Status:
    failure = Failure(task.claim, "no access", "auth_failure")
    return only(await task.world.engine.work.fail([failure])).unwrap()


async def rate_limit(task: Subject) -> Status:
    return only(await task.world.engine.work.fail([Failure(task.claim, "HTTP 429")])).unwrap()


async def release(task: Subject) -> Status:
    return only(await release_claims(task.world.engine, [task.claim])).unwrap()


async def snooze(task: Subject) -> Status:
    return only(await release_claims(task.world.engine, [task.claim], delay_sec=60)).unwrap()


async def suspend(task: Subject) -> Status:
    new = NewSuspension(task.claim, "nap", timeout_sec=60)
    (result,) = await task.world.engine.work.suspend([new])
    assert result.unwrap() is None
    return Status.PENDING


async def signal(task: Subject) -> Status:
    await task.world.engine.waits.signal(task.id, NewSignal("go"))
    return Status(task.world.status(task.id))


async def wait_for_children(task: Subject) -> Status:
    await spawn_children(task.world.engine, task.claim, [NewTask("child")], wait=True)
    return Status(task.world.status(task.id))


async def spawn(task: Subject) -> Status:
    await spawn_children(task.world.engine, task.claim, [NewTask("child")])
    return Status(task.world.status(task.id))


async def cancel(task: Subject) -> Status:
    await task.world.engine.cancel.cancel(task.id, "no")
    return Status.CANCELLED


async def retry(task: Subject) -> Status:
    return await task.world.engine.revive.retry(task.id)


async def rerun(task: Subject) -> Status:
    return await task.world.engine.rerun.rerun(task.id)


async def give_up(task: Subject) -> Status:
    await task.world.engine.dead_letters.resolve(
        task.id, ResolutionRequest(resolution="cancel", reviewer="ann")
    )
    return Status.CANCELLED


async def resolve_retry(task: Subject) -> Status:
    found = await task.world.engine.dead_letters.resolve(
        task.id, ResolutionRequest(resolution="retry", reviewer="ann")
    )
    return found.status


async def add_dependency(task: Subject) -> Status:
    upstream = task.world.row("SELECT id FROM lineshaft.task WHERE type = 'upstream'")
    return await task.world.engine.dependencies.add(task.id, [upstream["id"]])


async def claim(task: Subject) -> Status:
    found = await task.world.claim(await task.world.agent(), types=[task.type], start=False)
    return Status(found[0].status) if found else task.status


async def claim_and_start(task: Subject) -> Status:
    found = await task.world.claim(await task.world.agent(), types=[task.type])
    return Status(found[0].status) if found else task.status


async def heartbeat(task: Subject) -> Status:
    answer = await task.world.heartbeat(task.agent_id, 1, [task.claim])
    # While a person reviews its output, no agent holds the task.
    held = task.status in {Status.CLAIMED, Status.RUNNING}
    gone = "cancel" if task.status is Status.CANCELLED else "lost"
    assert answer == {task.id: "continue" if held else gone}
    return task.status


Act = Callable[[Subject], Awaitable[Status]]

#: What each call of the engine carries out: the rows of the table that it goes through, one of the ways.
CALLS: dict[Act, tuple[tuple[TaskOperation, ...], ...]] = {
    start: ((TaskOperation.START,),),
    complete: ((TaskOperation.SUBMIT_OUTPUT, TaskOperation.ACCEPT),),
    fail: ((TaskOperation.FAIL, TaskOperation.SCHEDULE_RETRY),),
    fail_for_good: ((TaskOperation.FAIL, TaskOperation.DEAD_LETTER),),
    rate_limit: ((TaskOperation.RATE_LIMIT,),),
    release: ((TaskOperation.RELEASE,),),
    snooze: ((TaskOperation.SNOOZE,),),
    suspend: ((TaskOperation.SUSPEND,),),
    wait_for_children: ((TaskOperation.WAIT_CHILDREN,),),
    cancel: ((TaskOperation.CANCEL,),),
    retry: ((TaskOperation.REVIVE, TaskOperation.UNBLOCK), (TaskOperation.PROMOTE,)),
    rerun: ((TaskOperation.RERUN, TaskOperation.UNBLOCK),),
    give_up: ((TaskOperation.CANCEL,),),
    resolve_retry: ((TaskOperation.REVIVE, TaskOperation.UNBLOCK),),
    add_dependency: ((TaskOperation.BLOCK,),),
    claim: ((TaskOperation.CLAIM,),),
    claim_and_start: ((TaskOperation.CLAIM, TaskOperation.START),),
    # These move nothing themselves.
    spawn: (),
    signal: (),
    heartbeat: (),
}

#: Rows of another call: only the dead-letter desk cancels what is dead (R-132, R-174), and only that.
ELSEWHERE = {
    (cancel, Status.DEAD_LETTERED),
    # The output of this test waits for a person, who alone decides; an agent that runs its own gate may fail.
    *((call, Status.VALIDATING) for call in (fail, fail_for_good, rate_limit)),
    *((give_up, status) for status in Status if status is not Status.DEAD_LETTERED),
    *((resolve_retry, status) for status in Status if status is not Status.DEAD_LETTERED),
}

#: Allowed without a move: one more thing to wait for, and children of a task that goes on.
STAYS = {
    (add_dependency, Status.PENDING),
    (spawn, Status.RUNNING),
    # It is kept until the task waits for it.
    *((signal, status) for status in LIVE),
}

#: The call that led here, again: answered as the first time (R-100, R-174), and nothing changes. READY and
#: PENDING tasks of this test never had a claim; tests/races/test_zombie_races.py repeats what leads there.
REPEATS = {
    (start, Status.RUNNING),
    (complete, Status.VALIDATING),
    (complete, Status.COMPLETED),
    *(
        (call, end)
        for call in (fail, fail_for_good, rate_limit)
        for end in (Status.RETRYING, Status.DEAD_LETTERED)
    ),
    (cancel, Status.CANCELLED),
}


def path(act: Act, source: Status) -> tuple[Status, list[str]] | None:
    """Where the table says that a call leads from here, and the events on the way."""
    if (act, source) in ELSEWHERE:
        return None
    for operations in CALLS[act]:
        status, events = source, []
        for operation in operations:
            row = TABLE.get((status, operation))
            if row is None:
                break
            status = row.target
            events += [row.event] if row.event else []
        else:
            return status, events
    return None


def is_within(part: list[str], whole: list[str]) -> bool:
    rest = iter(whole)
    return all(item in rest for item in part)


@pytest.mark.parametrize("act", CALLS, ids=lambda act: act.__name__)
async def test_the_engine_keeps_to_the_table(world: World, act: Act) -> None:
    """R-030..R-040, R-122, R-174, F-22, F-49, R-244: moved where the table has it, refused elsewhere."""
    await world.one("upstream", run_at=world.clock.now() + timedelta(days=1))
    subjects = [await make(world, status) for status in VISIBLE]
    for task in subjects:
        known = len(world.kinds(task.id))
        before = world.everything()
        expected = path(act, task.status)

        try:
            answer: Status | None = await act(task)
        except LineshaftError:
            answer = None

        status = world.status(task.id)
        if expected is not None:
            target, events = expected
            assert (task.status, answer, status) == (task.status, target, target)
            assert is_within(events, world.kinds(task.id)[known:])
        elif (act, task.status) in STAYS:
            assert (task.status, answer, status) == (task.status, task.status, task.status)
            assert world.everything() != before
        else:
            quiet = (act, task.status) in REPEATS or act in {claim, claim_and_start, heartbeat}
            assert (task.status, answer) == (task.status, task.status if quiet else None)
            assert world.everything() == before


async def test_every_row_of_the_table_has_a_call(world: World) -> None:
    """Every transition of the table is carried out; those that the matrix doesn't call are tested by name."""
    called = {operation for ways in CALLS.values() for way in ways for operation in way}
    elsewhere = {
        TaskOperation.JOIN_DAG,  # every submission
        TaskOperation.AWAIT_RERUN,  # test_rerun.py
        TaskOperation.REPLACE,  # submit/test_conflicts.py, in each state
        TaskOperation.REJECT,  # the gates
        TaskOperation.EXPIRE,  # the reaper
        TaskOperation.FINISH_BATCH,  # below
        TaskOperation.FAIL_BATCH,  # below
    }
    assert called | elsewhere == set(TaskOperation)
    agent = await world.agent()
    done, dead = await world.submit(*(NewTask("batch", children=[NewTask(f"{n}")]) for n in (1, 2)))

    await world.complete(await world.take(agent, types=["1"]))
    await world.fail(await world.take(agent, types=["2"]), category="auth_failure")

    for task_id, operation in ((done, TaskOperation.FINISH_BATCH), (dead, TaskOperation.FAIL_BATCH)):
        row = TABLE[Status.PENDING, operation]
        assert (world.status(task_id), world.kinds(task_id)[-1]) == (row.target, row.event)


async def test_answers_are_one_or_the_other(world: World) -> None:
    """A moved task has a status, a refused one an error."""
    agent = await world.agent()
    await world.one()
    task = await world.take(agent)
    answers: list[Moved] = [
        *await world.engine.work.complete([world.completion(task)]),
        *await release_claims(world.engine, [ref(task)]),
    ]
    assert [(answer.status is None, answer.error is None) for answer in answers] == [
        (False, True),
        (True, False),
    ]
