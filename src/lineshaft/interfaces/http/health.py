"""Whether the server is there, and whether it can do its work."""

from lineshaft import __version__
from lineshaft.interfaces.http import views
from lineshaft.interfaces.http.routing import Answer, Call, Routes

routes = Routes()


@routes.get("/healthz", None, views.Health)
async def alive(call: Call) -> Answer:  # noqa: ARG001 - every operation has one
    """The process answers. Asks nothing of the database."""
    return Answer(views.Health("ok", __version__))


@routes.get("/readyz", None, views.Readiness, codes=("unavailable",))
async def ready(call: Call) -> Answer:
    """The server can reach a migrated database; 503 otherwise."""
    await call.service.check_database()
    return Answer(views.Readiness("ready", "ok", call.service.wakeups.healthy))
