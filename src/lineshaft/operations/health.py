"""Readiness."""

from lineshaft.operations.operation import Engine, operation
from lineshaft.types import Readiness
from lineshaft.types.request import Nothing


@operation("GET /readyz", None, codes=("unavailable",))
async def ready(engine: Engine, request: Nothing) -> Readiness:  # noqa: ARG001 - it has no fields
    """The server can reach a migrated database and write to it; 503 otherwise."""
    await engine.tokens.exist()
    return Readiness("ready", "ok", wakeups=True)
