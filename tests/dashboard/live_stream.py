"""The stream of an open page, without a browser."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

from tests.dashboard.conftest import Served
from tests.server.client import Stream, read_head


@asynccontextmanager
async def live_stream(served: Served, page: str, cookies: dict[str, str]) -> AsyncIterator[Stream]:
    headers = {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}
    reader, writer = await served.client.send("GET", f"/live?page={quote(page, safe='')}", headers=headers)
    status, answered = await read_head(reader)
    try:
        yield Stream(status, answered, reader)
    finally:
        writer.close()
