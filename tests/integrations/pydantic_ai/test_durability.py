"""Runs of pydantic-ai's agents inside of handlers, against a real HTTP server with OpenAI's protocol."""

import asyncio
import logging
import sys
from decimal import Decimal
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest
from fastmcp.client.transports import StdioTransport
from pydantic import BaseModel
from pydantic_ai import Agent as Model
from pydantic_ai import ApprovalRequired, CallDeferred, FunctionToolset, RunContext
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.models.test import TestModel
from pydantic_ai.usage import UsageLimits

from lineshaft import Agent, Lineshaft, NewTask, SyncTaskContext, Task, TaskContext
from lineshaft.integrations.llm.client import LLMClient
from lineshaft.integrations.pydantic_ai import LineshaftDurability
from lineshaft.model.states import Status
from tests.agent.helpers import AT_ONCE, at_work, attempts, drain, engine_of, one, until
from tests.integrations.pydantic_ai.conftest import KEY
from tests.llm_server import USAGE, LLMServer, Reply

PAID = USAGE | {"cost": 0.01}


def reply(content: Any = "done", *tools: tuple[Any, ...], **options: Any) -> Reply:
    return Reply("hello" if tools else content, tools=tools, **{"usage": PAID, **options})


class BrokenError(Exception):
    """The handler's code fails."""


def durable(model: Any = "m", **options: Any) -> Model[None, str]:
    return Model(model, name="writer", capabilities=[LineshaftDurability(**options)])


def agent_for(writer: Model[Any, Any], *, fails: int = 1, **options: Any) -> Agent:
    """An agent whose handler `write` runs the other one, and fails behind it in its first attempts."""
    agent = Agent("a")

    @agent.task("write")
    async def write(ctx: TaskContext, prompt: str = "Write.") -> Any:
        output = (await writer.run(prompt, **options)).output
        if ctx.attempt <= fails:
            raise BrokenError
        return output

    return agent


async def look() -> str:
    """A tool without arguments."""
    return "x"


async def step_names(shaft: Lineshaft, task_id: str) -> list[str]:
    return list(await engine_of(shaft).read.steps(task_id))


def last_failure(task: Task) -> tuple[str, str]:
    return task.failure_history[-1].category, task.failure_history[-1].error


# What is recorded counts.


async def test_a_recorded_answer_is_neither_asked_nor_paid_for_again(
    shaft: Lineshaft, server: LLMServer
) -> None:
    server.plan(reply("", ("look", {"where": "here"}, "id1")), reply("found"), reply("more"))
    looked: list[str] = []
    writer = durable()

    @writer.tool_plain
    async def look(where: str) -> str:
        looked.append(where)
        return "a thing"

    agent = Agent("a")

    @agent.task("write")
    async def write(ctx: TaskContext, topic: str) -> str:
        first = (await writer.run(topic)).output
        if ctx.attempt == 1:
            raise BrokenError
        return f"{first}, {(await writer.run(topic)).output}"

    task = await one(shaft, agent, "write", spec={"topic": "things"}, retry=AT_ONCE)

    assert (task.status, task.result) == (Status.COMPLETED, "found, more")
    assert looked == ["here"]
    assert len(server.requests) == 3
    assert (task.cost_usd, task.tokens_used.input, task.tokens_used.output) == (Decimal("0.03"), 3_000, 300)
    assert await step_names(shaft, task.id) == [
        *("writer/model", "writer/look:id1", "writer/model#2", "writer#2/model"),
    ]


async def test_parallel_tools_keep_their_own_steps(shaft: Lineshaft, server: LLMServer) -> None:
    """Two equal calls are two; in whatever order they end, each has its result. One of three fails first."""
    calls = [("work", {"on": "x"}, "id1"), ("work", {"on": "x"}, "id2"), ("fail", {}, "id3")]
    server.plan(reply("", *calls), reply("both"))
    writer, ran = durable(), list[str]()
    second_done = asyncio.Event()

    @writer.tool
    async def work(ctx: RunContext[None], on: str) -> str:
        assert ctx.tool_call_id is not None
        if ctx.tool_call_id == "id1":
            await second_done.wait()
        second_done.set()
        ran.append(f"{ctx.tool_call_id} {on}")
        return f"result of {ctx.tool_call_id}"

    @writer.tool_plain
    async def fail() -> str:
        ran.append("fail")

        async def others_are_recorded() -> bool:
            return len(await step_names(shaft, submitted.id)) >= 3

        await until(others_are_recorded)
        if ran.count("fail") == 1:
            raise BrokenError
        return "fine"

    submitted = await shaft.submit(NewTask("write", retry=AT_ONCE))
    await drain(shaft, agent_for(writer, fails=0))

    task = await shaft.get(submitted)
    assert task.status is Status.COMPLETED
    assert sorted(ran) == ["fail", "fail", "id1 x", "id2 x"]
    assert ran.index("id2 x") < ran.index("id1 x")
    assert len(server.requests) == 2
    returned = {
        message["tool_call_id"]: message["content"]
        for message in server.requests[1]["messages"]
        if message["role"] == "tool"
    }
    assert returned == {"id1": "result of id1", "id2": "result of id2", "id3": "fine"}


async def test_ids_of_calls_that_repeat(shaft: Lineshaft, server: LLMServer) -> None:
    """Some servers number the calls of each answer from 0."""
    server.plan(
        reply("", ("look", {"at": 1}, "call_0")), reply("", ("look", {"at": 2}, "call_0")), reply("seen")
    )
    writer, looked = durable(), list[int]()

    @writer.tool_plain
    async def look(at: int) -> str:
        looked.append(at)
        return f"saw {at}"

    task = await one(shaft, agent_for(writer), "write", retry=AT_ONCE)

    assert (task.result, looked, len(server.requests)) == ("seen", [1, 2], 3)


async def test_a_retried_output_and_a_typed_one(shaft: Lineshaft, server: LLMServer) -> None:
    class City(BaseModel):
        name: str
        people: int

    server.plan(
        reply("", ("final_result", {"name": "Ghent"}, "id1")),
        reply("", ("final_result", {"name": "Ghent", "people": 265_000}, "id2")),
    )
    writer = Model("m", name="writer", output_type=City, capabilities=[LineshaftDurability()])

    task = await one(shaft, agent_for(writer), "write", retry=AT_ONCE)

    assert task.result == {"name": "Ghent", "people": 265_000}
    assert len(server.requests) == 2


async def test_runs_at_the_same_time(shaft: Lineshaft, server: LLMServer) -> None:
    """Runs of one agent are numbered as they begin; a `run_id` names one for good."""

    def answer(request: dict[str, Any]) -> Reply:
        return reply(request["messages"][-1]["content"].upper())

    server.answer = answer
    writer, agent = durable(), Agent("a")

    @agent.task("write")
    async def write(ctx: TaskContext) -> list[str]:
        runs = [writer.run("a"), writer.run("b"), writer.run("c", run_id="the third")]
        results = await asyncio.gather(*runs)
        if ctx.attempt == 1:
            raise BrokenError
        return [result.output for result in results]

    task = await one(shaft, agent, "write", retry=AT_ONCE)

    assert (task.result, len(server.requests)) == (["A", "B", "C"], 3)
    assert sorted(await step_names(shaft, task.id)) == ["the third/model", "writer#2/model", "writer/model"]


async def test_another_model_goes_on_with_the_answers_of_the_first(
    shaft: Lineshaft, server: LLMServer
) -> None:
    server.plan(reply("", ("look", {}, "id1")), Reply("busy", status=503), reply("done"))
    writer, agent = durable(), Agent("a")
    writer.tool_plain(look)

    @agent.task("write")
    async def write(ctx: TaskContext) -> str:
        return (await writer.run("Write.", model="m" if ctx.attempt == 1 else "another")).output

    task = await one(shaft, agent, "write", retry=AT_ONCE)

    assert task.result == "done"
    assert [request["model"] for request in server.requests] == ["m", "m", "another"]
    assert task.cost_usd == Decimal("0.02")


# What has changed.


@pytest.mark.parametrize(
    ("on_change", "asked", "end"),
    [("rerun", 2, "COMPLETED"), ("reuse", 1, "COMPLETED"), ("refuse", 1, "DEAD_LETTERED")],
)
async def test_a_changed_prompt(
    shaft: Lineshaft, server: LLMServer, on_change: Any, asked: int, end: str
) -> None:
    server.reply = reply("done")
    writer, agent = durable(on_prompt_change=on_change), Agent("a")

    @agent.task("write")
    async def write(ctx: TaskContext) -> str:
        output = (await writer.run("Write." if ctx.attempt == 1 else "Write more.")).output
        if ctx.attempt == 1:
            raise BrokenError
        return output

    task = await one(shaft, agent, "write", retry=AT_ONCE)

    assert (task.status, len(server.requests)) == (end, asked)
    if on_change == "refuse":
        assert last_failure(task)[0] == "step_mismatch"


@pytest.mark.parametrize(
    ("metadata", "ran", "category"),
    [
        (None, ["x"], "step_mismatch"),
        ({"lineshaft": {"on_change": "rerun"}}, ["x", "y"], None),
        ({"lineshaft": {"on_change": "reuse"}}, ["x"], None),
        # Not a step at all.
        ({"lineshaft": False}, ["x", "y"], None),
    ],
)
async def test_a_changed_call_of_a_tool(
    shaft: Lineshaft, server: LLMServer, metadata: Any, ran: list[str], category: str | None
) -> None:
    """As from a model that is asked again after a deployment. What has side effects is refused by itself."""
    server.plan(
        *(reply("", ("pay", {"whom": "x"}, "id1")), reply("done")),
        *(reply("", ("pay", {"whom": "y"}, "id1")), reply("done")),
    )
    writer, agent, paid = durable(), Agent("a"), list[str]()

    @writer.tool_plain(metadata=metadata)
    async def pay(whom: str) -> str:
        paid.append(whom)
        return "paid"

    @agent.task("write")
    async def write(ctx: TaskContext) -> str:
        output = (await writer.run(f"Write {ctx.attempt}.")).output
        if ctx.attempt == 1:
            raise BrokenError
        return output

    task = await one(shaft, agent, "write", retry=AT_ONCE)

    assert paid == ran
    assert (last_failure(task)[0] if task.status is Status.DEAD_LETTERED else None) == category


@pytest.mark.parametrize("options", [{"on_change": "never"}, {"onchange": "rerun"}, "rerun"])
async def test_options_of_a_tool_that_are_wrong(shaft: Lineshaft, server: LLMServer, options: Any) -> None:
    server.plan(reply("", ("look", {}, "id1")), reply("done"))
    writer = durable()
    writer.tool_plain(metadata={"lineshaft": options})(look)

    task = await one(shaft, agent_for(writer, fails=0), "write", max_attempts=1)

    assert task.status is Status.DEAD_LETTERED
    assert "refuse" in last_failure(task)[1]


# Money.


async def test_a_used_up_budget_stops_the_run_before_the_next_call(
    shaft: Lineshaft, server: LLMServer
) -> None:
    server.reply = reply("", ("look", {}))
    writer = durable()
    writer.tool_plain(look)

    task = await one(shaft, agent_for(writer), "write", retry=AT_ONCE, max_cost_usd=0.02)

    assert (task.status, last_failure(task)[0]) == (Status.DEAD_LETTERED, "budget_exceeded")
    assert (len(server.requests), task.cost_usd) == (2, Decimal("0.02"))


async def test_limits_of_the_run_itself(shaft: Lineshaft, server: LLMServer) -> None:
    server.reply = reply("", ("look", {}))
    writer = durable()
    writer.tool_plain(look)
    agent = agent_for(writer, usage_limits=UsageLimits(request_limit=2))

    task = await one(shaft, agent, "write", retry=AT_ONCE)

    assert (task.status, last_failure(task)[0]) == (Status.DEAD_LETTERED, "budget_exceeded")
    assert len(server.requests) == 2


@pytest.mark.parametrize("kind", ["durable", "plain"])
async def test_what_delegates_spend_counts(shaft: Lineshaft, server: LLMServer, kind: str) -> None:
    """Two at the same time; a delegate without steps of its own is recorded with the tool that called it."""
    calls = [("research", {"what": "x"}, "id1"), ("research", {"what": "y"}, "id2")]

    def answer(request: dict[str, Any]) -> Reply:
        first = request["messages"][-1]
        if first["role"] == "tool":
            return reply("all done")
        if first["content"] == "Write.":
            return reply("", *calls)
        return reply(f"about {first['content']}", usage=USAGE | {"cost": 0.1})

    server.answer = answer
    capabilities = [LineshaftDurability()] if kind == "durable" else []
    helper = Model(LLMClient.from_settings().model(), name="helper", capabilities=capabilities)
    writer = durable()

    @writer.tool
    async def research(ctx: RunContext[None], what: str) -> str:
        return (await helper.run(what, usage=ctx.usage)).output

    task = await one(shaft, agent_for(writer), "write", retry=AT_ONCE)

    assert task.result == "all done"
    assert len(server.requests) == 4
    assert (task.cost_usd, task.tokens_used.input) == (Decimal("0.22"), 4_000)
    names = await step_names(shaft, task.id)
    assert ("writer/research:id1/helper/model" in names) is (kind == "durable")


async def test_an_unknown_cost_stays_unknown(
    shaft: Lineshaft, server: LLMServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens are recorded; the model is named once."""
    server.reply = Reply("done", usage=USAGE)
    agent, spent = Agent("a"), list[Any]()
    writer = durable()

    @agent.task("write")
    async def write(ctx: TaskContext) -> str:
        await writer.run("Write.")
        output = (await writer.run("Write again.")).output
        spent.append(ctx._execution.spent.cost_usd)
        return output

    with caplog.at_level(logging.WARNING):
        task = await one(shaft, agent, "write")

    assert spent == [None]
    assert task.tokens_used.input == 2_000
    warnings = [record.getMessage() for record in caplog.records if "price" in record.getMessage()]
    assert len(warnings) == 1
    assert "the model m is unknown" in warnings[0]


# Failures.


@pytest.mark.parametrize(
    "refused",
    [
        (Reply("slow", status=429, headers={"Retry-After": "600"}), "rate_limit", Status.RETRYING),
        (Reply("resets in 10m", status=529), "rate_limit", Status.RETRYING),
        (Reply("who?", status=401), "auth_failure", Status.DEAD_LETTERED),
        (Reply("too long", status=400), "invalid_input", Status.DEAD_LETTERED),
        (Reply("broken", status=500), "error", Status.DEAD_LETTERED),
        (Reply(body=b"<html>"), "invalid_output", Status.DEAD_LETTERED),
        (Reply("", tools=[("unknown", {})]), "invalid_output", Status.DEAD_LETTERED),
    ],
)
async def test_failures_have_their_category(
    shaft: Lineshaft,
    server: LLMServer,
    connection: psycopg.Connection,
    refused: tuple[Reply, str, Status],
) -> None:
    server.reply, category, status = refused

    task = await one(shaft, agent_for(durable(), fails=0), "write", max_attempts=1, model_preferences=None)

    (attempt,) = await attempts(shaft, task.id)
    assert (task.status, attempt.category) == (status, category)
    if category == "rate_limit":
        row = connection.execute(
            "SELECT extract(epoch FROM due_at - now()) FROM lineshaft.task_live WHERE id = %s", [task.id]
        ).fetchone()
        assert row is not None
        assert 500 < row[0] <= 600


# Where it may be used.


async def test_outside_of_a_handler_it_changes_nothing(server: LLMServer) -> None:
    writer = durable()
    writer.tool_plain(look)
    server.plan(reply("", ("look", {})), reply("done"))

    assert (await writer.run("Write.", toolsets=[FunctionToolset(id="more")])).output == "done"


async def test_a_handler_that_is_not_async(shaft: Lineshaft, server: LLMServer) -> None:
    writer, agent = durable(), Agent("a")

    @agent.task("write")
    def write(_ctx: SyncTaskContext) -> str:
        return writer.run_sync("Write.").output

    task = await one(shaft, agent, "write", max_attempts=1)

    assert "Make it 'async def', and await agent.run()" in last_failure(task)[1]
    assert not server.requests


async def test_toolsets_of_one_run_are_refused(shaft: Lineshaft, server: LLMServer) -> None:
    """They would run again with each attempt."""
    more = FunctionToolset[None](id="more")
    more.add_function(lambda: "x", name="look")

    task = await one(shaft, agent_for(durable(), toolsets=[more]), "write", max_attempts=1)

    assert task.status is Status.DEAD_LETTERED
    assert not server.requests


async def test_a_model_of_the_users_own(shaft: Lineshaft) -> None:
    """Any instance of pydantic-ai."""
    task = await one(shaft, agent_for(durable(TestModel(custom_output_text="fine"))), "write", retry=AT_ONCE)

    assert task.result == "fine"


async def test_cancellation_stops_the_call(shaft: Lineshaft, server: LLMServer) -> None:
    over = Event()
    server.reply = reply("done", hold=over)
    agent = agent_for(durable(), fails=0)
    task = await shaft.submit(NewTask("write"))
    async with at_work(agent, shaft=shaft):
        await asyncio.to_thread(server.wait_for, 1)
        await shaft.cancel(task)
        over.set()

        async def is_over() -> bool:
            return (await shaft.get(task)).status is Status.CANCELLED

        await until(is_over)
    assert len(server.requests) == 1


# Progress.


async def test_progress_while_a_model_writes(
    shaft: Lineshaft, server: LLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.plan(reply("", ("look", {}, "id1")), reply("one two three"))
    writer, seen, agent = durable(progress=True), list[Any](), Agent("a")
    writer.tool_plain(look)

    @agent.task("write")
    async def write(ctx: TaskContext) -> str:
        monkeypatch.setattr(ctx._execution, "report_progress", seen.append)
        return (await writer.run("Write.")).output

    task = await one(shaft, agent, "write")

    assert task.result == "one two three"
    assert all(request["stream"] for request in server.requests)
    assert {"tool": "look"} in seen
    assert seen[-1] == {"characters": 13, "text": "one two three"}
    assert {"characters": 3, "text": "one"} in seen
    assert task.cost_usd == Decimal("0.02")


async def test_a_stream_that_breaks_off(shaft: Lineshaft, server: LLMServer) -> None:
    server.plan(reply("one two three four five", cut_after=400), reply("whole"))

    task = await one(shaft, agent_for(durable(progress=True), fails=0), "write", retry=AT_ONCE)

    assert (task.result, len(server.requests)) == ("whole", 2)


# People.


async def test_a_tool_that_needs_an_approval(shaft: Lineshaft, server: LLMServer) -> None:
    """The run waits without a slot; nothing before the wait is repeated."""
    server.plan(
        reply("", ("look", {}, "id0"), ("pay", {"usd": 5}, "id1"), ("pay", {"usd": 7}, "id2")),
        reply("done"),
    )
    writer, did = durable(), list[str]()

    @writer.tool_plain
    async def look() -> str:
        did.append("look")
        return "x"

    @writer.tool_plain(requires_approval=True)
    async def pay(usd: int) -> str:
        did.append(f"pay {usd}")
        return f"paid {usd}"

    agent = agent_for(writer, fails=0)
    task = await shaft.submit(NewTask("write"))
    await drain(shaft, agent)

    assert (await shaft.get(task)).status is Status.PENDING
    waiting = {item.task.spec["arguments"]["usd"]: item.task for item in (await shaft.approvals()).items}
    assert {one_.type for one_ in waiting.values()} == {"approve-tool-call"}
    assert waiting[5].title == "Approve pay"
    await shaft.approve(waiting[5].id, reviewer="ann", data={"approved": True, "arguments": {"usd": 4}})
    await shaft.reject(waiting[7].id, reviewer="ann", note="too much")
    await drain(shaft, agent)

    ended = await shaft.get(task)
    assert (ended.status, ended.result) == (Status.COMPLETED, "done")
    assert did == ["look", "pay 4"]
    assert len(server.requests) == 2
    assert "rejected the call" in server.sent()
    assert "paid 4" in server.sent()
    assert (await shaft.get_dag(ended.dag_id)).status == "completed"


async def test_tools_that_find_out_that_they_need_a_person(shaft: Lineshaft, server: LLMServer) -> None:
    server.plan(reply("", ("pay", {"usd": 500}, "id1"), ("ask", {}, "id2")), reply("done"))
    writer, paid = durable(), list[int]()

    @writer.tool
    async def pay(ctx: RunContext[None], usd: int) -> str:
        if usd > 100 and not ctx.tool_call_approved:
            raise ApprovalRequired(metadata={"why": "a lot"})
        paid.append(usd)
        return "paid"

    @writer.tool_plain
    async def ask() -> str:
        raise CallDeferred

    agent = agent_for(writer)
    task = await shaft.submit(NewTask("write", retry=AT_ONCE))
    await drain(shaft, agent)
    items = {item.task.type: item.task for item in (await shaft.approvals()).items}
    assert items["approve-tool-call"].spec["about"] == {"why": "a lot"}
    await shaft.approve(items["approve-tool-call"].id, reviewer="ann")
    await shaft.approve(items["execute-tool-call"].id, reviewer="bob", data="forty-two")
    await drain(shaft, agent)

    assert (await shaft.get(task)).result == "done"
    assert paid == [500]
    assert "forty-two" in server.sent()


async def test_an_approval_inside_of_a_tool_is_refused(shaft: Lineshaft, server: LLMServer) -> None:
    server.plan(reply("", ("delegate", {}, "id1")), reply("", ("look", {}, "id2")))
    helper = Model("m", name="helper", capabilities=[LineshaftDurability()])
    helper.tool_plain(requires_approval=True)(look)
    writer = durable()

    @writer.tool_plain
    async def delegate() -> str:
        return (await helper.run("Pay.")).output

    task = await one(shaft, agent_for(writer), "write", max_attempts=1)

    assert "inside of the step 'writer/delegate:id1'" in last_failure(task)[1]


# MCP.


@pytest.mark.slow("starts an MCP server")
async def test_tools_of_an_mcp_server(shaft: Lineshaft, server: LLMServer, tmp_path: Path) -> None:
    """A recorded call isn't repeated, nor is the server started for it. It doesn't get the key."""
    log = tmp_path / "calls"
    server.plan(reply("", ("add", {"one": 1, "other": 2}, "id1")), reply("three"), reply("again"))
    program = Path(__file__).with_name("mcp_tools.py")
    transport = StdioTransport(sys.executable, [str(program), str(log)])
    tools: MCPToolset[None] = MCPToolset(transport, id="sums")
    writer = Model("m", name="writer", toolsets=[tools], capabilities=[LineshaftDurability()])
    agent = agent_for(writer)

    task = await one(shaft, agent, "write", retry=AT_ONCE)

    assert task.result == "three"
    lines = log.read_text().splitlines()
    assert (lines.count("add 1 2"), lines.count("started")) == (1, 1)
    assert KEY not in log.read_text()
    assert "3" in server.sent(1)
    assert "writer/add:id1" in await step_names(shaft, task.id)
