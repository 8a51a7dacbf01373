"""Writes outcomes in batches: outcomes that arrive while a batch is being written form the next one.

A single completion takes the next task along: that costs little more than the completion.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from lineshaft.agent.outcome import Outcome, Verdict, describe, failed
from lineshaft.client.backend import Backend
from lineshaft.errors import InvalidInputError, PayloadTooLargeError, StaleClaimError, UnavailableError
from lineshaft.model.retry import FailureCategory
from lineshaft.types.assignments import Assignment
from lineshaft.types.work import (
    Cancellation,
    ClaimedTask,
    ClaimRef,
    Completion,
    Failure,
    Moved,
    Release,
    Spent,
)

_log = logging.getLogger("lineshaft.agent")

MAX_BATCH = 500
_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.1, 2.0


class Finished(Protocol):
    """A run whose handler has ended."""

    @property
    def claim(self) -> ClaimRef: ...

    @property
    def spent(self) -> Spent: ...

    def unsaved_state(self) -> bytes | None:
        """The state that its handler wants to find again; None: nothing new."""
        ...


_Item = tuple[Any, Outcome]
_Send = Callable[[Sequence[_Item]], Awaitable[list[Moved]]]


class Next(Protocol):
    """The agent, as one that takes the next task together with a completion."""

    def next_types(self) -> list[str] | None:
        """The types of the next task; None: it takes none now."""
        ...

    def take(self, assignments: Sequence[Assignment[ClaimedTask]], asked_at: float) -> None:
        """Start what was claimed; it was asked for at this time of the event loop's clock."""
        ...


class Writer:
    def __init__(
        self, backend: Backend, written: Callable[[Any, Moved | None], None], following: Next
    ) -> None:
        """`written` is called with each run and its result; None: there was nothing to write."""
        self._backend = backend
        self._written = written
        self._following = following
        self._pending: list[_Item] = []
        #: How many are being written.
        self.writing = 0
        self._some = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()
        self._task: asyncio.Task[None] | None = None
        #: A claim is under way together with a completion, or may have been made without an answer.
        self.claiming = False
        #: Claimed together with the last completion, and when that was sent.
        self._taken: list[Assignment[ClaimedTask]] = []
        self._asked_at = 0.0

    def put(self, run: Finished, outcome: Outcome) -> None:
        self._pending.append((run, outcome))
        self._some.set()
        self._none.clear()

    @property
    def busy(self) -> bool:
        return bool(self._pending or self.writing)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="lineshaft outcomes")

    async def flush(self) -> None:
        await self._none.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            await self._some.wait()
            items, self._pending = self._pending[:MAX_BATCH], self._pending[MAX_BATCH:]
            self.writing = len(items)
            await self._write(items)
            self.writing = 0
            if not self._pending:
                self._some.clear()
                self._none.set()

    async def _write(self, items: list[_Item]) -> None:
        by_verdict: dict[Verdict, list[_Item]] = {}
        for item in items:
            by_verdict.setdefault(item[1].verdict, []).append(item)
        for verdict, alike in by_verdict.items():
            match verdict:
                case Verdict.COMPLETE if len(items) == 1 and not self._pending:
                    await self._send(alike, self._complete_and_claim)
                case Verdict.COMPLETE:
                    await self._send(alike, self._complete)
                case Verdict.FAIL:
                    await self._send(alike, self._fail)
                case Verdict.SNOOZE | Verdict.RELEASE:
                    await self._send(alike, self._release)
                case Verdict.CANCEL:
                    await self._send(alike, self._cancel)
                case Verdict.NOTHING:
                    for run, _ in alike:
                        self._written(run, None)

    async def _send(self, items: list[_Item], send: _Send) -> None:
        pause = _FIRST_PAUSE_SEC
        while True:
            try:
                moved = await send(items)
            except UnavailableError as error:
                # The outcome counts whenever it arrives, unless another agent has the task by then.
                _log.warning("Writing the outcomes of %d tasks failed, retrying: %s", len(items), error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SEC)
            except Exception as error:  # noqa: BLE001 - one bad outcome must not block the others
                if len(items) > 1:
                    for item in items:
                        await self._send([item], send)
                    return
                await self._give_up(items[0], error, send)
                return
            else:
                for (run, outcome), answer in zip(items, moved, strict=True):
                    if answer.error is not None:
                        _log.warning("The outcome %s was refused: %s", outcome.verdict, answer.error)
                    self._written(run, answer)
                taken, self._taken = self._taken, []
                self.claiming = False
                if taken:
                    # Only now: the slot of the task before is free.
                    self._following.take(taken, self._asked_at)
                return

    async def _give_up(self, item: _Item, error: Exception, send: _Send) -> None:
        """Fail the attempt of an outcome that can't be written: else the task would stay RUNNING."""
        self.claiming = False
        run, outcome = item
        if isinstance(error, StaleClaimError):
            self._written(run, Moved(run.claim.id, None))
            return
        _log.error("The outcome %s of %s can't be written", outcome.verdict, run.claim.id, exc_info=error)
        if send == self._fail_plainly:
            self._written(run, Moved(run.claim.id, None))
            return
        if outcome.verdict is not Verdict.FAIL:
            unfit = isinstance(error, InvalidInputError | PayloadTooLargeError)
            category = FailureCategory.INVALID_OUTPUT if unfit else FailureCategory.CRASH
            outcome = failed(describe(error), category)
            if send in {self._complete, self._complete_and_claim}:
                await self._send([(run, outcome)], self._fail)
                return
        await self._send([(run, outcome)], self._fail_plainly)

    async def _complete(self, items: Sequence[_Item]) -> list[Moved]:
        return await self._backend.complete([_completion(item) for item in items])

    async def _complete_and_claim(self, items: Sequence[_Item]) -> list[Moved]:
        types = self._following.next_types()
        if types is None:
            return await self._complete(items)
        asked_at = asyncio.get_running_loop().time()
        (item,) = items
        self.claiming = True
        moved, self._taken = await self._backend.complete_and_claim(_completion(item), types=types)
        self._asked_at = asked_at
        return [moved]

    async def _save_states(self, items: Sequence[_Item]) -> None:
        for run, outcome in items:
            if outcome.is_postponed and (state := run.unsaved_state()) is not None:
                # Writing the outcome of a stale claim reports the error.
                with contextlib.suppress(StaleClaimError):
                    await self._backend.save_checkpoint(run.claim, state)

    async def _fail(self, items: Sequence[_Item]) -> list[Moved]:
        await self._save_states(items)
        return await self._backend.fail(
            [
                Failure(
                    run.claim,
                    outcome.error,
                    outcome.category,
                    outcome.retry_after_sec,
                    run.spent,
                    traceback=outcome.traceback,
                )
                for run, outcome in items
            ]
        )

    async def _fail_plainly(self, items: Sequence[_Item]) -> list[Moved]:
        """Fail without state and usage, which may be the parts that are invalid."""
        return await self._backend.fail(
            [Failure(run.claim, outcome.error, outcome.category) for run, outcome in items]
        )

    async def _release(self, items: Sequence[_Item]) -> list[Moved]:
        await self._save_states(items)
        return await self._backend.release(
            [Release(run.claim, outcome.delay_sec or None, run.spent) for run, outcome in items]
        )

    async def _cancel(self, items: Sequence[_Item]) -> list[Moved]:
        return await self._backend.cancel_held(
            [Cancellation(run.claim, outcome.reason, spent=run.spent) for run, outcome in items]
        )


def _completion(item: _Item) -> Completion:
    run, outcome = item
    return Completion(run.claim, outcome.output, outcome.artifacts, outcome.decision_report, run.spent)
