"""Origins: which web pages may call the server, and what their browsers are answered (CORS).

By default none but the server's own. `LINESHAFT_ALLOWED_ORIGINS` names others, exactly as browsers send them.
They may call the API, with credentials, but not open the dashboard's pages, whose cookie is for people. The
answers to other origins have no headers of CORS, so that a browser shows them to no page.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import structlog

_log = structlog.get_logger("lineshaft.http")

SETTING = "LINESHAFT_ALLOWED_ORIGINS"
#: Paths of the API; a WebSocket has no other protection than its origin.
_PREFIXES = ("/api/", "/v1/")
_PATHS = frozenset({"/ws", "/health"})
_METHODS = b"GET, POST, PUT, PATCH, DELETE"
#: Where the browser doesn't ask for headers of its own.
_HEADERS = b"authorization, content-type, idempotency-key"
#: Those that a page may read, besides the usual ones.
_EXPOSED = b"x-request-id, retry-after, location"
_PREFLIGHT_SEC = b"600"
#: Refused origins that are remembered: a page can make up any number of them.
_MOST_LOGGED = 1_000

Headers = list[tuple[bytes, bytes]]


class Origin(NamedTuple):
    """An allowed origin, in a request."""

    name: bytes

    @property
    def headers(self) -> Headers:
        return [
            (b"access-control-allow-origin", self.name),
            (b"access-control-allow-credentials", b"true"),
            (b"access-control-expose-headers", _EXPOSED),
        ]

    def preflight(self, asked: Mapping[bytes, bytes]) -> Headers:
        """The answer to the question that a browser asks before the request itself."""
        return [
            *self.headers,
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", asked.get(b"access-control-request-headers") or _HEADERS),
            (b"access-control-max-age", _PREFLIGHT_SEC),
        ]


class AllowedOrigins:
    def __init__(self, allowed: Collection[str] = ()) -> None:
        self._allowed = frozenset(name.encode() for name in allowed)
        self._logged: set[str] = set()

    def find(self, headers: Mapping[bytes, bytes], path: str) -> Origin | None:
        """The origin of a request, if it may call this path; None: ordinary rules apply."""
        name = headers.get(b"origin")
        if name not in self._allowed or not (path.startswith(_PREFIXES) or path in _PATHS):
            return None
        return Origin(name)

    def varies(self, path: str) -> bool:
        """Whether an answer depends on the origin, so that a cache must not give it to another."""
        return bool(self._allowed) and (path.startswith(_PREFIXES) or path in _PATHS)

    def log_refusal(self, origin: str) -> None:
        """Say once why pages of this origin get nothing."""
        if origin in self._logged or len(self._logged) >= _MOST_LOGGED:
            return
        self._logged.add(origin)
        _log.warning(
            "A page of another origin was refused. If it should call this server, add it to the setting.",
            origin=origin[:200],
            setting=SETTING,
        )


def is_preflight(method: str, headers: Mapping[bytes, bytes]) -> bool:
    return method == "OPTIONS" and b"access-control-request-method" in headers
