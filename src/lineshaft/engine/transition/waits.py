"""Waiting without a slot: a running task sleeps, or waits for a signal, and holds nothing meanwhile.

A wait is a step. Until its result is recorded it is a row that keeps its end, so that a task that is claimed
again, for whatever reason, waits no longer than it was to. The task is PENDING and due at that end: the
promoter makes it READY as it does after a back-off. Its next holder calls `suspend` again, which then records
how the wait ended, together with the receipt of the signal.

`suspend` and `signal` both lock the task first. Of two at the same moment, either the suspension finds the
signal, or the signal finds the task PENDING and makes it READY.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Raw, Struct

from lineshaft.engine.caller import caller
from lineshaft.engine.claim.claim_tokens import ClaimKey
from lineshaft.engine.feed.actor import actor_name, with_actor
from lineshaft.engine.live import spending
from lineshaft.engine.live.task_locks import HELD, LockedTask
from lineshaft.engine.live.waking import wake_ready
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_column, fetch_row, fetch_rows, fetch_value
from lineshaft.engine.submit.lanes import Lanes
from lineshaft.engine.transition.effects import log_events
from lineshaft.engine.transition.rows import NewEvent
from lineshaft.engine.transition.steps import Steps
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.errors import (
    BudgetExceededError,
    ForbiddenError,
    InvalidInputError,
    InvalidTransitionError,
    LineshaftError,
    NotFoundError,
    RateLimitedError,
    StaleClaimError,
    UnavailableError,
)
from lineshaft.ids import new_id
from lineshaft.model import budget
from lineshaft.model.fields import LONGEST_SECONDS
from lineshaft.model.states import Status
from lineshaft.types.tokens import Scope
from lineshaft.types.waits import (
    MAX_SIGNALS,
    NewSignal,
    NewSuspension,
    SentSignal,
    Signal,
    Suspended,
    TaskSignal,
    WaitEnd,
)
from lineshaft.types.work import NewCheckpoint

_SQL = catalog.load(__name__)
#: The name of the call, in the attempts that it ends.
SUSPEND = "suspend"
#: How many attempts that only waited a task keeps.
_KEPT_ATTEMPTS = 20
#: Signals of a task that people see.
_SHOWN = 20


class _Begun(Struct, frozen=True):
    until: datetime | None
    left_sec: float | None


class _Received(Struct, frozen=True):
    id: str
    name: str
    data: bytes | None
    at: datetime

    @property
    def signal(self) -> Signal:
        return Signal(self.id, self.name, Raw(self.data or b"null"), self.at)


class _Recipient(Struct, frozen=True):
    parent_id: str | None
    created_by_token: str | None


class _Woken(Struct, frozen=True):
    status: str


class Waits:
    def __init__(self, transitions: Transitions, lanes: Lanes, steps: Steps, claim_key: ClaimKey) -> None:
        self._transitions = transitions
        self._database = transitions.database
        self._locks = transitions.locks
        self._lanes = lanes
        self._steps = steps
        self._claim_key = claim_key

    # The task.

    async def suspend(self, items: Sequence[NewSuspension]) -> list[Suspended]:
        """Each item is a transaction of its own."""
        return [await self._result(item) for item in items]

    async def _result(self, item: NewSuspension) -> Suspended:
        try:
            return await self._database.run(lambda own: self._suspend(own, item))
        except UnavailableError:
            raise
        except LineshaftError as error:
            report = [(item.claim, item.spent)]
            if isinstance(error, StaleClaimError):
                await self._database.run(lambda own: spending.book_late(own, report, self._database.now))
            elif isinstance(error, BudgetExceededError):
                await self._database.run(lambda own: spending.book(own, report, self._database.now))
            return Suspended(item.claim.id, error=error)

    async def _suspend(self, connection: Connection, item: NewSuspension) -> Suspended:
        task_id = item.claim.id
        try:
            task = await self._locks.hold(connection, item.claim, "suspend")
        except StaleClaimError:
            if not await self._locks.ended_by(connection, [item.claim], SUSPEND):
                raise
            # A repeated call.
            return Suspended(task_id)
        known = await self._steps.read(connection, task_id, item.name)
        if known is not None:
            await spending.book(connection, [(item.claim, item.spent)], self._database.now)
            return Suspended(task_id, _recorded(item.name, known.data))
        wait = await self._begin(connection, item)
        signal = None if item.signal is None else await self._receive(connection, item)
        if signal is None and (wait.left_sec is None or wait.left_sec > 0):
            _check_total(task, item)
            await self._pause(connection, task, item, wait)
            return Suspended(task_id, until=wait.until)
        end = WaitEnd(wait.until, signal)
        await self._steps.insert(connection, item.claim, item.name, end.json)
        await connection.execute(_SQL["end_wait"], {"id": task_id, "name": item.name})
        await spending.book(connection, [(item.claim, item.spent)], self._database.now)
        return Suspended(task_id, end)

    async def _begin(self, connection: Connection, item: NewSuspension) -> _Begun:
        begun = await fetch_row(
            connection,
            _Begun,
            _SQL["begin_wait"],
            {
                **self._database.now,
                "id": item.claim.id,
                "epoch": item.claim.epoch,
                "name": item.name,
                "signal": item.signal,
                "timeout": item.timeout_sec,
                "until": item.until,
            },
        )
        assert begun is not None  # noqa: S101 - it is inserted or updated
        return begun

    async def _receive(self, connection: Connection, item: NewSuspension) -> Signal | None:
        parameters = {**self._database.now, "id": item.claim.id, "signal": item.signal}
        received = await fetch_row(connection, _Received, _SQL["receive"], parameters)
        return None if received is None else received.signal

    async def _pause(
        self, connection: Connection, task: LockedTask, item: NewSuspension, wait: _Begun
    ) -> None:
        """End the claim until the wait is over."""
        if item.checkpoint is not None:
            await self._steps.save_checkpoints_in(connection, [NewCheckpoint(item.claim, item.checkpoint)])
        effects = self._transitions.effects()
        lane_id = await self._lanes.next(connection, task, item.spent)
        # Without an end it is looked at after a year: a task that wakes too early waits again.
        delay_sec = LONGEST_SECONDS if wait.left_sec is None else wait.left_sec
        effects.requeue(task, Status.PENDING, delay_sec=delay_sec, spent=item.spent, lane_id=lane_id)
        effects.release_batch_lock(task)
        effects.attempt(task, "waiting", spent=item.spent, ended_by=SUSPEND)
        data: dict[str, Any] = {"step": item.name}
        if item.signal is not None:
            data["signal"] = item.signal
        if wait.until is not None:
            data["until"] = wait.until
        effects.event(task, ["task.waiting"], data)
        await self._transitions.write(connection, effects)
        await connection.execute(_SQL["forget_old_waits"], {"id": task.id, "keep": _KEPT_ATTEMPTS})

    # Others.

    async def signal(self, task_id: str, new: NewSignal, claim_token: str | None = None) -> SentSignal:
        """Send a signal to a task that hasn't ended; `claim_token`: of its parent, whose holder may."""
        tokens = None if claim_token is None else await self._claim_key.tokens()

        async def work(connection: Connection) -> SentSignal:
            to = await fetch_row(connection, _Recipient, _SQL["read_recipient"], {"id": task_id})
            if to is None:
                raise NotFoundError(f"There is no task {task_id}.")
            holder = None
            if tokens is not None and claim_token is not None and to.parent_id is not None:
                holder = tokens.find(to.parent_id, claim_token)
            ids = [task_id] if holder is None else [task_id, holder.id]
            locked = await self._locks.lock(connection, ids)
            parent = None if holder is None else locked.get(holder.id)
            holds = holder is not None and parent is not None and parent.epoch == holder.epoch
            if not (holds and parent is not None and parent.status in HELD):
                _check_rights(task_id, to, claim_token)
            return await self._send(connection, task_id, locked.get(task_id), new)

        return await self._database.run(work)

    async def _send(
        self, connection: Connection, task_id: str, task: LockedTask | None, new: NewSignal
    ) -> SentSignal:
        if new.idempotency_key is not None:
            parameters = {"id": task_id, "key": new.idempotency_key}
            sent = await fetch_row(connection, SentSignal, _SQL["find_signal"], parameters)
            if sent is not None:
                return msgspec.structs.replace(sent, duplicate=True)
        if task is None:
            status = await self._locks.end_status(connection, task_id)
            raise InvalidTransitionError(
                f"Can't send the signal {new.name!r} to task {task_id}: it is {status}. Only a task that "
                "hasn't ended receives signals."
            )
        if await fetch_value(connection, _SQL["count_unreceived"], {"id": task_id}) >= MAX_SIGNALS:
            raise RateLimitedError(
                f"Can't send the signal {new.name!r} to task {task_id}: {MAX_SIGNALS} signals wait for it "
                "already. It receives one with each ctx.wait_for."
            )
        sent = await fetch_row(
            connection,
            SentSignal,
            _SQL["insert_signal"],
            {
                **self._database.now,
                "id": task_id,
                "signal_id": new_id("signal"),
                "name": new.name,
                "key": new.idempotency_key,
                "sender": actor_name() or caller().token,
                "data": new.data.decode(),
            },
        )
        assert sent is not None  # noqa: S101 - INSERT … RETURNING
        parameters = {**self._database.now, "id": task_id, "name": new.name}
        woken = await fetch_row(connection, _Woken, _SQL["wake"], parameters)
        is_ready = woken is not None and woken.status == Status.READY
        kinds = ["task.signalled", "task.ready"] if is_ready else ["task.signalled"]
        data = with_actor({"signal": new.name})
        event = NewEvent.of(kinds, task_id, task.dag_id, epoch=task.epoch, data=data)
        await log_events(connection, self._database.now, [event])
        if is_ready:
            await wake_ready(connection, [task_id])
        return sent

    async def awaited(self, task_id: str) -> str | None:
        """The signal that a task waits for now."""
        async with self._database.connection() as connection:
            found = await fetch_column(connection, _SQL["awaited_signal"], {"id": task_id})
        return found[0] if found else None

    async def signals(self, task_id: str) -> list[TaskSignal]:
        """The newest signals of a task, for people."""
        async with self._database.connection() as connection:
            parameters = {"id": task_id, "limit": _SHOWN}
            return await fetch_rows(connection, TaskSignal, _SQL["list_signals"], parameters)


async def forget_waits(connection: Connection, ids: Sequence[str], now: dict[str, Any]) -> None:
    """Delete the waits of tasks, which are locked: the next one of the same name begins again."""
    await connection.execute(_SQL["forget_waits"], {**now, "ids": list(ids)})


def _recorded(name: str, data: bytes) -> WaitEnd:
    try:
        return msgspec.json.decode(data, type=WaitEnd)
    except msgspec.ValidationError:
        fault = f"step {name!r} is recorded, and not by a wait; give each step and each wait its own name"
        raise InvalidInputError(errors=[("name", fault)]) from None


def _check_rights(task_id: str, to: _Recipient, claim_token: str | None) -> None:
    """What steers a task needs more than the scope that agents have, or each could steer the others."""
    own = caller()
    if own.may(Scope.OPERATE) or (own.token is not None and own.token == to.created_by_token):
        return
    if claim_token is not None:
        raise StaleClaimError(
            f"The claim_token is not that of a claim of the parent of task {task_id} that is held. Send the "
            "claim_token of the task that spawned it, unchanged."
        )
    raise ForbiddenError(
        f"{own.name!r} has the scope {own.scope} and did not create task {task_id}, so it can't send it a "
        "signal. Use a token with the scope operate, the token that created the task, or send the "
        "claim_token of its parent."
    )


def _check_total(task: LockedTask, item: NewSuspension) -> None:
    """Waiting uses no attempt, but money: the limit over all claims applies here too.

    Nothing has moved: the holder fails the attempt, as when a heartbeat reports that it is over this limit.
    """
    total = task.cost_usd + item.spent.cost(task)
    if budget.total_limit_reached(total, task.max_total_cost_usd):
        raise BudgetExceededError(
            f"Task {task.id} can't wait: it has cost {total.normalize():f} USD in all, of max_total_cost_usd "
            f"{task.max_total_cost_usd}, so it couldn't go on afterwards. Raise max_total_cost_usd."
        )
