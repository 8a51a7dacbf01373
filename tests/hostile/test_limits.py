"""A caller that takes more than its share, pages of other sites, and a database that can't be written to."""

import asyncio
import statistics
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import Any

import psycopg
import pytest
from psycopg import sql

from lineshaft.engine.engine import Engine
from lineshaft.server.framework.streams import MAX_STREAMS_PER_TOKEN
from lineshaft.types import Scope
from tests.conftest import superuser
from tests.hostile.conftest import Serving, Target
from tests.server.client import Client, read_head

SOCKET = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
STREAM = {"Accept": "text/event-stream", "Connection": "keep-alive"}


async def with_token(dsn: str, target: Target, name: str, scope: Scope) -> Client:
    async with Engine(dsn) as engine:
        made = await engine.tokens.create(name, scope)
    return Client(target.port, made.token)


async def opened(resources: AsyncExitStack, client: Client, path: str, headers: dict[str, str]) -> int:
    """The status of a stream or socket that stays open."""
    reader, writer = await client.send("GET", path, headers=headers)
    resources.callback(writer.close)
    return (await read_head(reader))[0]


@pytest.mark.parametrize(
    ("path", "headers"), [("/v1/events", STREAM), ("/ws", SOCKET)], ids=["stream", "socket"]
)
async def test_one_token_cannot_take_all_streams(
    serving: Serving, dsn: str, path: str, headers: dict[str, str]
) -> None:
    with serving(LINESHAFT_AUTH="required") as target:
        greedy = await with_token(dsn, target, "greedy", Scope.READ)
        honest = await with_token(dsn, target, "honest", Scope.READ)
        async with target.unharmed(), AsyncExitStack() as resources:
            statuses = [
                await opened(resources, greedy, path, headers) for _ in range(MAX_STREAMS_PER_TOKEN + 10)
            ]
            other = await opened(resources, honest, path, headers)

    good = {200, 101}
    assert sum(status in good for status in statuses) == MAX_STREAMS_PER_TOKEN
    assert set(statuses[MAX_STREAMS_PER_TOKEN:]) == {429}
    assert other in good


@pytest.mark.slow("many readers for some seconds")
async def test_readers_in_a_loop_do_not_delay_submissions(target: Target) -> None:
    client = target.client
    await client.post("/v1/tasks/batch", {"tasks": [{"type": "t", "spec": {"n": n}} for n in range(500)]})
    over = asyncio.Event()

    reads: list[float] = []

    async def took(call: Awaitable[object]) -> float:
        began = time.monotonic()
        await call
        return time.monotonic() - began

    async def read() -> None:
        while not over.is_set():
            reads.append(await took(client.get("/v1/tasks", limit=500)))

    readers = [asyncio.create_task(read()) for _ in range(45)]
    times = [await took(client.submit()) for _ in range(10)]
    over.set()
    await asyncio.gather(*readers)

    # They don't queue behind the readers, whatever time the machine takes for a read.
    assert statistics.median(times) < statistics.median(reads) / 2, (times, reads)


async def test_a_form_of_another_site_is_refused(target: Target) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}

    for method in ("POST", "DELETE", "PATCH"):
        reply = await target.client.request(method, "/v1/pause", {}, headers=headers)
        assert (reply.status, reply.code) == (403, "forbidden")
    assert (await target.client.request("GET", "/v1/stats", headers=headers)).status == 200


async def test_where_tokens_are_required_the_description_of_the_api_needs_one(
    serving: Serving, dsn: str
) -> None:
    with serving(LINESHAFT_AUTH="required") as target:
        reader = await with_token(dsn, target, "reader", Scope.READ)
        for path in ("/docs", "/openapi.json"):
            assert (await target.client.get(path)).status == 401
            assert (await reader.get(path)).status == 200


@pytest.mark.parametrize("setting", ["default_transaction_read_only = on", "temp_file_limit = 0"])
async def test_a_database_that_cannot_be_written_to_is_not_ready(
    serving: Serving, dsn: str, setting: str
) -> None:
    """As a standby, and as one whose disk has no room for a file."""
    with serving() as target, psycopg.connect(superuser(dsn), autocommit=True) as connection:
        assert (await target.client.get("/readyz")).status == 200
        name = connection.info.dbname
        connection.execute(sql.SQL("ALTER DATABASE {} SET " + setting).format(sql.Identifier(name)))
        # Connections have the setting from their beginning.
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND backend_type = 'client backend'"
        )
        async with asyncio.timeout(60):
            # 503 for another reason first: its connections are gone.
            while b"can't be written to" not in (reply := await target.client.get("/readyz")).body:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

        assert (reply.status, reply.code) == (503, "unavailable")
        assert (await target.client.get("/healthz")).status == 200


def test_the_role_of_the_embedded_database_is_an_ordinary_owner(connection: psycopg.Connection[Any]) -> None:
    rights = connection.execute(
        "SELECT rolsuper, rolcreaterole, rolreplication, rolbypassrls FROM pg_roles"
        " WHERE rolname = current_user"
    ).fetchone()

    assert rights == (False, False, False, False)
    for attack in ("COPY (SELECT 1) TO PROGRAM 'id'", "SELECT pg_read_file('PG_VERSION')"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(attack)
