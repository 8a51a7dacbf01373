"""A hostile client in a chaos run: `python -m tests.chaos.attacker`.

It has tokens with the scopes `read`, `submit` and `agent`, the last bound to an agent of its own, and a way
to the servers. Nothing that it sends may be accepted, so that the rules about honest work need not know of
it. It ends with code 1 if anything was.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from tests.fuzz.generator import Generator, Names
from tests.fuzz.wire import Wire
from tests.server.client import Client, Reply

#: One attack takes at most so long, whatever the server does.
_ATTACK_SEC = 15.0
_PAUSE_SEC = 0.2
#: So many attacks are under way at once.
_AT_ONCE = 3
_SOCKETS, _STREAMS, _READERS = 40, 20, 8
#: Calls that change something, with bodies that would be accepted from somebody else.
_ENDINGS: dict[str, dict[str, Any]] = {
    "complete": {"output": {"data": "stolen"}, "cost_usd": 5},
    "fail": {"error": "stolen", "cost_usd": 5},
    "release": {},
    "cancel": {"reason": "stolen"},
    "start": {},
}
_OPERATIONS = ("/v1/pause", "/v1/tasks/cancel", "/v1/tokens", "/v1/dead-letters/resolve")
#: A task that isn't created: it depends on one that doesn't exist. All else is checked before.
_IMPOSSIBLE = {"type": "attack", "depends_on": ["task_that_does_not_exist"]}


def _large_schema(patterns: int) -> dict[str, object]:
    return {"properties": {f"p{n}": {"pattern": rf"[\w\pL]{{12}}x{n}"} for n in range(patterns)}}


_RECURSIVE = {
    "$ref": "#/$defs/r",
    "$defs": {
        "r": {
            "anyOf": [
                {"type": "array", "items": {"$ref": "#/$defs/r"}},
                {"type": "array", "items": {"$ref": "#/$defs/r"}, "minItems": 1},
                {"const": 5},
            ]
        }
    },
}


class Attacker:
    def __init__(self, port: int, seed: int, tokens: dict[str, str]) -> None:
        self._port = port
        self._dice = random.Random(seed)
        self._reader = Client(port, tokens["read"])
        self._submitter = Client(port, tokens["submit"])
        self._worker = Client(port, tokens["agent"])
        self._generator = Generator(
            seed, Names(), {"none": None, "wrong": "lsh_wrong", "read": tokens["read"]}
        )
        self.attacks: tuple[Callable[[], Awaitable[None]], ...] = (
            self.without_token,
            self.with_too_little_scope,
            self.forge_claims,
            self.claim_as_others,
            self.send_large_bodies,
            self.send_schemas,
            self.open_idle_connections,
            self.hold_streams,
            self.read_in_a_loop,
            self.send_at_random,
        )
        self.refused: Counter[str] = Counter()
        #: What must not happen.
        self.accepted: list[str] = []

    def _expect_refusal(self, name: str, reply: Reply) -> None:
        if reply.status < 400 or reply.status == 500:
            self.accepted.append(f"{name}: {reply.status} {reply.body[:300]!r}")
        else:
            self.refused[f"{name}: {reply.status}"] += 1

    async def without_token(self) -> None:
        client = Client(self._port)
        for path in _OPERATIONS:
            self._expect_refusal("without token", await client.post(path, {"type": "x"}))

    async def with_too_little_scope(self) -> None:
        for client in (self._reader, self._submitter, self._worker):
            self._expect_refusal("little scope", await client.post(self._dice.choice(_OPERATIONS), {}))

    async def forge_claims(self) -> None:
        running = await self._reader.get("/v1/tasks", status=["RUNNING", "CLAIMED"], limit=20)
        if running.status != 200:
            return
        for task in running.json["items"]:
            epoch = task["claim"]["epoch"]
            token = self._dice.choice((f"{epoch}.{task['id']}", "A" * 59, ""))
            call = self._dice.choice(list(_ENDINGS))
            body = {**_ENDINGS[call], "claim_token": token}
            self._expect_refusal("forged", await self._worker.post(f"/v1/tasks/{task['id']}/{call}", body))
            item = {**body, "id": task["id"]}
            batch = await self._worker.post(f"/v1/work/{call}", {"items": [item]})
            if batch.status == 200 and "problem" not in batch.json["items"][0]:
                self.accepted.append(f"forged in a batch: {batch.body[:300]!r}")

    async def claim_as_others(self) -> None:
        agents = await self._reader.get("/v1/agents")
        if agents.status != 200:
            return
        for agent in agents.json["items"]:
            for call in ("claim", "heartbeat", "drain", "leave"):
                path = f"/v1/agents/{agent['id']}/{call}"
                body = {"incarnation": agent["incarnation"]}
                self._expect_refusal("as another agent", await self._worker.post(path, body))

    async def send_large_bodies(self) -> None:
        for raw in (b"[" * (8 << 20), b'{"type": "' + b"x" * (9 << 20) + b'"}', b"[{}," * (1 << 20)):
            self._expect_refusal("large body", await self._submitter.request("POST", "/v1/tasks", raw=raw))

    async def send_schemas(self) -> None:
        for schema in (_large_schema(1500), _large_schema(20), _RECURSIVE):
            output = {"validation": "json-schema", "validation_schema": schema}
            reply = await self._submitter.post("/v1/tasks", {**_IMPOSSIBLE, "output": output})
            self._expect_refusal("schema", reply)

    async def open_idle_connections(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for number in range(_SOCKETS):
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                stack.callback(writer.close)
                writer.write((b"", b"GET /v1/ta", b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\n")[number % 3])
            await asyncio.sleep(3)

    async def hold_streams(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(_STREAMS):
                await stack.enter_async_context(self._reader.stream())
            await asyncio.sleep(3)

    async def read_in_a_loop(self) -> None:
        async def read() -> None:
            for _ in range(10):
                await self._reader.get(self._dice.choice(("/v1/tasks", "/v1/events", "/v1/stats")), limit=500)

        await asyncio.gather(*(read() for _ in range(_READERS)))

    async def send_at_random(self) -> None:
        async with Wire(self._port) as wire:
            for _ in range(200):
                request = self._generator.next()
                reply = await wire.call(request)
                if reply.status == 500:
                    self.accepted.append(f"500 for {request}")

    async def run(self, ending: asyncio.Event) -> None:
        while not ending.is_set():
            # A server that is away, or has been killed, answers nothing: that isn't the attacker's business.
            with contextlib.suppress(OSError, EOFError, TimeoutError, json.JSONDecodeError, AssertionError):
                async with asyncio.timeout(_ATTACK_SEC):
                    await self._dice.choice(self.attacks)()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), _PAUSE_SEC)


async def _attack(args: argparse.Namespace) -> int:
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    tokens = {scope: os.environ[f"ATTACKER_{scope.upper()}"] for scope in ("read", "submit", "agent")}
    attacker = Attacker(urlsplit(args.url).port or 0, args.seed, tokens)
    await asyncio.gather(*(attacker.run(ending) for _ in range(_AT_ONCE)))
    sys.stderr.write(f"{args.name}: refused {dict(attacker.refused)}, accepted {attacker.accepted}\n")
    return 1 if attacker.accepted else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.attacker")
    parser.add_argument("name")
    parser.add_argument("--url", required=True)
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(_attack(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
