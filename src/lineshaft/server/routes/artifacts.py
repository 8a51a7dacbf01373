"""Artifacts: files that tasks read and write. Their bytes are streamed both ways."""

from collections.abc import AsyncIterator
from datetime import timedelta
from urllib.parse import unquote

from starlette.responses import Response

from lineshaft.errors import ForbiddenError
from lineshaft.model.file_names import safe_file_name
from lineshaft.server.framework.downloads import (
    SAFE_HEADERS,
    Download,
    RangeNotSatisfiable,
    attachment,
    wanted_range,
)
from lineshaft.server.framework.routing import Answer, Routes, body_chunks
from lineshaft.server.routes import requests
from lineshaft.server.service import Call
from lineshaft.types import Artifact, Page, Scope

PATH = "/v1/artifacts"
#: Of a URL that needs no token.
_LINK_LIFETIME = timedelta(minutes=5)
_BYTES = "application/octet-stream"

routes = Routes()


@routes.post(PATH, Scope.AGENT, {201: Artifact}, upload=True)
async def put_artifact(call: Call, query: requests.PutArtifact) -> Answer:
    """Upload a file: the raw body, with its `Content-Type` and its name in `X-Filename`.

    The name is percent-encoded. `task_id` is the task that made it: the same file of the same task again is
    the same artifact. A token that is bound to an agent may name a task that the agent holds. An artifact
    that no task refers to is deleted after some weeks.
    """
    if query.task_id is not None:
        await _check_holder(call, query.task_id)
    made = await call.service.engine.artifacts.put(
        body_chunks(call.receive),
        name=_file_name(call.headers.get("x-filename", "")),
        content_type=call.headers.get("content-type"),
        task_id=query.task_id,
    )
    return Answer(made, 201)


@routes.get(PATH, Scope.READ, Page[Artifact])
async def list_artifacts(call: Call, query: requests.ListArtifacts) -> Answer:
    """List artifacts, newest first; with `task_id` those that this task made."""
    page = await call.service.engine.artifacts.page(
        task_id=query.task_id, limit=query.limit, cursor=query.cursor
    )
    return Answer(page)


@routes.get(f"{PATH}/{{id}}", Scope.READ, Artifact, codes=("not_found",))
async def read_artifact(call: Call) -> Answer:
    """Read the metadata of an artifact."""
    return Answer(await call.service.engine.artifacts.get(call.path["id"]))


@routes.get(
    f"{PATH}/{{id}}/content",
    Scope.READ,
    {200: _BYTES, 206: _BYTES, 304: None, 307: None, 416: None},
    codes=("not_found",),
)
async def read_content(call: Call, query: requests.ReadContent) -> Response:
    """Read the bytes of an artifact, or a `Range` of them. The `ETag` is their SHA-256.

    With `redirect=1`, on S3, the answer is 307 with a URL that needs no token for some minutes.
    """
    artifacts = call.service.engine.artifacts
    artifact = await artifacts.get(call.path["id"])
    if query.redirect and (link := await artifacts.link(artifact, _LINK_LIFETIME)) is not None:
        return Response(status_code=307, headers={"Location": link, "Cache-Control": "no-store"})
    etag = f'"{artifact.sha256}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", **SAFE_HEADERS}
    known = call.headers.get("if-none-match", "")
    if etag in known or known.strip() == "*":
        return Response(status_code=304, headers=headers)
    try:
        part = wanted_range(call.headers, artifact.size, etag)
    except RangeNotSatisfiable:
        return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{artifact.size}"})
    start, stop = part or (0, artifact.size)
    headers |= {
        "Content-Type": artifact.content_type,
        "Content-Length": str(stop - start),
        "Content-Disposition": attachment(safe_file_name(artifact.name)),
    }
    if part is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{artifact.size}"
    chunks = artifacts.read(artifact, start, stop)
    # A store that is away is an error of its own, as long as nothing was sent.
    first = await anext(chunks, b"")
    return Download(_chain(first, chunks), 200 if part is None else 206, headers)


@routes.delete(f"{PATH}/{{id}}", Scope.AGENT, codes=("not_found", "invalid_transition"))
async def delete_artifact(call: Call) -> Answer:
    """Delete an artifact that no live task refers to.

    A token that is bound to an agent may delete artifacts of tasks that the agent holds, and of none.
    """
    artifacts = call.service.engine.artifacts
    if call.principal.agent_id is not None:
        found = await artifacts.get(call.path["id"])
        if found.task_id is not None:
            await _check_holder(call, found.task_id)
    await artifacts.delete(call.path["id"])
    return Answer(status=204)


async def _check_holder(call: Call, task_id: str) -> None:
    """Raise ForbiddenError if the caller's token is bound to an agent that doesn't hold the task."""
    own = call.principal.agent_id
    if own is None:
        return
    holder = await call.service.engine.artifacts.holder(task_id)
    if holder != own:
        raise ForbiddenError(
            f"The token {call.principal.name!r} is bound to agent {own!r}, and task {task_id!r} is held by "
            f"{'no agent' if holder is None else f'agent {holder!r}'}. Only the agent that holds a task "
            "changes its artifacts: claim it first, or upload without task_id."
        )


def _file_name(header: str) -> str:
    """Percent-encoded, or UTF-8 as it is."""
    return unquote(header.encode("latin-1", "replace").decode("utf-8", "replace"), errors="replace")


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for chunk in rest:
        yield chunk
