"""The backend for a server: every method is a call of its HTTP API.

It raises the same exceptions as the database backend. What can be checked without the server (a spec that is
not valid JSON) is refused before anything is sent, by the same functions.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import quote, urlencode
from weakref import WeakSet

import msgspec

from lineshaft.artifacts.store import StoreUnavailableError
from lineshaft.artifacts.verified import verified
from lineshaft.client.backend import Claimed, HeartbeatTransport, Req, Res, WorkWaiter
from lineshaft.client.features import ServerFeatures
from lineshaft.client.http_work import (
    CLAIMS,
    OUTCOMES,
    POLL_SEC,
    HttpHeartbeats,
    HttpWaiter,
    assignments_in,
    claim_item,
    decoded,
    results_of,
)
from lineshaft.client.problems import exception_of
from lineshaft.errors import InvalidInputError, LineshaftError, UnavailableError
from lineshaft.http_client import Address, HttpPool, NoResponseError, Response
from lineshaft.model.file_names import media_type, stored_name
from lineshaft.model.retry import FailureCategory
from lineshaft.model.tasks import NewTask
from lineshaft.operations import dags, health, new_tasks, reservations, tasks
from lineshaft.operations.operation import Operation
from lineshaft.operations.wire import encode
from lineshaft.settings import TOKEN
from lineshaft.types import (
    Artifact,
    InstanceInfo,
    NewDag,
    Readiness,
    RegisteredAgent,
    Submitted,
    SubmittedDag,
    protocol,
)
from lineshaft.types import (
    work as w,
)
from lineshaft.types.features import ACCOUNTS, ERROR_CATEGORY
from lineshaft.types.protocol import BatchView, raise_problem
from lineshaft.types.request import Nothing
from lineshaft.types.reservations import NewReservation, Settlement
from lineshaft.types.waits import NewSuspension, WaitEnd

T = TypeVar("T")

#: The time limit of a request; agents may set a shorter one.
_ANSWER_SEC = 30.0
_MAINTENANCE_SEC = 30.0
#: The time limits of a piece of an upload or download, and of storing an upload that was sent.
_STEP_SEC, _STORED_SEC = 60.0, 660.0
_artifact = msgspec.json.Decoder(Artifact)
_steps = results_of(protocol.StepResult)
_checkpoints = results_of(protocol.CheckpointResult)
_spawned = results_of(protocol.SpawnedTasks)
_suspended = results_of(protocol.SuspendResult)
_maintained = msgspec.json.Decoder(protocol.Maintained)


class HttpBackend:
    def __init__(self, url: str, token: str | None = None, *, max_connections: int = 10) -> None:
        headers = {"Accept": "application/json", "User-Agent": "lineshaft"}
        if token is not None:
            headers["Authorization"] = f"Bearer {_checked_token(token)}"
        self._pool = HttpPool(Address.of(url), headers, size=max_connections)
        self._features = ServerFeatures()
        self._answer_sec = _ANSWER_SEC
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: WeakSet[HttpWaiter] = WeakSet()

    def __repr__(self) -> str:
        return f"<HttpBackend {self._pool.address}>"

    @property
    def place(self) -> str:
        return f"the server {self._pool.address}"

    async def open(self) -> None:
        """Check that the server answers, accepts the token and reaches its database."""
        self._loop = asyncio.get_running_loop()
        self._pool.open()
        try:
            opened = await self.call(tasks.which_ended, tasks.AskEnded(ids=[]))
            self._features.learn(opened.features)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._loop = None
        await self._pool.close()

    # Calls.

    async def call(self, operation: Operation[Req, Res], request: Req) -> Res:
        self._check_open()
        # What can be checked without the server is refused before anything is sent.
        if (check := getattr(request, "check", None)) is not None:
            check()

        async def send(fitted: Req) -> Response:
            sent = operation.wire.encoded(fitted)
            return await self._pool.request(
                operation.method,
                sent.target,
                sent.body,
                headers=() if sent.key is None else (("Idempotency-Key", sent.key),),
                within_sec=self._answer_sec,
                again=operation.may_repeat(fitted),
            )

        answer = decoded(await self._features.send(request, send), self._pool, operation.decoder)
        if isinstance(answer, RegisteredAgent):
            self._features.learn(answer.features)
        return answer

    def _check_open(self) -> None:
        if self._loop is None:
            raise LineshaftError("This Lineshaft is not open. Use 'async with Lineshaft(URL) as shaft'.")

    async def health(self) -> Readiness:
        return await self.call(health.ready, Nothing())

    # Submitting.

    async def submit(self, new: Sequence[NewTask], *, connection: Any) -> list[Submitted]:
        _refuse_connection(connection)
        if not new:
            return []
        return (await self.call(tasks.submit_batch, tasks.SubmitBatch(tasks=list(new)))).items

    async def submit_dag(self, dag: NewDag, *, connection: Any) -> SubmittedDag:
        _refuse_connection(connection)
        made = await self.call(dags.submit_dag, dags.SubmitDag(dag=dag))
        return SubmittedDag(made.dag.id, made.submitted, made.duplicate is True)

    # The bytes of artifacts.

    async def put_artifact(
        self,
        chunks: AsyncIterable[bytes],
        *,
        name: str,
        content_type: str | None,
        task_id: str | None,
        size: int | None,
    ) -> Artifact:
        self._check_open()
        headers = {"X-Filename": quote(stored_name(name), safe="")}
        headers |= {"Transfer-Encoding": "chunked"} if size is None else {"Content-Length": str(size)}
        # As the engine takes it: what isn't a media type can't be a header either.
        headers["Content-Type"] = media_type(content_type, name)
        target = "/v1/artifacts" + (f"?{urlencode({'task_id': task_id})}" if task_id else "")
        try:
            answer = await self._pool.connection().upload(
                target, chunks, headers, step_sec=_STEP_SEC, end_sec=_STORED_SEC
            )
        except NoResponseError as lost:
            raise self._pool.unavailable(lost, again=True) from None
        with _of_store():
            return decoded(answer, self._pool, _artifact)

    async def read_artifact(self, artifact: Artifact, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        self._check_open()
        if start >= stop:
            return
        headers = {} if (start, stop) == (0, artifact.size) else {"Range": f"bytes={start}-{stop - 1}"}
        target = f"/v1/artifacts/{quote(artifact.id, safe='')}/content"
        connection = self._pool.connection()
        try:
            async with connection.download(target, headers, step_sec=_STEP_SEC) as (status, chunks):
                if status not in {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT}:
                    body = b"".join([chunk async for chunk in chunks])
                    with _of_store():
                        raise exception_of(status, body, str(self._pool.address))
                async for chunk in verified(chunks, artifact.sha256, artifact.size, start, stop):
                    yield chunk
        except NoResponseError as lost:
            raise self._pool.unavailable(lost, again=True) from None

    # Working.

    async def _post(
        self, call: str, decoder: "msgspec.json.Decoder[T]", body: Any, *, again: bool = True
    ) -> T:
        self._check_open()

        async def send(fitted: Any) -> Response:
            return await self._pool.request(
                "POST", f"/v1/work/{call}", encode(fitted), within_sec=self._answer_sec, again=again
            )

        return decoded(await self._features.send(body, send), self._pool, decoder)

    async def claim(self, agent_id: str, incarnation: int, *, limit: int, types: Sequence[str]) -> Claimed:
        item = claim_item(agent_id, incarnation, limit, types)
        body = protocol.ClaimBatch(items=[item], view=BatchView.WORK)
        return assignments_in(await self._post("claim", CLAIMS, body, again=False))

    async def complete(self, items: Sequence[w.Completion]) -> list[w.Moved]:
        return await self._outcomes("complete", [protocol.CompleteItem.of(item) for item in items])

    async def complete_and_claim(
        self, item: w.Completion, *, types: Sequence[str]
    ) -> tuple[w.Moved, Claimed]:
        sent = protocol.CompleteItem.of(item, following=protocol.Next(types=list(types)))
        body = protocol.ViewedBatch(items=[sent], view=BatchView.WORK)
        (outcome,) = (await self._post("complete", OUTCOMES, body)).items
        following = outcome.next_claim
        return outcome.moved(item.claim.id), [] if following is None else [following]

    async def fail(self, items: Sequence[w.Failure]) -> list[w.Moved]:
        if not self._features.has(ERROR_CATEGORY):
            items = [_without_error_category(item) for item in items]
        if not self._features.has(ACCOUNTS):
            items = [_with_wait(item) for item in items]
        return await self._outcomes("fail", [protocol.FailItem.of(item) for item in items])

    async def release(self, items: Sequence[w.Release]) -> list[w.Moved]:
        return await self._outcomes("release", [protocol.ReleaseItem.of(item) for item in items])

    async def cancel_held(self, items: Sequence[w.Cancellation]) -> list[w.Moved]:
        return await self._outcomes("cancel", [protocol.CancelItem.of(item) for item in items])

    async def _outcomes(self, call: str, items: Sequence[protocol.OutcomeItem]) -> list[w.Moved]:
        body = protocol.ViewedBatch(items=list(items), view=BatchView.WORK)
        outcomes = (await self._post(call, OUTCOMES, body)).items
        return [outcome.moved(item.id) for item, outcome in zip(items, outcomes, strict=True)]

    async def record_step(self, step: w.NewStep) -> tuple[bytes, w.RemainingBudgets]:
        (result,) = (
            await self._post("steps", _steps, protocol.Batch(items=[protocol.StepItem.of(step)]))
        ).items
        return result.recorded()

    async def save_checkpoint(self, claim: w.ClaimRef, data: bytes) -> None:
        item = protocol.CheckpointItem.of(w.NewCheckpoint(claim, data))
        (result,) = (await self._post("checkpoint", _checkpoints, protocol.Batch(items=[item]))).items
        raise_problem(result.problem)

    async def spawn(
        self, claim: w.ClaimRef, key: str, tasks: Sequence[NewTask], *, wait: bool, spent: w.Spent
    ) -> w.Spawned:
        new = w.NewSpawn(claim, tasks, key, wait, spent)
        new_tasks.check_children(new.tasks)
        item = protocol.SpawnItem.of(new)
        (result,) = (await self._post("spawn", _spawned, protocol.Batch(items=[item]))).items
        return result.spawned()

    async def suspend(self, new: NewSuspension) -> WaitEnd | None:
        body = protocol.Batch(items=[protocol.SuspendItem.of(new)])
        (result,) = (await self._post("suspend", _suspended, body)).items
        return result.end()

    async def acquire(self, new: NewReservation, *, wait_sec: float) -> str | None:
        request = reservations.Acquire(
            claim_token=new.claim.token,
            task_id=new.claim.id,
            key=new.key,
            units=new.units,
            wait_sec=wait_sec,
            idempotency_key=new.idempotency_key,
        )
        if not wait_sec:
            return (await self.call(reservations.acquire, request)).reservation
        # On a connection of its own, so that those who wait don't hold up other calls.
        self._check_open()
        connection, operation = self._pool.connection(), reservations.acquire
        try:
            response = await self._pool.request_on(
                connection,
                operation.path,
                operation.wire.encoded(request).body or b"",
                within_sec=wait_sec + self._answer_sec,
            )
        finally:
            connection.abort()
        return decoded(response, self._pool, operation.decoder).reservation

    async def settle(self, settlement: Settlement) -> None:
        claim = settlement.claim
        request = reservations.Settle(
            claim_token=claim.token,
            task_id=claim.id,
            reservation=settlement.reservation,
            units=settlement.units,
            remaining=settlement.remaining,
        )
        await self.call(reservations.settle, request)

    # Running agents.

    def heartbeats(self) -> HeartbeatTransport:
        return HttpHeartbeats(self._pool, self._features, self._on_silence)

    def _on_silence(self) -> None:
        """A heartbeat had no answer: other open connections may be dead too."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._reconnect)

    def _reconnect(self) -> None:
        self._pool.reconnect()
        for waiter in list(self._waiters):
            waiter.hang_up()

    def waiter(self, agent_id: str, own: InstanceInfo) -> AbstractAsyncContextManager[WorkWaiter]:
        presence = w.Presence(agent_id, own.incarnation)
        waiter = HttpWaiter(self._pool, self._features, presence, lambda: self._answer_sec)
        self._waiters.add(waiter)
        return waiter

    @property
    def poll_interval_sec(self) -> float | None:
        return POLL_SEC

    async def release_unknown(self, agent_id: str, incarnation: int, known: Collection[str]) -> int:  # noqa: ARG002
        """Nothing: a server releases what it couldn't deliver. What the server itself lost, expires."""
        return 0

    def expect_answers_within(self, seconds: float) -> None:
        self._answer_sec = min(self._answer_sec, seconds)

    @property
    def maintenance_interval_sec(self) -> float:
        """Long: the server runs its own duties, and reports when something is due."""
        return _MAINTENANCE_SEC

    async def maintain(self) -> float | None:
        return (await self._post("maintain", _maintained, {})).next_sec


def _with_wait(item: w.Failure) -> w.Failure:
    """For a server that knows no instants: how long it is until then, by the clock of this process."""
    if item.retry_at is None:
        return item
    return msgspec.structs.replace(
        item, retry_after_sec=max((item.retry_at - datetime.now(UTC)).total_seconds(), 0.0)
    )


def _without_error_category(item: w.Failure) -> w.Failure:
    """As an older server understands it."""
    known = item.category != FailureCategory.ERROR
    return item if known else msgspec.structs.replace(item, category=FailureCategory.CRASH)


def _refuse_connection(connection: Any) -> None:
    if connection is not None:
        fault = (
            "can't be used over HTTP: a server's call can't be part of your transaction. Use "
            "Lineshaft(DSN) with the database itself, or submit with an idempotency_key after your commit"
        )
        raise InvalidInputError(errors=[("connection", fault)])


def _checked_token(token: str) -> str:
    try:
        return TOKEN.parse(token)
    except ValueError:
        raise InvalidInputError(errors=[("token", f"must be {TOKEN.words}")]) from None


@contextmanager
def _of_store() -> Iterator[None]:
    """A server that answers, but can't transfer bytes now: its store is away."""
    try:
        yield
    except UnavailableError as error:
        raise StoreUnavailableError(str(error)) from None
