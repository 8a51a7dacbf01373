"""Ports for servers that are started as programs, and so can't be given an open socket."""

import socket

_reserved: list[socket.socket] = []


def reserved_port() -> int:
    """A port of this machine for a server that the test starts, and may restart.

    It stays bound here, without listening, as long as this process lives: the system gives it to no other
    server, and to no connection as its own end. A server can bind it too if it sets SO_REUSEADDR, as nearly
    all do.
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    _reserved.append(bound)
    return int(bound.getsockname()[1])
