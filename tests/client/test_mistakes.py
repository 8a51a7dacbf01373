"""Mistakes in programs: each raises one line that shows the right form."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from lineshaft import Agent, Lineshaft, NewTask, SyncLineshaft, TaskContext
from tests.agent.helpers import drain


async def research(ctx: TaskContext, prompt: str) -> str:
    ctx.check_cancelled()
    return prompt


async def context_last(prompt: str, ctx: TaskContext) -> None: ...


async def second_context(prompt: str, where: TaskContext) -> None: ...


async def method(self: Any, prompt: str) -> None: ...


async def any_arguments(*args: str) -> None: ...


agent: Any = Agent("a")
handler: Any = agent.task("research")(research)
new_task: Any = NewTask
WRONG: Any = {"max_cost": 1}


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: agent.task(research), "needs the name of a task type: write @agent.task('research')."),
        (lambda: agent.task("t", max_cost=1), "Unknown option max_cost; did you mean max_cost_usd?"),
        (lambda: agent.task("t", time_limit=1), "Unknown option time_limit; did you mean time_limit_sec?"),
        (lambda: agent.task("t")(context_last), "ctx must be the first parameter"),
        (lambda: agent.task("t")(second_context), "where must be the first parameter"),
        (lambda: agent.task("t")(method), "Register an object's: agent.task('t')(object.method)."),
        (lambda: agent.task("t")(any_arguments), "it takes *args, but a spec has only named values"),
        (lambda: agent.task("t")("research"), "The handler of 't' must be a function, got 'research'."),
        (lambda: agent.task("t")(Agent), "The handler of 't' must be a function, got <class "),
        (lambda: new_task("t", max_cost=1), "Unknown option max_cost; did you mean max_cost_usd?"),
        (lambda: new_task("t", timeout=1), "Unknown option timeout; did you mean max_duration_sec?"),
        (lambda: new_task("t", max_retries=1), "Unknown option max_retries; did you mean max_attempts?"),
        (lambda: new_task("t", zzz=1), "Unknown option zzz; known are: children, "),
        (lambda: new_task("t", {"prompt": "x"}), "Write NewTask('t', spec={…})."),
        (handler.new, "missing a required argument: 'prompt'. Its handler takes (prompt: str)."),
        (lambda: handler.new("x").with_options(max_cost=1), "did you mean max_cost_usd?"),
    ],
)
def test_a_wrong_handler_or_task(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError) as raised:
        mistake()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: "research", "got 'research'. Write NewTask('research', spec={…}), or HANDLER.new(…)"),
        (lambda: handler, "got <TaskFunction 'research'>. Write research.new(…)"),
        (lambda: handler(None, "x"), "got a call of research. Write research.new(…)"),
        (lambda: None, "got None. Write HANDLER.new(…), or NewTask('type', spec={…})."),
    ],
)
async def test_something_else_instead_of_a_task(
    shaft: Lineshaft, wrong: Callable[[], Any], message: str
) -> None:
    with pytest.raises(TypeError) as raised:
        await shaft.submit(wrong())
    assert message in str(raised.value)
    with pytest.raises(TypeError, match=r"Expected a list of tasks, got a NewTask. Write \[task, …\]."):
        await shaft.submit_many(new_task("t"))
    with pytest.raises(TypeError, match="did you mean max_cost_usd"):
        await shaft.submit(new_task("t"), **WRONG)
    assert (await shaft.list()).items == []


async def test_a_forgotten_await(shaft: Lineshaft) -> None:
    call: Any = shaft.submit(handler.new("x"))
    advice = r"shaft\.submit\(…\) was not awaited\. Write: await shaft\.submit\(…\)"
    with pytest.raises(AttributeError, match=f"There is no 'id' yet: {advice}"):
        _ = call.id
    with pytest.raises(AttributeError, match=f"There is no 'result' yet: {advice}"):
        call.result()
    with pytest.raises(TypeError, match=advice):
        call["key"]
    with pytest.raises(TypeError, match=f"Expected an id, a handle, a task or a DAG, got <{advice}>"):
        await shaft.get(call)
    assert "was not awaited" in repr(call)

    handle = await call
    result: Any = handle.result(60)
    assert repr(result) == "<handle.result(…) was not awaited. Write: await handle.result(…)>"
    await drain(shaft, agent)
    assert await result == "x"


async def test_a_call_is_used_as_a_coroutine(shaft: Lineshaft) -> None:
    """Scheduled, gathered, limited in time, cancelled and closed."""
    one = asyncio.create_task(shaft.submit(handler.new("x")))
    others = await asyncio.gather(
        shaft.submit(handler.new("y")), asyncio.wait_for(shaft.submit(handler.new("z")), 60)
    )
    assert len({(await one).id, *(other.id for other in others)}) == 3
    waiting = asyncio.create_task(others[0].result())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    shaft.submit(handler.new("x")).close()
    call = shaft.submit(handler.new("x"))
    assert asyncio.iscoroutine(call)
    call.close()


def test_without_an_event_loop(dsn: str) -> None:
    with SyncLineshaft(dsn) as shaft, pytest.raises(TypeError, match="did you mean max_cost_usd"):
        shaft.submit(new_task("t"), **WRONG)


@pytest.mark.parametrize("name", ["delay", "apply_async", "submit", "send"])
def test_submitting_as_with_other_queues(name: str) -> None:
    with pytest.raises(AttributeError, match=re.escape("write: await shaft.submit(research.new(…))")):
        getattr(handler, name)
    assert not hasattr(handler, "anything")


def test_an_ordinary_with() -> None:
    shaft: Any = Lineshaft("http://127.0.0.1:1")
    with pytest.raises(TypeError, match=r"async with Lineshaft\(\).*with SyncLineshaft\(\)"), shaft:
        pass


def test_arguments_as_of_other_queues() -> None:
    shaft: Any = Lineshaft("http://127.0.0.1:1")
    with pytest.raises(TypeError, match=r"Write: await shaft\.submit\(NewTask\('TYPE', spec={…}\)\)"):
        shaft.submit("research", {"prompt": "x"})
    with pytest.raises(TypeError, match=r"Write: await shaft\.submit_dag\('TITLE', \[NewTask"):
        shaft.submit_dag([NewTask("research")])
