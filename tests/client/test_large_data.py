"""Data above a mebibyte is an artifact: stored and read back without its owner noticing."""

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psycopg
import pytest

from lineshaft import (
    Agent,
    Lineshaft,
    NewTask,
    OutputContract,
    RetrySpec,
    Snooze,
    Status,
    SyncLineshaft,
    Task,
    TaskContext,
)
from lineshaft.client import large_data
from lineshaft.engine.artifacts import artifacts

LARGE = "x" * (3 << 20)


async def _work(shaft: Lineshaft, agent: Agent) -> None:
    await agent.run(shaft, until_idle=True)


async def test_a_large_output_is_read_back(shaft: Lineshaft, dsn: str) -> None:
    agent = Agent("a")
    seen: dict[str, Any] = {}

    @agent.task("make")
    async def make() -> dict[str, str]:
        return {"text": LARGE}

    @agent.task("use")
    async def use(ctx: TaskContext, source: str) -> int:
        seen["input"] = ctx.inputs[f"task:{source}:output"]
        return len(seen["input"]["text"])

    made = await shaft.submit(NewTask("make"))
    used = await shaft.submit(
        NewTask("use", spec={"source": made.id, "context_refs": [f"task:{made.id}:output"]})
    )
    await _work(shaft, agent)

    assert await made.result(timeout=60) == {"text": LARGE}
    assert await used.result(timeout=60) == len(LARGE)
    assert seen["input"] == {"text": LARGE}
    (task,) = (await shaft.list(type="make")).items
    assert task.output.data is None
    assert str(task.output.data_ref).startswith("artifact:")
    assert task.output.size == len(LARGE) + len('{"text":""}')
    assert (await shaft.get(made, full=True)).output.data == {"text": LARGE}
    with psycopg.connect(dsn) as connection:
        stored = connection.execute(
            "SELECT max(pg_column_size(output)) FROM lineshaft.task_end UNION ALL"
            " SELECT max(pg_column_size(data)) FROM lineshaft.event"
        ).fetchall()
    assert all(size is None or size < 10_000 for (size,) in stored)


async def test_large_steps_and_checkpoints_survive_an_attempt(shaft: Lineshaft) -> None:
    agent = Agent("a")
    seen: list[Any] = []

    @agent.task("make")
    async def make(ctx: TaskContext) -> str:
        text: str = await ctx.step("search", lambda: LARGE)
        assert text == LARGE
        if ctx.attempt == 1:
            await ctx.checkpoint({"done": LARGE})
            raise RuntimeError("not yet")
        seen.append((ctx.last_checkpoint, ctx.steps["search"] == LARGE))
        return "done"

    retry = RetrySpec(initial_delay_sec=0, jitter=False)
    handle = await shaft.submit(NewTask("make", retry=retry))
    await _work(shaft, agent)

    assert await handle.result(timeout=60) == "done"
    assert seen == [({"done": LARGE}, True)]
    assert await shaft.steps(handle) == {"search": LARGE}


@pytest.mark.parametrize(("pattern", "status"), [("^x+$", Status.COMPLETED), ("^y", Status.DEAD_LETTERED)])
async def test_gates_check_the_data_itself(shaft: Lineshaft, pattern: str, status: Status) -> None:
    agent = Agent("a")

    @agent.task("make")
    async def make() -> str:
        return "x" * (1 << 20)

    gate = OutputContract(validation="regex", validation_schema=pattern)
    handle = await shaft.submit(NewTask("make", output=gate, max_attempts=1))
    await _work(shaft, agent)

    task = await shaft.get(handle, full=True)
    assert task.status is status, task.failure_reason
    if status is Status.COMPLETED:
        assert task.output.data == "x" * (1 << 20)


async def test_other_clients_give_a_reference_in_place_of_data(shaft: Lineshaft, where: str) -> None:
    if not where.startswith("http"):
        pytest.skip("over HTTP only")
    given = await shaft.artifacts.put("data.json", json.dumps([1, 2]).encode())

    def call(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(where + path, data, method=method)  # noqa: S310 - our own server
        try:
            with urllib.request.urlopen(request) as response:  # noqa: S310
                return response.status, json.load(response)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    handle = await shaft.submit(NewTask("make", max_attempts=1))
    other = await shaft.submit(NewTask("make", max_attempts=1))
    _, agent = call("POST", "/v1/agents", {"id": "curl", "type": "x", "max_concurrent_tasks": 2})
    claim = {"incarnation": agent["incarnation"], "limit": 2, "start": True}
    _, claimed = call("POST", "/v1/agents/curl/claim", claim)
    token = {item["task"]["id"]: item["claim_token"] for item in claimed["tasks"]}

    step = f"/v1/tasks/{handle.id}/steps/search"
    assert call("PUT", step, {"claim_token": token[handle.id], "data_ref": "artifact:artifact_x"})[0] == 422
    assert call("PUT", step, {"claim_token": token[handle.id], "data_ref": given.ref})[0] == 200
    both = {"data": 1, "data_ref": given.ref}
    path = f"/v1/tasks/{handle.id}/complete"
    assert call("POST", path, {"claim_token": token[handle.id], "output": both})[0] == 422
    status, task = call("POST", path, {"claim_token": token[handle.id], "output": {"data_ref": given.ref}})
    assert (status, task["status"]) == (200, "COMPLETED")
    assert (task["output"]["data"], task["output"]["data_ref"], task["output"]["size"]) == (
        None,
        given.ref,
        6,
    )
    assert call("GET", f"/v1/tasks/{handle.id}?full=1")[1]["output"]["data"] == [1, 2]
    assert await handle.result() == [1, 2]
    assert await shaft.steps(handle) == {"search": [1, 2]}

    body = {"claim_token": token[other.id], "output": {"data_ref": "artifact:artifact_x"}}
    _, failed = call("POST", f"/v1/tasks/{other.id}/complete", body)
    assert failed["failure_category"] == "invalid_output"


async def test_waiting_returns_a_large_output(shaft: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("make")
    async def make() -> str:
        return LARGE

    handle = await shaft.submit(NewTask("make"))
    dag = await shaft.submit_dag("two", [NewTask("make", key="one"), NewTask("make", key="two")])
    await _work(shaft, agent)

    assert (await shaft.wait(handle, timeout=60)).result == LARGE
    waited = await shaft.wait(handle.id, timeout=60)
    assert isinstance(waited, Task)
    assert waited.result == LARGE
    assert await dag.result(timeout=60) == {"one": LARGE, "two": LARGE}


def test_waiting_without_await_returns_a_large_output(blocking: SyncLineshaft) -> None:
    agent = Agent("a")

    @agent.task("make")
    def make() -> str:
        return LARGE

    handle = blocking.submit(NewTask("make"))
    blocking.loop.run(agent.run(blocking.shaft, until_idle=True))

    assert blocking.wait(handle, timeout=60).result == LARGE
    assert handle.result(timeout=60) == LARGE


async def test_a_large_state_is_stored_when_a_task_is_postponed(shaft: Lineshaft, dsn: str) -> None:
    agent = Agent("a")

    @agent.task("make")
    async def make(ctx: TaskContext) -> str:
        if "text" not in ctx.state:
            ctx.state["text"] = LARGE
            raise Snooze(0)
        return str(ctx.state["text"] == LARGE)

    handle = await shaft.submit(NewTask("make"))
    await _work(shaft, agent)

    assert await handle.result(timeout=60) == "True"
    with psycopg.connect(dsn) as connection:
        (saved,) = connection.execute("SELECT data FROM lineshaft.checkpoint").fetchall()
    assert saved[0]["data_ref"].startswith("artifact:")


class _Place:
    """The folder of the store, which can be taken away.

    In one step each time: a store that finds nothing in between would create a folder.
    """

    def __init__(self, folder: Path) -> None:
        self._link = folder
        self._folder, self._file = folder.with_name("elsewhere"), folder.with_name("file")
        folder.rename(self._folder)
        self._file.touch()
        self.bring_back()

    def take_away(self) -> None:
        self._lead_to(self._file)

    def bring_back(self) -> None:
        self._lead_to(self._folder)

    def _lead_to(self, target: Path) -> None:
        new = self._link.with_name("new link")
        new.symlink_to(target)
        new.replace(self._link)


@pytest.fixture
async def store_folder(shaft: Lineshaft, tmp_path: Path) -> _Place:
    await shaft.artifacts.put("first", b"x")
    return _Place(tmp_path / "artifacts")


async def test_an_attempt_waits_for_a_store_that_is_away(shaft: Lineshaft, store_folder: _Place) -> None:
    """With the result of a step, a checkpoint, its output, and what an earlier attempt left."""
    agent = Agent("a")

    def away_for_a_moment() -> None:
        store_folder.take_away()
        asyncio.get_running_loop().call_later(0.2, store_folder.bring_back)

    @agent.task("make")
    async def make(ctx: TaskContext) -> str:
        if ctx.attempt == 1:
            away_for_a_moment()
            await ctx.step("search", lambda: LARGE)
            away_for_a_moment()
            await ctx.checkpoint(LARGE)
            away_for_a_moment()
            raise RuntimeError("the next attempt reads both")
        assert ctx.steps["search"] == ctx.last_checkpoint == LARGE
        away_for_a_moment()
        return LARGE

    retry = RetrySpec(initial_delay_sec=0, jitter=False)
    handle = await shaft.submit(NewTask("make", retry=retry, max_attempts=2))
    await _work(shaft, agent)

    assert await handle.result(timeout=60) == LARGE


async def test_an_attempt_fails_if_the_store_stays_away(
    shaft: Lineshaft, store_folder: _Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_data, "PATIENCE_SEC", 0.3)
    agent = Agent("a")

    @agent.task("make")
    async def make(ctx: TaskContext) -> str:
        if ctx.attempt == 1:
            store_folder.take_away()
            await ctx.step("search", lambda: LARGE)
        return LARGE

    retry = RetrySpec(initial_delay_sec=0, jitter=False)
    handle = await shaft.submit(NewTask("make", retry=retry, max_attempts=2))
    await _work(shaft, agent)

    task = await handle.task()
    assert task.status is Status.DEAD_LETTERED
    for failed in task.failure_history:
        assert "has lost its file" in str(failed.error)
        assert "The attempt waited for it for 0.3 s." in str(failed.error)


async def test_a_state_is_kept_if_the_store_stays_away(
    shaft: Lineshaft, store_folder: _Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_data, "PATIENCE_SEC", 0.3)
    agent = Agent("a")

    @agent.task("make")
    async def make(ctx: TaskContext) -> bool:
        if not ctx.state:
            ctx.state["text"] = LARGE
            store_folder.take_away()
            raise Snooze(0)
        return bool(ctx.state["text"] == LARGE)

    handle = await shaft.submit(NewTask("make"))
    await _work(shaft, agent)

    assert await handle.result(timeout=60) is True


@pytest.mark.parametrize("fault", ["too large", "not JSON"])
async def test_what_a_gate_cant_read_is_rejected(
    shaft: Lineshaft, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "too large":
        monkeypatch.setattr(artifacts, "MAX_DATA_BYTES", 2 << 20)
    agent = Agent("a")

    @agent.task("make")
    async def make(ctx: TaskContext) -> Any:
        if fault == "too large":
            return LARGE
        made = await ctx.put_artifact("data", b"{not json")
        return {"data": None, "data_ref": made.ref, "size": made.size}

    gate = OutputContract(validation="regex", validation_schema="^x+$")
    handle = await shaft.submit(NewTask("make", output=gate, max_attempts=1))
    await _work(shaft, agent)

    task = await handle.task()
    assert (task.status, task.failure_category) == (Status.DEAD_LETTERED, "invalid_output")
    expected = "The data is 3145730 bytes, more than 2097152" if fault == "too large" else "is not JSON"
    assert "regex: The output can't be checked: " in str(task.failure_reason)
    assert expected in str(task.failure_reason)
