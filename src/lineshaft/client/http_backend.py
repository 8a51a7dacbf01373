"""The backend for a server: every method is a call of its HTTP API.

It raises the same exceptions as the database backend. What can be checked without the server (a spec that is
not valid JSON) is refused before anything is sent, by the same functions.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from decimal import Decimal
from http import HTTPStatus
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlencode
from weakref import WeakSet

import msgspec
from msgspec import UNSET, Raw, UnsetType

from lineshaft.artifacts.store import StoreUnavailableError
from lineshaft.artifacts.verified import verified
from lineshaft.client import requests, responses
from lineshaft.client.backend import HeartbeatTransport, WorkWaiter
from lineshaft.client.http_work import (
    POLL_SEC,
    CheckpointResults,
    ClaimResults,
    HttpHeartbeats,
    HttpWaiter,
    Outcomes,
    SpawnResults,
    StepResults,
    checked,
    claim_item,
    decoded,
    encode,
)
from lineshaft.client.problems import exception_of, unexpected_response
from lineshaft.errors import InvalidInputError, LineshaftError, UnavailableError
from lineshaft.http_client import Address, NoResponseError, Pool
from lineshaft.model.fields import check_fields
from lineshaft.model.file_names import media_type, stored_name
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.storable import replace_unstorable
from lineshaft.model.tasks import NewTask
from lineshaft.settings import TOKEN
from lineshaft.types import (
    AgentInfo,
    Approval,
    ApprovalDecision,
    Artifact,
    Attempt,
    Attention,
    Breaker,
    BulkResolution,
    Costs,
    Dag,
    DagFilter,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    EventPage,
    InstanceInfo,
    Limits,
    Lock,
    MatchedTasks,
    NewAgent,
    NewToken,
    Page,
    Readiness,
    RegisteredAgent,
    Report,
    Slowdown,
    Stats,
    Submitted,
    SubmittedDag,
    Task,
    TaskChange,
    TaskFilter,
    ThroughputHistory,
    Token,
    Waiting,
    Why,
    protocol,
)
from lineshaft.types.artifacts import artifact_id
from lineshaft.types.assignments import Assignment
from lineshaft.types.costs import check_days
from lineshaft.types.page import check_limit
from lineshaft.types.protocol import View
from lineshaft.types.sources import (
    Fired,
    Firing,
    NewSource,
    Source,
    SourceChange,
    SourceChanges,
    SourceFields,
    definition_of,
)
from lineshaft.types.work import (
    Cancellation,
    ClaimedTask,
    ClaimRef,
    Completion,
    DueRetries,
    Failure,
    LeftBehind,
    Moved,
    NewCheckpoint,
    NewSpawn,
    NewStep,
    Presence,
    Release,
    RemainingBudgets,
    Spawned,
    Spent,
)

T = TypeVar("T")

#: The time limit of a request; agents may set a shorter one.
_ANSWER_SEC = 30.0
_MAINTENANCE_SEC = 30.0
_MAX_IDS = 10_000
#: The time limits of a piece of an upload or download, and of storing an upload that was sent.
_STEP_SEC, _STORED_SEC = 60.0, 660.0
_artifact = msgspec.json.Decoder(Artifact)


class HttpBackend:
    def __init__(self, url: str, token: str | None = None, *, max_connections: int = 10) -> None:
        headers = {"Accept": "application/json", "User-Agent": "lineshaft"}
        if token is not None:
            headers["Authorization"] = f"Bearer {_checked_token(token)}"
        self._pool = Pool(Address.of(url), headers, size=max_connections)
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
            await self.finished([])
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._loop = None
        await self._pool.close()

    # Calls.

    async def _call(
        self, method: str, path: str, kind: type[T], body: bytes | None = None, *, again: bool = True
    ) -> T:
        self._check_open()
        answer = await self._pool.request(method, path, body, within_sec=self._answer_sec, again=again)
        found = checked(answer, self._pool)
        try:
            return msgspec.json.decode(found or b"null", type=kind)
        except msgspec.MsgspecError:
            raise unexpected_response(answer.status, str(self._pool.address)) from None

    def _check_open(self) -> None:
        if self._loop is None:
            raise LineshaftError("This Lineshaft is not open. Use 'async with Lineshaft(URL) as shaft'.")

    async def _get(self, path: str, kind: type[T], /, **query: Any) -> T:
        given = {name: _in_query(value) for name, value in query.items() if value not in (None, (), [])}
        return await self._call("GET", path + ("?" + urlencode(given, doseq=True) if given else ""), kind)

    async def _post(self, path: str, kind: type[T], body: Any, *, again: bool = True) -> T:
        return await self._call("POST", path, kind, encode(body), again=again)

    async def _patch(self, path: str, kind: type[T], body: Any, *, again: bool = False) -> T:
        return await self._call("PATCH", path, kind, encode(body), again=again)

    async def _delete(self, path: str, reason: str | None) -> None:
        query = "" if reason is None else "?" + urlencode({"reason": reason})
        await self._call("DELETE", path + query, object, again=False)

    # Submitting.

    async def submit(self, tasks: Sequence[NewTask], *, connection: Any) -> list[Submitted]:
        _refuse_connection(connection)
        if not tasks:
            return []
        body = {"tasks": requests.tasks(tasks)}
        return (await self._post("/v1/tasks/batch", responses.Items, body, again=False)).items

    async def submit_dag(
        self,
        title: str,
        tasks: Sequence[NewTask],
        *,
        budget_ceiling_usd: Decimal | float | None,
        created_by: str | None,
        idempotency_key: str | None,
        connection: Any,
    ) -> SubmittedDag:
        _refuse_connection(connection)
        body = requests.dag(
            title,
            tasks,
            budget_ceiling_usd=budget_ceiling_usd,
            created_by=created_by,
            idempotency_key=idempotency_key,
        )
        # With a key of its own it is created once, however often it is sent.
        again = idempotency_key is not None
        return (await self._post("/v1/dags", responses.NewDag, body, again=again)).value

    # Reading and operating.

    async def task(self, task_id: str) -> Task:
        return await self._get(f"/v1/tasks/{_part(task_id)}", Task)

    async def tasks(self, filters: TaskFilter, *, order: str, limit: int, cursor: str | None) -> Page[Task]:
        check_limit(limit)
        return await self._get(
            "/v1/tasks",
            Page[Task],
            order=str(order),
            limit=limit,
            cursor=cursor,
            **requests.given_fields(filters),
        )

    async def attempts(self, task_id: str) -> list[Attempt]:
        return (await self._get(f"/v1/tasks/{_part(task_id)}/attempts", Page[Attempt])).items

    async def steps(self, task_id: str) -> dict[str, Any]:
        return await self._get(f"/v1/tasks/{_part(task_id)}/steps", dict[str, Any])

    async def why(self, task_id: str) -> Why:
        return await self._get(f"/v1/tasks/{_part(task_id)}/why", Why)

    async def change(self, task_id: str, change: TaskChange) -> Task:
        return await self._patch(f"/v1/tasks/{_part(task_id)}", Task, change.wanted())

    async def add_dependencies(self, task_id: str, depends_on: Sequence[str]) -> Task:
        body = {"depends_on": list(depends_on)}
        return await self._post(f"/v1/tasks/{_part(task_id)}/dependencies", Task, body)

    async def cancel(self, task_id: str, reason: str, *, cascade: bool) -> Task:
        body = {"reason": replace_unstorable(reason), "cascade": cascade}
        return await self._post(f"/v1/tasks/{_part(task_id)}/cancel", Task, body)

    async def cancel_matching(self, wanted: TaskFilter, reason: str, *, dry_run: bool) -> MatchedTasks:
        body = {"filter": wanted, "reason": reason, "dry_run": dry_run}
        return await self._post("/v1/tasks/cancel", MatchedTasks, body, again=False)

    async def retry_matching(self, wanted: TaskFilter, *, dry_run: bool) -> MatchedTasks:
        body = {"filter": wanted, "dry_run": dry_run}
        return await self._post("/v1/tasks/retry", MatchedTasks, body, again=False)

    async def retry(self, task_id: str, *, delay_sec: float) -> Task:
        body = {"delay_sec": delay_sec} if delay_sec else {}
        return await self._post(f"/v1/tasks/{_part(task_id)}/retry", Task, body, again=False)

    async def finished(self, ids: Sequence[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        # Also called without ids: `open` checks the connection this way.
        for start in range(0, max(len(ids), 1), _MAX_IDS):
            part = list(ids[start : start + _MAX_IDS])
            found |= (await self._post("/v1/ended", responses.Ended, {"ids": part})).ids
        return found

    async def find_ids(self, text: str, kind: Literal["task", "dag"] | None) -> list[str]:
        return (await self._get("/v1/ids", responses.FoundIds, name=text, kind=kind)).ids

    async def dag(self, dag_id: str) -> Dag:
        return await self._get(f"/v1/dags/{_part(dag_id)}", Dag)

    async def dags(self, filters: DagFilter, *, limit: int, cursor: str | None) -> Page[Dag]:
        check_limit(limit)
        given = requests.given_fields(filters)
        return await self._get("/v1/dags", Page[Dag], limit=limit, cursor=cursor, **given)

    async def cancel_dag(self, dag_id: str, reason: str) -> Dag:
        body = {"reason": replace_unstorable(reason)}
        return await self._post(f"/v1/dags/{_part(dag_id)}/cancel", Dag, body)

    async def set_dag_budget(self, dag_id: str, usd: Decimal | float | None) -> Dag:
        return await self._patch(f"/v1/dags/{_part(dag_id)}", Dag, {"budget_ceiling_usd": usd}, again=True)

    async def add_dag_budget(self, dag_id: str, usd: Decimal | float) -> Dag:
        return await self._patch(f"/v1/dags/{_part(dag_id)}", Dag, {"add_budget_usd": usd})

    async def rename_dag(self, dag_id: str, title: str) -> Dag:
        check_fields(title=title)
        return await self._patch(f"/v1/dags/{_part(dag_id)}", Dag, {"title": title}, again=True)

    async def events(
        self,
        after: str | None,
        *,
        limit: int,
        task_id: str | None,
        dag_id: str | None,
        kinds: Collection[str] | None,
    ) -> EventPage:
        return await self._get(
            "/v1/events",
            EventPage,
            after=after,
            limit=limit,
            task_id=task_id,
            dag_id=dag_id,
            kind=sorted(kinds or ()),
        )

    async def approvals(self, *, limit: int, cursor: str | None) -> Page[Approval]:
        check_limit(limit)
        return await self._get("/v1/approvals", Page[Approval], limit=limit, cursor=cursor)

    async def decide(self, task_id: str, decision: ApprovalDecision) -> Task:
        body = {
            "approve": decision.approve,
            "reviewer": decision.reviewer,
            "note": decision.note,
            "data": Raw(decision.data or b"null"),
            "decision_report": Raw(decision.report or b"null"),
        }
        return await self._post(f"/v1/approvals/{_part(task_id)}", Task, body, again=False)

    async def reports(
        self, query: str, *, type_: str | None, dag_id: str | None, limit: int, cursor: str | None
    ) -> Page[Report]:
        check_limit(limit)
        return await self._get(
            "/v1/reports",
            Page[Report],
            q=query or None,
            type=type_,
            dag_id=dag_id,
            limit=limit,
            cursor=cursor,
        )

    async def dead_letters(
        self, filters: DeadLetterFilter, *, limit: int, cursor: str | None
    ) -> Page[DeadLetter]:
        check_limit(limit)
        return await self._get(
            "/v1/dead-letters",
            Page[DeadLetter],
            limit=limit,
            cursor=cursor,
            **requests.given_fields(filters),
        )

    async def dead_letter(self, task_id: str) -> DeadLetter:
        return await self._get(f"/v1/dead-letters/{_part(task_id)}", DeadLetter)

    async def dead_letter_groups(
        self, *, types: Sequence[str], categories: Sequence[str], limit: int
    ) -> list[DeadLetterGroup]:
        check_limit(limit)
        found = await self._get(
            "/v1/dead-letters/groups",
            Page[DeadLetterGroup],
            type=list(types),
            category=list(categories),
            limit=limit,
        )
        return found.items

    async def resolve(self, task_id: str, decision: ResolutionRequest) -> Task:
        decision.check()
        path = f"/v1/dead-letters/{_part(task_id)}/resolve"
        return await self._post(path, Task, decision, again=False)

    async def resolve_all(self, filters: DeadLetterFilter, decision: ResolutionRequest) -> BulkResolution:
        decision.check()
        body = {**msgspec.structs.asdict(decision), "filter": requests.given_fields(filters)}
        return await self._post("/v1/dead-letters/resolve", BulkResolution, body, again=False)

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

    async def artifact(self, ref: str) -> Artifact:
        return await self._get(f"/v1/artifacts/{_part(artifact_id(ref))}", Artifact)

    async def artifacts(self, *, task_id: str | None, limit: int, cursor: str | None) -> Page[Artifact]:
        check_limit(limit)
        return await self._get("/v1/artifacts", Page[Artifact], task_id=task_id, limit=limit, cursor=cursor)

    async def read_artifact(self, artifact: Artifact, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        self._check_open()
        if start >= stop:
            return
        headers = {} if (start, stop) == (0, artifact.size) else {"Range": f"bytes={start}-{stop - 1}"}
        target = f"/v1/artifacts/{_part(artifact.id)}/content"
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

    async def delete_artifact(self, ref: str) -> None:
        await self._call("DELETE", f"/v1/artifacts/{_part(artifact_id(ref))}", type(None))

    async def agents(self, *, status: Sequence[str], limit: int, cursor: str | None) -> Page[AgentInfo]:
        check_limit(limit)
        return await self._get("/v1/agents", Page[AgentInfo], status=list(status), limit=limit, cursor=cursor)

    async def agent(self, agent_id: str) -> AgentInfo:
        return await self._get(f"/v1/agents/{_part(agent_id)}", AgentInfo)

    async def change_agent(
        self,
        agent_id: str,
        *,
        status: str | None,
        max_concurrent_tasks: int | UnsetType | None,
        budget_usd: Decimal | float | UnsetType | None,
        add_budget_usd: Decimal | float | None,
        reason: str | None,
    ) -> AgentInfo:
        given = {
            "status": status,
            "max_concurrent_tasks": max_concurrent_tasks,
            "budget_usd": budget_usd,
            "add_budget_usd": add_budget_usd,
            "reason": reason,
        }
        body = {name: value for name, value in given.items() if value is not UNSET}
        return await self._patch(f"/v1/agents/{_part(agent_id)}", AgentInfo, body)

    async def delete_agent(self, agent_id: str, *, reason: str | None) -> None:
        await self._delete(f"/v1/agents/{_part(agent_id)}", reason)

    async def limits(self) -> Limits:
        return await self._get("/v1/limits", Limits)

    async def change_limits(self, changes: Mapping[str, Any], *, reason: str | None) -> Limits:
        return await self._patch("/v1/limits", Limits, {**changes, "reason": reason})

    async def breakers(self, *, limit: int, cursor: str | None) -> Page[Breaker]:
        check_limit(limit)
        return await self._get("/v1/breakers", Page[Breaker], limit=limit, cursor=cursor)

    async def open_breaker(self, key: str, *, reason: str | None) -> Breaker:
        return await self._post(f"/v1/breakers/{_part(key)}/open", Breaker, {"reason": reason})

    async def reset_breaker(self, key: str, *, reason: str | None) -> Breaker:
        return await self._post(f"/v1/breakers/{_part(key)}/reset", Breaker, {"reason": reason})

    async def locks(self, *, limit: int, cursor: str | None) -> Page[Lock]:
        check_limit(limit)
        return await self._get("/v1/locks", Page[Lock], limit=limit, cursor=cursor)

    async def release_lock(self, key: str, *, reason: str | None) -> None:
        await self._delete(f"/v1/locks/{_part(key)}", reason)

    async def slowdowns(self, *, limit: int, cursor: str | None) -> Page[Slowdown]:
        check_limit(limit)
        return await self._get("/v1/slowdowns", Page[Slowdown], limit=limit, cursor=cursor)

    async def end_slowdown(self, key: str, *, reason: str | None) -> None:
        await self._delete(f"/v1/slowdowns/{_part(key)}", reason)

    async def pause(self, type_: str | None, *, reason: str | None) -> None:
        if type_ is not None:
            check_fields(type=type_)
        await self._post("/v1/pause", object, {"type": type_, "reason": reason})

    async def resume(self, type_: str | None, *, reason: str | None) -> None:
        await self._post("/v1/resume", object, {"type": type_, "reason": reason})

    async def stats(self) -> Stats:
        return await self._get("/v1/stats", Stats)

    async def waiting(self) -> Waiting:
        return await self._get("/v1/waiting", Waiting)

    async def throughput(self) -> ThroughputHistory:
        return await self._get("/v1/throughput", ThroughputHistory)

    async def costs(self, *, days: int, type_: str | None, model: str | None, agent_id: str | None) -> Costs:
        check_days(days)
        return await self._get("/v1/costs", Costs, days=days, type=type_, model=model, agent_id=agent_id)

    async def attention(self) -> Attention:
        return await self._get("/v1/attention", Attention)

    async def health(self) -> Readiness:
        return await self._get("/readyz", Readiness)

    async def sources(self, *, kind: str | None, limit: int, cursor: str | None) -> Page[Source]:
        check_limit(limit)
        return await self._get("/v1/sources", Page[Source], kind=kind, limit=limit, cursor=cursor)

    async def source(self, name: str) -> Source:
        return await self._get(f"/v1/sources/{_part(name)}", Source)

    async def create_source(self, source: NewSource) -> Source:
        return await self._post("/v1/sources", Source, definition_of(source), again=False)

    async def put_source(self, source: NewSource, *, version: int | None = None) -> Source:
        path, body = f"/v1/sources/{_part(source.name)}", _based_on(version, source)
        # What took effect has a new version: the same call again would be refused.
        return await self._call("PUT", path, Source, encode(body), again=version is None)

    async def patch_source(self, name: str, changes: SourceFields, *, version: int | None = None) -> Source:
        path, body = f"/v1/sources/{_part(name)}", _based_on(version, changes)
        return await self._patch(path, Source, body, again=version is None)

    async def delete_source(self, name: str) -> None:
        await self._call("DELETE", f"/v1/sources/{_part(name)}", object, again=False)

    async def fire_source(self, name: str, event: Mapping[str, Any] | None, *, dry_run: bool) -> Fired:
        body = {"dry_run": dry_run} | ({} if event is None else {"event": event})
        return await self._post(f"/v1/sources/{_part(name)}/fire", Fired, body, again=False)

    async def source_firings(self, name: str, *, limit: int, cursor: str | None) -> Page[Firing]:
        check_limit(limit)
        return await self._get(f"/v1/sources/{_part(name)}/firings", Page[Firing], limit=limit, cursor=cursor)

    async def apply_sources(
        self, sources: Sequence[NewSource], *, origin: str, dry_run: bool
    ) -> list[SourceChange]:
        body = {"origin": origin, "sources": list(map(definition_of, sources)), "dry_run": dry_run}
        return (await self._post("/v1/sources/apply", SourceChanges, body)).items

    async def tokens(self) -> list[Token]:
        return (await self._get("/v1/tokens", Page[Token])).items

    async def create_token(
        self, name: str, scope: str, *, agent_id: str | None, budget_usd: Decimal | float | None
    ) -> NewToken:
        body = {"name": name, "scope": scope, "agent_id": agent_id, "budget_usd": budget_usd}
        return await self._post("/v1/tokens", NewToken, body, again=False)

    async def revoke_token(self, which: str) -> None:
        await self._call("DELETE", f"/v1/tokens/{_part(which)}", object, again=False)

    # Working.

    async def register(self, agent: NewAgent) -> RegisteredAgent:
        return await self._post("/v1/agents", RegisteredAgent, requests.given_fields(agent), again=False)

    async def drain(self, agent_id: str, incarnation: int) -> None:
        body = protocol.AgentInstance(incarnation=incarnation)
        await self._post(f"/v1/agents/{_part(agent_id)}/drain", object, body)

    async def leave(self, agent_id: str, incarnation: int) -> None:
        body = protocol.AgentInstance(incarnation=incarnation)
        await self._post(f"/v1/agents/{_part(agent_id)}/leave", object, body)

    async def siblings(
        self, agent_id: str, incarnation: int, *, gone: Sequence[str], everyone: bool
    ) -> list[str]:
        body = protocol.Siblings(incarnation=incarnation, gone=tuple(gone), everyone=everyone)
        found = await self._post(f"/v1/agents/{_part(agent_id)}/siblings", protocol.SiblingNames, body)
        return found.instances

    async def claim(
        self, agent_id: str, incarnation: int, *, limit: int, types: Sequence[str]
    ) -> list[Assignment[ClaimedTask]]:
        item = claim_item(agent_id, incarnation, limit, types)
        body = protocol.ClaimBatch(items=[item], view=View.WORK)
        return (await self._post("/v1/work/claim", ClaimResults, body, again=False)).assignments

    async def complete(self, items: Sequence[Completion]) -> list[Moved]:
        return await self._outcomes("complete", items, [protocol.CompleteItem.of(item) for item in items])

    async def complete_and_claim(
        self, item: Completion, *, types: Sequence[str]
    ) -> tuple[Moved, list[Assignment[ClaimedTask]]]:
        following = protocol.Next(types=list(types))
        body = protocol.ViewedBatch(
            items=[protocol.CompleteItem.of(item, following=following)], view=View.WORK
        )
        found = await self._post("/v1/work/complete", Outcomes, body)
        (moved,) = found.moved([item.claim.id])
        return moved, [each.next_claim for each in found.items if each.next_claim is not None]

    async def fail(self, items: Sequence[Failure]) -> list[Moved]:
        return await self._outcomes("fail", items, [protocol.FailItem.of(item) for item in items])

    async def release(self, items: Sequence[Release]) -> list[Moved]:
        return await self._outcomes("release", items, [protocol.ReleaseItem.of(item) for item in items])

    async def cancel_held(self, items: Sequence[Cancellation]) -> list[Moved]:
        return await self._outcomes("cancel", items, [protocol.CancelItem.of(item) for item in items])

    async def _outcomes(
        self,
        call: str,
        given: Sequence[Completion | Failure | Release | Cancellation],
        items: Sequence[protocol.Body],
    ) -> list[Moved]:
        body = protocol.ViewedBatch(items=list(items), view=View.WORK)
        found = await self._post(f"/v1/work/{call}", Outcomes, body)
        return found.moved([item.claim.id for item in given])

    async def record_step(self, step: NewStep) -> tuple[bytes, RemainingBudgets]:
        body = protocol.Batch(items=[protocol.StepItem.of(step)])
        return (await self._post("/v1/work/steps", StepResults, body)).recorded

    async def save_checkpoint(self, claim: ClaimRef, data: bytes) -> None:
        body = protocol.Batch(items=[protocol.CheckpointItem.of(NewCheckpoint(claim, data))])
        (await self._post("/v1/work/checkpoint", CheckpointResults, body)).check()

    async def spawn(
        self, claim: ClaimRef, key: str, tasks: Sequence[NewTask], *, wait: bool, spent: Spent
    ) -> Spawned:
        new = NewSpawn(claim, tasks, key, wait, spent)
        item = {
            "id": claim.id,
            "claim_token": claim.token,
            "key": new.key,
            "tasks": requests.children(new.tasks),
            "wait": new.wait,
            "cost_usd": spent.cost_usd,
            "tokens_used": {"input": spent.tokens_input, "output": spent.tokens_output},
        }
        return (await self._post("/v1/work/spawn", SpawnResults, {"items": [item]})).spawned

    # Running agents.

    def heartbeats(self) -> HeartbeatTransport:
        return HttpHeartbeats(self._pool, self._on_silence)

    def _on_silence(self) -> None:
        """A heartbeat had no answer: other open connections may be dead too."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._reconnect)

    def _reconnect(self) -> None:
        self._pool.reconnect()
        for waiter in list(self._waiters):
            waiter.hang_up()

    def waiter(self, agent_id: str, own: InstanceInfo) -> AbstractAsyncContextManager[WorkWaiter]:
        waiter = HttpWaiter(self._pool, Presence(agent_id, own.incarnation), lambda: self._answer_sec)
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
        return (await self._post("/v1/work/maintain", protocol.Maintained, {})).next_sec

    async def retry_within(self, types: Sequence[str], within_sec: float) -> DueRetries:
        found = await self._get(
            "/v1/work/retries", protocol.RetryDue, type=list(types), within_sec=within_sec
        )
        return DueRetries(found.count, found.due_sec)

    async def left_behind(self, types: Sequence[str]) -> LeftBehind:
        return await self._get("/v1/work/left-behind", LeftBehind, type=list(types))


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


def _in_query(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


@contextmanager
def _of_store() -> Iterator[None]:
    """A server that answers, but can't transfer bytes now: its store is away."""
    try:
        yield
    except UnavailableError as error:
        raise StoreUnavailableError(str(error)) from None


def _based_on(version: int | None, source: SourceFields) -> dict[str, Any]:
    return definition_of(source) | ({} if version is None else {"version": version})


def _part(name: str) -> str:
    """As one segment of a path."""
    return quote(name, safe="")
