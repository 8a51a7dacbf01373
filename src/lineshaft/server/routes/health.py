"""Liveness and readiness of the server."""

from lineshaft import __version__
from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.routes import responses
from lineshaft.server.service import Call
from lineshaft.types import Readiness

routes = Routes()


@routes.get("/healthz", None, responses.Health)
async def alive(call: Call) -> Answer:  # noqa: ARG001 - every operation has one
    """The process answers. Doesn't use the database."""
    return Answer(responses.Health("ok", __version__))


@routes.get("/readyz", None, Readiness, codes=("unavailable",))
async def ready(call: Call) -> Answer:
    """The server can reach a migrated database and write to it; 503 otherwise."""
    await call.service.check_database()
    return Answer(Readiness("ready", "ok", call.service.wakeups.healthy))
