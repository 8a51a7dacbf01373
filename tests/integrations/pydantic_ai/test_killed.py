"""SIGKILL between and in the calls of models and tools: what is recorded is neither repeated nor paid again.

The server of the model is the test's: it counts what was asked.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest

from lineshaft import Lineshaft, NewTask
from lineshaft.model.states import Status
from tests.agent.agent_process import AgentProcess, _started
from tests.agent.helpers import AT_ONCE, at_work, ended, engine_of, lose_claim, until
from tests.integrations.pydantic_ai.conftest import KEY
from tests.integrations.pydantic_ai.durable_program import Points, make_agent
from tests.llm_server import USAGE, LLMServer, Reply

SLOW = pytest.mark.slow("starts a process for each case")
ALL = [
    "writer/look:id1",
    "writer/look:id2",
    "writer/model",
    "writer/model#2",
    "writer/model#3",
    "writer/write:id3",
]
#: What is recorded when each point is reached; the other call of a tool beside `look` may be.
RECORDED: dict[str, set[str]] = {
    "started": set(),
    "look id1": {"writer/model"},
    "look id2": {"writer/model"},
    "write": {"writer/model", "writer/look:id1", "writer/look:id2", "writer/model#2"},
    "ended": set(ALL),
}


@asynccontextmanager
async def program(where: str, log: Path, *options: str) -> AsyncIterator[AgentProcess]:
    async with _started(
        "-m", "tests.integrations.pydantic_ai.durable_program", where, str(log), *options
    ) as process:
        yield process


def script(hold: Callable[[int], Event | None]) -> Callable[[dict[str, Any]], Reply]:
    """The model: what it says depends on the results that it has, as for a real one."""
    usage = USAGE | {"cost": 0.01}

    def answer(request: dict[str, Any]) -> Reply:
        results = [message for message in request["messages"] if message["role"] == "tool"]
        held = hold(len(results))
        if not results:
            calls = [("look", {"where": "x"}, "id1"), ("look", {"where": "x"}, "id2")]
            return Reply(tools=calls, usage=usage, hold=held)
        if len(results) == 2:
            return Reply(tools=[("write", {"text": "y"}, "id3")], usage=usage, hold=held)
        return Reply("; ".join(message["content"] for message in results), usage=usage, hold=held)

    return answer


async def submit(shaft: Lineshaft) -> str:
    return (await shaft.submit(NewTask("work", retry=AT_ONCE, max_attempts=3))).id


async def finished(shaft: Lineshaft, connection: psycopg.Connection, task_id: str, log: Path) -> None:
    """Let another agent finish it, and check what came of it."""
    await lose_claim(shaft, connection, task_id)
    async with at_work(make_agent("second", Points(log)), shaft=shaft):
        task = await ended(shaft, task_id)

    assert (task.status, task.result) == (
        Status.COMPLETED,
        "x as id1 saw it; x as id2 saw it; wrote y",
    )
    assert sorted(await engine_of(shaft).read.steps(task_id)) == ALL
    # Three answers that count, however often somebody was killed.
    assert (task.cost_usd, task.tokens_used.input) == (Decimal("0.03"), 3_000)
    _check_no_key(connection)


@pytest.mark.slow("starts and kills agents")
@pytest.mark.parametrize(
    "point", ["write", *(pytest.param(each, marks=SLOW) for each in RECORDED if each != "write")]
)
async def test_killed_between_calls(  # noqa: PLR0917 - fixtures
    shaft: Lineshaft,
    where: str,
    server: LLMServer,
    tmp_path: Path,
    connection: psycopg.Connection,
    point: str,
) -> None:
    """In a tool, or outside of all of them: no answer is asked for twice, no tool but that one runs twice."""
    server.answer = script(lambda _: None)
    log = tmp_path / "log"
    task_id = await submit(shaft)
    async with program(where, log, point) as process:
        await process.reaches(point)
        if point.startswith("look"):
            other = {"look id1": "writer/look:id2", "look id2": "writer/look:id1"}[point]

            async def other_is_recorded() -> bool:
                return other in await engine_of(shaft).read.steps(task_id)

            await until(other_is_recorded)
        assert set(await engine_of(shaft).read.steps(task_id)) >= RECORDED[point]
        await process.kill()

    await finished(shaft, connection, task_id, log)

    assert len(server.requests) == 3
    reached = log.read_text().splitlines()
    for tool in ("look id1", "look id2", "write"):
        assert reached.count(tool) == 1 + (tool == point)


@pytest.mark.slow("starts and kills agents")
@pytest.mark.parametrize("number", [0, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)])
async def test_killed_while_a_model_answers(  # noqa: PLR0917 - fixtures
    shaft: Lineshaft,
    where: str,
    server: LLMServer,
    tmp_path: Path,
    connection: psycopg.Connection,
    number: int,
) -> None:
    """Nobody has seen that answer: only that one is asked for again."""
    over = Event()
    server.answer = script(lambda results: over if results == number else None)
    log = tmp_path / "log"
    task_id = await submit(shaft)
    before = {0: 1, 2: 2, 3: 3}[number]
    async with program(where, log) as process:
        await asyncio.to_thread(server.wait_for, before)
        await process.kill()
    over.set()

    await finished(shaft, connection, task_id, log)

    assert len(server.requests) == 4
    reached = log.read_text().splitlines()
    assert [reached.count(tool) for tool in ("look id1", "look id2", "write")] == [1, 1, 1]


def _check_no_key(connection: psycopg.Connection) -> None:
    """The key of the model is in no row of any table."""
    tables = connection.execute(
        "SELECT table_name FROM information_schema.tables WHERE table_schema = 'lineshaft'"
    ).fetchall()
    for (table,) in tables:
        found = connection.execute(
            f'SELECT count(*) FROM lineshaft."{table}" AS row WHERE row::text LIKE %s'.encode(), [f"%{KEY}%"]
        ).fetchone()
        assert found == (0,), table
