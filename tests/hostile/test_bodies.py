"""Request bodies that are expensive to read, decode or refuse."""

import asyncio

import pytest

from tests.hostile.conftest import Target
from tests.server.client import read_reply

MIB = 1 << 20


def filled(piece: str, size: int = 8 * MIB - 100) -> bytes:
    """A body of this size that repeats a piece within an array."""
    return b'{"type": "t", "spec": {"a": [' + (piece * (size // len(piece))).encode().rstrip(b",") + b"]}}"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * (8 * MIB - 1),
        filled("[" * 90 + "]" * 90 + ","),
        filled("[],"),
        filled('"[",'),
        filled('"\\\\",'),
        b"[]" * (4 * MIB - 1),
        filled("[" * 90 + "]" * 90 + ",", MIB // 3),
        filled("[],", MIB // 2),
    ],
    ids=["open", "nested", "empty", "in strings", "escapes", "invalid", "nested, allowed", "empty, allowed"],
)
async def test_megabytes_of_brackets(target: Target, body: bytes) -> None:

    async with target.unharmed():
        replies = await asyncio.gather(
            *(target.client.request("POST", "/v1/tasks", raw=body) for _ in range(2))
        )

    assert {reply.status for reply in replies} <= {201, 413, 422}


async def test_a_call_without_data_takes_no_large_body(target: Target) -> None:
    reply = await target.client.request("POST", "/v1/pause", raw=b'{"type": "' + b"x" * MIB + b'"}')

    assert (reply.status, reply.code) == (413, "payload_too_large")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [9 * MIB, 60 * MIB])
async def test_a_body_over_the_limit_is_answered(target: Target, chunked: bool, size: int) -> None:
    """The client sends all of it before it reads, and gets the response, not a reset."""
    body, length = b"x" * size, f"Content-Length: {size}"
    if chunked:
        body, length = b"%x\r\n%s\r\n0\r\n\r\n" % (size, body), "Transfer-Encoding: chunked"
    head = f"POST /v1/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{length}\r\n\r\n"

    async with target.unharmed():
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        writer.write(head.encode() + body)
        await writer.drain()
        reply = await read_reply(reader)
        writer.close()

    assert (reply.status, reply.code) == (413, "payload_too_large")


async def test_a_large_body_for_an_unknown_path_is_answered(target: Target) -> None:
    reply = await target.client.request("POST", "/v1/nothing", raw=b"x" * (4 * MIB))

    assert (reply.status, reply.code) == (404, "not_found")
