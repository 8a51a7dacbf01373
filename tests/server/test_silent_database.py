"""A database that is silent or away: the server says so, and goes on."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from lineshaft.dashboard.shared_reads import Shared
from lineshaft.errors import UnavailableError
from tests.dashboard.live_stream import live_stream
from tests.proxy import proxied
from tests.server.client import Reply, Stream
from tests.server.conftest import serving
from tests.server.test_waiting import waiting

LIMIT_SEC = 1.0


async def shown(stream: Stream) -> None:
    """Wait for the page. On a busy machine the limit may have passed before."""
    async with asyncio.timeout(60):
        while (await stream.event())["event"] != "page":
            pass


@pytest.mark.slow("waits for limits that must leave a loaded machine enough time")
async def test_calls_and_pages_say_soon_that_the_database_is_silent_and_work_again_afterwards(
    dsn: str,
) -> None:
    """Before, a page took more than 20 s, and a call a minute."""
    asked = ("/v1/tasks", "/v1/stats", "/metrics", "/readyz", "/", "/tasks", "/costs")
    async with (
        proxied(dsn) as (through, proxy),
        serving(through, duties=True, read_timeout_sec=LIMIT_SEC) as served,
    ):
        client = served.client

        async def all_work() -> None:
            async with asyncio.timeout(60):
                while {(await client.get(path)).status for path in asked} != {200}:
                    pass

        await all_work()
        async with live_stream(served, "/tasks", {}) as stream:
            await shown(stream)
            proxy.hold()
            # Below the limit of calls that change something.
            async with asyncio.timeout(40):
                replies = await asyncio.gather(*map(client.get, asked))
                # Who calls isn't known, so nothing was changed.
                submitted = await client.post("/v1/tasks", {"type": "t"})
                assert (await stream.event())["event"] == "away"

            assert {reply.status for reply in (*replies, submitted)} == {503}
            assert all(reply.headers["retry-after"] == "1" for reply in replies)
            call, page = replies[0], replies[asked.index("/tasks")]
            assert call.code == "unavailable"
            assert f"within {LIMIT_SEC:g} s" in call.json["detail"]
            assert b'<meta http-equiv="refresh" content="5">' in page.body
            assert b"loads again every few seconds" in page.body

            proxy.restore()
            await shown(stream)
        await all_work()
        assert (await client.get("/v1/tasks")).json["items"] == []

        proxy.cut()
        assert (await client.get("/v1/tasks")).status == 503
        proxy.restore()
        await all_work()
        assert not served.running.done()


async def test_a_long_poll_outlasts_the_limit_of_reads(dsn: str) -> None:
    async with serving(dsn, read_timeout_sec=0.2) as served:
        client, polls = served.client, 0

        async def poll() -> Reply:
            nonlocal polls
            polls += 1
            return await client.post("/v1/agents/a/claim", {"incarnation": 1, "wait_sec": 60})

        await answered(lambda: client.post("/v1/agents", {"id": "a"}))
        polling = asyncio.create_task(answered(poll))
        await waiting(served, 1)
        begun = polls
        # Longer than the limit.
        await asyncio.wait({polling}, timeout=0.5)
        task = await answered(lambda: client.post("/v1/tasks", {"type": "t"}))

        assert [claimed["task"]["id"] for claimed in (await polling).json["tasks"]] == [task.json["id"]]
        assert polls == begun, "it was not broken off"


async def answered(call: Callable[[], Awaitable[Reply]]) -> Reply:
    """Call until there is an answer: on a busy machine the look-up of the caller may exceed the limit."""
    async with asyncio.timeout(60):
        while (reply := await call()).status == 503:
            pass
    return reply


async def test_a_shared_read_that_fails_fails_for_all_who_wait_for_it() -> None:
    """Otherwise each page would wait for the limit after the one before it."""
    reads, failing = 0, asyncio.Event()

    async def read() -> int:
        nonlocal reads
        reads += 1
        if reads == 1:
            await failing.wait()
            raise UnavailableError("silent")
        return reads

    shared = Shared(read, 60)
    pages = [asyncio.create_task(shared.get()) for _ in range(3)]
    await asyncio.sleep(0)
    failing.set()
    found = await asyncio.gather(*pages, return_exceptions=True)

    assert [str(each) for each in found] == ["silent"] * 3
    assert await shared.get() == 2
