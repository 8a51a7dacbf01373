"""Heartbeats: one statement renews all leases of a process.

`Heartbeats` has a connection for nothing else, and replaces it when it doesn't answer. It is used from the
event loop of a separate thread: neither a blocking handler nor an exhausted pool delays a heartbeat.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol

import psycopg
from msgspec.structs import replace
from psycopg import AsyncConnection

from lineshaft.clock import Clock, DatabaseClock
from lineshaft.engine.guards.locks import LOCK_TTL_SEC
from lineshaft.engine.live import disputes, spending
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import set_up
from lineshaft.engine.postgres.literals import json_text
from lineshaft.engine.postgres.pipeline import pipelined
from lineshaft.engine.postgres.session import connect_options, shut_down
from lineshaft.errors import UnavailableError
from lineshaft.types.work import ClaimRef, EndedClaim, HeartbeatAnswers, HeldTask, Presence

_SQL = catalog.load(__name__)


class Heartbeats:
    def __init__(self, dsn: str, *, clock: Clock | None = None, prepare: bool = True) -> None:
        self.dsn = dsn
        self.clock = clock or DatabaseClock()
        self.prepare = prepare
        self._connection: AsyncConnection[Any] | None = None

    async def beat(
        self, agents: Sequence[Presence], tasks: Sequence[HeldTask], *, answer_within_sec: float
    ) -> HeartbeatAnswers:
        """One statement for all; raises UnavailableError when there is no answer in time."""
        call = asyncio.ensure_future(self._beat(agents, tasks))
        try:
            await asyncio.wait({call}, timeout=answer_within_sec)
            if call.done():
                return call.result()
            raise UnavailableError(f"The database didn't answer a heartbeat within {answer_within_sec:g} s.")
        except (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction, OSError) as error:
            # Read-only: the server has become a standby. The next heartbeat connects again, to the primary.
            raise UnavailableError(f"The database is unavailable: {error}") from error
        finally:
            if not call.done() or call.exception() is not None:
                await self._give_up(call)

    async def _beat(self, agents: Sequence[Presence], tasks: Sequence[HeldTask]) -> HeartbeatAnswers:
        if self._connection is None:
            opened = await AsyncConnection.connect(
                self.dsn,
                autocommit=True,
                application_name="lineshaft heartbeats",
                **connect_options(self.dsn),
            )
            self._connection = opened
            await set_up(opened, prepare=self.prepare)
        return await send_heartbeat(self._connection, {"now": self.clock.now()}, agents, tasks)

    async def _give_up(self, call: "asyncio.Future[HeartbeatAnswers]") -> None:
        """The next heartbeat gets a new connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            shut_down(connection)
        elif not call.done():
            # It hangs while connecting, where a cancellation takes effect at once.
            call.cancel()
        await asyncio.wait({call})
        if not call.cancelled():
            # Retrieved, or asyncio logs that it never was.
            call.exception()
        connection = connection or self._connection
        self._connection = None
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _Answer(Protocol):
    """The columns of `heartbeat`: the answer for one task, or for one agent."""

    task_id: str | None
    epoch: int
    agent_id: str
    incarnation: int
    answer: str
    at_risk: bool | None
    slots: int
    slowdown_until: datetime | None
    renewed: bool | None


async def send_heartbeat(
    connection: AsyncConnection[Any],
    now: dict[str, Any],
    agents: Sequence[Presence],
    tasks: Sequence[HeldTask],
) -> HeartbeatAnswers:
    """Renew leases, and write through what the tasks have spent.

    Leases first: they never wait for a row, but a report does, for a moment.
    """
    parameters = {
        **now,
        "lock_ttl": LOCK_TTL_SEC,
        "agents": [agent.agent_id for agent in agents],
        "incarnations": [agent.incarnation for agent in agents],
        "ids": [task.id for task in tasks],
        "epochs": [task.epoch for task in tasks],
        "holders": [task.holder.agent_id for task in tasks],
        "progress": [json_text(task.progress) for task in tasks],
    }
    rows: list[_Answer]
    (rows,) = await pipelined(connection, (_SQL["heartbeat"], parameters))
    answers = HeartbeatAnswers({})
    over: dict[ClaimRef, EndedClaim] = {}
    ended: set[ClaimRef] = set()
    at_risk: list[ClaimRef] = []
    for row in rows:
        if row.task_id is None:
            agent = Presence(row.agent_id, row.incarnation)
            answers.agents[agent] = row.answer
            answers.slots[agent] = row.slots
            if row.slowdown_until is not None:
                answers.slowdowns[agent] = row.slowdown_until
        elif row.answer == "unlocked":
            # Its document lock is gone, so it can't complete; until its lease expires it may still spend.
            claim = ClaimRef(row.task_id, row.epoch)
            over[claim] = EndedClaim(row.task_id, row.epoch, "lost", None)
        elif row.answer != "continue":
            claim = ClaimRef(row.task_id, row.epoch)
            ended.add(claim)
            over[claim] = EndedClaim(row.task_id, row.epoch, row.answer, None)
        else:
            if not row.renewed:
                answers.not_renewed.add((row.task_id, row.epoch))
            if row.at_risk:
                at_risk.append(ClaimRef(row.task_id, row.epoch))
    reports = [(task.claim, task.spent) for task in tasks]
    reasons = await spending.limits_reached(connection, at_risk, now) if at_risk else {}
    try:
        reports = await disputes.within_ceilings(connection, reports, now, at_once=True)
        reasons |= await spending.book_at_once(
            connection, [(claim, spent) for claim, spent in reports if claim not in ended], now
        )
        await spending.book_late_at_once(
            connection, [(claim, spent) for claim, spent in reports if claim in ended], now
        )
    except psycopg.errors.LockNotAvailable:
        # Another transaction is moving one of these tasks.
        answers = replace(answers, spent_later=True)
    over |= {claim: EndedClaim(claim.id, claim.epoch, "cancel", reason) for claim, reason in reasons.items()}
    answers.over.extend(over.values())
    return answers
