"""Liveness of the server."""

from msgspec import Struct

from lineshaft import __version__
from lineshaft.operations.operation import operation
from lineshaft.server.service import Call
from lineshaft.types.request import Nothing


class Health(Struct, frozen=True):
    status: str
    version: str


@operation("GET /healthz", None)
async def alive(call: Call, request: Nothing) -> Health:  # noqa: ARG001 - every operation has them
    """The process answers. Doesn't use the database."""
    return Health("ok", __version__)
