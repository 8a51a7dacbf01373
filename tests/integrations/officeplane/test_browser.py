"""A web UI on another origin, in a real browser: it reads, writes with JSON, and follows changes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser

from tests.dashboard.conftest import browser
from tests.server.conftest import Serve, Served

__all__ = ["browser"]

#: What the UI does first: metrics and the list, a new task, and a socket.
_PAGE = b"<!doctype html><title>UI</title>"
_LOAD = """async (server) => {
    const call = async (path, options) =>
        (await fetch(server + path, {credentials: "include", ...options})).json();
    const json = {"Content-Type": "application/json", "Idempotency-Key": "one"};
    const socket = new WebSocket(server.replace("http", "ws") + "/ws");
    const messages = [];
    const changed = new Promise((resolve, reject) => {
        socket.onerror = () => reject(new Error("no socket"));
        socket.onmessage = ({data}) => {
            messages.push(JSON.parse(data));
            if (messages.at(-1).type === "task_update") resolve();
        };
    });
    const greeted = new Promise((resolve, reject) => {
        socket.addEventListener("message", resolve, {once: true});
        socket.addEventListener("error", () => reject(new Error("no socket")), {once: true});
    });
    await greeted;
    const metrics = await call("/api/metrics");
    const body = JSON.stringify({taskType: "write_page", documentId: "abc"});
    const made = await call("/api/tasks", {method: "POST", headers: json, body});
    await changed;
    return {metrics, made, list: await call("/api/tasks"), types: messages.map((each) => each.type)};
}"""


@asynccontextmanager
async def page_server() -> AsyncIterator[str]:
    """Another server of this machine, with the UI's page; yields its origin."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        )
        writer.write(head % len(_PAGE) + _PAGE)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://localhost:{server.sockets[0].getsockname()[1]}"


async def load(browser: Browser, served: Served, origin: str) -> dict[str, Any]:
    context = await browser.new_context()
    try:
        page = await context.new_page()
        await page.goto(origin)
        found: dict[str, Any] = await page.evaluate(_LOAD, f"http://127.0.0.1:{served.client.port}")
        return found
    finally:
        await context.close()


async def test_an_allowed_page_reads_writes_and_listens(browser: Browser, serve: Serve) -> None:
    async with page_server() as origin, serve(allowed_origins=(origin,)) as served:
        found = await load(browser, served, origin)

        assert found["metrics"]["tasks"]["total"] == 0
        assert (found["made"]["state"], found["made"]["documentId"]) == ("QUEUED", "abc")
        assert [task["id"] for task in found["list"]] == [found["made"]["id"]]
        assert found["types"] == ["connection", "task_update"]


async def test_a_page_that_is_not_allowed_gets_nothing(
    browser: Browser, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    async with page_server() as origin, serve(allowed_origins=("https://ui.example",)) as served:
        with pytest.raises(Exception, match=r"no socket|Failed to fetch"):
            await load(browser, served, origin)

        assert json.loads((await served.client.get("/api/tasks")).body) == []
    assert "LINESHAFT_ALLOWED_ORIGINS" in capsys.readouterr().out
