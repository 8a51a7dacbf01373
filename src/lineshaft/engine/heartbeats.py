"""Heartbeats of one process: a connection that serves nothing else, and is given up when it doesn't answer.

It belongs to the event loop of whoever calls it, which is that of a thread of its own: neither a handler that
blocks nor a pool without a free connection delays a heartbeat.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection

from lineshaft.clock import Clock, DatabaseClock
from lineshaft.engine.claim.claims import LOCK_TTL_SEC
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import PLAN_BY_INDEX, configure
from lineshaft.engine.postgres.literals import array_literal
from lineshaft.engine.postgres.pool import shut_down
from lineshaft.errors import UnavailableError
from lineshaft.types.work import EndedClaim, HeartbeatAnswers, HeldTask, Presence


class Heartbeats:
    def __init__(self, dsn: str, *, clock: Clock | None = None, prepare: bool = True) -> None:
        self._dsn = dsn
        self._clock = clock or DatabaseClock()
        self._prepare = prepare
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
        except (psycopg.OperationalError, OSError) as error:
            raise UnavailableError(f"The database is away: {error}") from error
        finally:
            if not call.done() or call.exception() is not None:
                await self._give_up(call)

    async def _beat(self, agents: Sequence[Presence], tasks: Sequence[HeldTask]) -> HeartbeatAnswers:
        if self._connection is None:
            opened = await AsyncConnection.connect(
                self._dsn, autocommit=True, application_name="lineshaft heartbeats"
            )
            self._connection = opened
            configure(opened, prepare=self._prepare)
            await opened.execute(PLAN_BY_INDEX)
        return await beat_on(self._connection, {"now": self._clock.now()}, agents, tasks)

    async def _give_up(self, call: "asyncio.Future[HeartbeatAnswers]") -> None:
        """Whatever is wrong with the connection, the next heartbeat gets a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            shut_down(connection)
        elif not call.done():
            # It hangs while connecting, where a cancellation is heeded at once.
            call.cancel()
        await asyncio.wait({call})
        if not call.cancelled():
            # Looked at, or asyncio complains that nobody did.
            call.exception()
        connection = connection or self._connection
        self._connection = None
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


async def beat_on(
    connection: AsyncConnection[Any],
    now: dict[str, Any],
    agents: Sequence[Presence],
    tasks: Sequence[HeldTask],
) -> HeartbeatAnswers:
    cursor = await connection.execute(
        catalog.load("transition/working")["beat"],
        {
            **now,
            "lock_ttl": LOCK_TTL_SEC,
            "agents": [agent.agent_id for agent in agents],
            "incarnations": [agent.incarnation for agent in agents],
            "ids": array_literal([task.id for task in tasks]),
            "epochs": array_literal([task.epoch for task in tasks]),
            "holders": [task.agent_id for task in tasks],
            "intervals": [float(task.interval_sec) for task in tasks],
            "progress": [None if task.progress is None else task.progress.decode() for task in tasks],
            "costs": [task.cost_usd for task in tasks],
        },
    )
    answers = HeartbeatAnswers({})
    for task_id, epoch, agent_id, answer, slots, slowdown_until in await cursor.fetchall():
        if task_id is None:
            answers.agents[agent_id] = answer
            answers.slots[agent_id] = slots
            if slowdown_until is not None:
                answers.slowdowns[agent_id] = slowdown_until
        elif answer != "continue":
            answers.over.append(EndedClaim(task_id, epoch, answer))
    return answers
