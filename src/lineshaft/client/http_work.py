"""What keeps a process of agents going over HTTP: heartbeats, and waiting for work."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from lineshaft.client import protocol
from lineshaft.client.problems import exception_of
from lineshaft.errors import UnavailableError
from lineshaft.http_client import Connection, Pool, Response
from lineshaft.types import AgentInfo
from lineshaft.types.work import HeartbeatAnswers, HeldTask, Presence

#: As an idle agent with the database itself does; the server wakes it sooner.
POLL_SEC = 30.0
_LONGEST_WAIT_SEC = 60.0
_OK = range(200, 300)


def checked(answer: Response, pool: Pool) -> bytes:
    """The body; raises what a refusal means."""
    if answer.status not in _OK:
        raise exception_of(answer.status, answer.body, str(pool.address))
    return answer.body


class HttpHeartbeats:
    """Heartbeats, on a connection that serves nothing else and is given up when it doesn't answer."""

    def __init__(self, pool: Pool, on_silence: Callable[[], None]) -> None:
        """`on_silence` is called, from the thread of the heartbeats, when one is not answered any more.

        Once, not with each that follows: a server that is merely slow must not be asked everything again and
        again.
        """
        self._is_silent = False
        self._pool = pool
        self._on_silence = on_silence
        self._connection = pool.connection()
        self._decode = msgspec.json.Decoder(HeartbeatAnswers).decode

    async def beat(
        self, agents: Sequence[Presence], tasks: Sequence[HeldTask], *, answer_within_sec: float
    ) -> HeartbeatAnswers:
        body = protocol.CrewBeat(
            agents=[protocol.Member(agent_id=a.agent_id, incarnation=a.incarnation) for a in agents],
            tasks=[
                protocol.HeldBeat(
                    id=task.id,
                    epoch=task.epoch,
                    agent_id=task.agent_id,
                    progress=protocol.raw_of(task.progress),
                    cost_usd=task.cost_usd,
                )
                for task in tasks
            ],
        )
        try:
            answer = await self._pool.request_on(
                self._connection, "/v1/crew/heartbeat", protocol.encode(body), within_sec=answer_within_sec
            )
            found = self._decode(checked(answer, self._pool))
        except UnavailableError:
            if not self._is_silent:
                self._is_silent = True
                self._on_silence()
            raise
        self._is_silent = False
        return found

    async def close(self) -> None:
        self._connection.abort()
        # The socket is closed with the next turn of the loop, which may be its last.
        await asyncio.sleep(0)


class HttpIdler:
    """One agent's way to wait. The server keeps its place in the line between two questions."""

    def __init__(self, pool: Pool, agent: AgentInfo, answer_within_sec: Callable[[], float]) -> None:
        self._pool = pool
        self._agent = agent
        self._answer_within_sec = answer_within_sec
        self._connection: Connection = pool.connection()
        self._decode = msgspec.json.Decoder(protocol.Woken).decode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()

    async def wait(self, timeout: float | None) -> bool:  # noqa: ASYNC109 - running out of time is an answer
        seconds = _LONGEST_WAIT_SEC if timeout is None else min(timeout, _LONGEST_WAIT_SEC)
        body = protocol.Wait(
            agent_id=self._agent.id,
            incarnation=self._agent.incarnation,
            types=list(self._agent.types or ()),
            wait_sec=seconds,
        )
        answer = await self._pool.request_on(
            self._connection,
            "/v1/crew/wait",
            protocol.encode(body),
            within_sec=seconds + self._answer_within_sec(),
        )
        return self._decode(checked(answer, self._pool)).work

    def pass_on(self) -> None:
        """Nothing to tell: the server sees which claims came back full, and who leaves."""

    def decline(self) -> None:
        """As above: the server sees what a claim asked for, and what it left."""

    def hang_up(self) -> None:
        """Whoever waits learns at once that nobody answers, and asks anew."""
        self._connection.abort()
