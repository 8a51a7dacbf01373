"""A command as an agent: what it is given, and what its end means."""

import asyncio
import os
import select
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lineshaft import Agent, Lineshaft, NewTask, Task
from lineshaft.agent.exec import UnixAccount
from lineshaft.agent.exec.command import MAX_OUTPUT_BYTES, TAIL_BYTES
from lineshaft.errors import LineshaftError
from lineshaft.model.states import Status
from tests.agent.commands import Commands, commands_in
from tests.agent.helpers import AT_ONCE, PATIENCE, attempts, kinds, one

pytestmark = pytest.mark.alike_over_http


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as made:
        yield made


async def output(shaft: Lineshaft, agent: Agent, **fields: Any) -> Any:
    task = await one(shaft, agent, "t", **fields)
    assert task.status is Status.COMPLETED, task.failure_history
    return task.result


async def failure(shaft: Lineshaft, agent: Agent, **fields: Any) -> tuple[str, str]:
    task = await one(shaft, agent, "t", max_attempts=1, **fields)
    assert task.status is Status.DEAD_LETTERED
    assert task.failure_reason is not None
    return str(task.failure_category), task.failure_history[-1].error or ""


async def test_a_command_gets_the_task_as_json_and_in_variables(shaft: Lineshaft, commands: Commands) -> None:
    agent = commands.agent(
        f"""exec {shlex.quote(sys.executable)} -c '
import json, os, sys
task = json.load(sys.stdin)
own = {{k: v for k, v in os.environ.items() if k.startswith("LINESHAFT_")}}
print(json.dumps([task, own]))'"""
    )
    spec = {"prompt": 'two\nlines "quoted" $HOME', "max-words": 12, "deep": {"a": [1]}, "fast": True}
    parent = await shaft.submit(NewTask("other"))
    task, variables = await output(shaft, agent, title="Title", spec=spec)

    assert task["spec"] == spec
    assert (task["title"], task["type"], task["agent_id"], task["attempt"]) == ("Title", "t", "a", 1)
    assert (task["steps"], task["checkpoint"], task["last_error"], task["inputs"]) == ({}, None, None, {})
    assert variables["LINESHAFT_TASK_ID"] == task["id"] != parent.id
    assert variables["LINESHAFT_TASK_SPEC_PROMPT"] == spec["prompt"]
    assert variables["LINESHAFT_TASK_SPEC_MAX_WORDS"] == "12"
    assert variables["LINESHAFT_TASK_SPEC_FAST"] == "true"
    assert "LINESHAFT_TASK_SPEC_DEEP" not in variables
    assert variables["LINESHAFT_TASK_ATTEMPT"] == "1"
    assert variables["LINESHAFT_FD"] == "3"


async def test_a_command_gets_its_lock_and_its_document(shaft: Lineshaft, commands: Commands) -> None:
    agent = commands.agent(
        f"""exec {shlex.quote(sys.executable)} -c '
import json, os, sys
task, own = json.load(sys.stdin), os.environ
names = ("LINESHAFT_TASK_LOCK_KEY", "LINESHAFT_TASK_DOCUMENT_ID")
print(json.dumps([task["lock_key"], task["documentId"], [own.get(name) for name in names]]))'"""
    )

    assert await output(shaft, agent, lock_key="doc:a b") == ["doc:a b", "a b", ["doc:a b", "a b"]]
    assert await output(shaft, agent, lock_key="other") == ["other", None, ["other", None]]
    assert await output(shaft, agent) == [None, None, [None, None]]


async def test_values_too_long_for_variables_are_on_standard_input(
    shaft: Lineshaft, commands: Commands
) -> None:
    agent = commands.agent('test -z "$LINESHAFT_TASK_SPEC_TEXT" && printf "$LINESHAFT_TASK_SPEC_N " && wc -c')
    text = await output(shaft, agent, spec={"text": "x" * 1_000_000, "n": 7})

    n, size = text.split()
    assert n == "7"
    assert int(size) > 1_000_000


@pytest.mark.parametrize(
    ("printed", "options", "expected"),
    [
        ("printf '{\"a\": [1, 2]}\\n'", {}, {"a": [1, 2]}),
        ("echo 42", {}, 42),
        ("echo just words", {}, "just words"),
        ("printf 'two\\nlines\\n\\n'", {}, "two\nlines\n"),
        ("true", {}, None),
        ("echo 42", {"output": "text"}, "42"),
        ("printf '\\377'", {}, "\ufffd"),
        ("cat > /dev/null; echo read", {}, "read"),
    ],
)
async def test_what_it_prints_is_the_output(
    shaft: Lineshaft, commands: Commands, printed: str, options: dict[str, Any], expected: Any
) -> None:
    assert await output(shaft, commands.agent(printed, **options)) == expected


@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        ("echo broken >&2; exit 3", {}, ("error", "The command ended with exit code 3.\nbroken")),
        ("echo on stdout; exit 1", {}, ("error", "The command ended with exit code 1.\non stdout")),
        ("exit 1", {}, ("error", "The command ended with exit code 1.")),
        ("echo no key >&2; exit 77", {}, ("auth_failure", "The command ended with exit code 77.\nno key")),
        ("exit 64", {}, ("invalid_input", "The command ended with exit code 64.")),
        ("exit 65", {}, ("invalid_input", "The command ended with exit code 65.")),
        ("kill -SEGV $$", {}, ("crash", "The command was killed by SIGSEGV.")),
        ("echo words", {"output": "json"}, ("invalid_output", "The command's output is not valid JSON")),
        ("yes", {}, ("invalid_output", f"more than {MAX_OUTPUT_BYTES} bytes")),
        ("tell nonsense; sleep 1000", {}, ("invalid_output", "is not a valid message")),
        ("tell '{\"porgress\": 1}'; sleep 1000", {}, ("invalid_output", "porgress")),
        ("tell '{\"wait\": true}'; sleep 1000", {}, ("invalid_output", "has none of progress, step")),
        ("tell '{\"spend\": -1}'; sleep 1000", {}, ("invalid_output", "is refused")),
        ('tell \'{"spawn": "x", "tasks": []}\'; sleep 1000', {}, ("invalid_output", "at least one task")),
        ("yes >&3", {}, ("invalid_output", "is not a valid message")),
        ("exec sleep 1000", {"time_limit_sec": 0.2}, ("timeout", "timed out after 0.2 s")),
    ],
)
async def test_failures(
    shaft: Lineshaft, commands: Commands, script: str, options: dict[str, Any], expected: tuple[str, str]
) -> None:
    category, error = await failure(shaft, commands.agent(script, **options))

    assert category == expected[0]
    assert expected[1] in error


async def test_exit_code_75_postpones_the_task_without_using_an_attempt(
    shaft: Lineshaft, commands: Commands
) -> None:
    agent = commands.agent("exit 75", retry_later_sec=500)
    task = await one(shaft, agent, "t", max_attempts=1)

    assert (task.status, task.attempts) == (Status.PENDING, 0)
    assert task.run_at is not None or task.retry_at is not None
    assert "task.failed" not in await kinds(shaft, task.id)


@pytest.mark.parametrize("code", [1, 75])
async def test_a_rate_limit_on_standard_error_is_recognised(
    shaft: Lineshaft, commands: Commands, code: int
) -> None:
    """R-210: no attempt is used."""
    agent = commands.agent(f"echo 'HTTP 429 Too Many Requests, retry after 30 s' >&2; exit {code}")
    task = await one(shaft, agent, "t", max_attempts=1)

    assert (task.status, task.attempts) == (Status.RETRYING, 0)
    (past,) = await attempts(shaft, task.id)
    assert past.outcome == "rate_limited"


async def test_the_end_of_standard_error_is_kept_and_all_of_it_read(
    shaft: Lineshaft, commands: Commands
) -> None:
    agent = commands.agent("seq 1 200000 >&2; exit 1")
    _, error = await failure(shaft, agent)

    lines = error.splitlines()
    assert lines[-1] == "200000"
    assert lines[1].isdigit()
    assert TAIL_BYTES - 10 < len(error.encode()) < TAIL_BYTES + 100


async def test_the_next_attempt_gets_the_last_error(shaft: Lineshaft, commands: Commands) -> None:
    agent = commands.agent(
        'if [ "$LINESHAFT_TASK_ATTEMPT" = 1 ]; then echo no luck >&2; exit 1; fi\n'
        f"exec {shlex.quote(sys.executable)} -c "
        '\'import json, sys; t = json.load(sys.stdin); print(t["last_error"]["error"])\''
    )
    assert (await output(shaft, agent, retry=AT_ONCE)).endswith("no luck")


async def test_a_command_gets_only_the_allowed_part_of_the_environment(
    shaft: Lineshaft, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", "postgresql://secret")
    monkeypatch.setenv("LINESHAFT_TOKEN", "secret")
    monkeypatch.setenv("LINESHAFT_TASK_SPEC_OLD", "of another task")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("LC_TIME", "kept")
    names = "$LINESHAFT_DATABASE_URL,$LINESHAFT_TOKEN,$LINESHAFT_TASK_SPEC_OLD,$OPENAI_API_KEY,$LC_TIME"
    printed = f'echo "{names}"'

    assert await output(shaft, commands.agent(printed)) == ",,,,kept"
    assert await output(shaft, commands.agent(printed, pass_env=["LINESHAFT_TOKEN"])) == ",secret,,,kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another account")
async def test_a_command_under_another_account(shaft: Lineshaft, commands: Commands) -> None:
    """It can't read the agent's files, and ends like any other."""
    secret = commands.directory / "secret"
    secret.write_text("password")
    secret.chmod(0o600)
    command = commands.command(
        *("/bin/sh", "-c", f'id -un; id -Gn; echo "$HOME"; cat {secret} 2>&1 | tail -c 18'),
        account=UnixAccount.find("nobody"),
    )
    agent = Agent("a")
    agent.task("t")(command)

    assert (await output(shaft, agent)).split("\n") == [
        "nobody",
        "nogroup",
        "/nonexistent",
        "Permission denied",
    ]


@pytest.mark.parametrize("name", ["root", "no-such-account"])
def test_an_account_that_is_not_allowed(name: str) -> None:
    with pytest.raises(LineshaftError, match=name):
        UnixAccount.find(name)


async def test_lines_of_standard_error_above_the_limit_are_counted(
    shaft: Lineshaft, commands: Commands, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    agent = commands.agent("seq 100000 >&2; echo done")

    assert await output(shaft, agent) == "done"

    lines = [record.getMessage() for record in caplog.records]
    shown = sum(line.isdigit() for line in lines)
    left_out = sum(int(line.split()[0]) for line in lines if "lines left out" in line)
    assert shown < 10_000
    assert shown + left_out == 100_000


async def test_without_a_shell_nothing_is_expanded(shaft: Lineshaft, commands: Commands) -> None:
    agent = Agent("a")
    agent.task("t")(commands.command("echo", "$HOME", "a b", ";", "false"))
    assert await output(shaft, agent) == "$HOME a b ; false"


async def test_a_command_that_cant_be_started_fails_the_task(shaft: Lineshaft, commands: Commands) -> None:
    agent = Agent("a")
    agent.task("t")(commands.command("/no/such/command"))
    category, error = await failure(shaft, agent)
    assert category == "error"
    assert "/no/such/command" in error


class PidPipe:
    """Process ids that a script writes into a named pipe."""

    def __init__(self, commands: Commands) -> None:
        self.pipe = commands.directory / "pids"
        os.mkfifo(self.pipe)
        # For writing too: then neither this nor the script's own opening waits for the other side.
        handle = os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK)
        commands.resources.callback(os.close, handle)
        self._handle = handle

    async def read(self) -> list[int]:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._handle, readable.set)
        try:
            await asyncio.wait_for(readable.wait(), PATIENCE)
        finally:
            loop.remove_reader(self._handle)
        return [int(word) for word in os.read(self._handle, 100).split()]


async def gone(*pids: int) -> None:
    """Wait until these processes, which are not children of the test, have ended."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert (await asyncio.to_thread(select.select, [handle], [], [], PATIENCE))[0], f"{pid} goes on"
        finally:
            os.close(handle)


class TimeLimits:
    """Limits of commands that pass when the test says so: real ones may be over before a command is ready."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._set: dict[float | None, asyncio.Timeout] = {}
        self._real = asyncio.timeout
        monkeypatch.setattr(asyncio, "timeout", self._timeout)

    def _timeout(self, delay: float | None) -> asyncio.Timeout:
        limit = self._set[delay] = self._real(delay)
        return limit

    def let_pass(self, seconds: float) -> None:
        self._set[seconds].reschedule(asyncio.get_running_loop().time())


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> TimeLimits:
    return TimeLimits(monkeypatch)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_the_time_limit_ends_the_whole_group(
    shaft: Lineshaft, commands: Commands, limits: TimeLimits
) -> None:
    """SIGTERM first, then SIGKILL; the last output is kept."""
    pids = PidPipe(commands)
    agent = commands.agent(
        f"""
sh -c 'trap "" TERM; while :; do sleep 1000; done' &
stubborn=$!
trap 'echo got TERM >&2; exit 0' TERM
echo $$ $stubborn >> {pids.pipe}
while :; do sleep 1000 & wait $!; done
""",
        time_limit_sec=1001,
    )
    failing = asyncio.create_task(failure(shaft, agent))
    processes = await pids.read()
    limits.let_pass(1001)
    category, error = await failing

    assert category == "timeout"
    assert error.startswith("The command timed out after 1001 s.\n")
    assert error.endswith("got TERM")
    await gone(*processes)


async def test_a_program_that_ignores_sigterm_is_killed(
    shaft: Lineshaft, commands: Commands, limits: TimeLimits
) -> None:
    pids = PidPipe(commands)
    agent = commands.agent(
        f"trap '' TERM; echo stubborn >&2; echo $$ > {pids.pipe}; while :; do sleep 1000; done",
        time_limit_sec=1001,
        kill_after_sec=0.2,
    )
    failing = asyncio.create_task(failure(shaft, agent))
    await pids.read()
    limits.let_pass(1001)

    assert await failing == ("timeout", "The command timed out after 1001 s.\nstubborn")


async def test_the_tasks_own_limit_counts(shaft: Lineshaft, commands: Commands, limits: TimeLimits) -> None:
    pids = PidPipe(commands)
    agent = commands.agent(
        f'echo "limit $LINESHAFT_TASK_TIME_LIMIT_SEC" >&2; echo $$ > {pids.pipe}; exec sleep 1000',
        kill_after_sec=500,
    )
    failing = asyncio.create_task(failure(shaft, agent, max_duration_sec=3000))
    await pids.read()
    limits.let_pass(2700)
    category, error = await failing

    assert category == "timeout"
    assert error.endswith("limit 2700")


async def test_processes_left_running_are_killed_and_not_waited_for(
    shaft: Lineshaft, commands: Commands
) -> None:
    """A daemon that left the group keeps the pipes open; the task completes anyway."""
    pids = PidPipe(commands)
    left = commands.directory / "left"
    daemon_script = f"setsid sh -c 'echo > {left}; exec sleep 1000' & d=$!; until [ -e {left} ]; do :; done"
    agent = commands.agent(f"sleep 1000 & a=$!; {daemon_script}; echo $a $d > {pids.pipe}; echo done")

    assert await output(shaft, agent) == "done"
    left_behind, daemon = await pids.read()
    await gone(left_behind)
    os.kill(daemon, signal.SIGKILL)
    await gone(daemon)


async def test_a_cancelled_task_ends_its_command(shaft: Lineshaft, commands: Commands) -> None:
    pids = PidPipe(commands)
    agent = commands.agent(f"echo $$ > {pids.pipe}; exec sleep 1000", heartbeat_interval_sec=0.5)
    submitted = await shaft.submit(NewTask("t"))
    running = asyncio.create_task(agent.run(shaft, until_idle=True, handle_signals=False))
    (pid,) = await pids.read()
    await shaft.cancel(submitted)
    await asyncio.wait_for(running, PATIENCE)

    await gone(pid)
    assert (await shaft.get(submitted)).status is Status.CANCELLED


async def test_an_agent_that_stops_releases_tasks_and_ends_its_commands(
    shaft: Lineshaft, commands: Commands
) -> None:
    """R-081: no attempt is used."""
    pids = PidPipe(commands)
    agent = commands.agent(f"echo $$ > {pids.pipe}; exec sleep 1000")
    submitted = await shaft.submit(NewTask("t"))
    running = asyncio.create_task(agent.run(shaft, handle_signals=False))
    (pid,) = await pids.read()
    agent.stop(now=True)
    await asyncio.wait_for(running, PATIENCE)

    await gone(pid)
    task: Task = await shaft.get(submitted)
    assert (task.status, task.attempts) == (Status.READY, 0)


async def test_no_agent_gets_a_task_whose_command_is_still_ending(
    shaft: Lineshaft, commands: Commands, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even an agent without patience gives a command the time between SIGTERM and SIGKILL."""
    monkeypatch.setattr("lineshaft.agent.executor._PATIENCE_SEC", 0)
    pids = PidPipe(commands)
    agent = commands.agent(f"trap 'exit 1' TERM; echo $$ > {pids.pipe}; while :; do sleep 1000; done")
    submitted = await shaft.submit(NewTask("t"))
    running = asyncio.create_task(agent.run(shaft, handle_signals=False))
    await pids.read()
    agent.stop(now=True)
    await asyncio.wait_for(running, PATIENCE)

    assert "ignores its cancellation" not in caplog.text
    assert (await shaft.get(submitted)).status is Status.READY


@pytest.mark.slow("starts many commands")
async def test_many_at_once_leave_no_descriptors(shaft: Lineshaft, commands: Commands) -> None:
    agent = Agent("a", max_concurrent_tasks=20)
    agent.task("t")(commands.script("tell '{\"progress\": 1}'; cat; echo noise >&2"))
    assert (await output(shaft, agent, spec={"n": 0}))["spec"] == {"n": 0}
    before = open_descriptors()
    submitted = await shaft.submit_many([NewTask("t", spec={"n": n}) for n in range(60)])
    await asyncio.wait_for(agent.run(shaft, until_idle=True, handle_signals=False), PATIENCE)

    assert [(await shaft.get(task)).result["spec"]["n"] for task in submitted] == list(range(60))
    # Some connections of the pool may have come and gone.
    assert abs(open_descriptors() - before) < 10


@pytest.mark.slow("starts and kills an agent")
@pytest.mark.alike_over_http(False)
async def test_commands_die_with_an_agent_that_is_killed(
    shaft: Lineshaft, transport: str, where: str, commands: Commands
) -> None:
    """Another agent will get the task: two commands must not work on it."""
    pids = PidPipe(commands)
    script = commands.directory / "work.sh"
    script.write_text(f"#!/bin/sh\ntrap '' TERM\nsleep 1000 &\necho $$ $! > {pids.pipe}\nwait\nsleep 1000\n")
    script.chmod(0o700)
    await shaft.submit(NewTask("t"))
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lineshaft.cli.main", "agent", "--exec", str(script)),
        *("--type", "t"),
        env=os.environ | {{"database": "LINESHAFT_DATABASE_URL", "http": "LINESHAFT_URL"}[transport]: where},
    )
    at_work = await pids.read()
    assert all(map(alive, at_work))
    agent.send_signal(signal.SIGKILL)
    await agent.wait()

    await gone(*at_work)
