"""Large data: stored as an artifact before it is sent, and read back where it is used.

An attempt whose work is done doesn't fail because the store is away for a moment: the agent repeats the call
for a bounded time. It waits for the database and for servers as it does with every other write.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from lineshaft.artifacts.store import StoreUnavailableError, WrongStoreError
from lineshaft.client.backend import Backend
from lineshaft.errors import LineshaftError, UnavailableError
from lineshaft.model.parts import NoSuchPartError, Part
from lineshaft.operations import artifacts
from lineshaft.types import Artifact, Task
from lineshaft.types.artifacts import artifact_id
from lineshaft.types.assignments import Assignment, part_in
from lineshaft.types.data_refs import MAX_INLINE_BYTES, DataRef, data_ref_in
from lineshaft.types.request import ById
from lineshaft.types.work import ClaimedTask, decoded_inputs

T = TypeVar("T")

#: How long an attempt waits for a store that is away, before it fails.
PATIENCE_SEC = 60.0
_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.1, 5.0
_PIECE = 1 << 20
_steps = msgspec.json.Decoder(dict[str, Raw]).decode
_children = msgspec.json.Decoder(dict[str, dict[str, Raw]]).decode


async def patiently(call: Callable[[], Awaitable[T]], given_up: Callable[[], bool]) -> T:
    """Repeat a call while the store is away, for a minute; while the database is, until `given_up`."""
    clock = asyncio.get_running_loop().time
    pause, until = _FIRST_PAUSE_SEC, clock() + PATIENCE_SEC
    while True:
        try:
            return await call()
        except WrongStoreError:
            raise
        except StoreUnavailableError as error:
            if given_up() or clock() + pause > until:
                text = f"{error} The attempt waited for it for {PATIENCE_SEC:g} s."
                raise StoreUnavailableError(text) from None
        except UnavailableError:
            if given_up():
                raise
            until = clock() + PATIENCE_SEC
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SEC)


async def stored(
    backend: Backend, task_id: str, name: str, json: bytes, given_up: Callable[[], bool]
) -> bytes:
    """The JSON itself, or a reference to it if it is large. Waits patiently until `given_up`."""
    if len(json) <= MAX_INLINE_BYTES:
        return json
    made = await patiently(
        lambda: backend.put_artifact(
            _pieces(json), name=name, content_type="application/json", task_id=task_id, size=len(json)
        ),
        given_up,
    )
    return DataRef(data_ref=made.ref, size=made.size).json


async def loaded(backend: Backend, json: bytes) -> bytes:
    """What a reference stands for; any other JSON as it is."""
    ref = data_ref_in(json)
    if ref is None:
        return json
    artifact = await metadata(backend, ref.data_ref)
    chunks = [chunk async for chunk in backend.read_artifact(artifact, 0, artifact.size)]
    data = b"".join(chunks)
    try:
        msgspec.json.decode(data, type=Raw)
    except msgspec.MsgspecError as error:
        raise LineshaftError(f"{ref.data_ref} stands for data, but is not JSON: {error}.") from None
    return data


async def value(backend: Backend, json: Raw) -> Any:
    """The value of JSON, or of what that refers to."""
    return msgspec.json.decode(await loaded(backend, bytes(json)))


async def metadata(backend: Backend, ref: str) -> Artifact:
    """An artifact by its reference or id."""
    return await backend.call(artifacts.read_artifact, ById(id=artifact_id(ref)))


async def with_data(backend: Backend, task: Task) -> Task:
    """The task with its output's data, wherever that is stored."""
    output = task.output
    if output.data_ref is None:
        return task
    data = await loaded(backend, DataRef(data_ref=output.data_ref, size=output.size).json)
    return replace(task, output=replace(output, data_json=Raw(data)))


def has_large_data(assignment: Assignment[ClaimedTask]) -> bool:
    parts = (assignment.steps_json, assignment.checkpoint_json, assignment.children_json)
    return any(b'"data_ref"' in bytes(part) for part in (*parts, *assignment.inputs_json.values()))


async def with_large_data(
    backend: Backend, assignment: Assignment[ClaimedTask], given_up: Callable[[], bool]
) -> Assignment[ClaimedTask]:
    """The assignment with all data that it refers to. Waits patiently until `given_up`."""

    async def load(json: Raw) -> Raw:
        return Raw(await patiently(lambda: loaded(backend, bytes(json)), given_up))

    inputs = {name: await load(json) for name, json in assignment.inputs_json.items()}
    for name, of in decoded_inputs(assignment.task.inputs).items():
        # The part of an output that is in the store.
        if isinstance(of, Part) and name in inputs and data_ref_in(bytes(assignment.inputs_json[name])):
            try:
                inputs[name] = Raw(part_in(bytes(inputs[name]), of.path))
            except NoSuchPartError:
                del inputs[name]
    children = _children(assignment.children_json)
    for child in children.values():
        if "output" in child:
            child["output"] = await load(child["output"])
    return replace(
        assignment,
        inputs_json=inputs,
        checkpoint_json=await load(assignment.checkpoint_json),
        steps_json=Raw(
            msgspec.json.encode(
                {name: await load(json) for name, json in _steps(assignment.steps_json).items()}
            )
        ),
        children_json=Raw(msgspec.json.encode(children)),
    )


async def _pieces(json: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(json), _PIECE):
        yield json[start : start + _PIECE]
