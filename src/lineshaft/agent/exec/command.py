"""The handler that runs a command: what the command gets, and what its exit means.

A command gets the task as JSON on its standard input, and the most important fields as environment variables.
Artifacts are files in one folder; files that it writes to another become artifacts of the output. What it
prints is the output's data: JSON if it is valid JSON, else text. The exit codes are those of sysexits.h. The
end of its standard error is kept with a failed attempt.
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from msgspec import Struct, field

from lineshaft import background
from lineshaft.agent.context import TaskContext, execution_of
from lineshaft.agent.exec.account import UnixAccount
from lineshaft.agent.exec.account_files import read_variables
from lineshaft.agent.exec.files import attempt_files, delete_left_behind
from lineshaft.agent.exec.messages import Conversation
from lineshaft.agent.exec.process import AGENT_FD, Inflow, Process
from lineshaft.agent.outcome import Fail, Result, Snooze
from lineshaft.agent.threads import Threads
from lineshaft.child_environment import child_environment
from lineshaft.guardian import Guardian
from lineshaft.model import ratelimit
from lineshaft.model.retry import FailureCategory
from lineshaft.settings import FD_VARIABLE, TASK_PREFIX

MAX_OUTPUT_BYTES = 8 << 20
TAIL_BYTES = 4096
_LONGEST_LOGGED_LINE = 2000
#: Lines of a program that are logged; the others are counted. The end of the output is kept in any case.
LINES_PER_SEC = 100

#: Exit codes other than 0, as in sysexits.h. All others are errors of the command.
RETRY_LATER = os.EX_TEMPFAIL
CATEGORIES = {
    os.EX_USAGE: FailureCategory.INVALID_INPUT,
    os.EX_DATAERR: FailureCategory.INVALID_INPUT,
    os.EX_NOPERM: FailureCategory.AUTH_FAILURE,
}

#: The kernel accepts 128 KiB for one variable and some MiB for all; longer values are only in the JSON.
_LONGEST_VARIABLE = 100_000
_ALL_VARIABLES = 500_000
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9]")

#: Fields of the context that a command gets as JSON and as variables.
_PLAIN_FIELDS = (
    *("id", "type", "title", "dag_id", "parent_id", "agent_id", "model", "account"),
    *("deadline", "epoch", "attempt", "max_attempts"),
)

OutputFormat = Literal["auto", "json", "text"]


class Command(Struct, frozen=True):
    """A handler for `Agent.task`. Use it as a context manager, which ends its helper processes."""

    arguments: Sequence[str]
    #: Variables of the agent that commands get in addition to the usual ones.
    pass_env: Sequence[str] = ()
    #: The account that commands run under; None: the agent's.
    account: UnixAccount | None = None
    #: Seconds; None: only the task's own limit applies.
    time_limit_sec: float | None = None
    #: Between SIGTERM and SIGKILL.
    kill_after_sec: float = 5.0
    #: How long exit code 75 postpones a task.
    retry_later_sec: float = 60.0
    output: OutputFormat = "auto"
    #: Environment files of accounts with providers, by the name of the account.
    account_files: Mapping[str, Path] = field(default_factory=dict)
    _threads: Threads = field(default_factory=lambda: Threads("lineshaft command"))
    _guardian: Guardian = field(default_factory=Guardian)

    def __enter__(self) -> Self:
        delete_left_behind()
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()
        self._guardian.close()

    @property
    def patience_sec(self) -> float:
        """How long stopping may take: the time between the signals, and a moment for the last one."""
        return self.kill_after_sec + 1.0

    async def __call__(self, ctx: TaskContext) -> Any:
        async with attempt_files(self.account) as files:
            await files.fetch(ctx, execution_of(ctx).stored_files)
            result = await self._run(ctx, files.variables)
            if isinstance(result, Result):
                await files.store(ctx)
            return result

    async def _run(self, ctx: TaskContext, folders: dict[str, str]) -> Any:
        # It ends before the task's limit, to leave time for ending the command and reporting why.
        limit = ctx.time_limit_sec - min(self.kill_after_sec, 0.1 * ctx.time_limit_sec)
        if self.time_limit_sec is not None:
            limit = min(limit, self.time_limit_sec)
        own = self._account_variables(ctx)
        variables = own | environment(os.environ, ctx, pass_env=self.pass_env, time_limit_sec=limit) | folders
        # Fetching its files may have taken long.
        await execution_of(ctx).lease.hold()
        process = Process.start(
            self.arguments if self.account is None else self.account.wrapped(self.arguments),
            variables if self.account is None else variables | self.account.variables,
            document(ctx),
            self._threads,
            self._guardian,
        )
        conversation = Conversation(ctx, process.answer)
        output, errors = _Kept(MAX_OUTPUT_BYTES), _Tail(ctx)
        parts = [
            asyncio.create_task(work)
            for work in (
                _until_ended(process),
                conversation.listen(process.messages),
                output.take(process.stdout),
                errors.take(process.stderr),
            )
        ]
        try:
            await self._watch(process, parts, limit, errors)
        finally:
            await background.stop(*parts)
            code = process.close()
        if conversation.wish is not None:
            return conversation.wish
        if code != 0:
            return self._failure(code, errors.text or output.tail)
        return Result(self._parsed(output.data), decision_report=conversation.decision_report)

    def _account_variables(self, ctx: TaskContext) -> dict[str, str]:
        """What the account of the task needs."""
        if not self.account_files:
            return {}
        if ctx.account is None:
            ctx.log.warning("The server chose no account: it is of an older version")
            raise Snooze(self.retry_later_sec)
        file = self.account_files.get(ctx.account)
        return {} if file is None else read_variables(file)

    async def _watch(
        self, process: Process, parts: "list[asyncio.Task[None]]", limit: float, errors: "_Tail"
    ) -> None:
        """Wait until the process has exited and its output is processed; end it on a timeout or an error."""
        try:
            async with asyncio.timeout(limit):
                await asyncio.wait(parts, return_when=asyncio.FIRST_EXCEPTION)
        except TimeoutError:
            await process.end(self.kill_after_sec)
            process.finish()
            await asyncio.wait(parts)
            raise Fail(
                _with_tail(f"The command timed out after {limit:g} s.", errors.text), FailureCategory.TIMEOUT
            ) from None
        except asyncio.CancelledError:
            await process.end(self.kill_after_sec)
            raise
        for part in parts:
            error = part.exception() if part.done() else None
            if error is not None:
                await process.end(self.kill_after_sec)
                raise error

    def _failure(self, code: int, tail: str) -> Fail | Snooze:
        if code < 0:
            with suppress(ValueError):
                text = _with_tail(f"The command was killed by {signal.Signals(-code).name}.", tail)
                return Fail(text, FailureCategory.CRASH)
        text = _with_tail(f"The command ended with exit code {code}.", tail)
        if code == RETRY_LATER:
            if ratelimit.is_rate_limit(tail):
                return Fail(text, FailureCategory.RATE_LIMIT)
            return Snooze(self.retry_later_sec)
        return Fail(text, CATEGORIES.get(code, FailureCategory.ERROR))

    def _parsed(self, data: bytes) -> Any:
        if self.output != "text":
            if not data.strip():
                return None
            try:
                return msgspec.json.decode(data)
            except msgspec.DecodeError as error:
                if self.output == "json":
                    raise Fail(
                        _with_tail(f"The command's output is not valid JSON: {error}.", _end_of(data)),
                        FailureCategory.INVALID_OUTPUT,
                    ) from None
        return data.decode(errors="replace").removesuffix("\n")


async def _until_ended(process: Process) -> None:
    await process.ended()
    process.finish()


class _Kept:
    """Keeps all output, up to a limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._data = bytearray()

    async def take(self, flow: Inflow) -> None:
        async for chunk in flow.chunks():
            self._data += chunk
            if len(self._data) > self._most:
                raise Fail(
                    f"The command printed more than {self._most} bytes. Write the output to a file, and "
                    "report the file as an artifact.",
                    FailureCategory.INVALID_OUTPUT,
                )

    @property
    def data(self) -> bytes:
        return bytes(self._data)

    @property
    def tail(self) -> str:
        return _end_of(self.data)


class _Tail:
    """Logs all output line by line, and keeps the end of it."""

    def __init__(self, ctx: TaskContext) -> None:
        self._log = ctx.log
        self._data = b""
        self._line = b""
        self._second = 0
        self._written = 0
        self._left_out = 0

    async def take(self, flow: Inflow) -> None:
        async for chunk in flow.chunks():
            self._data = (self._data + chunk)[-TAIL_BYTES:]
            *lines, self._line = (self._line + chunk).split(b"\n")
            self._begin_second()
            room = LINES_PER_SEC - self._written
            for line in lines[:room]:
                self._write(line)
            self._left_out += max(len(lines) - room, 0)
            if len(self._line) > _LONGEST_LOGGED_LINE:
                self._write(self._line)
                self._line = b""
        if self._line:
            self._write(self._line)
        self._count_left_out()

    def _begin_second(self) -> None:
        now = int(time.monotonic())
        if now != self._second:
            self._count_left_out()
            self._second, self._written = now, 0

    def _count_left_out(self) -> None:
        if self._left_out:
            self._log.info("%d lines left out (more than %d a second)", self._left_out, LINES_PER_SEC)
            self._left_out = 0

    def _write(self, line: bytes) -> None:
        if self._written >= LINES_PER_SEC:
            self._left_out += 1
            return
        self._written += 1
        self._log.info("%s", line[:_LONGEST_LOGGED_LINE].decode(errors="replace"))

    @property
    def text(self) -> str:
        return _end_of(self._data)


def _end_of(data: bytes) -> str:
    text = data[-TAIL_BYTES:].decode(errors="replace").strip()
    if len(data) >= TAIL_BYTES:
        # The first line is cut off, unless it is the only one.
        text = text.partition("\n")[2] or text
    return text


def _with_tail(text: str, tail: str) -> str:
    return f"{text}\n{tail}" if tail else text


def document(ctx: TaskContext) -> bytes:
    """The task as JSON for the command."""
    last = ctx.last_error
    return msgspec.json.encode(
        {
            **{name: getattr(ctx, name) for name in _PLAIN_FIELDS},
            "lock_key": ctx.task.lock_key,
            "lock_keys": ctx.task.lock_keys,
            # As OfficePlane spells it.
            "documentId": ctx.task.document_id,
            "spec": ctx.spec,
            "inputs": ctx.inputs,
            "resume": ctx.resume,
            "steps": ctx.steps,
            "checkpoint": ctx.last_checkpoint,
            "last_error": last,
            "previous_attempts": ctx.previous_attempts,
        }
    )


def environment(
    variables: Mapping[str, str], ctx: TaskContext, *, pass_env: Sequence[str], time_limit_sec: float
) -> dict[str, str]:
    """The allowed part of the agent's environment, and the task's variables."""
    inherited = child_environment(variables, pass_env)
    fields: dict[str, Any] = {name.upper(): getattr(ctx, name) for name in _PLAIN_FIELDS}
    fields["LOCK_KEY"], fields["DOCUMENT_ID"] = ctx.task.lock_key, ctx.task.document_id
    fields["DEADLINE"] = None if ctx.deadline is None else ctx.deadline.isoformat()
    fields["TIME_LIMIT_SEC"] = f"{time_limit_sec:g}"
    for name, value in ctx.spec.items():
        fields.setdefault("SPEC_" + _NOT_IN_NAMES.sub("_", name).upper(), value)
    return inherited | _as_text(fields) | {FD_VARIABLE: str(AGENT_FD)}


def _as_text(fields: Mapping[str, Any]) -> dict[str, str]:
    variables: dict[str, str] = {}
    room = _ALL_VARIABLES
    for name, value in fields.items():
        if value is None or isinstance(value, dict | list):
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        size = len(text.encode())
        if size <= min(_LONGEST_VARIABLE, room):
            variables[TASK_PREFIX + name] = text
            room -= size
    return variables
