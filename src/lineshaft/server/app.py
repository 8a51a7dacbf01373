"""The application: all routes and the pages that describe them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from lineshaft import __version__
from lineshaft.errors import InvalidInputError, LineshaftError, NotFoundError
from lineshaft.integrations.officeplane import routes as officeplane_routes
from lineshaft.integrations.officeplane import sockets
from lineshaft.integrations.officeplane.officeplane import ERROR_FORMATS, Officeplane
from lineshaft.server.framework import docs_page, openapi, problems
from lineshaft.server.framework.middleware import AllowedHosts, BodyLimit, RequestMiddleware
from lineshaft.server.framework.routing import Operation, routes
from lineshaft.server.routes import (
    agents,
    artifacts,
    dags,
    events,
    guards,
    health,
    metrics,
    review,
    stats,
    tasks,
    tokens,
    work,
)
from lineshaft.server.service import Service

#: Routes are matched in this order: the most frequent calls first.
RESOURCES = (work, agents, tasks, dags, events, artifacts, review, guards, stats, tokens, metrics, health)
_NATIVE = [operation for resource in RESOURCES for operation in resource.routes.operations]
_OFFICEPLANE = officeplane_routes.routes.operations
OPERATIONS: Sequence[Operation] = [*_NATIVE, *_OFFICEPLANE]


def create_app(service: Service, officeplane: Officeplane | None = None) -> Starlette:
    """The application without the request middleware."""
    guest = officeplane or Officeplane(service)
    return Starlette(
        routes=[
            *routes(_NATIVE, service),
            *routes(_OFFICEPLANE, guest),
            *sockets.routes(guest),
            openapi.route(describe, service),
            docs_page.route(describe, service),
        ],
        exception_handlers={HTTPException: _refuse, LineshaftError: _render},
    )


def with_middleware(app: ASGIApp, service: Service) -> RequestMiddleware:
    """The application as it is served: every request passes the middleware."""
    settings = service.settings
    return RequestMiddleware(
        app,
        hosts=AllowedHosts(settings.host, settings.allowed_hosts),
        max_body_bytes=settings.max_body_bytes,
        error_formats=ERROR_FORMATS,
        uploads={artifacts.PATH: BodyLimit(settings.max_artifact_bytes, "LINESHAFT_MAX_ARTIFACT_BYTES")},
    )


@cache
def describe() -> dict[str, Any]:
    """The OpenAPI document."""
    return openapi.document("Lineshaft", __version__, OPERATIONS, ERROR_FORMATS)


async def _refuse(request: Request, error: Exception) -> Response:
    """A request that no route matches."""
    assert isinstance(error, HTTPException)  # noqa: S101 - it is registered for these only
    return await _render(request, _refusal(request, error))


def _refusal(request: Request, error: HTTPException) -> LineshaftError:
    if error.status_code == 404:  # noqa: PLR2004
        return NotFoundError(f"Unknown path {request.url.path}. /openapi.json lists all paths.")
    if error.status_code == 405:  # noqa: PLR2004
        return problems.MethodNotAllowedError(
            f"{request.url.path} doesn't accept {request.method}. /openapi.json lists each path's methods."
        )
    return InvalidInputError(str(error.detail))


async def _render(request: Request, error: Exception) -> Response:
    assert isinstance(error, LineshaftError)  # noqa: S101 - it is registered for these only
    status, body, headers = problems.response(error, request.scope)
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})
