"""Connections that only wait, from clients without a token."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.hostile.conftest import Serving, Target

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HALF_HEADER = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Part: "
SLOW_BODY = b"POST /v1/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n{"


@contextlib.asynccontextmanager
async def connected(target: Target, number: int, first: bytes) -> AsyncIterator[list[Connection]]:
    opened: list[Connection] = []
    try:
        for _ in range(number):
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
                writer.write(first)
                opened.append((reader, writer))
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


async def ended(connection: Connection) -> None:
    with contextlib.suppress(ConnectionError):
        await connection[0].read()


@pytest.mark.parametrize("first", [b"", HALF_HEADER, SLOW_BODY], ids=["idle", "half header", "slow body"])
async def test_more_connections_than_descriptors(serving: Serving, first: bytes) -> None:
    """The server goes on answering, keeps spare files for the database, and writes a short log."""
    with serving(descriptors=256) as target:
        async with target.unharmed(), connected(target, 300, first):
            replies = [await target.client.get("/readyz") for _ in range(20)]
            await target.client.submit()

        assert {reply.status for reply in replies} == {200}
        assert len(target.log.read_bytes()) < 200_000


@pytest.mark.slow("waits for the deadlines")
@pytest.mark.parametrize("first", [b"", HALF_HEADER, SLOW_BODY], ids=["idle", "half header", "slow body"])
async def test_a_connection_that_only_waits_is_closed(target: Target, first: bytes) -> None:
    async with target.unharmed(), connected(target, 50, first) as opened, asyncio.timeout(60):
        await asyncio.gather(*map(ended, opened))


@pytest.mark.slow("longer than the deadline of headers")
async def test_a_long_poll_is_not_closed(target: Target) -> None:
    agent = await target.client.register()
    body = {"incarnation": agent["incarnation"], "wait_sec": 13}

    reply = await target.client.post(f"/v1/agents/{agent['id']}/claim", body)

    assert reply.json == {"tasks": []}
