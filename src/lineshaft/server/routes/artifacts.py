"""The bytes of artifacts, streamed both ways."""

from collections.abc import AsyncIterator
from datetime import timedelta
from urllib.parse import unquote

from starlette.responses import Response

from lineshaft.model.file_names import safe_file_name
from lineshaft.operations.artifacts import check_holder
from lineshaft.operations.operation import operation
from lineshaft.server.framework.downloads import (
    SAFE_HEADERS,
    Download,
    RangeNotSatisfiable,
    attachment,
    wanted_range,
)
from lineshaft.server.framework.routing import body_chunks
from lineshaft.server.service import Call
from lineshaft.types import Artifact, Scope
from lineshaft.types.request import ById, Request

PATH = "/v1/artifacts"
#: How long a URL works that needs no token.
_LINK_LIFETIME = timedelta(minutes=5)
_BYTES = "application/octet-stream"


class PutArtifact(Request, frozen=True, kw_only=True):
    #: The task that made it.
    task_id: str | None = None


@operation(f"POST {PATH}", Scope.AGENT, created=True, upload=True)
async def put_artifact(call: Call, request: PutArtifact) -> Artifact:
    """Upload a file: the raw body, with its `Content-Type` and its name in `X-Filename`.

    The name is percent-encoded. `task_id` is the task that made it: the same file of the same task again is
    the same artifact. A token that is bound to an agent may name a task that the agent holds. An artifact
    that no task refers to is deleted after some weeks.
    """
    if request.task_id is not None:
        await check_holder(call.service.engine, request.task_id)
    return await call.service.engine.artifacts.put(
        body_chunks(call.receive),
        name=_file_name(call.headers.get("x-filename", "")),
        content_type=call.headers.get("content-type"),
        task_id=request.task_id,
    )


class ReadContent(ById, frozen=True, kw_only=True):
    #: Answer with the address of the content on S3, if it is there.
    redirect: bool = False


@operation(
    f"GET {PATH}/{{id}}/content",
    Scope.READ,
    response={200: _BYTES, 206: _BYTES, 304: None, 307: None, 416: None},
    codes=("not_found",),
)
async def read_content(call: Call, request: ReadContent) -> Response:
    """Read the bytes of an artifact, or a `Range` of them. The `ETag` is their SHA-256.

    With `redirect=1`, on S3, the answer is 307 with a URL that needs no token for some minutes.
    """
    artifacts = call.service.engine.artifacts
    artifact = await artifacts.get(request.id)
    if request.redirect and (link := await artifacts.link(artifact, _LINK_LIFETIME)) is not None:
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


def _file_name(header: str) -> str:
    """Percent-encoded, or UTF-8 as it is."""
    return unquote(header.encode("latin-1", "replace").decode("utf-8", "replace"), errors="replace")


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for chunk in rest:
        yield chunk
