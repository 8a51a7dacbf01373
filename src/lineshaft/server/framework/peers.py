"""The account that calls: the owner of the peer's socket, as Linux lists it in /proc/net.

A proxy on this machine calls over loopback as a person does, and by default it adds no header that shows it.
But it runs under an account of its own, and the kernel knows under which one each socket was opened.
"""

import asyncio
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from starlette.types import Scope as AsgiScope

#: A socket of IPv6 may have addresses of IPv4, so a peer may be in either.
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
#: The key of the connection's `Peer` in the scope of a request.
PEER = "lineshaft.peer"
#: The kernel lists sockets page by page, and leaves one out if others come and go beside it at that moment.
#: So one that wasn't found is looked for again.
_LOOKS = 3
#: Columns of the tables, and a state in which the other end hasn't answered yet.
_LOCAL, _REMOTE, _STATE, _UID, _INODE = 1, 2, 3, 7, 9
_CONNECTING = "02"

Address = tuple[str, int]
#: Both ends of a connection as the kernel writes them, the peer's first.
Ends = tuple[str, str]


class Peer:
    """The other end of a connection. Its account is looked up once, when it is first asked for."""

    def __init__(self, client: Address | None, server: tuple[str, int | None] | None) -> None:
        self._client, self._server = client, server
        self._account: asyncio.Future[int | None] | None = None

    async def account(self, accounts: "Accounts") -> int | None:
        """The user id; None: the peer isn't on this machine, or has closed the connection."""
        if self._client is None or self._server is None or self._server[1] is None:
            return None
        if self._account is None:
            server = (self._server[0], self._server[1])
            self._account = asyncio.ensure_future(accounts.find(self._client, server))
        return await asyncio.shield(self._account)


def peer_of(scope: AsgiScope) -> Peer:
    """The peer of a request. A WebSocket, which is one request, gets its own here."""
    return cast("Peer", scope.setdefault(PEER, Peer(scope.get("client"), scope.get("server"))))


class Accounts:
    """Looks up accounts. However many connections ask, one thread at a time reads a table."""

    def __init__(self) -> None:
        self._reading = asyncio.Lock()
        self._next: dict[Path, asyncio.Future[dict[Ends, int]]] = {}

    async def find(self, client: Address, server: Address) -> int | None:
        possible = list(zip(_written(client), _written(server), strict=False))
        for table in TABLES * _LOOKS:
            if table not in self._next:
                self._next[table] = asyncio.ensure_future(self._read(table))
            owners = await asyncio.shield(self._next[table])
            for ends in possible:
                if ends in owners:
                    return owners[ends]
        return None

    async def _read(self, table: Path) -> dict[Ends, int]:
        async with self._reading:
            # Who asks from now on may have connected after this reading began.
            del self._next[table]
            return await asyncio.to_thread(read_owners, table)

    async def work(self) -> bool:
        """Whether this system shows accounts: a connection to ourselves must have ours."""
        try:
            with (
                socket.create_server(("127.0.0.1", 0)) as listening,
                socket.create_connection(listening.getsockname()) as own,
            ):
                return await self.find(own.getsockname(), listening.getsockname()) == os.geteuid()
        except OSError:
            return False


def read_owners(table: Path) -> dict[Ends, int]:
    """The user ids of all connected sockets of a table that a process has open."""
    try:
        lines = table.read_text("ascii").splitlines()[1:]
    except OSError:
        return {}
    rows = map(str.split, lines)
    # A socket that its process has closed is shown with user 0: it must not pass for root.
    return {
        (row[_LOCAL], row[_REMOTE]): int(row[_UID])
        for row in rows
        if row[_INODE] != "0" and row[_STATE] != _CONNECTING
    }


def _written(address: Address) -> Iterator[str]:
    """An address as the kernel writes it: 32 bits at a time in the machine's byte order.

    One of IPv4 may be that of a socket of IPv6.
    """
    host, port = address
    ip = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    words = struct.unpack(f"={len(ip.packed) // 4}I", ip.packed)
    text = "".join(f"{word:08X}" for word in words) + f":{port:04X}"
    yield text
    if ip.version == 4:  # noqa: PLR2004
        mapped = struct.unpack("=I", b"\0\0\xff\xff")[0]
        yield f"{0:016X}{mapped:08X}{text}"
