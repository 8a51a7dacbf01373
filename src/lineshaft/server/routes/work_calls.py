"""The calls of the worker protocol, in batches. A per-task route calls these with one item.

Each returns one result per item, in order: the response, or the error of an item that was refused. An invalid
item doesn't affect the others.
"""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from lineshaft.artifacts.store import StoreUnavailableError
from lineshaft.clock import lease_time
from lineshaft.errors import (
    ForbiddenError,
    InvalidInputError,
    LineshaftError,
    NotFoundError,
    PayloadTooLargeError,
    UnavailableError,
)
from lineshaft.model.states import Status
from lineshaft.model.storable import check_storable
from lineshaft.operations import new_tasks
from lineshaft.server.framework import problems
from lineshaft.server.long_poll import check_in_time
from lineshaft.server.routes.held_claims import Verify, verifier
from lineshaft.server.service import Call, Service
from lineshaft.types import Scope, Task, documents, protocol
from lineshaft.types import work as w
from lineshaft.types.assignments import Assignment, assignments
from lineshaft.types.data_refs import MAX_INLINE_BYTES, DataRef
from lineshaft.types.protocol import BatchView
from lineshaft.types.waits import Suspended

_log = logging.getLogger("lineshaft.server")

T = TypeVar("T")
V = TypeVar("V")
B = TypeVar("B", bound=Struct)

Items = Sequence[T | LineshaftError]
Results = list[Any]

#: An assignment with the full task object in place of the short one.
_full: Callable[..., Assignment[Task]] = msgspec.structs.replace
#: A claim that has waited longer for tasks must still be allowed when it gets some.
ALLOWED_FOR_SEC = 1.0


R = TypeVar("R", bound=w.Moved | w.RecordedStep | w.SpawnResult | Suspended)


# Batches.


@cache
def _decoder(kind: type[Any]) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(kind)


def decoded(items: Sequence[Raw], kind: type[B]) -> list[B | LineshaftError]:
    return [_decoded(item, kind) for item in items]


def _decoded(item: Raw, kind: type[B]) -> B | LineshaftError:
    try:
        simplify = None
        if kind is protocol.SpawnItem:
            new_tasks.check_dag_count(bytes(item))
            simplify = documents.with_tasks
        decoded: B = documents.decode(item, _decoder(kind), simplify)
    except msgspec.MsgspecError as error:
        return problems.unreadable(error)
    except LineshaftError as error:
        return error
    return decoded


def answer(results: Results, call: Call) -> dict[str, Any]:
    """The response of a batch."""
    return {
        "items": [
            protocol.ItemProblem(problems.problem(result, call.request_id))
            if isinstance(result, LineshaftError)
            else result
            for result in results
        ]
    }


def only(results: Results) -> Any:
    """The response of a single call."""
    (result,) = results
    if isinstance(result, LineshaftError):
        raise result
    return result


async def _in_order(
    items: Items[T], convert: Callable[[T], V], send: Callable[[list[V]], Awaitable[Sequence[R]]]
) -> list[R | LineshaftError]:
    """Send the valid items in one call, and put its results back into their order."""
    results: list[Any] = []
    valid: list[V] = []
    for item in items:
        try:
            if isinstance(item, LineshaftError):
                raise item
            valid.append(convert(item))
            results.append(None)
        except LineshaftError as error:
            results.append(error)
    sent = iter(await send(valid) if valid else ())
    return [_unwrapped(next(sent)) if result is None else result for result in results]


def _unwrapped(result: R) -> R | LineshaftError:
    return result if result.error is None else result.error


def _outcome(result: w.Moved | LineshaftError) -> protocol.Outcome | LineshaftError:
    if isinstance(result, LineshaftError):
        return result
    return protocol.Outcome(
        id=result.id,
        status=result.status or msgspec.UNSET,
        retry_in_sec=result.retry_in_sec,
        failure_reason=result.failure_reason,
    )


async def _shown(service: Service, moved: Sequence[w.Moved | LineshaftError], view: BatchView) -> Results:
    """The tasks as they are now."""
    if view is BatchView.WORK:
        return [_outcome(result) for result in moved]
    tasks = await _tasks(service, [result.id for result in moved if not isinstance(result, LineshaftError)])
    return [_task_or_error(result, tasks) for result in moved]


def _task_or_error(result: w.Moved | LineshaftError, tasks: Mapping[str, Task]) -> Task | LineshaftError:
    return result if isinstance(result, LineshaftError) else tasks.get(result.id) or _deleted(result.id)


async def _tasks(service: Service, ids: Iterable[str]) -> dict[str, Task]:
    wanted = sorted(set(ids))
    return {task.id: task for task in await service.engine.read.tasks_by_id(wanted)} if wanted else {}


def _deleted(task_id: str) -> LineshaftError:
    return NotFoundError(f"Task {task_id!r} was deleted while this request ran.")


# Claims.


async def claim(
    call: Call, items: Items[protocol.ClaimItem], *, wait_sec: float, view: BatchView, poll: str | None = None
) -> Results:
    service = call.service
    items = [_own(call, item) for item in items]
    valid = [item for item in items if not isinstance(item, LineshaftError)]
    if len(valid) < len(items):
        # The caller should learn about the invalid ones at once.
        wait_sec = 0.0
    asked_at = time.monotonic()
    async with service.long_polls.claimed(valid, call.receive, wait_sec=wait_sec, name=poll) as claims:
        some = any(each.claim.tasks for each in claims)
        if some and time.monotonic() - asked_at >= ALLOWED_FOR_SEC:
            # Its token may have been revoked since, or the first one created: the tasks are released.
            await service.authenticate(Scope.AGENT, call.scope)
        assigned = await _assigned(service, [each.claim for each in claims], view)
        results = iter(
            each.error
            or protocol.ClaimResult(
                tasks=tasks,
                waited_sec=each.waited_sec if tasks else msgspec.UNSET,
                slowdown_until=each.slowdown_until or msgspec.UNSET,
            )
            for each, tasks in zip(claims, assigned, strict=True)
        )
        return [item if isinstance(item, LineshaftError) else next(results) for item in items]


def _own(call: Call, item: protocol.ClaimItem | LineshaftError) -> protocol.ClaimItem | LineshaftError:
    """The item, or an error if the caller's token is bound to another agent."""
    try:
        if not isinstance(item, LineshaftError):
            call.caller.check_agent(item.agent_id)
    except ForbiddenError as error:
        return error
    return item


async def _assigned(service: Service, claims: Sequence[w.Claim], view: BatchView) -> list[list[Any]]:
    tokens = await service.engine.claim_key.tokens()
    assigned = [assignments(claim, tokens.issue) for claim in claims]
    if view is BatchView.WORK:
        return list(assigned)
    tasks = await _tasks(service, (task.id for claim in claims for task in claim.tasks))
    return [_with_tasks(some, tasks) for some in assigned]


def _with_tasks(
    assigned: Iterable[Assignment[w.ClaimedTask]], tasks: Mapping[str, Task]
) -> list[Assignment[Task]]:
    return [_full(each, task=tasks[each.task.id]) for each in assigned if each.task.id in tasks]


async def assigned_task(service: Service, claim: w.Claim) -> Assignment[Task]:
    ((assignment,),) = await _assigned(service, [claim], BatchView.FULL)
    full: Assignment[Task] = assignment
    return full


# Heartbeats.


async def heartbeat(call: Call, items: Items[protocol.HeartbeatItem]) -> Results:
    results: Results = list(items)
    left = [number for number, item in enumerate(items) if not isinstance(item, LineshaftError)]
    while left:
        # An instance that is named twice gets a call of its own: answers are by instance.
        batch: dict[w.Presence, int] = {}
        for number in left:
            batch.setdefault(_presence(results[number]), number)
        left = [number for number in left if number not in set(batch.values())]
        for number, result in (await _heartbeat(call, {n: results[n] for n in batch.values()})).items():
            results[number] = result
    return results


def _presence(item: protocol.HeartbeatItem) -> w.Presence:
    return w.Presence(item.agent_id, item.incarnation)


async def _heartbeat(call: Call, items: dict[int, protocol.HeartbeatItem]) -> dict[int, Any]:
    held: dict[int, list[w.HeldTask]] = {}
    results: dict[int, Any] = {}
    tokens = await call.service.engine.claim_key.tokens()
    for number, item in items.items():
        try:
            check_storable(agent_id=item.agent_id)
            call.caller.check_agent(item.agent_id)
            # A task with an invalid token is lost, as one that was lost since.
            held[number] = [
                task.held(tokens.find(task.id, task.claim_token), _presence(item)) for task in item.tasks
            ]
        except LineshaftError as error:
            results[number] = error
    present = [_presence(items[number]) for number in held]
    tasks = [task for some in held.values() for task in some]
    answers = await call.service.engine.work.heartbeat(present, tasks) if held else w.HeartbeatAnswers({})
    for number, own in held.items():
        try:
            results[number] = await _heartbeat_result(call.service, items[number], own, answers)
        except UnavailableError:
            raise
        except LineshaftError as error:
            results[number] = error
    return results


async def _heartbeat_result(
    service: Service, item: protocol.HeartbeatItem, held: Sequence[w.HeldTask], answers: w.HeartbeatAnswers
) -> protocol.HeartbeatResult:
    agent = _presence(item)
    status = answers.agents.get(agent)
    if status is None:
        # Raises if it is unknown or superseded.
        status = (await service.engine.fleet.present(item.agent_id, item.incarnation)).status
    ended = {(over.id, over.epoch): over for over in answers.over}
    own = {task.id: ended.get((task.id, task.epoch)) for task in held}
    reasons = {
        name: over.reason for name, over in own.items() if over is not None and over.reason is not None
    }
    return protocol.HeartbeatResult(
        tasks={name: "continue" if over is None else over.answer for name, over in own.items()},
        reasons=reasons or msgspec.UNSET,
        spent_later=answers.spent_later or msgspec.UNSET,
        not_renewed=[task.id for task in held if (task.id, task.epoch) in answers.not_renewed]
        or msgspec.UNSET,
        status=status,
        max_concurrent_tasks=answers.slots.get(agent, msgspec.UNSET),
        slowdown_until=answers.slowdowns.get(agent, msgspec.UNSET),
    )


# Outcomes.


async def start(call: Call, items: Items[protocol.StartItem], view: BatchView) -> Results:
    moved = await _in_order(items, await verifier(call, items), call.service.engine.work.start)
    return await _shown(call.service, moved, view)


async def complete(call: Call, items: Items[protocol.CompleteItem], view: BatchView) -> Results:
    claim_of = await verifier(call, items)
    work = call.service.engine.work
    claims: dict[str, w.Claim] = {}
    taken: list[w.ClaimedTask] = []
    asked_at = lease_time()

    async def send(converted: Sequence[tuple[w.Completion, protocol.Next | None]]) -> list[w.Moved]:
        completions = [
            (await _with_stored_output(call.service, item), following) for item, following in converted
        ]
        together = [item for item, following in completions if following is None]
        moved = iter(await work.complete(together) if together else ())
        results = []
        for item, following in completions:
            if following is None:
                results.append(next(moved))
            else:
                result, claim = await work.complete_and_claim(item, types=following.types)
                claims[item.claim.id] = claim
                taken.extend(claim.tasks)
                results.append(result)
        return results

    def convert(item: protocol.CompleteItem) -> tuple[w.Completion, protocol.Next | None]:
        following = protocol.Next() if item.next is True else item.next or None
        for name in (following and following.types) or ():
            check_storable(types=name)
        return item.completion(claim_of(item)), following

    with call.service.engine.undelivered.release_if_undelivered(taken):
        moved = await _in_order(items, convert, send)
        _expect_retries(call.service, moved)
        if not claims:
            return await _shown(call.service, moved, view)
        shown = await _shown_with_next(call.service, moved, claims, view)
        # The outputs are recorded: a repeated call returns the same.
        check_in_time(taken, asked_at)
        return shown


async def _with_stored_output(service: Service, item: w.Completion) -> w.Completion:
    """The completion with a reference to its output, if that is large; Python agents send one themselves."""
    output = item.output
    if output is None or len(output) <= MAX_INLINE_BYTES:
        return item

    async def chunks() -> AsyncIterator[bytes]:
        yield output

    try:
        artifact = await service.engine.artifacts.put(
            chunks(), name="output.json", content_type="application/json", task_id=item.claim.id
        )
    except (StoreUnavailableError, InvalidInputError, PayloadTooLargeError) as error:
        # The work is done: it isn't refused because of where its output is stored.
        _log.warning("The output of %s stays in the database: %s", item.claim.id, error)
        return item
    return replace(item, output=DataRef(data_ref=artifact.ref, size=artifact.size).json)


async def _shown_with_next(
    service: Service,
    moved: Sequence[w.Moved | LineshaftError],
    claims: Mapping[str, w.Claim],
    view: BatchView,
) -> Results:
    """The tasks as they are now, with the claims that followed, by the ids of the tasks before them."""
    tokens = await service.engine.claim_key.tokens()
    following: dict[str, Any] = {
        name: next(iter(assignments(claim, tokens.issue)), None) for name, claim in claims.items()
    }
    if view is BatchView.WORK:
        shown: Results = [_outcome(result) for result in moved]
    else:
        ended = [result.id for result in moved if not isinstance(result, LineshaftError)]
        tasks = await _tasks(
            service, [*ended, *(task.id for claim in claims.values() for task in claim.tasks)]
        )
        following = {
            name: None if each is None else next(iter(_with_tasks([each], tasks)), None)
            for name, each in following.items()
        }
        shown = [_task_or_error(result, tasks) for result in moved]
    return [_with_next(result, following, view) for result in shown]


def _with_next(result: Any, following: Mapping[str, Any], view: BatchView) -> Any:
    if isinstance(result, LineshaftError) or result.id not in following:
        return result
    if view is BatchView.WORK:
        return msgspec.structs.replace(result, next_claim=following[result.id])
    fields = {name: getattr(result, name) for name in result.__struct_fields__}
    return protocol.CompletedTask(**fields, next_claim=following[result.id])


async def fail(call: Call, items: Items[protocol.FailItem], view: BatchView) -> Results:
    claim_of = await verifier(call, items)
    moved = await _in_order(items, lambda item: item.failure(claim_of(item)), call.service.engine.work.fail)
    _expect_retries(call.service, moved)
    return await _shown(call.service, moved, view)


def _expect_retries(service: Service, moved: Sequence[w.Moved | LineshaftError]) -> None:
    for result in moved:
        if isinstance(result, w.Moved) and result.retry_in_sec is not None:
            service.openings.expect(result.retry_in_sec)


async def release(call: Call, items: Items[protocol.ReleaseItem], view: BatchView) -> Results:
    claim_of = await verifier(call, items)
    moved = await _in_order(
        items, lambda item: item.release(claim_of(item)), call.service.engine.work.release
    )
    return await _shown(call.service, moved, view)


async def cancel(call: Call, items: Items[protocol.CancelItem], view: BatchView) -> Results:
    claim_of = await verifier(call, items)

    async def send(item: protocol.CancelItem) -> w.Moved:
        try:
            return await _cancel(call, item, claim_of)
        except UnavailableError:
            raise
        except LineshaftError as error:
            return w.Moved(item.id, None, error)

    async def send_all(valid: list[protocol.CancelItem]) -> list[w.Moved]:
        return [await send(item) for item in valid]

    return await _shown(call.service, await _in_order(items, lambda item: item, send_all), view)


async def _cancel(call: Call, item: protocol.CancelItem, claim_of: Verify) -> w.Moved:
    engine = call.service.engine
    if item.claim_token is not None:
        (moved,) = await engine.work.cancel([item.cancellation(claim_of(item))])
        return moved
    if not call.caller.may(Scope.OPERATE):
        raise ForbiddenError(
            f"{call.caller.name!r} has the scope agent and can cancel only tasks that it holds: send the "
            "claim_token. Other tasks need the scope operate."
        )
    await engine.cancel.cancel(item.id, item.reason, cascade=item.cascade)
    return w.Moved(item.id, Status.CANCELLED)


# Progress.


async def record_steps(call: Call, items: Items[protocol.StepItem]) -> Results:
    claim_of = await verifier(call, items)
    recorded = await _in_order(
        items, lambda item: item.step(claim_of(item), item.name), call.service.engine.work.record_steps
    )
    return [
        result
        if isinstance(result, LineshaftError) or isinstance(item, LineshaftError)
        else protocol.StepResult(name=item.name, data=Raw(result.unwrap()), remaining_usd=result.budgets)
        for item, result in zip(items, recorded, strict=True)
    ]


async def save_checkpoints(call: Call, items: Items[protocol.CheckpointItem]) -> Results:
    claim_of = await verifier(call, items)
    saved = await _in_order(
        items, lambda item: item.checkpoint(claim_of(item)), call.service.engine.work.save_checkpoints
    )
    return [
        result
        if isinstance(result, LineshaftError) or isinstance(item, LineshaftError)
        else protocol.CheckpointResult(data=item.data)
        for item, result in zip(items, saved, strict=True)
    ]


async def spawn(call: Call, items: Items[protocol.SpawnItem]) -> Results:
    header = call.headers.get("idempotency-key")
    claim_of = await verifier(call, items)
    # One key serves the whole request, so its tasks are numbered across items.
    numbers = count()

    def convert(item: protocol.SpawnItem) -> w.NewSpawn:
        new_tasks.check_tasks(item.tasks, keys=True)
        new_tasks.check_creators(item.tasks)
        return item.spawn(claim_of(item), new_tasks.keyed(item.tasks, header, numbers))

    spawned = await _in_order(items, convert, call.service.engine.work.spawn)
    return [result if isinstance(result, LineshaftError) else _spawned(result.unwrap()) for result in spawned]


def _spawned(made: w.Spawned) -> protocol.SpawnedTasks:
    return protocol.SpawnedTasks(items=list(made.submitted), children=made.children, paused=made.paused)


async def suspend(call: Call, items: Items[protocol.SuspendItem]) -> Results:
    claim_of = await verifier(call, items)
    suspended = await _in_order(
        items, lambda item: item.suspension(claim_of(item)), call.service.engine.work.suspend
    )
    return [
        result if isinstance(result, LineshaftError) else protocol.SuspendResult.of(result)
        for result in suspended
    ]
