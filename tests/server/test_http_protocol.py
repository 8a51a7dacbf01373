"""HTTP as it is sent, byte by byte: what is refused, what is accepted, and in which order it is answered."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from lineshaft.server.framework.http_protocol import MAX_HEAD_BYTES
from tests.server.client import Client, Reply, read_head
from tests.server.conftest import Serve, Served, until

HOST = b"Host: 127.0.0.1\r\n"
GET = b"GET /healthz HTTP/1.1\r\n" + HOST
POST = b"POST /v1/tasks HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
TASK = b'{"type": "x"}'
WITH_LENGTH = POST + b"Content-Length: %d\r\n" % len(TASK)
CHUNK = b"%x\r\n%b\r\n" % (len(TASK), TASK)
LAST = b"Connection: close\r\n\r\n"

REFUSED = {
    "length and encoding": WITH_LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "encoding and length": CHUNKED + b"Content-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": WITH_LENGTH + b"Content-Length: 2\r\n\r\n" + TASK,
    "the same length twice": WITH_LENGTH + b"Content-Length: %d\r\n\r\n" % len(TASK) + TASK,
    "list of lengths": POST + b"Content-Length: 1, 1\r\n\r\nx",
    "length with a sign": POST + b"Content-Length: +1\r\n\r\nx",
    "negative length": POST + b"Content-Length: -1\r\n\r\nx",
    "empty length": POST + b"Content-Length: \r\n\r\n",
    "hexadecimal length": POST + b"Content-Length: 0x1\r\n\r\nx",
    "length of too many digits": POST + b"Content-Length: " + b"0" * 50 + b"1\r\n\r\nx",
    "length beyond 64 bits": POST + b"Content-Length: 99999999999999999999\r\n\r\nx",
    "unknown encoding": POST + b"Transfer-Encoding: identity\r\n\r\n",
    "two encodings": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "encoding twice": CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "encoding that ends otherwise": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "misspelled encoding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "no encoding": POST + b"Transfer-Encoding: \r\n\r\n",
    "line feeds only": b"GET /healthz HTTP/1.1\nHost: 127.0.0.1\n\n",
    "line feed within the headers": b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\nX: y\r\n\r\n",
    "carriage return within a header": GET + b"X: a\rb\r\n\r\n",
    "folded header": GET + b"X: a\r\n b\r\n\r\n",
    "space before the headers": b"GET /healthz HTTP/1.1\r\n X: y\r\n" + HOST + b"\r\n",
    "space before the colon": b"GET /healthz HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
    "space in a name": GET + b"A B: c\r\n\r\n",
    "header without a name": GET + b": c\r\n\r\n",
    "header without a colon": GET + b"foo\r\n\r\n",
    "NUL in a header": GET + b"X: a\0b\r\n\r\n",
    "NUL in a name": GET + b"X\0: a\r\n\r\n",
    "NUL in the path": b"GET /\0 HTTP/1.1\r\n" + HOST + b"\r\n",
    "control character": GET + b"X: a\x01b\r\n\r\n",
    "byte beyond ASCII in a name": GET + b"X\xff: a\r\n\r\n",
    "byte beyond ASCII in the path": b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces": b"GET  /healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces after the path": b"GET /healthz  HTTP/1.1\r\n" + HOST + b"\r\n",
    "space in the path": b"GET /health z HTTP/1.1\r\n" + HOST + b"\r\n",
    "empty lines first": b"\r\n\r\n" + GET + b"\r\n",
    "line feed first": b"\n" + GET + b"\r\n",
    "method in lower case": b"get /healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    "unknown method": b"FOO /healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    "tunnel": b"CONNECT example.org:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "RTSP": b"DESCRIBE /healthz RTSP/1.0\r\n" + HOST + b"\r\n",
    "ICE": b"SOURCE /healthz ICE/1.0\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /healthz\r\n\r\n",
    "HTTP/2": b"GET /healthz HTTP/2.0\r\n" + HOST + b"\r\n",
    "HTTP/2 from the start": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two hosts": GET + HOST + b"\r\n",
    "two hosts in HTTP/1.0": b"GET /healthz HTTP/1.0\r\n" + HOST + b"Host: example.org\r\n\r\n",
    "chunk with a sign": CHUNKED + b"\r\n-1\r\na\r\n0\r\n\r\n",
    "chunk with 0x": CHUNKED + b"\r\n0x1\r\na\r\n0\r\n\r\n",
    "chunk size beyond 64 bits": CHUNKED + b"\r\n10000000000000001\r\na\r\n0\r\n\r\n",
    "chunk longer than its size": CHUNKED + b"\r\n1\r\nab\r\n0\r\n\r\n",
    "chunk size with a line feed": CHUNKED + b"\r\n1\na\r\n0\r\n\r\n",
    "chunk with a line feed": CHUNKED + b"\r\n1\r\na\n0\r\n\r\n",
    "invalid trailer": CHUNKED + b"\r\n" + CHUNK + b"0\r\nX y\r\n\r\n",
    "length in a trailer": CHUNKED + b"\r\n" + CHUNK + b"0\r\nContent-Length: 7\r\n\r\n",
}
LARGE = b"a" * 1_000
TOO_LARGE = {
    "header": GET + b"X: " + LARGE * 70,
    "headers": GET + (b"X: " + LARGE + b"\r\n") * 70,
    "many headers": GET + b"X: y\r\n" * 12_000,
    "path": b"GET /" + LARGE * 70,
    "name": GET + LARGE * 70,
    "all headers at once": GET + b"X: y\r\n" * 12_000 + b"\r\n",
}
CREATED = {
    "length": WITH_LENGTH + LAST + TASK,
    "chunked": CHUNKED + LAST + CHUNK + b"0\r\n\r\n",
    "chunked in capitals": POST + b"Transfer-Encoding: Chunked\r\n" + LAST + CHUNK + b"0\r\n\r\n",
    "extension": CHUNKED + LAST + b"%x;a=b\r\n%b\r\n0\r\n\r\n" % (len(TASK), TASK),
    "small chunks": CHUNKED + LAST + b"".join(b"1\r\n%c\r\n" % byte for byte in TASK) + b"0\r\n\r\n",
    "another protocol offered": WITH_LENGTH + b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n" + TASK,
    "another protocol and chunks": CHUNKED
    + b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n"
    + CHUNK
    + b"0\r\n\r\n",
    "HTTP/1.0": b"POST /v1/tasks HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(TASK)
    + TASK,
}

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(client: Client) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port, limit=1 << 20)
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()


async def replies(reader: asyncio.StreamReader) -> list[Reply]:
    """All until the server closes the connection."""
    found: list[Reply] = []
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            status, headers = await read_head(reader)
            found.append(Reply(status, headers, await reader.readexactly(int(headers["content-length"]))))
    return found


async def sent(client: Client, parts: Sequence[bytes]) -> list[Reply]:
    """All replies to bytes that are sent part by part, until the server closes the connection."""
    async with connected(client) as (reader, writer):
        reading = asyncio.create_task(replies(reader))
        for part in parts:
            writer.write(part)
            # The server runs in this event loop: it reads the part, may answer, and may close.
            for _ in range(5):
                await asyncio.sleep(0)
            if reading.done():
                break
        return await reading


def bytewise(data: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in data]


async def test_what_is_not_valid_http_is_refused(client: Client) -> None:
    """Everything that proxies and servers could read in different ways, at once and byte by byte."""
    for name, data in REFUSED.items():
        for parts in [data], bytewise(data):
            (reply,) = await sent(client, parts)

            assert (reply.status, reply.code) == (400, "invalid_input"), name
            assert reply.headers["connection"] == "close"
            assert "HTTP/1.1" in reply.json["detail"]
    assert (await client.get("/v1/tasks")).json["items"] == [], "a refused request has taken effect"


async def test_requests_with_large_heads_are_refused(client: Client) -> None:
    for name, data in TOO_LARGE.items():
        assert len(data) > MAX_HEAD_BYTES
        parts = [data] if data.endswith(b"\r\n\r\n") else [data[: 60 << 10], data[60 << 10 :]]
        (reply,) = await sent(client, parts)

        assert reply.status == 400, name


async def test_large_extensions_and_trailers_of_chunks_are_refused(client: Client) -> None:
    """They need no memory, but no end of them would ever come."""
    for start in (b"\r\n1;", b"\r\n" + CHUNK + b"0\r\nX: "):
        async with connected(client) as (reader, writer):
            writer.write(CHUNKED + start)
            with contextlib.suppress(ConnectionError):
                for _ in range(2_000):
                    writer.write(LARGE)
                    await writer.drain()
            assert [reply.status for reply in await replies(reader)] in ([400], []), "reset, or refused"


async def test_valid_requests_are_accepted_at_once_and_byte_by_byte(client: Client) -> None:
    for name, data in CREATED.items():
        for parts in [data], bytewise(data):
            (reply,) = await sent(client, parts)

            assert reply.status == 201, (name, reply)


async def test_trailers_are_not_headers(client: Client) -> None:
    trailers = b"0\r\nX-Request-Id: trailer\r\nHost: example.org\r\n\r\n"
    (reply,) = await sent(client, [CHUNKED + LAST + CHUNK + trailers])

    assert reply.status == 201
    assert reply.headers["x-request-id"].startswith("req_")


async def test_spaces_around_a_header_are_not_part_of_it(client: Client) -> None:
    (reply,) = await sent(client, [GET + b"X-Request-Id: \t mine \t \r\n" + LAST])

    assert reply.headers["x-request-id"] == "mine"


async def test_requests_sent_ahead_are_answered_in_their_order(client: Client) -> None:
    middle = WITH_LENGTH + b"\r\n" + TASK + CHUNKED + b"\r\n" + CHUNK + b"0\r\n\r\n" + GET + b"\r\n"
    data = middle * 10 + GET + LAST
    for parts in [data], bytewise(data):
        found = await sent(client, parts)

        assert [reply.status for reply in found] == [201, 201, 200] * 10 + [200]


async def test_an_invalid_request_does_not_affect_the_ones_before_it(client: Client) -> None:
    found = await sent(
        client, [GET + b"\r\n" + WITH_LENGTH + b"\r\n" + TASK + b"FOO / HTTP/1.1\r\n\r\n" + GET]
    )

    assert [reply.status for reply in found] == [200, 201, 400]


async def test_a_body_is_never_taken_for_a_request(client: Client) -> None:
    inner = GET + b"\r\n"
    for offer in (b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b"Upgrade: h2c\r\n"):
        outer = POST + offer + b"Content-Length: %d\r\n\r\n" % len(inner) + inner
        found = await sent(client, [outer + GET + LAST])

        assert [reply.status for reply in found] == [422, 200], offer


async def test_what_follows_a_closing_request_is_ignored(client: Client) -> None:
    found = await sent(client, [GET + LAST + WITH_LENGTH + b"\r\n" + TASK])

    assert [reply.status for reply in found] == [200]
    assert (await client.get("/v1/tasks")).json["items"] == []


async def test_a_request_behind_a_waiting_one_waits(served: Served) -> None:
    """It isn't even read: it could be invalid, and its answer would come first."""
    agent = await served.client.register()
    body = json.dumps({"incarnation": agent["incarnation"], "wait_sec": 60}).encode()
    claim = b"POST /v1/agents/a1/claim HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with connected(served.client) as (reader, writer):
        writer.write(claim + WITH_LENGTH + LAST + TASK)
        await until(lambda: served.service.wakeups.waiting)
        assert (await served.client.get("/v1/tasks")).json["items"] == []

        await served.client.submit("first")

        claimed, created = await replies(reader)
    assert claimed.json["tasks"][0]["task"]["type"] == "first"
    assert created.status == 201


async def test_a_client_that_waits_for_permission_to_send_gets_it(client: Client) -> None:
    async with connected(client) as (reader, writer):
        writer.write(WITH_LENGTH + b"Expect: 100-continue\r\n" + LAST)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(TASK)
        (reply,) = await replies(reader)

    assert reply.status == 201


async def test_a_refused_request_gets_no_permission_to_send(serve: Serve) -> None:
    async with serve(auth=True) as served, connected(served.client) as (reader, writer):
        writer.write(WITH_LENGTH + b"Expect: 100-continue\r\n" + LAST)
        status, _ = await read_head(reader)

    assert status == 401


async def test_a_body_that_breaks_off_ends_the_request(served: Served) -> None:
    """The operation has begun: it waits for the body."""
    (reply,) = await sent(served.client, [CHUNKED + b"\r\n3\r\n{", b'"t', b"broken"])

    assert reply.status == 400
    assert (await served.client.get("/v1/tasks")).json["items"] == []


async def test_a_stream_in_http_1_0_ends_with_the_connection(client: Client) -> None:
    """Such a client doesn't know chunks."""
    async with connected(client) as (reader, writer):
        writer.write(b"GET /v1/events HTTP/1.0\r\n" + HOST + b"Accept: text/event-stream\r\n\r\n")
        status, headers = await read_head(reader)
        await client.submit()
        first = await reader.readline()

    assert (status, headers["connection"]) == (200, "close")
    assert "transfer-encoding" not in headers
    assert b":" in first, "the size of a chunk"


async def test_head_has_no_body(client: Client) -> None:
    async with connected(client) as (reader, writer):
        writer.write(b"HEAD /healthz HTTP/1.1\r\n" + HOST + b"\r\n" + GET + LAST)
        status, headers = await read_head(reader)
        (got,) = await replies(reader)

    assert got.status == 200
    assert status == 405 or headers["content-length"] == got.headers["content-length"]


@pytest.mark.parametrize("target", ["http://127.0.0.1/healthz", "*"])
async def test_other_forms_of_targets_are_unknown_paths(client: Client, target: str) -> None:
    method = "OPTIONS" if target == "*" else "GET"
    (reply,) = await sent(client, [f"{method} {target} HTTP/1.1\r\n".encode() + HOST + LAST])

    assert (reply.status, reply.code) == (404, "not_found")
