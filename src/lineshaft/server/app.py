"""The application, put together from its areas."""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from lineshaft import __version__
from lineshaft.errors import InvalidInputError, LineshaftError, NotFoundError
from lineshaft.integrations.officeplane import routes as officeplane
from lineshaft.integrations.officeplane import sockets
from lineshaft.server.framework import docs_page, openapi, problems
from lineshaft.server.framework.middleware import Gate, Names
from lineshaft.server.framework.routing import Operation, routes
from lineshaft.server.routes import (
    agents,
    claims,
    dags,
    events,
    guards,
    health,
    metrics,
    review,
    stats,
    tasks,
    work,
)
from lineshaft.server.service import Service

#: What is called most often is found first.
AREAS = (work, agents, claims, tasks, dags, events, review, guards, stats, metrics, health, officeplane)
OPERATIONS: Sequence[Operation] = [operation for area in AREAS for operation in area.routes.operations]


def create_app(service: Service) -> FastAPI:
    """Everything but the gate. Whoever adds parts of their own adds them to this."""
    app = FastAPI(
        title="Lineshaft",
        version=__version__,
        # They would load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        exception_handlers={HTTPException: _explain, LineshaftError: _tell},
    )
    app.router.routes.extend(routes(OPERATIONS, service))
    app.router.routes.extend(sockets.routes(service))
    openapi.describe(app, OPERATIONS)
    app.router.routes.append(docs_page.route(app.openapi))
    return app


def gated(app: ASGIApp, service: Service) -> Gate:
    """What is served: nothing gets in around the gate."""
    settings = service.settings
    return Gate(
        app, names=Names(settings.host, settings.allowed_hosts), max_body_bytes=settings.max_body_bytes
    )


async def _explain(request: Request, error: Exception) -> Response:
    """What the router refuses: no such path, no such method."""
    assert isinstance(error, HTTPException)  # noqa: S101 - it is registered for these only
    return await _tell(request, _meaning(request, error))


def _meaning(request: Request, error: HTTPException) -> LineshaftError:
    if error.status_code == 404:  # noqa: PLR2004
        return NotFoundError(f"There is no {request.url.path}. /openapi.json lists what there is.")
    if error.status_code == 405:  # noqa: PLR2004
        return problems.MethodNotAllowedError(
            f"{request.url.path} doesn't know {request.method}. /openapi.json lists what it does."
        )
    return InvalidInputError(str(error.detail))


async def _tell(request: Request, error: Exception) -> Response:
    assert isinstance(error, LineshaftError)  # noqa: S101 - it is registered for these only
    request_id = getattr(request.state, "request_id", None)
    status, headers, body = problems.rendered(error, request_id, request.url.path)
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})
