"""Messages from a running program to its agent: one JSON object per line, on the descriptor LINESHAFT_FD.

Most messages have no answer:

    {"progress": ANYTHING}
    {"spend": USD, "tokens_input": N, "tokens_output": N}
    {"step": NAME, "result": ANYTHING, "spend": USD}
    {"checkpoint": ANYTHING}
    {"artifact": ANYTHING}
    {"decision_report": ANYTHING}
    {"fail": REASON, "category": NAME, "retry_after_sec": N}   how the attempt ends, whatever the exit code;
    {"rate_limited": REASON, "retry_at": TIME}                 the last of these counts
    {"snooze": SECONDS}
    {"cancel": REASON}
    {"settle": RESERVATION, "units": {"tokens": N}}            what was really used of a quota

Five are questions, each answered by one line on the same descriptor:

    {"step": NAME}                              → {"step": NAME, "done": true, "result": …}, or "done": false
    {"spawn": KEY, "tasks": […], "wait": true}  → {"spawn": KEY, "children": [{"id", "status", "output"}]}
    {"sleep": NAME, "seconds": N}               → {"sleep": NAME}
    {"wait_for": NAME, "signal": NAME, "timeout": N}
        → {"wait_for": NAME, "timed_out": false, "data": …}, or "timed_out": true
    {"quota": KEY, "units": {"tokens": N}}      → {"quota": KEY, "reservation": ID}, when there is room

A program whose task has to wait is ended, and started again when the wait is over: it asks again then, and is
answered.

Messages are processed in order: an answer means that everything before it is stored. An invalid line ends the
program and fails the attempt, since its content would be lost.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from lineshaft.agent.context import TaskContext, execution_of
from lineshaft.agent.exec.process import Inflow
from lineshaft.agent.outcome import Cancel, Fail, RateLimited, Snooze
from lineshaft.errors import BudgetExceededError, LineshaftError, StaleClaimError
from lineshaft.model.retry import FailureCategory
from lineshaft.model.tasks import NewTask
from lineshaft.types.reservations import Settlement, Units

MAX_LINE_BYTES = 8 << 20
_SHOWN = 200


class Message(Struct, forbid_unknown_fields=True):
    progress: Any = UNSET
    spend: Decimal | UnsetType = UNSET
    tokens_input: int = 0
    tokens_output: int = 0
    step: str | UnsetType = UNSET
    result: Any = UNSET
    checkpoint: Any = UNSET
    artifact: Any = UNSET
    decision_report: Any = UNSET
    spawn: str | UnsetType = UNSET
    tasks: list[NewTask] | UnsetType = UNSET
    wait: bool = False
    sleep: str | UnsetType = UNSET
    seconds: float | UnsetType = UNSET
    wait_for: str | UnsetType = UNSET
    signal: str | None = None
    timeout: float | None = None
    quota: str | UnsetType = UNSET
    settle: str | UnsetType | None = UNSET
    units: Units = Units()
    fail: str | UnsetType = UNSET
    category: str = FailureCategory.ERROR
    retry_after_sec: float | None = None
    rate_limited: str | UnsetType = UNSET
    retry_at: datetime | None = None
    account: str | None = None
    snooze: float | UnsetType = UNSET
    cancel: str | UnsetType = UNSET


#: The kinds of messages; `spend` may also belong to a step, and comes last.
_KINDS = (
    *("progress", "step", "checkpoint", "artifact", "decision_report", "spawn", "sleep", "wait_for"),
    *("quota", "settle", "fail", "rate_limited", "snooze", "cancel", "spend"),
)
_decode = msgspec.json.Decoder(Message).decode


class Conversation:
    """Carries out a program's messages with the task's context."""

    def __init__(self, ctx: TaskContext, answer: Callable[[bytes], Awaitable[None]]) -> None:
        self._ctx = ctx
        self._execution = execution_of(ctx)
        self._answer = answer
        #: How the attempt ends, if the program said so.
        self.wish: Cancel | Fail | Snooze | None = None
        self.decision_report: Any = None

    async def listen(self, flow: Inflow) -> None:
        """Process messages until the program exits or closes the descriptor."""
        rest = bytearray()
        async for chunk in flow.chunks():
            rest += chunk
            *lines, last = rest.split(b"\n")
            for line in lines:
                await self._receive(line)
            if len(last) > MAX_LINE_BYTES:
                raise _invalid(bytes(last), f"is longer than {MAX_LINE_BYTES} bytes")
            rest = last
        await self._receive(rest)

    async def _receive(self, line: bytes | bytearray) -> None:
        if not line.strip():
            return
        try:
            message = _decode(line)
            kind = next(name for name in _KINDS if getattr(message, name) is not UNSET)
        except StopIteration:
            raise _invalid(line, f"has none of {', '.join(_KINDS)}") from None
        except msgspec.MsgspecError as error:
            raise _invalid(line, f"is not a valid message: {error}") from None
        try:
            await self._process(kind, message)
        except (BudgetExceededError, StaleClaimError):
            raise
        except TimeoutError:
            raise Fail("The command sent a question and didn't read the answer.", "timeout") from None
        except (ValueError, LineshaftError) as error:
            raise _invalid(line, f"is refused: {error}") from error

    async def _process(self, kind: str, message: Message) -> None:  # noqa: C901, PLR0912 - a case for each kind
        ctx = self._ctx
        match kind:
            case "progress":
                ctx.progress(message.progress)
            case "spend":
                self._charge(message)
                self._execution.account.check_limits()
            case "step" if message.result is UNSET:
                await self._answer_step(str(message.step))
            case "step":
                await self._execution.steps.end(str(message.step), message.result, self._charge(message))
            case "spawn":
                await self._spawn(str(message.spawn), message)
            case "sleep" | "wait_for":
                await self._wait(kind, message)
            case "quota":
                use = await self._execution.quotas.acquire(str(message.quota), message.units)
                await self._send({"quota": message.quota, "reservation": use.reservation})
            case "settle" if message.settle is not UNSET:
                claim = self._execution.claim
                await self._execution.quotas.settle(Settlement(claim, message.settle, message.units))
            case "checkpoint":
                await ctx.checkpoint(message.checkpoint)
            case "artifact":
                ctx.artifact(message.artifact)
            case "decision_report":
                self.decision_report = message.decision_report
            case "fail":
                self.wish = Fail(str(message.fail), message.category, retry_after_sec=message.retry_after_sec)
            case "rate_limited":
                self.wish = RateLimited(
                    str(message.rate_limited),
                    retry_at=message.retry_at,
                    retry_after_sec=message.retry_after_sec,
                    account=message.account,
                )
            case "snooze" if message.snooze is not UNSET:
                self.wish = Snooze(message.snooze)
            case "cancel":
                self.wish = Cancel(str(message.cancel))

    def _charge(self, message: Message) -> Decimal:
        """Limits are checked afterwards: a step is recorded with its cost first."""
        if message.spend is UNSET:
            return Decimal(0)
        return self._execution.charge(message.spend, message.tokens_input, message.tokens_output)

    async def _answer_step(self, name: str) -> None:
        recorded = self._execution.steps.begin(name)
        if recorded is None:
            await self._execution.lease.hold()
            await self._send({"step": name, "done": False})
        else:
            await self._send({"step": name, "done": True, "result": msgspec.json.decode(recorded)})

    async def _spawn(self, key: str, message: Message) -> None:
        if message.tasks is UNSET:
            raise ValueError("a spawn needs tasks")
        children = await self._ctx.spawn(key, message.tasks, wait=message.wait)
        listed = [{"id": child.id, "status": child.status, "output": child.output} for child in children]
        await self._send({"spawn": key, "children": listed})

    async def _wait(self, kind: str, message: Message) -> None:
        waits = self._execution.waits
        if kind == "sleep":
            if message.seconds is UNSET:
                raise ValueError("a sleep needs seconds")
            await waits.sleep(str(message.sleep), message.seconds)
            await self._send({"sleep": message.sleep})
            return
        name = str(message.wait_for)
        end = await waits.wait_for(name, signal=message.signal, timeout=message.timeout)
        data = None if end.signal is None else end.signal.data
        await self._send({"wait_for": name, "timed_out": end.signal is None, "data": data})

    async def _send(self, answer: dict[str, Any]) -> None:
        await self._answer(msgspec.json.encode(answer) + b"\n")


def _invalid(line: bytes | bytearray, why: str) -> Fail:
    shown = bytes(line[:_SHOWN]).decode(errors="replace")
    return Fail(
        f"The command wrote a line to LINESHAFT_FD that {why}. The line: {shown}",
        FailureCategory.INVALID_OUTPUT,
    )
