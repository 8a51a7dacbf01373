"""OfficePlane's API as a guest of the server: what its routes and WebSockets share, and its error format."""

from msgspec import Struct
from starlette.types import Scope as AsgiScope

from lineshaft.engine.caller import Caller
from lineshaft.integrations.officeplane.tasks import TaskConverter
from lineshaft.integrations.officeplane.this_process import ThisProcess
from lineshaft.integrations.officeplane.updates import Updates
from lineshaft.server.framework import routing
from lineshaft.server.framework.problems import ErrorFormat, ErrorFormats
from lineshaft.server.service import Service
from lineshaft.types import Problem, Scope


class Detail(Struct, frozen=True):
    """An error."""

    detail: str


def _detail(problem: Problem) -> Detail:
    return Detail(problem.detail)


ERROR_FORMAT = ErrorFormat("application/json", Detail, _detail)
ERROR_FORMATS = ErrorFormats({"/api/": ERROR_FORMAT})


class Officeplane:
    def __init__(self, service: Service) -> None:
        self.engine = service.engine
        self.stopping = service.stopping
        self.converter = TaskConverter(first_is_extra=service.settings.max_retries_are == "extra")
        self.updates = Updates(service.tail, service.events, self.engine.read, self.converter)
        self.process = ThisProcess()
        self._service = service

    async def authenticate(self, scope: Scope | None, request: AsgiScope) -> Caller:
        return await self._service.authenticate(scope, request)


Call = routing.Call[Officeplane]
