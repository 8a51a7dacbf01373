"""Single requests of the HTTP client; tests/client has those of its pool."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lineshaft.http_client import NoResponseError, post


@asynccontextmanager
async def answering(*parts: bytes, endless: bytes = b"") -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that sends these bytes, and its log of request heads."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        try:
            writer.writelines(parts)
            while endless:
                writer.write(endless)
                await writer.drain()
                # The client is in the same event loop, and must not wait until the line is full.
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook?key=1", heads


async def test_a_response_body_is_read_up_to_its_limit() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with answering(head, endless=b"5\r\nabcde\r\n") as (url, _):
        none = await post(url, b"{}", headers={}, timeout_sec=60, max_body=0)
        some = await post(url, b"{}", headers={}, timeout_sec=60, max_body=7)

    assert (none.status, none.body) == (200, b"")
    assert some.body == b"abcdeab"


async def test_headers_of_the_caller_replace_the_defaults() -> None:
    async with answering(b"HTTP/1.1 204 No Content\r\n\r\n") as (url, heads):
        await post(
            url,
            b"x",
            headers={"host": "hooks.test", "content-type": "text/plain"},
            timeout_sec=60,
            max_body=0,
        )

    head = heads[0].lower()
    assert head.startswith(b"post /hook?key=1 http/1.1")
    assert head.count(b"\r\nhost: ") == head.count(b"\r\ncontent-type: ") == 1
    assert b"host: hooks.test" in head
    assert b"content-type: text/plain" in head


async def test_a_failure_does_not_contain_the_url() -> None:
    async with answering() as (url, _):
        with pytest.raises(NoResponseError, match="closed without a response") as closed:
            await post(url, b"{}", headers={}, timeout_sec=60, max_body=0)

    assert closed.value.sent
    assert "key=1" not in str(closed.value)


async def test_a_host_name_that_cannot_be_one() -> None:
    with pytest.raises(NoResponseError, match="its host name can't be resolved"):
        await post("http://a..invalid/", b"{}", headers={}, timeout_sec=60, max_body=0)
