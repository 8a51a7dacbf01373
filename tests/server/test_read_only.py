"""A database that accepts no writes: a standby, or a full disk. People look at the dashboard right then."""

import asyncio

import psycopg
from psycopg import sql

from tests.server.conftest import Served


async def test_every_read_is_answered(served: Served, dsn: str) -> None:
    client = served.client
    task = await client.submit("code")
    await client.register()
    document = (await client.get("/openapi.json")).json
    with psycopg.connect(dsn, autocommit=True) as operator:
        operator.execute(
            sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(
                sql.Identifier(operator.info.dbname)
            )
        )
        # Sessions that are open already may still write.
        operator.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND backend_type = 'client backend'"
        )

    # A call that meets a session at its end is refused.
    async with asyncio.timeout(60):
        while True:
            if (await client.get("/v1/stats")).status == 200:
                break
            await asyncio.sleep(0.02)

    reads = {path for path, item in document["paths"].items() if "get" in item and "{" not in path}
    reads -= {"/readyz"}
    answered = {path: (await client.get(path)).status for path in sorted(reads)}
    pages = {path: (await client.get(path)).status for path in ("/", "/costs", f"/tasks/{task['id']}")}

    assert {path: status for path, status in (answered | pages).items() if status >= 500} == {}
    assert (await client.get("/readyz")).status == 503
