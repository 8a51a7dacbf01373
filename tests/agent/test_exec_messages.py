"""What a command can say while it runs: progress, money, steps, checkpoints, spawning, and its wishes."""

import asyncio
import os
import shlex
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from lineshaft import Agent, Lineshaft, NewTask
from lineshaft.model.states import Status
from tests.agent.commands import Commands, commands_in
from tests.agent.helpers import AT_ONCE, PATIENCE, attempts, one

pytestmark = pytest.mark.alike_over_http

#: Prints a part of the task on standard input.
SHOW = (
    f"{shlex.quote(sys.executable)} -c "
    "'import json, sys; print(json.dumps(json.load(sys.stdin)[sys.argv[1]]))' "
)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as made:
        yield made


async def completed(shaft: Lineshaft, agent: Agent, **fields: Any) -> Any:
    task = await one(shaft, agent, "t", **fields)
    assert task.status is Status.COMPLETED, task.failure_history
    return task


async def test_progress_is_shown_while_it_runs(shaft: Lineshaft, commands: Commands) -> None:
    go = commands.directory / "go"
    agent = commands.agent(f'mkfifo {go}; tell \'{{"progress": {{"done": 1, "of": 3}}}}\'; cat {go}')
    submitted = await shaft.submit(NewTask("t"))
    running = asyncio.create_task(agent.run(shaft, until_idle=True, handle_signals=False))
    while (await shaft.get(submitted)).progress is None:  # noqa: ASYNC110 - only the database knows
        await asyncio.sleep(0)
    assert (await shaft.get(submitted)).progress == {"done": 1, "of": 3}
    await asyncio.to_thread(go.write_text, "now")
    await asyncio.wait_for(running, PATIENCE)

    assert (await shaft.get(submitted)).result == "now"


async def test_money_and_tokens_are_booked(shaft: Lineshaft, commands: Commands) -> None:
    agent = commands.agent(
        """
tell '{"spend": 0.02, "tokens_input": 900, "tokens_output": 100}'
tell '{"step": "a", "result": 1, "spend": 0.1, "tokens_input": 100}'
tell '{"spend": 0.003}'"""
    )
    task = await completed(shaft, agent)

    assert task.cost_usd == Decimal("0.123")
    assert (task.tokens_used.input, task.tokens_used.output) == (1000, 100)


async def test_a_recorded_step_is_not_lost_by_a_crash(shaft: Lineshaft, commands: Commands) -> None:
    """The next attempt gets it, on standard input and as an answer, and it is charged once."""
    agent = commands.agent(
        f"""
case $(ask '{{"step": "search"}}') in
  *'"done":true,"result":["a","b"]'*) {SHOW} steps ;;
  *'"done":false'*)
    tell '{{"step": "search", "result": ["a", "b"], "spend": 0.5}}'
    ask '{{"step": "write"}}' > /dev/null
    kill -KILL $$ ;;
esac"""
    )
    task = await completed(shaft, agent, retry=AT_ONCE)

    assert task.result == {"search": ["a", "b"]}
    assert (task.attempts, task.cost_usd) == (1, Decimal("0.5"))
    assert [past.cost_usd for past in await attempts(shaft, task.id)] == [Decimal("0.5"), Decimal(0)]


async def test_the_last_messages_count_after_the_command_has_ended(
    shaft: Lineshaft, commands: Commands
) -> None:
    """The pipe is read to its end, also without a final newline."""
    agent = commands.agent(
        """
if [ "$LINESHAFT_TASK_ATTEMPT" = 1 ]; then
  i=0; while [ $i -lt 200 ]; do tell "{\\"step\\": \\"s$i\\", \\"result\\": $i}"; i=$((i + 1)); done
  printf '{"checkpoint": {"at": 200}}' >&3
  exit 1
fi
ask '{"step": "s199"}'
"""
        + SHOW
        + "checkpoint"
    )
    task = await completed(shaft, agent, retry=AT_ONCE)
    step, checkpoint = task.result.splitlines()
    assert step == '{"step":"s199","done":true,"result":199}'
    assert checkpoint == '{"at": 200}'


async def test_the_next_attempt_gets_the_checkpoint(shaft: Lineshaft, commands: Commands) -> None:
    agent = commands.agent(
        f"""
tell '{{"checkpoint": {{"page": 1}}}}'; tell '{{"checkpoint": {{"page": 2}}}}'
test "$LINESHAFT_TASK_ATTEMPT" = 1 && exit 1
{SHOW} checkpoint"""
    )
    assert (await completed(shaft, agent, retry=AT_ONCE)).result == {"page": 2}


async def test_no_step_begins_when_the_money_is_used_up(shaft: Lineshaft, commands: Commands) -> None:
    """A step that was paid for is recorded anyway."""
    agent = commands.agent(
        """
tell '{"step": "dear", "result": "kept", "spend": 2}'
ask '{"step": "expensive"}' >&2
ask '{"step": "next"}' >&2
echo never"""
    )
    task = await one(shaft, agent, "t", max_cost_usd=1)

    assert (task.status, task.failure_category) == (Status.DEAD_LETTERED, "budget_exceeded")
    assert "max_cost_usd" in (task.failure_history[-1].error or "")
    assert task.cost_usd == 2


async def test_spending_is_bound_by_the_total(shaft: Lineshaft, commands: Commands) -> None:
    task = await one(shaft, commands.agent("""tell '{"spend": 3}'; echo done"""), "t", max_total_cost_usd=1)

    assert (task.status, task.failure_category) == (Status.DEAD_LETTERED, "budget_exceeded")
    assert "max_total_cost_usd" in (task.failure_history[-1].error or "")
    assert task.cost_usd == 3


async def test_spawn_and_wait(shaft: Lineshaft, commands: Commands) -> None:
    """R-145: the command ends, and runs again when its children have ended; nothing is spawned twice."""
    parts = '[{"type": "part", "spec": {"n": 1}}, {"type": "part", "spec": {"n": 2}}]'
    agent = commands.agent(f"""ask '{{"spawn": "parts", "wait": true, "tasks": {parts}}}'""")

    @agent.task("part")
    def part(n: int) -> int:
        return 10 * n

    task = await completed(shaft, agent)

    assert [child["output"] for child in task.result["children"]] == [10, 20]
    assert {child["status"] for child in task.result["children"]} == {"COMPLETED"}
    assert task.attempts == 0
    assert len((await shaft.list(parent_id=task.id)).items) == 2
    assert [past.outcome for past in await attempts(shaft, task.id)] == ["waiting", "completed"]


async def test_spawn_without_waiting(shaft: Lineshaft, commands: Commands) -> None:
    agent = commands.agent('ask \'{"spawn": "k", "tasks": [{"type": "later"}]}\'')
    task = await completed(shaft, agent)

    (child,) = task.result["children"]
    assert child["status"] == "READY"
    assert (await shaft.get(child["id"])).parent_id == task.id


async def test_artifacts_and_a_decision_report(shaft: Lineshaft, commands: Commands) -> None:
    agent = commands.agent(
        """
tell '{"artifact": "s3://bucket/a"}'; tell '{"artifact": {"path": "b"}}'
tell '{"decision_report": {"why": "because"}}'
echo data"""
    )
    task = await completed(shaft, agent)

    assert task.output.data == "data"
    assert task.output.artifacts == ["s3://bucket/a", {"path": "b"}]
    assert task.output.decision_report == {"why": "because"}


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize(
    ("wish", "status"),
    [
        ('{"cancel": "not wanted"}', Status.CANCELLED),
        ('{"snooze": 1000}', Status.PENDING),
        ('{"fail": "no good", "category": "invalid_input"}', Status.DEAD_LETTERED),
        ('{"fail": "slow down", "category": "rate_limit", "retry_after_sec": 100}', Status.RETRYING),
    ],
)
async def test_a_message_about_the_end_overrides_the_exit_code(
    shaft: Lineshaft, commands: Commands, wish: str, status: Status, code: int
) -> None:
    task = await one(shaft, commands.agent(f"tell '{wish}'; exit {code}"), "t")
    assert task.status is status


async def test_a_claim_that_is_over_ends_the_command(shaft: Lineshaft, commands: Commands) -> None:
    """Its next message finds out; heartbeats are too rare here."""
    go = commands.directory / "go"
    os.mkfifo(go)
    agent = Agent("a", heartbeat_interval_sec=1000)
    agent.task("t")(commands.script(f'cat {go}; tell \'{{"step": "s", "result": 1}}\'; exec sleep 1000'))
    submitted = await shaft.submit(NewTask("t"))
    running = asyncio.create_task(agent.run(shaft, until_idle=True, handle_signals=False))
    while (await shaft.get(submitted)).status is not Status.RUNNING:  # noqa: ASYNC110 - only the database knows
        await asyncio.sleep(0)
    await shaft.cancel(submitted)
    await asyncio.to_thread(go.write_text, "now")
    await asyncio.wait_for(running, PATIENCE)

    assert (await shaft.get(submitted)).status is Status.CANCELLED
