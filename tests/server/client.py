"""A client that shows everything: real requests over a real socket, answers as they came."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of a problem, which must look like one."""
        assert self.headers["content-type"] == "application/problem+json", self
        found = self.json
        assert found["status"] == self.status
        assert {"type", "title", "detail", "retryable"} <= found.keys()
        return str(found["code"])


@dataclass
class Client:
    port: int
    token: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Any = None,
        headers: Mapping[str, str] | None = None,
        raw: bytes | None = None,
    ) -> Reply:
        reader, writer = await self.send(method, path, body, query=query, headers=headers, raw=raw)
        try:
            return await read_reply(reader)
        finally:
            writer.close()

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Any = None,
        headers: Mapping[str, str] | None = None,
        raw: bytes | None = None,
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Without waiting for the answer."""
        data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        target = path + ("?" + urlencode(query, doseq=True) if query else "")
        all_headers = {
            "Host": f"127.0.0.1:{self.port}",
            "Content-Length": str(len(data)),
            "Connection": "close",
        }
        if self.token is not None:
            all_headers["Authorization"] = f"Bearer {self.token}"
        all_headers |= self.headers
        all_headers |= headers or {}
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        await writer.drain()
        return reader, writer

    async def get(self, path: str, **query: Any) -> Reply:
        return await self.request("GET", path, query=query)

    async def post(self, path: str, body: Any = None, **options: Any) -> Reply:
        return await self.request("POST", path, {} if body is None else body, **options)

    async def put(self, path: str, body: Any) -> Reply:
        return await self.request("PUT", path, body)

    async def patch(self, path: str, body: Any) -> Reply:
        return await self.request("PATCH", path, body)

    async def delete(self, path: str) -> Reply:
        return await self.request("DELETE", path)

    # Short ways to do what most tests need.

    async def submit(self, type_: str = "code", **fields: Any) -> dict[str, Any]:
        reply = await self.post("/v1/tasks", {"type": type_, **fields})
        assert reply.status == 201, reply
        task: dict[str, Any] = reply.json
        return task

    async def task(self, task_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.get(f"/v1/tasks/{task_id}")).json
        return found

    async def register(self, agent_id: str = "a1", **fields: Any) -> dict[str, Any]:
        reply = await self.post("/v1/agents", {"id": agent_id, "max_concurrent_tasks": 10, **fields})
        assert reply.status in {200, 201}, reply
        agent: dict[str, Any] = reply.json
        return agent

    async def claim(self, agent: Mapping[str, Any], **fields: Any) -> list[dict[str, Any]]:
        asked = {"incarnation": agent["incarnation"], **fields}
        reply = await self.post(f"/v1/agents/{agent['id']}/claim", asked)
        assert reply.status == 200, reply
        found: list[dict[str, Any]] = reply.json["tasks"]
        return found

    async def hold(self, agent: Mapping[str, Any], **fields: Any) -> tuple[str, str]:
        """The one task that is to be had, RUNNING: its id and claim token."""
        (item,) = await self.claim(agent, **fields)
        task_id, token = item["task"]["id"], item["claim_token"]
        started = await self.post(f"/v1/tasks/{task_id}/start", {"claim_token": token})
        assert started.json["status"] == "RUNNING", started
        return task_id, token

    @asynccontextmanager
    async def stream(self, **query: Any) -> AsyncIterator["Stream"]:
        headers = {"Accept": "text/event-stream", "Connection": "keep-alive"}
        if "last_event_id" in query:
            headers["Last-Event-ID"] = query.pop("last_event_id")
        reader, writer = await self.send("GET", "/v1/events", query=query, headers=headers)
        status, answered = await read_head(reader)
        try:
            yield Stream(status, answered, reader)
        finally:
            writer.close()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    pairs = (line.split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), {name.lower(): value for name, value in pairs}


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    status, headers = await read_head(reader)
    return Reply(status, headers, await reader.read())


@dataclass
class Stream:
    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader

    async def event(self) -> dict[str, str]:
        """The next one; comments are passed over. Raises EOFError when the stream is over."""
        fields: dict[str, str] = {}
        while True:
            line = await self.line()
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "data" in fields:
                return fields

    async def rest(self) -> list[dict[str, str]]:
        """All events until the stream is over."""
        events = []
        with suppress(EOFError):
            while True:
                events.append(await self.event())
        return events

    async def line(self) -> str:
        while not getattr(self, "_left", b"").count(b"\n"):
            size = (await self.reader.readline()).strip()
            if not size or size == b"0":
                raise EOFError
            chunk = await self.reader.readexactly(int(size, 16))
            await self.reader.readline()
            self._left = getattr(self, "_left", b"") + chunk
        line, _, self._left = self._left.partition(b"\n")
        return line.decode().rstrip("\r")
