"""The application: all routes and the pages that describe them."""

from collections.abc import Sequence
from functools import cache
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute, Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from lineshaft import __version__
from lineshaft.dashboard.dashboard import Dashboard, wants_page
from lineshaft.errors import InvalidInputError, LineshaftError, NotFoundError
from lineshaft.integrations.officeplane import monitoring, sockets
from lineshaft.integrations.officeplane import routes as officeplane_routes
from lineshaft.integrations.officeplane.officeplane import ERROR_FORMATS, Officeplane
from lineshaft.operations import table
from lineshaft.operations.operation import operations_in
from lineshaft.server.framework import docs_page, openapi, problems
from lineshaft.server.framework.middleware import AllowedHosts, BodyLimit, RequestMiddleware
from lineshaft.server.framework.origins import AllowedOrigins
from lineshaft.server.framework.routing import routes
from lineshaft.server.routes import additions, agents, artifacts, health, hooks, metrics, work
from lineshaft.server.service import Service

#: What only a server answers comes before the table: most calls are of agents.
_NATIVE = operations_in(work, agents, artifacts, hooks, metrics, health, additions)
_NATIVE += table.OPERATIONS
_OFFICEPLANE = operations_in(officeplane_routes, monitoring)
#: Every operation of a server.
OPERATIONS = [*_NATIVE, *_OFFICEPLANE]


class App(Router):
    """All routes. Errors are for the request middleware, which answers them; to people, with a page."""

    def __init__(self, routes: Sequence[BaseRoute], dashboard: Dashboard) -> None:
        # Starlette's own redirects name a scheme and a host, which are not the client's behind a proxy.
        super().__init__(routes, redirect_slashes=False)
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Routes raise an exception, in place of a response of their own, if they are part of an application.
        scope["app"] = self
        try:
            await self.app(scope, receive, send)
        except HTTPException as error:
            refusal = _refusal(scope, error)
            if not wants_page(scope):
                raise refusal from None
            await (await self._dashboard.error(refusal, Request(scope)))(scope, receive, send)

    async def not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A path with a slash too many leads to the one without."""
        path = scope["path"].rstrip("/")
        # A browser takes what follows two slashes for a host.
        if scope["type"] == "http" and path != scope["path"] and not path.startswith("//"):
            shorter = {**scope, "path": path}
            if any(route.matches(shorter)[0] is not Match.NONE for route in self.routes):
                query = scope["query_string"].decode("latin-1")
                to = quote(path, safe="/:@!$&'()*+,;=~") + (f"?{query}" if query else "")
                await RedirectResponse(to)(scope, receive, send)
                return
        await super().not_found(scope, receive, send)


def create_app(
    service: Service, officeplane: Officeplane | None = None, dashboard: Dashboard | None = None
) -> App:
    """The application without the request middleware."""
    guest = officeplane or Officeplane(service)
    pages = dashboard or Dashboard(service)
    return App(
        [
            *routes(_NATIVE, service),
            *routes(_OFFICEPLANE, guest),
            *sockets.routes(guest),
            openapi.route(describe, service),
            docs_page.route(describe, service),
            *pages.routes(),
        ],
        pages,
    )


def with_middleware(app: ASGIApp, service: Service) -> RequestMiddleware:
    """The application as it is served: every request passes the middleware."""
    settings = service.settings
    return RequestMiddleware(
        app,
        hosts=AllowedHosts(settings.host, settings.allowed_hosts),
        max_body_bytes=settings.max_body_bytes,
        error_formats=ERROR_FORMATS,
        open_prefix=hooks.PREFIX,
        origins=AllowedOrigins(settings.allowed_origins),
        uploads={artifacts.PATH: BodyLimit(settings.max_artifact_bytes, "LINESHAFT_MAX_ARTIFACT_BYTES")},
    )


@cache
def describe() -> dict[str, Any]:
    """The OpenAPI document."""
    return openapi.document("Lineshaft", __version__, OPERATIONS, ERROR_FORMATS)


def _refusal(scope: Scope, error: HTTPException) -> LineshaftError:
    """The error of a request that no route matches."""
    path = scope["path"]
    if error.status_code == 404:  # noqa: PLR2004
        return NotFoundError(f"Unknown path {path}. /openapi.json lists all paths.")
    if error.status_code == 405:  # noqa: PLR2004
        return problems.MethodNotAllowedError(
            f"{path} doesn't accept {scope['method']}. /openapi.json lists each path's methods."
        )
    return InvalidInputError(str(error.detail))
