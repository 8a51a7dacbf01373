"""Accounts with providers: what handlers and commands get, and windows of hours with killed processes."""

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from lineshaft import Agent, Fail, Lineshaft, NewTask, RateLimited, TaskContext
from lineshaft.agent.exec import Command, read_variables
from lineshaft.agent.outcome import of_exception
from lineshaft.errors import LineshaftError
from lineshaft.model.states import Status
from lineshaft.testing import InlineBench
from tests.agent.account_program import ACCOUNTS, SLOTS
from tests.agent.agent_process import AgentProcess, module
from tests.agent.helpers import PATIENCE, at_work, attempts, one, soon

WINDOW = timedelta(hours=5)
TASKS = 30


# What handlers get.


async def test_a_handler_gets_an_account_and_may_close_it(shaft: Lineshaft) -> None:
    agent = Agent("a", accounts=ACCOUNTS)
    until = datetime.now(UTC) + WINDOW
    used: list[str | None] = []

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str | None:
        used.append(ctx.account)
        if len(used) == 1:
            raise RateLimited("5-hour limit reached", retry_at=until)
        return ctx.account

    task = await one(shaft, agent, "t")

    assert (task.status, task.attempts) == (Status.COMPLETED, 0)
    past = [(each.outcome, each.account) for each in await attempts(shaft, task.id)]
    assert past == [("rate_limited", "team-1"), ("completed", "team-2")]
    assert used == ["team-1", "team-2"]
    (slowdown,) = (await shaft.slowdowns()).items
    assert (slowdown.key, abs(slowdown.until - until) < timedelta(seconds=1)) == ("account:team-1", True)
    found = await shaft.get_agent("a")
    assert [(each.name, each.open) for each in found.accounts] == [("team-1", False), ("team-2", True)]


async def test_a_failure_may_name_another_account(shaft: Lineshaft) -> None:
    """A tool that switches between accounts by itself."""
    agent = Agent("a", accounts=["team-1"])

    @agent.task("t")
    async def handler() -> None:
        raise RateLimited(retry_after_sec=WINDOW, account="team-9")

    task = await one(shaft, agent, "t")

    assert [past.account for past in await attempts(shaft, task.id)] == ["team-9"]
    assert [item.key for item in (await shaft.slowdowns()).items] == ["account:team-9"]


async def test_agents_go_on_by_themselves_when_an_account_opens(shaft: Lineshaft) -> None:
    """There is no notification then; polls would come after 30 s."""
    agent = Agent("a", accounts=["team-1"])
    limited, done = asyncio.Event(), asyncio.Event()

    @agent.task("t")
    async def handler(n: int) -> None:
        if n == 1:
            limited.set()
            raise RateLimited(retry_at=datetime.now(UTC) + timedelta(seconds=2))
        done.set()

    async with at_work(agent, shaft=shaft):
        await shaft.submit(NewTask("t", spec={"n": 1}))
        await soon(limited)
        async for _ in shaft.events(None, kinds=["signal.slowdown"]):
            break
        await shaft.submit(NewTask("t", spec={"n": 2}))
        await asyncio.wait_for(done.wait(), PATIENCE)


async def test_without_accounts_there_is_none() -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str | None:
        return ctx.account

    assert await InlineBench().run(handler) is None
    assert await InlineBench(account="team-1").run(handler) == "team-1"


def test_a_rate_limit_names_a_valid_instant_and_account() -> None:
    with pytest.raises(ValueError, match="needs a time zone"):
        RateLimited(retry_at=datetime(2030, 1, 1))  # noqa: DTZ001
    with pytest.raises(ValueError, match="printable"):
        RateLimited(account="\n")
    at = datetime(2030, 1, 1, tzinfo=UTC)
    outcome = of_exception(RateLimited("wait", retry_at=at, account="x"))
    assert (outcome.error, outcome.category) == ("wait", "rate_limit")
    assert (outcome.retry_at, outcome.account) == (at, "x")
    assert isinstance(RateLimited(), Fail)


# Commands.


def test_environment_files(tmp_path: Path) -> None:
    file = tmp_path / "team-1.env"
    file.write_text("# a comment\n\nexport KEY=sk-1\nQUOTED='a b'\n DIR = x\nEMPTY=\n")
    with pytest.raises(LineshaftError, match=r"Line 5 of .*team-1.env is not NAME=VALUE"):
        read_variables(file)
    file.write_text("# a comment\n\nexport KEY=sk-1\nQUOTED='a b'\nURL=http://x?a=b\nEMPTY=\n")

    assert read_variables(file) == {"KEY": "sk-1", "QUOTED": "a b", "URL": "http://x?a=b", "EMPTY": ""}
    with pytest.raises(LineshaftError, match="can't be read"):
        read_variables(tmp_path / "missing")


async def test_a_command_gets_the_variables_of_its_account(shaft: Lineshaft, tmp_path: Path) -> None:
    """And closes it with a message, with exit code 0."""
    files = {}
    for name in ACCOUNTS:
        files[name] = tmp_path / f"{name}.env"
        files[name].write_text(f"TOOL_KEY=key of {name}\nLINESHAFT_TASK_ID=forged\n")
    script = tmp_path / "script"
    until = datetime.now(UTC) + WINDOW
    script.write_text(
        '#!/bin/sh\necho "$LINESHAFT_TASK_ACCOUNT: $TOOL_KEY of $LINESHAFT_TASK_ID"\n'
        "[ \"$LINESHAFT_TASK_ACCOUNT\" = team-2 ] || printf '%s\\n' "
        f'\'{{"rate_limited": "usage limit", "retry_at": "{until.isoformat()}"}}\' >&"$LINESHAFT_FD"\n'
    )
    script.chmod(0o700)
    agent = Agent("a", accounts=ACCOUNTS)
    with Command([str(script)], account_files=files) as command:
        agent.task("t")(command)
        task = await one(shaft, agent, "t")

    assert (task.result, task.attempts) == (f"team-2: key of team-2 of {task.id}", 0)


# Windows of hours.


def pass_time(connection: psycopg.Connection, length: timedelta) -> None:
    """As if so much time had passed: all that the database knows lies further back."""
    columns = connection.execute(
        "SELECT table_name, array_agg(column_name::text) FROM information_schema.columns"
        " WHERE table_schema = 'lineshaft' AND data_type = 'timestamp with time zone'"
        " AND table_name = ANY (%s)"
        " GROUP BY table_name",
        [["task_live", "slowdown", "account", "account_outage", "instance", "attempt", "agent", "event"]],
    ).fetchall()
    for table, names in columns:
        moved = sql.SQL(", ").join(
            sql.SQL("{0} = {0} - {1}").format(sql.Identifier(name), sql.Literal(length)) for name in names
        )
        connection.execute(sql.SQL("UPDATE lineshaft.{} SET {}").format(sql.Identifier(table), moved))


def count(connection: psycopg.Connection, query: str) -> int:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


def moment(connection: psycopg.Connection, query: str) -> datetime:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    assert isinstance(row[0], datetime)
    return row[0]


async def until_count(connection: psycopg.Connection, query: str, n: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while count(connection, query) < n:  # noqa: ASYNC110 - only the database knows
            await asyncio.sleep(0.02)


FIRST_END = "SELECT min(until) FROM lineshaft.slowdown"
FIRST_CLAIM = "SELECT min(claimed_at) FROM lineshaft.task_end WHERE status = 'COMPLETED'"
BEATING = (
    "SELECT count(*) FROM lineshaft.instance"
    " WHERE status = 'active' AND last_heartbeat > registered_at + interval '0.2 s'"
)
CLAIMS = "SELECT count(*) FROM lineshaft.event WHERE 'task.claimed' = ANY (kinds)"
CLOSED = "SELECT count(*) FROM lineshaft.event WHERE 'accounts.closed' = ANY (kinds)"
OPENED = "SELECT count(*) FROM lineshaft.event WHERE 'accounts.opened' = ANY (kinds)"
COMPLETED = "SELECT count(*) FROM lineshaft.task_end WHERE status = 'COMPLETED'"
NOT_HELD = "SELECT (count(lease_until) = 0)::integer FROM lineshaft.task_live"


async def _two(stack: AsyncExitStack, where: str, folder: Path) -> list[AgentProcess]:
    processes = []
    for _ in range(2):
        process = await stack.enter_async_context(module("tests.agent.account_program", where, str(folder)))
        await process.reaches("started")
        processes.append(process)
    return processes


@pytest.mark.slow("starts and kills agents")
async def test_thirty_tasks_on_two_accounts_that_close_for_five_hours(
    shaft: Lineshaft, where: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    """With kill -9 in between: no attempt used, no dead letter, nothing on a closed account; on in time."""
    ends = {name: datetime.now(UTC) + WINDOW for name in ACCOUNTS}
    for name, until in ends.items():
        (tmp_path / name).write_text(until.isoformat())
    tasks = await shaft.submit_many([NewTask("code", spec={"n": n}) for n in range(TASKS)])
    async with AsyncExitStack() as stack:
        killed = await _two(stack, where, tmp_path)
        await until_count(connection, CLOSED, 1)
        await until_count(connection, NOT_HELD, 1)
        for process in killed:
            await process.kill()
    rushed = count(connection, CLAIMS)
    # What both processes held when the accounts closed, and what they were just claiming.
    assert len(ACCOUNTS) <= rushed <= 3 * len(ACCOUNTS) * SLOTS < TASKS
    live = connection.execute("SELECT attempts, rate_limits, due_at FROM lineshaft.task_live").fetchall()
    assert [row[:2] for row in live] == [(0, 0)] * TASKS
    # Those for which another account seemed to be open are claimable, but no agent may claim them.
    later = [row[2] for row in live if row[2] is not None and row[2] > datetime.now(UTC)]
    assert all(min(abs(due - end) for end in ends.values()) < timedelta(milliseconds=1) for due in later)

    # New processes wait as well, up to the instant.
    async with AsyncExitStack() as stack:
        waiting = await _two(stack, where, tmp_path)
        await until_count(connection, BEATING, 2)
        assert count(connection, CLAIMS) == rushed
        for process in waiting:
            await process.kill()
    left = timedelta(seconds=3)
    pass_time(connection, moment(connection, FIRST_END) - datetime.now(UTC) - left)
    opens = moment(connection, FIRST_END)
    for name in ACCOUNTS:
        (tmp_path / name).unlink()
    async with AsyncExitStack() as stack:
        await _two(stack, where, tmp_path)
        await until_count(connection, COMPLETED, TASKS)
        await until_count(connection, OPENED, 1)
    # The clocks of this process and of the database are one.
    assert opens <= moment(connection, FIRST_CLAIM) < opens + timedelta(seconds=PATIENCE / 2)

    assert (count(connection, CLOSED), count(connection, OPENED)) == (1, 1)
    assert count(connection, "SELECT coalesce(sum(attempts), 0) FROM lineshaft.task_end") == 0
    assert count(connection, "SELECT count(*) FROM lineshaft.dead_letter") == 0
    outcomes = {past.outcome for task in tasks for past in await attempts(shaft, task.id)}
    assert outcomes == {"rate_limited", "completed"}
    assert count(connection, CLAIMS) == rushed + TASKS
