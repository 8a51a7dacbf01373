"""Heartbeats and waiting for work over HTTP, each on a connection of its own."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from lineshaft.client.backend import Claimed, Waited
from lineshaft.client.features import ServerFeatures
from lineshaft.client.problems import exception_of, unexpected_response
from lineshaft.errors import LineshaftError, UnavailableError
from lineshaft.http_client import Connection, HttpPool, Response
from lineshaft.ids import new_id
from lineshaft.operations.wire import encode
from lineshaft.types import protocol
from lineshaft.types import work as w
from lineshaft.types.agents import AgentInstance
from lineshaft.types.protocol import MAX_ITEMS, MAX_WAIT_SEC, BatchView, raise_problem

T = TypeVar("T")

#: How long an idle agent waits in one call.
POLL_SEC = 55.0
#: How long an interrupted poll may take to return, before its connection is closed.
_INTERRUPT_SEC = 2.0
_OK = range(200, 300)


def checked(response: Response, pool: HttpPool) -> bytes:
    """The body; raises the error of any other response than 2xx."""
    if response.status not in _OK:
        raise exception_of(response.status, response.body, str(pool.address))
    return response.body


def decoded(response: Response, pool: HttpPool, decoder: "msgspec.json.Decoder[T]") -> T:
    body = checked(response, pool)
    try:
        return decoder.decode(body or b"null")
    except msgspec.MsgspecError:
        raise unexpected_response(response.status, str(pool.address)) from None


class Results(msgspec.Struct, Generic[T], frozen=True):
    """The response of a batch."""

    items: list[T]


def results_of(kind: type[T]) -> "msgspec.json.Decoder[Results[T]]":
    return msgspec.json.Decoder(Results[kind])  # type: ignore[valid-type]


CLAIMS = results_of(protocol.ClaimResult[w.ClaimedTask])
OUTCOMES = results_of(protocol.Outcome)
_BEATS = results_of(protocol.HeartbeatResult)


def assignments_in(claims: Results[protocol.ClaimResult[w.ClaimedTask]]) -> Claimed:
    for item in claims.items:
        raise_problem(item.problem)
    return [assignment for item in claims.items if item.tasks is not UNSET for assignment in item.tasks]


def claim_item(agent_id: str, incarnation: int, limit: int, types: Sequence[str]) -> protocol.ClaimItem:
    return protocol.ClaimItem(
        agent_id=agent_id, incarnation=incarnation, limit=limit, types=list(types), start=True
    )


class HttpHeartbeats:
    """Heartbeats on a connection that serves nothing else, and is replaced when it doesn't answer."""

    def __init__(self, pool: HttpPool, features: ServerFeatures, on_silence: Callable[[], None]) -> None:
        """`on_silence` is called, from the thread of the heartbeats, when the first of several has no answer.

        Only then: a server that is merely slow must not get all other requests again and again.
        """
        self._is_silent = False
        self._pool = pool
        self._features = features
        self._on_silence = on_silence
        self._connection = pool.connection()

    async def beat(
        self, agents: Sequence[w.Presence], tasks: Sequence[w.HeldTask], *, answer_within_sec: float
    ) -> w.HeartbeatAnswers:
        held: dict[w.Presence, list[w.HeldTask]] = {agent: [] for agent in agents}
        for task in tasks:
            held[task.holder].append(task)
        answers = w.HeartbeatAnswers({})
        for start in range(0, max(len(agents), 1), MAX_ITEMS):
            part = agents[start : start + MAX_ITEMS]
            results = await self._send(part, held, answer_within_sec)
            for agent, result in zip(part, results, strict=True):
                _add(answers, agent, held[agent], result)
            if any(result.spent_later is True for result in results):
                answers = replace(answers, spent_later=True)
        return answers

    async def _send(
        self, agents: Sequence[w.Presence], held: dict[w.Presence, list[w.HeldTask]], answer_within_sec: float
    ) -> list[protocol.HeartbeatResult]:
        body = protocol.Batch(
            items=[
                protocol.HeartbeatItem(
                    agent_id=agent.agent_id,
                    incarnation=agent.incarnation,
                    tasks=[protocol.HeartbeatTask.of(task) for task in held[agent]],
                )
                for agent in agents
            ]
        )
        try:
            response = await self._post_on(self._connection, "/v1/work/heartbeat", body, answer_within_sec)
            found = decoded(response, self._pool, _BEATS).items
        except UnavailableError:
            if not self._is_silent:
                self._is_silent = True
                self._on_silence()
            raise
        self._is_silent = False
        return found

    async def release(
        self, agent: w.Presence, items: Sequence[tuple[w.Release, bytes | None]], *, answer_within_sec: float
    ) -> list[w.Moved]:
        """On another connection: a heartbeat may be pending."""
        connection = self._pool.connection()
        moved: list[w.Moved] = []
        try:
            drain = f"/v1/agents/{quote(agent.agent_id, safe='')}/drain"
            body = AgentInstance(incarnation=agent.incarnation)
            checked(await self._post_on(connection, drain, body, answer_within_sec), self._pool)
            for start in range(0, len(items), MAX_ITEMS):
                part = items[start : start + MAX_ITEMS]
                states = [
                    w.NewCheckpoint(release.claim, state) for release, state in part if state is not None
                ]
                if states:
                    saves = protocol.Batch(items=[protocol.CheckpointItem.of(state) for state in states])
                    await self._post_on(connection, "/v1/work/checkpoint", saves, answer_within_sec)
                releases = protocol.ViewedBatch(
                    items=[protocol.ReleaseItem.of(release) for release, _ in part], view=BatchView.WORK
                )
                response = await self._post_on(connection, "/v1/work/release", releases, answer_within_sec)
                outcomes = decoded(response, self._pool, OUTCOMES).items
                moved += [
                    one.moved(release.claim.id) for one, (release, _) in zip(outcomes, part, strict=True)
                ]
        finally:
            connection.abort()
        return moved

    async def _post_on(
        self, connection: Connection, target: str, body: Any, answer_within_sec: float
    ) -> Response:
        async def send(fitted: Any) -> Response:
            return await self._pool.request_on(
                connection, target, encode(fitted), within_sec=answer_within_sec
            )

        return await self._features.send(body, send)

    async def close(self) -> None:
        self._connection.abort()
        # The socket closes in the next iteration of the event loop, which may be its last.
        await asyncio.sleep(0)


def _add(
    answers: w.HeartbeatAnswers,
    agent: w.Presence,
    held: Sequence[w.HeldTask],
    result: protocol.HeartbeatResult,
) -> None:
    if result.problem is not None:
        # An instance without an answer was superseded.
        return
    answers.agents[agent] = result.status or "active"
    if result.max_concurrent_tasks is not UNSET:
        answers.slots[agent] = result.max_concurrent_tasks
    if result.slowdown_until is not UNSET:
        answers.slowdowns[agent] = result.slowdown_until
    said = {} if result.tasks is UNSET else result.tasks
    reasons = {} if result.reasons is UNSET else result.reasons
    not_renewed = () if result.not_renewed is UNSET else result.not_renewed
    for task in held:
        # With an answer that this version doesn't know, work goes on: if the claim is over, writes are stale.
        if (answer := said.get(task.id)) in {"cancel", "lost"}:
            answers.over.append(w.EndedClaim(task.id, task.epoch, answer, reasons.get(task.id)))
        elif answer != "continue" or task.id in not_renewed:
            answers.not_renewed.add((task.id, task.epoch))


class HttpWaiter:
    """Waits for work with long polls, which claim it."""

    def __init__(
        self,
        pool: HttpPool,
        features: ServerFeatures,
        agent: w.Presence,
        answer_within_sec: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._features = features
        self._agent = agent
        self._answer_within_sec = answer_within_sec
        self._connection: Connection = pool.connection()
        #: Names the long poll, so that a later call can end it.
        self._poll = new_id("poll")
        self._polling: asyncio.Task[Response] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()
        if self._ending is not None:
            await asyncio.wait({self._ending})

    async def wait(
        self,
        timeout: float,  # noqa: ASYNC109 - the end of the time is a result
        *,
        types: Sequence[str],
        limit: int,
    ) -> Waited | None:
        seconds = min(timeout, MAX_WAIT_SEC)
        item = claim_item(self._agent.agent_id, self._agent.incarnation, limit, types)
        body = protocol.ClaimBatch(items=[item], wait_sec=seconds, poll=self._poll, view=BatchView.WORK)
        within_sec = seconds + self._answer_within_sec()

        async def send(fitted: protocol.ClaimBatch[protocol.ClaimItem]) -> Response:
            return await self._pool.request_on(
                self._connection, "/v1/work/claim", encode(fitted), within_sec=within_sec
            )

        self._polling = asyncio.create_task(self._features.send(body, send))
        ending = self._ending
        try:
            response = await self._polling
        except UnavailableError:
            if self._ending is not ending:
                # It was interrupted, and its connection closed.
                return None
            raise
        finally:
            self._polling = None
        claims = decoded(response, self._pool, CLAIMS)
        assignments = assignments_in(claims)
        if not assignments:
            return None
        (waited_sec,) = (item.waited_sec for item in claims.items)
        return Waited(assignments, None if waited_sec is UNSET else waited_sec)

    def interrupt(self) -> None:
        """End the current wait. It still returns what the server has claimed."""
        if self._polling is not None and (self._ending is None or self._ending.done()):
            self._ending = asyncio.create_task(self._end(self._polling))

    async def _end(self, polling: "asyncio.Task[Response]") -> None:
        body = encode(protocol.ClaimBatch[Any](items=[], poll=self._poll))
        with contextlib.suppress(LineshaftError):
            await self._pool.request("POST", "/v1/work/claim", body, within_sec=_INTERRUPT_SEC, again=True)
        await asyncio.wait({polling}, timeout=_INTERRUPT_SEC)
        if not polling.done():
            # The server releases what it has claimed for a client that disconnects.
            self.hang_up()

    def pass_on(self) -> None:
        """The server does this after a claim that came back full."""

    def decline(self) -> None:
        """The server does this after a claim that left something."""

    def hang_up(self) -> None:
        """Close the connection: a pending call fails at once."""
        self._connection.abort()
