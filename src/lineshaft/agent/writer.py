"""Writes outcomes in batches: outcomes that arrive while a batch is being written form the next one.

A single completion takes the next task along: that costs little more than the completion.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import NamedTuple

from lineshaft import background
from lineshaft.agent.claim_calls import ClaimCalls, Claimed
from lineshaft.agent.execution import Execution
from lineshaft.agent.outcome import Outcome, OutcomeKind, describe, failed
from lineshaft.client.backend import Backend
from lineshaft.errors import InvalidInputError, PayloadTooLargeError, StaleClaimError, UnavailableError
from lineshaft.model.retry import FailureCategory
from lineshaft.types.work import Cancellation, Completion, Failure, Moved, Release

_log = logging.getLogger("lineshaft.agent")

MAX_BATCH = 500
_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.1, 2.0


class _Item(NamedTuple):
    """An outcome to write."""

    execution: Execution
    outcome: Outcome
    #: It is written without state and spending, which may be the parts that can't be.
    is_bare: bool = False


class Writer:
    def __init__(
        self,
        backend: Backend,
        claims: ClaimCalls,
        written: Callable[[Execution, Moved | None], None],
        start: Callable[[Claimed], None],
    ) -> None:
        """`written` is called with each execution and its result; None: there was nothing to write.

        `start` is called with the task that was claimed together with a completion.
        """
        self._backend = backend
        self._claims = claims
        self._written = written
        self._start = start
        self._pending: list[_Item] = []
        #: How many outcomes are being written.
        self.writing = 0
        self._some = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()
        self._task = asyncio.create_task(self._run(), name="lineshaft outcomes")

    def put(self, execution: Execution, outcome: Outcome) -> None:
        self._pending.append(_Item(execution, outcome))
        self._some.set()
        self._none.clear()

    @property
    def busy(self) -> bool:
        return bool(self._pending or self.writing)

    async def flush(self) -> None:
        await self._none.wait()

    async def close(self) -> None:
        await background.stop(self._task)

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
        by_kind: dict[OutcomeKind, list[_Item]] = {}
        for item in items:
            by_kind.setdefault(item.outcome.kind, []).append(item)
        for kind, alike in by_kind.items():
            if kind is OutcomeKind.NOTHING:
                for item in alike:
                    self._written(item.execution, None)
            else:
                await self._send(alike, takes_next=len(items) == 1 and not self._pending)

    async def _send(self, items: list[_Item], *, takes_next: bool = False) -> None:
        """Write outcomes of the same kind; `takes_next`: a completion claims the next task."""
        pause = _FIRST_PAUSE_SEC
        while True:
            try:
                moved, claimed = await self._call(items, takes_next=takes_next)
            except UnavailableError as error:
                # The outcome counts whenever it arrives, unless another agent has the task by then.
                _log.warning("Writing the outcomes of %d tasks failed, retrying: %s", len(items), error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SEC)
            except Exception as error:  # noqa: BLE001 - one bad outcome must not block the others
                if len(items) > 1:
                    for item in items:
                        await self._send([item])
                else:
                    await self._write_instead(items[0], error)
                return
            else:
                for item, answer in zip(items, moved, strict=True):
                    # A lost claim is logged with its task.
                    if answer.error is not None and not isinstance(answer.error, StaleClaimError):
                        _log.warning("The outcome %s was refused: %s", item.outcome.kind, answer.error)
                    self._written(item.execution, answer)
                if claimed is not None:
                    # Only now: the slot of the task before is free.
                    self._start(claimed)
                return

    async def _write_instead(self, item: _Item, error: Exception) -> None:
        """Fail the attempt of an outcome that can't be written: else the task would stay RUNNING."""
        claim = item.execution.claim
        substitute = None
        if not isinstance(error, StaleClaimError):
            _log.error("The outcome %s of %s can't be written", item.outcome.kind, claim.id, exc_info=error)
            substitute = _substitute(item, error)
        if substitute is None:
            stale = error if isinstance(error, StaleClaimError) else None
            self._written(item.execution, Moved(claim.id, None, stale))
        else:
            await self._send([substitute])

    async def _call(self, items: list[_Item], *, takes_next: bool) -> tuple[list[Moved], Claimed | None]:
        match items[0].outcome.kind:
            case OutcomeKind.COMPLETE if takes_next:
                moved, claimed = await self._claims.complete_and_claim(_completion(items[0]))
                return [moved], claimed
            case OutcomeKind.COMPLETE:
                return await self._backend.complete([_completion(item) for item in items]), None
            case OutcomeKind.CANCEL:
                return await self._backend.cancel_held(
                    [Cancellation(one.claim, outcome.reason, spent=one.spent) for one, outcome, _ in items]
                ), None
            case OutcomeKind.FAIL:
                await self._save_states(items)
                return await self._backend.fail([_failure(item) for item in items]), None
            case _:
                await self._save_states(items)
                return await self._backend.release(
                    [Release(one.claim, outcome.delay_sec or None, one.spent) for one, outcome, _ in items]
                ), None

    async def _save_states(self, items: list[_Item]) -> None:
        for execution, outcome, is_bare in items:
            if is_bare or not outcome.is_postponed:
                continue
            if (state := execution.unsaved_state()) is not None:
                # Writing the outcome of a stale claim reports the error.
                with contextlib.suppress(StaleClaimError):
                    await self._backend.save_checkpoint(execution.claim, state)


def _substitute(item: _Item, error: Exception) -> _Item | None:
    """What to write in place of an outcome that can't be written; None: nothing can."""
    execution, outcome, is_bare = item
    if is_bare:
        return None
    if outcome.kind is OutcomeKind.FAIL:
        return _Item(execution, outcome, is_bare=True)
    unfit = isinstance(error, InvalidInputError | PayloadTooLargeError)
    category = FailureCategory.INVALID_OUTPUT if unfit else FailureCategory.ERROR
    # A completion has an output that may be the cause. All else has only state and spending.
    return _Item(
        execution, failed(describe(error), category), is_bare=outcome.kind is not OutcomeKind.COMPLETE
    )


def _completion(item: _Item) -> Completion:
    execution, outcome, _ = item
    return Completion(
        execution.claim, outcome.output, outcome.artifacts, outcome.decision_report, execution.spent
    )


def _failure(item: _Item) -> Failure:
    execution, outcome, is_bare = item
    if is_bare:
        return Failure(execution.claim, outcome.error, outcome.category)
    return Failure(
        execution.claim,
        outcome.error,
        outcome.category,
        outcome.retry_after_sec,
        execution.spent,
        traceback=outcome.traceback,
        retry_at=outcome.retry_at,
        account=outcome.account,
    )
