"""Sources: what creates work when something happens."""

from typing import Any

from msgspec import UNSET

from lineshaft.engine.sources.firing import Occasion
from lineshaft.errors import InvalidInputError
from lineshaft.server.framework.auth import Principal
from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.routes import requests
from lineshaft.server.service import Call, Service
from lineshaft.sources.definition import agent_of
from lineshaft.types import Page, Scope
from lineshaft.types.sources import (
    Fired,
    Firing,
    NewSource,
    Source,
    SourceChanges,
    SourceFields,
    Verification,
    definition_of,
)

routes = Routes()

_EXAMPLE = {
    "kind": "schedule",
    "cron": "0 9 * * MON",
    "timezone": "Europe/Berlin",
    "template": {"task": {"type": "report", "title": "Week of ${event.tick}"}},
}


@routes.get("/v1/sources", Scope.READ, Page[Source])
async def list_sources(call: Call, query: requests.SourceQuery) -> Answer:
    """List sources by name, with when each fires next and what became of the last event."""
    page = await call.service.engine.sources.find(kind=query.kind, limit=query.limit, cursor=query.cursor)
    return Answer(page)


@routes.post(
    "/v1/sources",
    Scope.OPERATE,
    {201: Source},
    codes=("already_exists",),
    example={"name": "weekly", **_EXAMPLE},
)
async def create_source(call: Call, body: NewSource) -> Answer:
    """Create a source.

    A schedule has `cron` or `every_sec`, a webhook `verify`. Strings of the template may contain
    `${EXPRESSION}`, in JMESPath, over `event`, `source` and `now`.
    """
    check_verification(call.service, call.principal, body.verify)
    return Answer(await call.service.engine.sources.create(body), 201)


@routes.post(
    "/v1/sources/apply",
    Scope.OPERATE,
    SourceChanges,
    example={"origin": "file:sources.yaml", "sources": [{"name": "weekly", **_EXAMPLE}], "dry_run": True},
)
async def apply_sources(call: Call, body: requests.ApplySources) -> Answer:
    """Make the sources of an origin these, all or nothing, and return what changes.

    Sources of other origins stay. A definition that was applied before changes nothing, and a pause by hand
    survives. `dry_run` only returns the differences.
    """
    for source in body.sources:
        check_verification(call.service, call.principal, source.verify)
    changes = await call.service.engine.sources.apply(body.sources, origin=body.origin, dry_run=body.dry_run)
    return Answer(SourceChanges(changes))


# Before the paths that end with the name, which may contain slashes.
@routes.get("/v1/sources/{name:path}/firings", Scope.READ, Page[Firing], codes=("not_found",))
async def list_source_firings(call: Call, query: requests.Page) -> Answer:
    """List what became of each tick, delivery or event of a source, newest first."""
    sources = call.service.engine.sources
    return Answer(await sources.firings(call.path["name"], limit=query.limit, cursor=query.cursor))


@routes.post(
    "/v1/sources/{name:path}/fire",
    Scope.OPERATE,
    Fired,
    codes=("not_found",),
    example={"event": {"action": "opened"}, "dry_run": True},
)
async def fire_source(call: Call, body: requests.FireSource) -> Answer:
    """Fire a source now, with this event.

    With `dry_run` it returns the tasks that would be created, and creates nothing.
    """
    firings, name = call.service.engine.firings, call.path["name"]
    event = None if body.event is UNSET else body.event
    if body.dry_run:
        return Answer(await firings.preview(name, event))
    occasion = None if event is None else Occasion(event)
    return Answer(await firings.fire(name, occasion, by_hand=True))


@routes.get("/v1/sources/{name:path}", Scope.READ, Source, codes=("not_found",))
async def get_source(call: Call) -> Answer:
    """Read a source."""
    return Answer(await call.service.engine.sources.get(call.path["name"]))


@routes.put(
    "/v1/sources/{name:path}",
    Scope.AGENT,
    {200: Source, 201: Source},
    codes=("not_found", "invalid_transition"),
    example=_EXAMPLE,
)
async def put_source(call: Call, body: requests.PutSource) -> Answer:
    """Create or replace a source.

    Needs the scope `operate`, except for a schedule named `agent:ID/NAME`, which the agent itself may declare
    with the scope `agent`. Without `enabled`, an existing source stays paused or not. With `version`, only
    that version is replaced: `invalid_transition` if the source has changed since, and nothing is created.
    """
    name = call.path["name"]
    if body.name not in {UNSET, name}:
        raise InvalidInputError(errors=[("name", f"is {body.name!r}, but the path has {name!r}")])
    agent = agent_of(name)
    if agent is None:
        call.principal.check(Scope.OPERATE)
    elif not call.principal.may(Scope.OPERATE):
        call.principal.check_agent(agent)
    check_verification(call.service, call.principal, body.verify)
    given: dict[str, Any] = {field: getattr(body, field) for field in SourceFields.__struct_fields__}
    source, made = await call.service.engine.sources.put(
        NewSource(name=name, kind=body.kind, **given),
        version=body.version,
        origin="api" if agent is None else "agent",
    )
    return Answer(source, 201 if made else 200)


@routes.patch(
    "/v1/sources/{name:path}",
    Scope.OPERATE,
    Source,
    codes=("not_found", "invalid_transition"),
    example={"enabled": False},
)
async def change_source(call: Call, body: requests.ChangeSource) -> Answer:
    """Change fields of a source. `enabled` false pauses it until it is enabled by hand.

    With `version`, it is `invalid_transition` if the source has changed since.
    """
    if not definition_of(body):
        raise InvalidInputError(errors=[("", "nothing to change: give a field of the source")])
    check_verification(call.service, call.principal, body.verify)
    name = call.path["name"]
    return Answer(await call.service.engine.sources.patch(name, body, version=body.version))


@routes.delete("/v1/sources/{name:path}", Scope.OPERATE, codes=("not_found",))
async def delete_source(call: Call) -> Answer:
    """Delete a source and its history. Work that it has created stays."""
    await call.service.engine.sources.delete(call.path["name"])
    return Answer(status=204)


def check_verification(service: Service, principal: Principal, verify: Any) -> None:
    """A webhook without a signature lets anybody create work, so only an administrator may open one."""
    if isinstance(verify, Verification) and verify.scheme == "none" and service.needs_tokens:
        principal.check(Scope.ADMIN)
