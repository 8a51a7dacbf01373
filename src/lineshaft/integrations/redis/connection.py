"""Connections to Redis or Valkey: calls have deadlines, and no error, log line or repr has the password."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from lineshaft.errors import SettingsError, UnavailableError
from lineshaft.settings import Settings

if TYPE_CHECKING:
    import redis
    import redis.asyncio

#: The longest that one answer may take.
TIMEOUT_SEC = 0.5


class RedisUnavailableError(UnavailableError):
    """Redis is not available."""


class RedisServer:
    """Where Redis is. It has no connections of its own: `connect` makes clients, which have pools."""

    def __init__(self, url: str, *, timeout_sec: float = TIMEOUT_SEC) -> None:
        """`url` as `LINESHAFT_REDIS_URL` allows it (`settings.py`)."""
        self._url = url
        self.timeout_sec = timeout_sec
        # Found, not imported: a command that ends soon doesn't wait for it.
        if find_spec("redis") is None:
            raise SettingsError(
                "LINESHAFT_REDIS_URL needs the client of Redis: pip install 'lineshaft[redis]'."
            )

    def __repr__(self) -> str:
        return f"RedisServer({self.place})"

    @property
    def place(self) -> str:
        """For people: host, port and database, or the socket's path."""
        parts = urlsplit(self._url)
        if parts.scheme == "unix":
            return unquote(parts.path)
        database = parts.path.strip("/")
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or "localhost"
        return f"{host}:{parts.port or 6379}" + (f"/{database}" if database else "")

    def connect(
        self, name: str, *, read_timeout_sec: float | None = None, max_connections: int = 8
    ) -> "redis.asyncio.Redis":
        """A client for asyncio; close it with `aclose()`. It connects when it is first used.

        `name` is shown by CLIENT LIST. `read_timeout_sec` is for blocking commands, whose answers take
        longer; it includes the time that they block. Nothing is tried twice: callers decide.
        """
        library: Any = import_module("redis.asyncio")
        pool = library.BlockingConnectionPool.from_url(
            self._url, **self._options(name, read_timeout_sec, max_connections, "redis.asyncio.retry")
        )
        client: redis.asyncio.Redis = library.Redis.from_pool(pool)
        return client

    def connect_blocking(
        self, name: str, *, read_timeout_sec: float | None = None, max_connections: int = 8
    ) -> "redis.Redis":
        """As `connect`, for threads; close it with `close()`."""
        library: Any = import_module("redis")
        pool = library.BlockingConnectionPool.from_url(
            self._url, **self._options(name, read_timeout_sec, max_connections, "redis.retry")
        )
        client: redis.Redis = library.Redis.from_pool(pool)
        return client

    @contextlib.asynccontextmanager
    async def answering(self, within_sec: float | None = None) -> AsyncIterator[None]:
        """As `reporting`, for calls that together end soon; None: within the time of one answer."""
        with self.reporting():
            async with asyncio.timeout(within_sec or self.timeout_sec):
                yield

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Errors of the client become RedisUnavailableError, which says what to do."""
        library: Any = import_module("redis")
        try:
            yield
        except library.AuthenticationError:
            raise RedisUnavailableError(
                f"Redis at {self.place} refuses the user or the password of LINESHAFT_REDIS_URL."
            ) from None
        except library.RedisError as error:
            raise RedisUnavailableError(f"Redis at {self.place}: {_reason(error)}.") from None
        except (OSError, TimeoutError) as error:
            raise RedisUnavailableError(
                f"Redis at {self.place} doesn't answer: {str(error) or 'no answer in time'}."
            ) from None

    def _options(
        self, name: str, read_timeout_sec: float | None, connections: int, retry: str
    ) -> dict[str, Any]:
        return {
            "socket_connect_timeout": self.timeout_sec,
            "socket_timeout": self.timeout_sec if read_timeout_sec is None else read_timeout_sec,
            # For a connection of the pool.
            "timeout": self.timeout_sec,
            "max_connections": connections,
            "client_name": name,
            # The client's default repeats calls for seconds.
            "retry": import_module(retry).Retry(import_module("redis.backoff").NoBackoff(), 0),
            # Fewer round trips while connecting: no HELLO, no CLIENT SETINFO.
            "protocol": 2,
            "driver_info": None,
        }


def dispatch_server(settings: Settings) -> RedisServer | None:
    """The one that carries wake-ups. Behind a pooler in transaction mode none does: sessions must last."""
    return RedisServer(settings.redis_url) if settings.redis_url and settings.sessions else None


def _reason(error: Exception) -> str:
    """The server's words. They quote commands, but never a password."""
    text = str(error).strip().rstrip(".") or type(error).__name__
    library: Any = import_module("redis.exceptions")
    if isinstance(error, (library.AskError, library.ClusterDownError, library.ClusterCrossSlotError)):
        return f"it is part of a cluster, and Lineshaft needs a single server ({text})"
    if "unknown command" in text:
        return f"{text}: if it is a Sentinel, name the server that it watches"
    return text
