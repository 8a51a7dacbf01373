"""What the server understands, and requests that leave out the rest."""

from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import TypeVar

from lineshaft.http_client import Response
from lineshaft.types import features

T = TypeVar("T")

_UNKNOWN_FIELD = b"unknown field"


class ServerFeatures:
    """The features that the server has announced; none before the client is open, and of older servers."""

    def __init__(self) -> None:
        self._announced: frozenset[str] = frozenset()

    def learn(self, announced: Iterable[str]) -> None:
        self._announced = frozenset(announced)

    def has(self, feature: str) -> bool:
        return feature in self._announced

    async def send(self, request: T, send: Callable[[T], Awaitable[Response]]) -> Response:
        """Send a request without the fields that the server hasn't announced."""
        # A server of this version or a newer one announces all that this client may send.
        understands_all = self._announced >= features.FEATURES
        fitted = request if understands_all else features.fitting(request, self._announced)
        response = await send(fitted)
        if response.status != HTTPStatus.UNPROCESSABLE_ENTITY or _UNKNOWN_FIELD not in response.body:
            return response
        least = features.fitting(request, frozenset())
        if least is fitted or least == fitted:
            return response
        # Behind one address there are servers of several versions, as during an upgrade: all of them get what
        # the oldest understands, until the next registration. Nothing was changed, so it may be sent again.
        self._announced = frozenset()
        return await send(least)
