"""Sources: what creates work when something happens."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from lineshaft.engine.caller import caller
from lineshaft.errors import InvalidInputError
from lineshaft.operations.operation import Engine, operation
from lineshaft.operations.wire import Body
from lineshaft.types import (
    Fired,
    Firing,
    NewSource,
    Page,
    Scope,
    Source,
    SourceFields,
    SourceKind,
    Verification,
)
from lineshaft.types.request import OnePage, Request
from lineshaft.types.sources import SourceChanges, definition_of

_EXAMPLE = {
    "kind": "schedule",
    "cron": "0 9 * * MON",
    "timezone": "Europe/Berlin",
    "template": {"task": {"type": "report", "title": "Week of ${event.tick}"}},
}


class ByName(Request, frozen=True, kw_only=True):
    name: str


class ListSources(OnePage, frozen=True, kw_only=True):
    kind: str | None = None


@operation("GET /v1/sources", Scope.READ)
async def list_sources(engine: Engine, request: ListSources) -> Page[Source]:
    """List sources by name, with when each fires next and what became of the last event."""
    return await engine.sources.find(kind=request.kind, limit=request.limit, cursor=request.cursor)


@operation(
    "POST /v1/sources",
    Scope.OPERATE,
    created=True,
    codes=("already_exists",),
    example={"name": "weekly", **_EXAMPLE},
)
async def create_source(engine: Engine, request: NewSource) -> Source:
    """Create a source.

    A schedule has `cron` or `every_sec`, a webhook `verify`. Strings of the template may contain
    `${EXPRESSION}`, in JMESPath, over `event`, `source` and `now`.
    """
    check_verification(request.verify)
    return await engine.sources.create(request)


class ApplySources(Request, frozen=True, kw_only=True):
    #: Marks these sources: only those of the same origin are removed.
    origin: Annotated[str, Meta(pattern="^file:[A-Za-z0-9._-]{1,100}$")]
    sources: Annotated[list[NewSource], Meta(max_length=10_000)]
    dry_run: bool = False


@operation(
    "POST /v1/sources/apply",
    Scope.OPERATE,
    repeatable=True,
    example={"origin": "file:sources.yaml", "sources": [{"name": "weekly", **_EXAMPLE}], "dry_run": True},
)
async def apply_sources(engine: Engine, request: ApplySources) -> SourceChanges:
    """Make the sources of an origin these, all or nothing, and return what changes.

    Sources of other origins stay. A definition that was applied before changes nothing, and a pause by hand
    survives. `dry_run` only returns the differences.
    """
    for source in request.sources:
        check_verification(source.verify)
    changes = await engine.sources.apply(request.sources, origin=request.origin, dry_run=request.dry_run)
    return SourceChanges(changes)


class ListFirings(OnePage, frozen=True, kw_only=True):
    name: str


# Before the paths that end with the name, which may contain slashes.
@operation("GET /v1/sources/{name:path}/firings", Scope.READ, codes=("not_found",))
async def list_source_firings(engine: Engine, request: ListFirings) -> Page[Firing]:
    """List what became of each tick, delivery or event of a source, newest first."""
    return await engine.sources.firings(request.name, limit=request.limit, cursor=request.cursor)


class FireSource(ByName, frozen=True, kw_only=True):
    event: dict[str, Any] | UnsetType = UNSET
    dry_run: bool = False


@operation(
    "POST /v1/sources/{name:path}/fire",
    Scope.OPERATE,
    codes=("not_found",),
    example={"event": {"action": "opened"}, "dry_run": True},
)
async def fire_source(engine: Engine, request: FireSource) -> Fired:
    """Fire a source now, with this event.

    With `dry_run` it returns the tasks that would be created, and creates nothing.
    """
    from lineshaft.engine.sources.firing import Occasion  # noqa: PLC0415 - imports psycopg

    event = None if request.event is UNSET else request.event
    if request.dry_run:
        return await engine.firings.preview(request.name, event)
    return await engine.firings.fire(request.name, None if event is None else Occasion(event), by_hand=True)


@operation("GET /v1/sources/{name:path}", Scope.READ, codes=("not_found",))
async def get_source(engine: Engine, request: ByName) -> Source:
    """Read a source."""
    return await engine.sources.get(request.name)


class ChangeSource(SourceFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: The version that the change is based on: it is refused if the source has changed since.
    version: int | None = None


class PutSource(ChangeSource, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: SourceKind
    #: As in the path.
    name: str | UnsetType = UNSET


class ReplaceSource(ByName, frozen=True, kw_only=True):
    source: Body[PutSource]


@operation(
    "PUT /v1/sources/{name:path}",
    Scope.AGENT,
    by_hand=True,
    response={200: Source, 201: Source},
    # What took effect has a new version: the same call again would be refused.
    repeatable=lambda request: request.source.version is None,
    codes=("not_found", "invalid_transition"),
    example=_EXAMPLE,
)
async def put_source(engine: Engine, request: ReplaceSource) -> Source:
    """Create or replace a source.

    Needs the scope `operate`, except for a schedule named `agent:ID/NAME`, which the agent itself may declare
    with the scope `agent`. Without `enabled`, an existing source stays paused or not. With `version`, only
    that version is replaced: `invalid_transition` if the source has changed since, and nothing is created.
    """
    return (await put(engine, request))[0]


async def put(engine: Engine, request: ReplaceSource) -> tuple[Source, bool]:
    """The source, and whether it is new."""
    from lineshaft.sources.definition import agent_of  # noqa: PLC0415 - imports jmespath and cronsim

    name, source, who = request.name, request.source, caller()
    if source.name not in {UNSET, name}:
        raise InvalidInputError(errors=[("name", f"is {source.name!r}, but the path has {name!r}")])
    agent = agent_of(name)
    if agent is None:
        who.check(Scope.OPERATE)
    elif not who.may(Scope.OPERATE):
        who.check_agent(agent)
    check_verification(source.verify)
    return await engine.sources.put(
        NewSource(name=name, kind=source.kind, **fields_of(source)),
        version=source.version,
        origin="api" if agent is None else "agent",
    )


class PatchSource(ByName, frozen=True, kw_only=True):
    change: Body[ChangeSource]


@operation(
    "PATCH /v1/sources/{name:path}",
    Scope.OPERATE,
    repeatable=lambda request: request.change.version is None,
    codes=("not_found", "invalid_transition"),
    example={"enabled": False},
)
async def change_source(engine: Engine, request: PatchSource) -> Source:
    """Change fields of a source. `enabled` false pauses it until it is enabled by hand.

    With `version`, it is `invalid_transition` if the source has changed since.
    """
    if not definition_of(request.change):
        raise InvalidInputError(errors=[("", "nothing to change: give a field of the source")])
    check_verification(request.change.verify)
    return await engine.sources.patch(request.name, request.change, version=request.change.version)


@operation("DELETE /v1/sources/{name:path}", Scope.OPERATE, codes=("not_found",))
async def delete_source(engine: Engine, request: ByName) -> None:
    """Delete a source and its history. Work that it has created stays."""
    await engine.sources.delete(request.name)


def fields_of(source: SourceFields) -> dict[str, Any]:
    """The fields that can be changed."""
    return {name: getattr(source, name) for name in SourceFields.__struct_fields__}


def check_verification(verify: Any) -> None:
    """A webhook without a signature lets anybody create work, so only an administrator may open one."""
    if isinstance(verify, Verification) and verify.scheme == "none" and caller().needs_token:
        caller().check(Scope.ADMIN)
