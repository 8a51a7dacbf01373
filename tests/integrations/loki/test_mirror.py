"""A folder and a queue alike, in both directions."""

import json
import logging
import shutil
from datetime import timedelta
from typing import Any

import pytest

from lineshaft.errors import UnavailableError
from lineshaft.integrations.loki.claimer import Claimer
from lineshaft.integrations.loki.holdings import FOLDER_AGENT
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from tests.integrations.loki.conftest import Shared
from tests.integrations.loki.readers import by_id, places, put, queue

REPORT = {"why": "asked", "what": "done", "tradeoffs": "none"}
RESULT = {"status": "success", "output": {"n": 1}, "decisionReport": REPORT}


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "type": "x", "payload": {"n": name}, "claimedBy": None, "priority": 5} | fields


def free(shared: Shared) -> list[str]:
    return [found["id"] for found in queue(shared.root, "pending") if found["claimedBy"] is None]


async def test_every_task_is_in_the_file_of_its_state(shared: Shared) -> None:
    """U4, R-249."""
    world = shared.world
    agent = await world.agent("a1")
    held = await world.one(preset="loki")
    (task,) = await world.claim(agent)
    gone = await world.one()
    await world.engine.cancel.cancel(gone, "not needed")
    dead = await world.one()
    await world.kill(agent, dead)
    done = await world.one()
    await world.complete(await world.take(agent), {"a": 1})
    upstream = await world.one(run_at=world.clock.now() + timedelta(hours=1))
    waits = await world.one(depends_on=[upstream])

    await shared.round(shared.mirror(offer=0))

    assert places(shared.root) == {
        held: ["in-progress"],
        gone: ["cancelled"],
        dead: ["dead-letter"],
        done: ["completed"],
        upstream: ["pending"],
        waits: ["pending"],
    }
    assert task.id == held
    assert free(shared) == []
    assert by_id(shared.root, "in-progress")[held]["claimedBy"] == "a1"
    assert by_id(shared.root, "completed")[done]["result"]["output"] == {"a": 1}
    assert by_id(shared.root, "cancelled")[gone]["cancelReason"] == "not needed"
    assert by_id(shared.root, "pending")[waits]["dependencies"] == [upstream]
    assert json.loads((shared.root / "queue/current-task.json").read_text())["id"] == held


async def test_changes_are_shown(shared: Shared) -> None:
    world = shared.world
    mirror = shared.mirror(offer=0)
    await shared.round()
    task_id = await world.one(preset="loki", max_attempts=2)
    await shared.round()
    assert places(shared.root) == {task_id: ["pending"]}
    task = await world.take(await world.agent("a1"))
    await shared.round()
    assert places(shared.root) == {task_id: ["in-progress"]}
    await world.fail(task, "it broke")
    await shared.round()
    found = by_id(shared.root, "pending")[task_id]
    assert (found["retries"], found["lastError"], found["backoffSeconds"]) == (1, "it broke", 60)
    assert found["availableAt"] is not None
    assert mirror.is_leading


async def test_offers_are_claimed_before_they_are_shown(shared: Shared) -> None:
    world = shared.world
    tasks = [await world.one(priority=number) for number in range(5)]

    await shared.round(shared.mirror(offer=3))

    assert free(shared) == tasks[:3]
    assert [found["claimedBy"] for found in queue(shared.root, "pending")][3:] == ["lineshaft", "lineshaft"]
    assert world.statuses(tasks) == ["CLAIMED"] * 3 + ["READY"] * 2
    agent = await world.agent()
    assert {task.id for task in await world.claim(agent, 10)} == set(tasks[3:])


async def test_a_record_that_is_imported_is_not_claimed_by_agents_while_the_file_shows_it_as_free(
    shared: Shared,
) -> None:
    """A program could take it from the file at the same time, and it would run twice."""
    world = shared.world
    mirror = shared.mirror(offer=2)
    await shared.round()
    agent = await world.agent()
    names = [f"t{number}" for number in range(5)]
    put(shared.root, "pending", [record(name) for name in names])

    await mirror._intake.take_over(first=False)
    assert world.statuses(names) == ["CLAIMED"] * 5
    assert await world.claim(agent, 10) == []

    await shared.round()
    assert len(free(shared)) == 2
    assert {task.id for task in await world.claim(agent, 10)} == {*names} - {*free(shared)}


async def test_a_claim_in_the_file_is_a_claim_of_an_agent_of_that_name(shared: Shared) -> None:
    """R-058: the agent is registered on the fly."""
    world = shared.world
    task_id = await world.one(preset="loki")
    await shared.round(shared.mirror())

    shared.claim(task_id, "shell-1")
    await shared.round()

    task = (await world.engine.read.tasks_by_id([task_id]))[0]
    assert (task.status, task.claim.agent_id, task.attempts) == (Status.RUNNING, "shell-1", 0)
    assert places(shared.root) == {task_id: ["in-progress"]}
    assert by_id(shared.root, "in-progress")[task_id]["claimedBy"] == "shell-1"


async def test_a_result_in_the_file_completes_the_task(shared: Shared) -> None:
    world = shared.world
    task_id = await world.one(preset="loki")
    after = await world.one(depends_on=[task_id])
    await shared.round(shared.mirror())
    claimer = Claimer(shared.root)
    assert (claimer.claim("shell-1") or {})["id"] == task_id
    claimer.complete(task_id, RESULT)

    await shared.round()

    assert world.status(task_id) == "COMPLETED"
    done = by_id(shared.root, "completed")[task_id]
    assert (done["result"], done["claimedBy"]) == (RESULT, None)
    await shared.round()
    assert free(shared) == [after]


async def test_a_completion_without_a_report_is_incomplete(shared: Shared) -> None:
    """R-093."""
    world = shared.world
    task_id = await world.one(preset="loki")
    await shared.round(shared.mirror())
    shared.claim(task_id)
    await shared.round()

    shared.move(task_id, "in-progress", "completed", result={"status": "success", "output": 1})
    await shared.round()

    assert world.status(task_id) == "RETRYING"
    assert by_id(shared.root, "pending")[task_id]["lastError"]["status"] == "incomplete"


async def test_a_failure_in_the_file_fails_the_attempt(shared: Shared) -> None:
    world = shared.world
    task_id = await world.one(preset="loki", max_attempts=2)
    await shared.round(shared.mirror())
    claimer = Claimer(shared.root)
    for _ in range(2):
        assert (claimer.claim("shell-1") or {})["id"] == task_id
        assert claimer.fail(task_id, "it broke").record["claimedBy"] in {"lineshaft", None}
        await shared.round()
        world.clock.advance(61)
        await world.engine.maintenance.promote_for_claim(10)
        await shared.round()

    assert world.status(task_id) == "DEAD_LETTERED"
    assert [attempt["error"] for attempt in world.attempts(task_id) if attempt["outcome"] == "failed"] == [
        "it broke"
    ] * 2
    assert places(shared.root) == {task_id: ["dead-letter"]}
    needed = json.loads((shared.root / "signals/HUMAN_REVIEW_NEEDED").read_text())
    assert needed["deadLetters"] == [task_id]


async def test_what_appears_in_pending_becomes_a_task(
    shared: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    world = shared.world
    await shared.round(shared.mirror(offer=0))

    put(
        shared.root,
        "pending",
        [
            record("late", dependencies=["early"]),
            record("early", priority=9, mine=[1]),
            record("copy", payload={"n": "early"}),
            record("bad", priority=7, payload=[]),
        ],
    )
    with caplog.at_level(logging.INFO, "lineshaft.loki"):
        await shared.mirrors[0].run_once()
        await shared.mirrors[0].run_once()

    assert world.statuses(["early", "late"]) == ["READY", "PENDING"]
    assert places(shared.root) == {"early": ["pending"], "late": ["pending"], "bad": ["pending"]}
    assert by_id(shared.root, "pending")["early"]["mine"] == [1]
    assert "Duplicate task detected: copy is task early" in caplog.text
    assert "bad in" in caplog.text
    assert world.task("early")["created_by"] == "system:loki"


@pytest.mark.parametrize("wrong", ['"dependencies": 5', '"dependencies": [["x"]]', '"payload": {"n": 1e999}'])
async def test_a_record_that_is_wrong_harms_no_other(shared: Shared, wrong: str) -> None:
    await shared.round(shared.mirror())

    records = f'[{{"id": "bad", "type": "x", {wrong}}}, {{"id": "good", "type": "x"}}]'
    (shared.root / "queue/pending.json").write_text(records)
    await shared.mirrors[0].run_once()
    await shared.mirrors[0].run_once()

    assert shared.world.status("good") == "CLAIMED"
    assert wrong in (shared.root / "queue/pending.json").read_text()


async def test_a_claim_in_the_far_future_is_one(shared: Shared) -> None:
    task_id = await shared.world.one(preset="loki")
    await shared.round(shared.mirror())

    claim = {"claimedBy": "sh", "claimedAt": "9999-12-31T23:59:59.9Z"}
    shared.change("pending", lambda records: records[task_id].update(claim))
    await shared.round()

    assert shared.world.status(task_id) == "RUNNING"


async def test_what_programs_did_is_kept_while_the_database_is_away(shared: Shared) -> None:
    world = shared.world
    task_id = await world.one(preset="loki")
    await shared.round(shared.mirror())
    claimer = Claimer(shared.root)
    claimer.claim("shell-1")
    await shared.round()
    world.connection.execute(
        "CREATE FUNCTION away() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'away' USING ERRCODE = 'cannot_connect_now'; END $$"
    )
    for table in ("task_live", "task_end"):
        world.connection.execute(
            f"CREATE TRIGGER away BEFORE INSERT OR UPDATE OR DELETE ON {table} EXECUTE FUNCTION away()"
        )
    try:
        claimer.complete(task_id, RESULT)
        put(shared.root, "pending", [record("new")])
        for _ in range(2):
            with pytest.raises(UnavailableError):
                await shared.mirrors[0].run_once()
    finally:
        world.connection.execute("DROP FUNCTION away CASCADE")

    await shared.round()

    assert (world.status(task_id), world.status("new")) == ("COMPLETED", "CLAIMED")
    assert places(shared.root) == {task_id: ["completed"], "new": ["pending"]}


async def test_a_record_that_is_claimed_when_it_appears_is_never_ready(shared: Shared) -> None:
    """The claim begins in the transaction of the submission: no agent can be faster."""
    world = shared.world
    await shared.round(shared.mirror())

    put(shared.root, "pending", [record("a", claimedBy="shell-2")])
    await shared.round()

    assert world.status("a") == "RUNNING"
    assert world.kinds("a")[:4] == ["task.created", "task.ready", "task.claimed", "task.started"]
    assert by_id(shared.root, "in-progress")["a"]["claimedBy"] == "shell-2"


async def test_history_of_other_programs_stays(shared: Shared) -> None:
    old = [record(f"old{number}", result={"output": number}, extra={"k": number}) for number in range(70)]
    put(shared.root, "completed", old)
    put(shared.root, "dead-letter", [record("dead", lastError="x")])
    put(shared.root, "pending", [record("new", dependencies=["old3"])])

    await shared.round(shared.mirror())

    assert queue(shared.root, "completed") == old
    assert queue(shared.root, "dead-letter") == [record("dead", lastError="x")]
    assert free(shared) == ["new"]


async def test_ended_tasks_of_which_only_the_newest_are_kept(shared: Shared) -> None:
    world = shared.world
    mirror = shared.mirror(keep=3, offer=0)
    await shared.round()
    tasks = [await world.one() for _ in range(6)]
    agent = await world.agent()
    for _ in tasks:
        await world.complete(await world.take(agent))

    await shared.round()

    assert [found["id"] for found in queue(shared.root, "completed")] == tasks[3:]
    assert mirror.view.place(tasks[0]) is None


async def test_what_an_offer_depends_on_stays_in_completed(shared: Shared) -> None:
    """A program looks for dependencies there, and finds them however old they are."""
    world = shared.world
    upstream = await world.one()
    waits = await world.one(depends_on=[upstream], priority=0)
    agent = await world.agent()
    await world.complete(await world.take(agent))
    for _ in range(4):
        await world.one(priority=0, type_="other")
        (task,) = await world.claim(agent, types=["other"])
        await world.complete(task)

    await shared.round(shared.mirror(keep=1))

    assert free(shared) == [waits]
    assert upstream in by_id(shared.root, "completed")
    assert (Claimer(shared.root).claim("sh") or {})["id"] == waits


@pytest.mark.parametrize("name", ["PAUSE", "STOP"])
async def test_nothing_is_claimed_while_the_folder_is_paused(shared: Shared, name: str) -> None:
    world = shared.world
    task_id = await world.one()
    await shared.round(shared.mirror())
    assert free(shared) == [task_id]

    (shared.root / name).touch()
    await shared.round()

    assert free(shared) == []
    assert world.status(task_id) == "READY"
    assert await world.claim(await world.agent()) == []
    (shared.root / name).unlink()
    await shared.round()
    assert await world.engine.read.pauses() == []


async def test_a_pause_of_a_person_stays(shared: Shared) -> None:
    await shared.world.engine.pauses.pause(None, reason="by ann")
    (shared.root).mkdir()
    (shared.root / "PAUSE").touch()
    await shared.round(shared.mirror())
    (shared.root / "PAUSE").unlink()
    await shared.round()

    (pause,) = await shared.world.engine.read.pauses()
    assert pause.reason == "by ann"


async def test_offers_that_nobody_takes_go_to_agents_that_are_free(shared: Shared) -> None:
    world = shared.world
    task_id = await world.one()
    await shared.round(shared.mirror())
    world.clock.advance(11)
    await shared.round()
    assert free(shared) == [task_id], "there is no agent"

    agent = await world.agent("a1")
    await shared.round()

    assert free(shared) == []
    assert [task.id for task in await world.claim(agent)] == [task_id]
    assert world.task(task_id)["attempts"] == 0


async def test_a_cancelled_record_cancels_its_task(shared: Shared) -> None:
    """R-170 … R-174."""
    world = shared.world
    task_id = await world.one(run_at=world.clock.now() + timedelta(hours=1))
    after = await world.one(depends_on=[task_id])
    await shared.round(shared.mirror())

    shared.move(task_id, "pending", "cancelled", cancelReason="not needed")
    await shared.round()

    assert world.statuses([task_id, after]) == ["CANCELLED", "CANCELLED"]
    assert by_id(shared.root, "cancelled")[task_id]["cancelReason"] == "not needed"
    assert by_id(shared.root, "cancelled")[after]["cancelReason"] == f"Parent {task_id} cancelled"


async def test_a_dead_letter_that_is_moved_back_is_retried(shared: Shared) -> None:
    """R-133, R-134: with a line in the log of decisions."""
    world = shared.world
    task_id = await world.one()
    await world.kill(await world.agent(), task_id)
    await shared.round(shared.mirror(offer=0))
    assert (shared.root / "signals/HUMAN_REVIEW_NEEDED").exists()

    shared.move(task_id, "dead-letter", "pending", retries=0)
    await shared.round()

    assert world.status(task_id) == "READY"
    (log,) = (shared.root / "logs/decisions").glob("dlq-review-*.md")
    assert f"{task_id}: retry" in log.read_text()
    assert not (shared.root / "signals/HUMAN_REVIEW_NEEDED").exists()


async def test_a_truncated_file_deletes_nothing(shared: Shared) -> None:
    world = shared.world
    tasks = [await world.one() for _ in range(3)]
    await shared.round(shared.mirror(offer=0))

    put(shared.root, "pending", [])
    await shared.round()

    assert set(by_id(shared.root, "pending")) == set(tasks)
    assert world.statuses(tasks) == ["READY"] * 3


async def test_what_is_not_json_is_never_overwritten(
    shared: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    world = shared.world
    first = await world.one()
    await shared.round(shared.mirror(offer=0))
    (shared.root / "queue/pending.json").write_text("[{broken")
    second = await world.one()

    for _ in range(3):
        await shared.mirrors[0].run_once()

    assert (shared.root / "queue/pending.json").read_text() == "[{broken"
    assert caplog.text.count("pending.json can't be read") == 1
    put(shared.root, "pending", [])
    await shared.round()
    assert set(by_id(shared.root, "pending")) == {first, second}


async def test_a_wrapper_stays_and_foreign_keys_survive(shared: Shared) -> None:
    put(shared.root, "pending", {"version": "1.0", "tasks": []})
    task_id = await shared.world.one()
    await shared.mirror().run_once()

    whole = json.loads((shared.root / "queue/pending.json").read_text())

    assert whole["version"] == "1.0"
    assert [found["id"] for found in whole["tasks"]] == [task_id]


async def test_the_orchestrators_state_is_kept_up_to_date(shared: Shared) -> None:
    world = shared.world
    path = shared.root / "state/orchestrator.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"phase": "build", "metrics": {"tasksCompleted": 4, "cost": 1}}))
    await shared.round(shared.mirror(offer=0))
    agent = await world.agent()
    await world.one(type_="good")
    await world.complete(await world.take(agent))
    await world.kill(agent, await world.one(type_="bad"))
    await world.engine.breakers.open("ops")

    await shared.round()

    state = json.loads(path.read_text())
    assert state["phase"] == "build"
    assert state["metrics"] == {"tasksCompleted": 5, "tasksFailed": 1, "cost": 1}
    assert {kind: breaker["state"] for kind, breaker in state["circuitBreakers"].items()} == {
        "bad": "closed",
        "ops": "open",
    }
    assert state["circuitBreakers"]["bad"]["failures"] == 1


async def test_events_are_appended_and_go_on_after_a_restart(shared: Shared) -> None:
    world = shared.world
    await shared.round(mirror := shared.mirror(offer=0))
    first = await world.one()
    await shared.round()
    await mirror.close()
    second = await world.one()
    await shared.round(shared.mirror(offer=0))

    lines = [json.loads(line) for line in (shared.root / "events.jsonl").read_text().splitlines()]
    created = [line["data"]["task_id"] for line in lines if line["type"] == "task.created"]
    assert created == [first, second]
    assert set(lines[0]) == {"timestamp", "type", "data"}


async def test_signals_are_files(shared: Shared) -> None:
    """R-214, R-218."""
    world = shared.world
    await shared.round(shared.mirror(offer=0))
    await world.one()
    await world.fail(await world.take(), "429 Too Many Requests", retry_after_sec=30)

    await shared.round()

    assert json.loads((shared.root / "signals/SLOWDOWN").read_text())["wait"] == 15
    assert json.loads((shared.root / "signals/RATE_LIMITED").read_text())["task"]


async def test_thresholds_of_breakers_are_read_when_the_folder_is_attached(shared: Shared) -> None:
    """R-182."""
    world = shared.world
    (shared.root / "config").mkdir(parents=True)
    (shared.root / "config/circuit-breakers.yaml").write_text(
        "defaults: {failureThreshold: 2}\noverrides:\n  ops: {failureThreshold: 1}\n"
    )
    await shared.round(shared.mirror(offer=0))

    await world.kill(await world.agent(), await world.one(type_="ops"))

    assert (await world.engine.read.breaker("ops")).state == "open"


async def test_only_one_mirror_writes_and_the_next_goes_on(shared: Shared) -> None:
    """Two servers on one folder: what the first one held stays held by the second."""
    world = shared.world
    taken, offered = await world.one(priority=0), await world.one(priority=1)
    await shared.round(first := shared.mirror())
    shared.claim(taken, "shell-1")
    await shared.round()
    second = shared.mirror()
    assert await second.run_once() == {}

    # The kernel releases the lock of a process that dies.
    assert first._leading is not None
    first._leading.close()
    first._leading = None
    shared.mirrors.remove(first)
    await shared.round(second)

    assert second.is_leading
    assert set(second.holdings.taken) == {taken}
    assert free(shared) == [offered]
    shared.move(taken, "in-progress", "completed", result=RESULT)
    await shared.round(second)
    assert world.status(taken) == "COMPLETED"


async def test_a_folder_that_is_removed_has_one_mirror_afterwards(
    shared: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    world = shared.world
    taken, offered = await world.one(priority=0), await world.one(priority=1)
    await shared.round(first := shared.mirror())
    shared.claim(taken, "shell-1")
    await shared.round()
    shutil.rmtree(shared.root)
    await shared.round(first)

    assert (first.is_leading, set(first.holdings.taken), free(shared)) == (True, {taken}, [offered])

    shutil.rmtree(shared.root)
    await shared.round(second := shared.mirror())
    with caplog.at_level(logging.INFO, "lineshaft.loki"):
        assert await first.run_once() == {}
    await second.run_once()

    assert (first.is_leading, second.is_leading, free(shared)) == (False, True, [offered])
    assert "Another process mirrors" in caplog.text


async def test_a_stale_file_is_not_taken_for_acts(shared: Shared) -> None:
    """While no mirror runs the queue goes on; the files are of an earlier time."""
    world = shared.world
    task_id = await world.one()
    await shared.round(mirror := shared.mirror(offer=0))
    await mirror.close()
    shared.mirrors.clear()
    dead, cancelled = await world.one(), await world.one()
    agent = await world.agent()
    put(shared.root, "cancelled", [record(cancelled)])
    put(shared.root, "in-progress", [record(dead, claimedBy="a9")])
    for _ in range(3):
        (task,) = await world.claim(agent)
        if task.id == cancelled:
            await world.release(task, delay_sec=100)
        else:
            await world.fail(task, "no access", category="auth_failure")

    await shared.round(shared.mirror(offer=0))

    assert world.statuses([task_id, dead, cancelled]) == ["DEAD_LETTERED", "DEAD_LETTERED", "PENDING"]
    assert places(shared.root) == {task_id: ["dead-letter"], dead: ["dead-letter"], cancelled: ["pending"]}


async def test_what_is_taken_keeps_its_lease(shared: Shared) -> None:
    world = shared.world
    task_id = await world.one()
    await shared.round(shared.mirror())
    shared.claim(task_id)
    await shared.round()

    for _ in range(10):
        world.clock.advance(50)
        await shared.round()
        await world.engine.maintenance.reap(100)

    assert world.status(task_id) == "RUNNING"


async def test_a_claim_during_a_pause_stays_with_the_program(shared: Shared) -> None:
    """The queue is paused between the offer and the claim: the program works all the same."""
    world = shared.world
    task_id = await world.one()
    await shared.round(shared.mirror())
    shared.claim(task_id, "sh")
    await world.engine.pauses.pause(None)
    await shared.round()

    assert world.task(task_id)["status"] == "RUNNING"
    assert world.live(task_id)["agent_id"] == FOLDER_AGENT
    shared.move(task_id, "in-progress", "completed", result=RESULT)
    await shared.round()
    assert world.status(task_id) == "COMPLETED"


async def test_closing_withdraws_offers(shared: Shared) -> None:
    world = shared.world
    task_id = await world.one()
    await shared.round(mirror := shared.mirror())
    assert free(shared) == [task_id]

    await mirror.close()

    assert free(shared) == []
    assert world.status(task_id) == "READY"


async def cost_of_a_change(shared: Shared, tasks: int) -> tuple[int, int, int]:
    """Tasks read, bytes read and bytes written for one more completed task, after so many."""
    world, mirror = shared.world, shared.mirrors[0]
    agent = await world.agent()
    await world.submit(*[NewTask("x", spec={"n": 10_000 + number}) for number in range(tasks)])
    for _ in range(0, tasks, 100):
        claimed = await world.claim(agent, 100)
        await world.engine.work.complete([world.completion(task) for task in claimed])
    await shared.round()
    await world.one(spec={"n": 10_000})
    task = await world.take(agent)
    await shared.round()
    before = mirror.tasks_read, mirror.folder.bytes_read, mirror.folder.bytes_written
    await world.complete(task)
    await shared.round()
    now = mirror.tasks_read, mirror.folder.bytes_read, mirror.folder.bytes_written
    found = [after - earlier for earlier, after in zip(before, now, strict=True)]
    return found[0], found[1], found[2]


async def test_the_cost_of_a_change_does_not_grow_with_completed_tasks(shared: Shared) -> None:
    """The proof of loki.md, in rows and bytes rather than in time."""
    await shared.round(shared.mirror(offer=0))

    few = await cost_of_a_change(shared, 100)
    many = await cost_of_a_change(shared, 900)

    assert (few[0], few[1]) == (many[0], many[1]) == (1, 0)
    assert abs(many[2] - few[2]) < 200, "the same 50 records, give or take a digit"
