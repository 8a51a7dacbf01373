"""Files of a task: its artifacts, and its output and spec as downloads."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from msgspec import Struct
from starlette.responses import Response

from lineshaft.dashboard.visit import Pages, Visit
from lineshaft.model.file_names import safe_file_name
from lineshaft.model.printable import printable
from lineshaft.server.framework.downloads import SAFE_HEADERS, Download, attachment
from lineshaft.types import Artifact, Task
from lineshaft.types.artifacts import REF_PREFIX, artifact_id

pages = Pages()

_MOST_ARTIFACTS = 100
#: Bytes of a text that are shown.
_PREVIEW_BYTES = 20 << 10
#: What a browser may show. Nothing here can contain a script.
_PICTURES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_TEXT_TYPES = ("text/", "application/json", "application/x-ndjson", "application/yaml", "application/xml")


class Listed(Struct, frozen=True):
    artifact: Artifact
    #: output, input, or empty: it was made by an attempt.
    role: str

    @property
    def is_picture(self) -> bool:
        return _type_of(self.artifact) in _PICTURES

    @property
    def is_text(self) -> bool:
        return _type_of(self.artifact).startswith(_TEXT_TYPES)


def _type_of(artifact: Artifact) -> str:
    return artifact.content_type.partition(";")[0].strip().lower()


async def artifacts_of(visit: Visit, one: Task) -> list[Listed]:
    output = _references(one.output.artifacts)
    context = one.spec.get("context_refs")
    given = _references(context if isinstance(context, list) else [])
    made = await visit.engine.artifacts.page(task_id=one.id, limit=_MOST_ARTIFACTS, cursor=None)
    known = {artifact.id: artifact for artifact in made.items}
    others = [name for name in (*output, *given) if name not in known][:_MOST_ARTIFACTS]
    if others:
        known |= await visit.engine.artifacts.find(others)
    roles = {**dict.fromkeys(given, "input"), **dict.fromkeys(output, "output")}
    return [
        Listed(artifact, roles.get(artifact.id, ""))
        for artifact in sorted(known.values(), key=lambda each: (each.id not in output, each.created_at))
    ]


def _references(values: Sequence[Any]) -> list[str]:
    """Ids of artifacts among what outputs and specs refer to."""
    texts = [value.get("ref") if isinstance(value, dict) else value for value in values]
    return [artifact_id(text) for text in texts if isinstance(text, str) and text.startswith(REF_PREFIX)]


@pages.page("/tasks/{id}/artifacts/{artifact}")
async def artifact_content(visit: Visit) -> Response:
    """Pictures are shown; the first part of a text with `preview`; everything else is a download."""
    artifacts = visit.engine.artifacts
    artifact = await artifacts.get(visit.path["artifact"])
    kind = _type_of(artifact)
    if visit.query.get("preview"):
        part = b"".join([chunk async for chunk in artifacts.read(artifact, 0, _PREVIEW_BYTES)])
        text = printable(part.decode(errors="replace"))
        more = f"\n… ({artifact.size:,} bytes)" if artifact.size > _PREVIEW_BYTES else ""
        headers = {**SAFE_HEADERS, "Content-Type": "text/plain; charset=utf-8"}
        return Response((text + more).encode(), headers=headers)
    headers = dict(SAFE_HEADERS)
    if kind in _PICTURES and not visit.query.get("download"):
        headers |= {"Content-Type": kind, "Content-Disposition": "inline"}
    else:
        headers |= {
            "Content-Type": "application/octet-stream",
            "Content-Disposition": attachment(safe_file_name(artifact.name)),
        }
    return await _streamed(visit, artifact, headers)


async def _streamed(visit: Visit, artifact: Artifact, headers: dict[str, str]) -> Response:
    chunks = visit.engine.artifacts.read(artifact)
    # A store that is away is an error of its own, as long as nothing was sent.
    first = await anext(chunks, b"")

    async def all_chunks() -> AsyncIterator[bytes]:
        if first:
            yield first
        async for chunk in chunks:
            yield chunk

    return Download(all_chunks(), 200, {**headers, "Content-Length": str(artifact.size)})


@pages.page("/tasks/{id}/output.json")
async def output_json(visit: Visit) -> Response:
    one = await visit.engine.read.task(visit.path["id"])
    headers = _json_headers(one, "output")
    if one.output.data_ref is None:
        return Response(bytes(one.output.data_json), headers=headers)
    artifact = await visit.engine.artifacts.get(one.output.data_ref)
    return await _streamed(visit, artifact, headers)


@pages.page("/tasks/{id}/spec.json")
async def spec_json(visit: Visit) -> Response:
    one = await visit.engine.read.task(visit.path["id"])
    return Response(bytes(one.spec_json), headers=_json_headers(one, "spec"))


def _json_headers(one: Task, what: str) -> dict[str, str]:
    return {
        **SAFE_HEADERS,
        "Content-Type": "application/json",
        "Content-Disposition": attachment(safe_file_name(f"{one.id}-{what}.json")),
    }
