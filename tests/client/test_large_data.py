"""Data above a mebibyte is an artifact: stored and read back without its owner noticing."""

import json
import urllib.error
import urllib.request
from typing import Any

import psycopg
import pytest

from lineshaft import Agent, Lineshaft, NewTask, OutputContract, RetrySpec, Status, TaskContext

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
