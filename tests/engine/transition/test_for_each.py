"""A task with for_each becomes one child for each item of a list that another task returns."""

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.rules import Rules
from lineshaft.errors import DependentsRunningError, InvalidTransitionError, StaleClaimError
from lineshaft.model.parts import ForEach
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import AgentInfo, SubmittedDag
from lineshaft.types.assignments import assignments
from lineshaft.types.work import Claim, ClaimedTask
from tests.invariants import check_invariants
from tests.world import World, decoded, ref, spawn_children


def fan_out(**fields: Any) -> list[NewTask]:
    """A list, a task for each of its items, and one that gets all their outputs."""
    for_each = fields.pop("for_each", ForEach("scan.files"))
    return [
        NewTask("scan", key="scan"),
        NewTask("review", key="review", for_each=for_each, **({"spec": {"strict": True}} | fields)),
        NewTask("report", key="report", inputs={"reviews": "review"}),
    ]


class FanOut:
    """That DAG, whose list exists."""

    def __init__(self, world: World, dag: SubmittedDag) -> None:
        self.world = world
        self.dag = dag
        self.scan, self.node, self.report = (dag.tasks[key].id for key in ("scan", "review", "report"))

    @classmethod
    async def of(cls, world: World, items: Sequence[Any] = ("a", "b", "c"), **fields: Any) -> "FanOut":
        made = cls(world, await world.dag(*fan_out(**fields)))
        await made.scanned(items)
        return made

    async def scanned(self, items: Any) -> None:
        task = await self.world.take(await self.world.agent("scanner"), types=["scan"])
        await self.world.complete(task, {"files": items})

    def children(self, *, present: bool = True) -> list[dict[str, Any]]:
        """In the order of the list; those of the list that counts, or all."""
        return self.world.rows(
            "SELECT tasks.*, task.inputs AS parts FROM lineshaft.tasks JOIN lineshaft.task USING (id)"
            " WHERE tasks.parent_id = %s AND (NOT %s OR EXISTS ("
            "   SELECT FROM lineshaft.edge WHERE task_id = tasks.parent_id AND depends_on = tasks.id))"
            " ORDER BY (task.inputs->'index'->>'value')::integer",
            self.node,
            present,
        )

    def statuses(self) -> list[str]:
        return [child["status"] for child in self.children()]


async def test_each_item_becomes_a_child_with_the_item_and_its_position(world: World) -> None:
    """The task is the template; its output is the list of the children's, whatever the order they end in."""
    agent = await world.agent()
    made = await FanOut.of(world, ["a", {"path": "b"}, None])

    claim = await world.claims(agent, 10)
    given = [each.inputs for each in assignments(claim)]
    assert given == [
        {"item": "a", "index": 0},
        {"item": {"path": "b"}, "index": 1},
        {"item": None, "index": 2},
    ]
    assert {(task.type, decoded(task.spec)["strict"], task.parent_id) for task in claim.tasks} == {
        ("review", True, made.node)
    }
    assert [task.title for task in claim.tasks] == ["review [0]", "review [1]", "review [2]"]
    assert world.status(made.node) == "PENDING"
    for task in reversed(claim.tasks):
        assert world.status(made.report) == "PENDING"
        await world.complete(task, task.title[-2])

    assert world.end(made.node)["output"] == ["0", "1", "2"]
    claim = await world.claims(agent, 10)
    (report,) = assignments(claim)
    assert report.inputs == {"reviews": ["0", "1", "2"]}
    await world.complete(report.task)
    assert world.dag_row(made.dag.id)["status"] == "completed"
    assert world.dag_row(made.dag.id)["total"] == 6


async def test_an_empty_list_completes_its_task_with_an_empty_list(world: World) -> None:
    made = await FanOut.of(world, [])

    assert (world.status(made.node), world.end(made.node)["output"]) == ("COMPLETED", [])
    assert world.status(made.report) == "READY"


@pytest.mark.parametrize(
    ("for_each", "output", "error"),
    [
        (ForEach("scan.files"), {"files": "a"}, "expected a list, but it is 'a'"),
        (
            ForEach("scan.files"),
            {"found": [], "names": 1},
            "there is no 'files' in the output: it is an object with 'found', 'names'",
        ),
        (ForEach("scan"), None, "expected a list, but it is None"),
        (ForEach("scan.files.0", max=2), {"files": [[1, 2, 3]]}, "the list has 3 items, but max is 2"),
        (ForEach("scan.files.3"), {"files": [1]}, "there is no '3' in 'files': it is a list of 1 items"),
    ],
)
async def test_a_list_that_is_missing_or_too_long_fails_the_task(
    world: World, for_each: ForEach, output: Any, error: str
) -> None:
    """Nothing would change with another try: the task is a dead letter at once, and says why."""
    dag = await world.dag(*fan_out(for_each=for_each))
    scan, node = dag.tasks["scan"].id, dag.tasks["review"].id

    await world.complete(await world.take(), output)

    end = world.end(node)
    assert (world.status(scan), end["status"], end["category"]) == (
        "COMPLETED",
        "DEAD_LETTERED",
        "invalid_input",
    )
    assert end["reason"] == f"for_each over {for_each.over!r}: {error}."
    assert world.dag_row(dag.id)["status"] == "failed"
    assert world.kinds(node)[-1] == "task.dead_lettered"


async def test_a_list_in_the_artifact_store_fails_its_task(world: World) -> None:
    """The transaction that expands it can't read the store."""
    dag = await world.dag(*fan_out(for_each=ForEach("scan")))
    world.connection.execute(
        "INSERT INTO lineshaft.content (sha256, size, stored, used_at) VALUES ('x', 2000000, true, now())"
    )
    world.connection.execute(
        "INSERT INTO lineshaft.artifact (id, created_at, used_at, size, sha256, name, content_type)"
        " VALUES ('a1', now(), now(), 2000000, 'x', 'x', 'x')"
    )

    await world.complete(await world.take(), {"data": None, "data_ref": "artifact:a1", "size": 2_000_000})

    assert world.end(dag.tasks["review"].id)["reason"] == (
        f"for_each over 'scan': the output of task {dag.tasks['scan'].id} is larger than 1048576 bytes, so "
        "it is in the artifact store (artifact:a1). Return a smaller one, for example names instead of "
        "contents."
    )


async def test_only_so_many_children_run_at_once(world: World) -> None:
    """Each waits for the one `concurrency` positions before it: a slow one holds up its own chain only."""
    agent = await world.agent()
    made = await FanOut.of(world, list(range(7)), for_each=ForEach("scan.files", concurrency=3))

    first = await world.claim(agent, 10)
    assert [task.title for task in first] == ["review [0]", "review [1]", "review [2]"]
    assert made.statuses() == ["RUNNING"] * 3 + ["PENDING"] * 4
    slow, *others = first
    for task in others:
        await world.complete(task, task.title)
    second = await world.claim(agent, 10)
    assert [task.title for task in second] == ["review [4]", "review [5]"]
    for task in second:
        await world.complete(task, task.title)
    assert await world.claim(agent, 10) == []
    await world.complete(slow, slow.title)
    for position in (3, 6):
        (task,) = await world.claim(agent, 10)
        assert task.title == f"review [{position}]"
        await world.complete(task, task.title)

    assert world.end(made.node)["output"] == [f"review [{n}]" for n in range(7)]


async def test_a_child_that_is_a_dead_letter_makes_one_of_its_task(world: World) -> None:
    """The others are cancelled, as in a batch; a retry of the task runs only what hasn't completed."""
    agent = await world.agent()
    made = await FanOut.of(world, list(range(4)), for_each=ForEach("scan.files", concurrency=2))
    first, second = await world.claim(agent, 10)
    await world.complete(first, "first")

    assert await world.fail(second, "no", category="auth_failure") is Status.DEAD_LETTERED

    assert made.statuses() == ["COMPLETED", "DEAD_LETTERED", "CANCELLED", "CANCELLED"]
    end = world.end(made.node)
    assert (end["status"], end["category"], end["reason"]) == (
        "DEAD_LETTERED",
        "dependency",
        f"child {second.id} failed",
    )
    assert world.dag_row(made.dag.id)["status"] == "failed"

    assert await world.engine.revive.retry(made.node) is Status.PENDING
    assert made.statuses() == ["COMPLETED", "READY", "READY", "PENDING"]
    assert await world.finish_all() == 4
    assert world.end(made.node)["output"] == ["first", "done", "done", "done"]
    assert world.dag_row(made.dag.id)["status"] == "completed"


async def test_a_child_that_is_retried_before_its_task_is_not_run_twice(world: World) -> None:
    agent = await world.agent()
    made = await FanOut.of(world, list(range(2)))
    first, second = await world.claim(agent, 10)
    await world.fail(second, "no", category="auth_failure")
    await world.engine.revive.retry(second.id)
    await world.complete(await world.take(agent), "second")

    assert world.status(made.node) == "DEAD_LETTERED"
    await world.engine.revive.retry(made.node)
    (again,) = await world.claim(agent, 10)
    assert again.id == first.id
    await world.complete(again, "first")
    assert world.end(made.node)["output"] == ["first", "second"]


async def test_a_cancelled_task_takes_its_children_along(world: World) -> None:
    agent = await world.agent()
    made = await FanOut.of(world, list(range(3)), for_each=ForEach("scan.files", concurrency=2))
    (held,) = await world.claim(agent, 1)

    await world.engine.cancel.cancel(made.node, "enough")

    assert made.statuses() == ["CANCELLED"] * 3
    assert await world.heartbeat(agent.id, claims=[ref(held)]) == {held.id: "cancel"}
    assert world.dag_row(made.dag.id)["status"] == "completed"


async def test_a_list_that_failed_is_read_again_when_its_task_is_retried(world: World) -> None:
    """Also twice: what is wrong is said again."""
    agent = await world.agent()
    made = await FanOut.of(world, "no list")
    assert await world.engine.revive.retry(made.node) is Status.DEAD_LETTERED
    assert (
        world.end(made.node)["reason"] == "for_each over 'scan.files': expected a list, but it is 'no list'."
    )

    await world.engine.rerun.rerun(made.scan, downstream=True)
    assert world.status(made.node) == "PENDING"
    await made.scanned(["a"])

    assert [task.title for task in await world.claim(agent, 10)] == ["review [0]"]


async def test_a_list_that_is_made_again_replaces_the_children(world: World) -> None:
    """Those of the old list stay in the history, and count no longer."""
    made = await FanOut.of(world, list(range(3)))
    await world.finish_all("old")
    assert world.dag_row(made.dag.id)["status"] == "completed"

    await world.engine.rerun.rerun(made.scan, downstream=True)

    assert world.statuses([made.node, made.report]) == ["PENDING", "PENDING"]
    assert made.children() == []
    await made.scanned(["x", "y"])
    assert made.statuses() == ["READY", "READY"]
    assert await world.finish_all("new") == 3
    assert world.end(made.node)["output"] == ["new", "new"]
    assert len(made.children(present=False)) == 5
    assert world.dag_row(made.dag.id)["status"] == "completed"
    assert world.dag_kinds(made.dag.id)[-1] == "dag.completed"


async def test_a_list_is_not_made_again_under_children_that_run(world: World) -> None:
    """Unless the caller wants it: then they are cancelled, and the task waits for the new list."""
    agent = await world.agent()
    made = await FanOut.of(world, list(range(3)), for_each=ForEach("scan.files", concurrency=2))
    held, other = await world.claim(agent, 10)
    await world.complete(other, "old")

    with pytest.raises(DependentsRunningError, match=made.node):
        await world.engine.rerun.rerun(made.scan)
    assert made.statuses() == ["RUNNING", "COMPLETED", "PENDING"]
    await world.engine.rerun.rerun(made.scan, cancel_running=True)

    old = made.children(present=False)
    assert [child["status"] for child in old] == ["CANCELLED", "COMPLETED", "CANCELLED"]
    assert world.statuses([made.scan, made.node, made.report]) == ["READY", "PENDING", "PENDING"]
    assert await world.heartbeat(agent.id, claims=[ref(held)]) == {held.id: "cancel"}
    await made.scanned(["x"])
    assert await world.finish_all("new") == 2
    assert world.end(made.node)["output"] == ["new"]


async def test_a_task_whose_list_is_not_there_yet_just_waits_again(world: World) -> None:
    """It has begun with nothing, so nothing is in the way of a rerun."""
    agent = await world.agent()
    dag = await world.dag(
        NewTask("scan", key="scan"),
        NewTask("slow", key="slow"),
        NewTask("review", key="review", for_each=ForEach("scan"), depends_on=["slow"]),
    )
    (scan,) = await world.claim(agent, types=["scan"])
    await world.complete(scan, ["old"])
    await world.engine.rerun.rerun(scan.id)
    assert world.live(dag.tasks["review"].id)["blocked"] == 2
    (scan,) = await world.claim(agent, types=["scan"])
    await world.complete(scan, ["x", "y"])
    await world.finish_all()

    assert world.end(dag.tasks["review"].id)["output"] == ["done", "done"]


async def test_a_task_that_is_run_again_runs_its_children_again(world: World) -> None:
    made = await FanOut.of(world, list(range(3)), for_each=ForEach("scan.files", concurrency=1))
    await world.finish_all("old")

    await world.engine.rerun.rerun(made.node)

    assert made.statuses() == ["READY", "PENDING", "PENDING"]
    assert await world.finish_all("new") == 3
    assert world.end(made.node)["output"] == ["new", "new", "new"]
    assert len(made.children(present=False)) == 3


async def test_one_child_is_run_again_without_the_others(world: World) -> None:
    """The next one in its chain waited for its end only, and needs nothing of it."""
    made = await FanOut.of(world, list(range(3)), for_each=ForEach("scan.files", concurrency=1))
    await world.finish_all("old")
    first = made.children()[0]["id"]

    await world.engine.rerun.rerun(first, downstream=True)

    assert made.statuses() == ["READY", "COMPLETED", "COMPLETED"]
    assert world.statuses([made.node, made.report]) == ["PENDING", "PENDING"]
    assert await world.finish_all("new") == 2
    assert world.end(made.node)["output"] == ["new", "old", "old"]


async def test_a_dead_letter_of_an_old_list_doesn_t_touch_the_new_one(world: World) -> None:
    """Nor does a retry of the task bring it back."""
    agent = await world.agent()
    made = await FanOut.of(world, list(range(2)))
    first, second = await world.claim(agent, 10)
    await world.fail(second, "no", category="auth_failure")
    await world.engine.rerun.rerun(made.scan, downstream=True)
    await made.scanned(["x"])
    (new,) = made.children()
    held = await world.take(agent)
    assert held.id == new["id"]

    # A person retries the old one, and it fails again.
    await world.engine.revive.retry(second.id)
    await world.kill(agent, second.id)
    assert (world.status(made.node), world.status(new["id"])) == ("PENDING", "RUNNING")
    await world.fail(held, "no", category="auth_failure")
    await world.engine.revive.retry(made.node)
    assert world.statuses([first.id, second.id, new["id"]]) == ["CANCELLED", "DEAD_LETTERED", "READY"]

    assert await world.finish_all() == 2
    assert world.end(made.node)["output"] == ["done"]
    assert world.dag_row(made.dag.id)["status"] == "completed"


async def test_children_come_after_what_their_task_waited_for(world: World) -> None:
    """In what is read of the DAG; those of an old list are neither a beginning nor an end."""
    made = await FanOut.of(world, ["a", "b"])
    await world.engine.rerun.rerun(made.scan, downstream=True, cancel_running=True)
    await made.scanned(["x"])
    (child,) = made.children()

    dag = await world.engine.read.dag(made.dag.id)

    assert (dag.roots, dag.leaves) == ([made.scan], [made.report])
    assert dag.critical_path == [child["id"], made.node, made.report]
    assert len(dag.tasks) == 6
    assert dag.counts == {"READY": 1, "PENDING": 2, "COMPLETED": 1, "CANCELLED": 2}
    read = await world.engine.read.dag_tasks(made.dag.id, opened=[], most=100)
    assert [task.id for task in read.tasks] == [made.scan, made.node, made.report]
    assert str(read.lists[made.node]) == "1 READY"


async def test_a_list_that_another_call_has_made_is_expanded_by_the_promoter(world: World) -> None:
    """A task with a known key stands for the existing task, which may have completed."""
    scan = await world.one("scan", idempotency_key="scan of monday")
    await world.complete(await world.take(), ["a", "b"])

    dag = await world.dag(
        NewTask("scan", key="scan", idempotency_key="scan of monday"),
        NewTask("review", key="review", for_each=ForEach("scan")),
    )

    assert dag.tasks["scan"].id == scan
    assert world.status(dag.tasks["review"].id) == "PENDING"
    assert await world.finish_all() == 2
    assert world.end(dag.tasks["review"].id)["output"] == ["done", "done"]


async def test_a_task_that_spawns_may_spawn_a_list(world: World) -> None:
    agent = await world.agent()
    await world.one("parent")
    parent = await world.take(agent)

    await spawn_children(
        world.engine,
        ref(parent),
        [NewTask("scan", key="scan"), NewTask("review", for_each=ForEach("scan"))],
        wait=True,
    )
    await world.complete(await world.take(agent), ["a", "b"])
    reviews = await world.claim(agent, 10)
    assert [task.type for task in reviews] == ["review", "review"]
    for task in reviews:
        await world.complete(task, task.title)

    again = await world.take(agent)
    assert (again.id, again.resume) == (parent.id, True)


async def test_a_list_counts_as_tasks_that_are_spawned(world: World, limited: World) -> None:
    """Its task fails if the DAG would have more of them than the installation allows."""
    made = await FanOut.of(limited, list(range(6)))

    end = world.end(made.node)
    assert end["status"] == "DEAD_LETTERED"
    assert end["reason"] == (
        f"for_each over 'scan.files': with the 6 items of the list, DAG {made.dag.id} would have more than 5 "
        "spawned tasks. Return fewer items, or raise LINESHAFT_MAX_SPAWNED_TASKS, and retry this task."
    )
    assert world.dag_row(made.dag.id)["spawned"] == 0


@pytest.fixture
async def limited(world: World) -> AsyncIterator[World]:
    async with Engine(
        world.engine.database.dsn, clock=world.clock, rules=Rules(max_spawned_tasks=5)
    ) as engine:
        yield replace(world, engine=engine)


async def test_children_have_the_limits_of_their_task_and_use_its_dag_s_money(world: World) -> None:
    """Together they cost at most max_cost_usd × items; and the DAG's ceiling holds for them."""
    agent = await world.agent(budget_usd=None)
    dag = await world.dag(*fan_out(max_cost_usd=2, max_total_cost_usd=3, max_attempts=2), ceiling=5)
    await world.complete(await world.take(agent, types=["scan"]), {"files": ["a", "b", "c"]})

    held = await world.claim(agent, 10)

    assert len(held) == 2, "a third would exceed the DAG's ceiling"
    assert {(str(task.max_cost_usd), task.max_attempts) for task in held} == {("2.000000", 2)}
    assert world.dag_row(dag.id)["reserved_usd"] == 4
    await world.complete(held[0], spent="0.5")
    assert len(await world.claim(agent, 10)) == 1


async def test_children_take_a_lock_one_by_one(world: World) -> None:
    """Of a batch the batch holds the lock, because its children never run together; here they might."""
    agent = await world.agent()
    await FanOut.of(world, list(range(3)), lock_key="doc:1")

    for position in range(3):
        (task,) = await world.claim(agent, 10)
        assert task.title == f"review [{position}]"
        await world.complete(task)


async def test_a_default_of_the_type_reaches_the_children(world: World) -> None:
    """Also one that was set while the task waited for its list."""
    agent = await world.agent()
    dag = await world.dag(*fan_out())
    await world.engine.task_types.set("review", {"max_cost_usd": 3})
    await world.complete(await world.take(agent, types=["scan"]), {"files": ["a"]})

    (task,) = await world.claim(agent, 10)

    assert task.max_cost_usd == 3
    assert world.task(dag.tasks["review"].id)["max_cost_usd"] == 3


class Story:
    """Random acts of agents and people on a list."""

    ACTS = ("claim", "claim", "finish", "finish", "fail", "cancel", "retry", "retry", "rerun")

    def __init__(self, world: World, agent: AgentInfo, random: Random) -> None:
        self.world = world
        self.agent = agent
        self.random = random
        self.held: list[ClaimedTask] = []
        self.lists = 0

    async def finish(self, task: ClaimedTask) -> None:
        """Items name their list; the output of a child is its item."""
        if task.type == "scan":
            self.lists += 1
            items = [f"{self.lists}.{n}" for n in range(self.random.randrange(5))]
            await self.world.complete(task, {"files": items})
        else:
            (given,) = assignments(Claim([task]))
            await self.world.complete(task, given.inputs.get("item"))

    async def act(self) -> None:
        engine, random = self.world.engine, self.random
        task_id = random.choice(self.world.rows("SELECT id FROM lineshaft.task ORDER BY id"))["id"]
        self.held = [task for task in self.held if self.is_held(task)]
        match random.choice(self.ACTS):
            case "claim":
                self.held += await self.world.claim(self.agent, random.randrange(1, 4))
            case "finish" if self.held:
                await self.finish(self.any_held())
            case "fail" if self.held:
                await self.world.fail(self.any_held(), "no", category="auth_failure")
            case "cancel":
                await engine.cancel.cancel(task_id, "no")
            case "retry":
                await engine.revive.retry(task_id)
            case "rerun":
                down, running = random.choice([False, True]), random.choice([False, True])
                await engine.rerun.rerun(task_id, downstream=down, cancel_running=running)

    def is_held(self, task: ClaimedTask) -> bool:
        query = "SELECT FROM lineshaft.task_live WHERE id = %s AND epoch = %s AND status = 'RUNNING'"
        return bool(self.world.rows(query, task.id, task.epoch))

    def any_held(self) -> ClaimedTask:
        return self.held.pop(self.random.randrange(len(self.held)))

    async def end(self, task_ids: Sequence[str]) -> None:
        """Retry what has failed, and finish everything."""
        for _ in range(20):
            for task in [*self.held, *await self.world.claim(self.agent, 100)]:
                with suppress(StaleClaimError):
                    await self.finish(task)
            self.held = []
            for name in task_ids:
                if self.world.status(name) in {"DEAD_LETTERED", "CANCELLED"}:
                    await self.world.engine.revive.retry(name)


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_the_list_can_be_finished(world: World, seed: int) -> None:
    """In the end each item of the last list has one output, in order."""
    random = Random(seed)
    for_each = ForEach("scan.files", concurrency=random.choice([None, 1, 2]))
    dag = await world.dag(*fan_out(for_each=for_each, max_attempts=1))
    story = Story(world, await world.agent(), random)

    for _ in range(40):
        with suppress(InvalidTransitionError, DependentsRunningError):
            await story.act()
        check_invariants(world.connection)

    ids = [dag.tasks[key].id for key in ("scan", "review", "report")]
    await story.end(ids)
    assert world.statuses(ids[:2]) == ["COMPLETED", "COMPLETED"]
    output = world.end(ids[1])["output"]
    assert [item.partition(".")[2] for item in output] == [str(n) for n in range(len(output))]
    assert len({item.partition(".")[0] for item in output}) <= 1
