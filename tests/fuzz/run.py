"""A run: many connections that send random requests with tokens of all scopes, and what came of them."""

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from lineshaft.types import Scope
from tests.fuzz.generator import Generator, Names, Request
from tests.fuzz.wire import Wire
from tests.hostile.conftest import Target
from tests.server.client import Client, Reply

#: No call waits, so none takes this long.
_ANSWER_SEC = 60.0
_EXPLAINED = 20
#: A call that the database is too busy for; its client repeats it.
_BUSY = 503


@dataclass
class Outcome:
    statuses: Counter[int] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    #: What must not happen, with the request that caused it.
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def record(self, request: Request, reply: Reply) -> None:
        self.statuses[reply.status] += 1
        self.operations[request.operation] += 1
        allowed = request.documented
        if reply.status >= 500 and reply.status != _BUSY:
            self.fault(f"{reply.status} {reply.body[:500]!r}", request)
        elif allowed is not None and reply.status not in allowed:
            self.fault(f"undocumented {reply.status} {reply.body[:300]!r}", request)

    def fault(self, what: str, request: Request) -> None:
        if len(self.faults) < _EXPLAINED:
            self.faults.append(f"{what}\n    {request}")


async def tokens_of_all_scopes(client: Client) -> dict[str, str | None]:
    """Made by the first caller of a new server, who is trusted; the last one may do everything."""
    first = (await client.post("/v1/tokens", {"name": "fuzz-first", "scope": "admin"})).json["token"]
    admin = Client(client.port, first)
    made: dict[str, str | None] = {"none": None, "wrong": "lsh_wrong"}
    bound = {"name": "fuzz-bound", "scope": "agent", "agent_id": "fuzz-bound"}
    made["bound"] = (await admin.post("/v1/tokens", bound)).json["token"]
    for scope in Scope:
        asked = {"name": f"fuzz-{scope}", "scope": scope}
        made[scope] = (await admin.post("/v1/tokens", asked)).json["token"]
    return made


async def fuzz(
    target: Target,
    tokens: dict[str, str | None],
    *,
    requests: int,
    seed: int,
    outcome: Outcome,
    connections: int = 8,
) -> None:
    """Fill in the outcome, also if the run doesn't come to its end."""
    names, numbers = Names(), count()
    began = time.monotonic()

    async def send(worker: int) -> None:
        generator = Generator(seed * 1000 + worker, names, tokens)
        async with Wire(target.port) as wire:
            while next(numbers) < requests and target.process.poll() is None:
                request = generator.next()
                try:
                    async with asyncio.timeout(_ANSWER_SEC):
                        reply = await wire.call(request)
                except (OSError, EOFError, TimeoutError) as error:
                    outcome.fault(f"no answer: {error!r}", request)
                    return
                outcome.record(request, reply)
                with contextlib.suppress(ValueError):
                    names.learn(reply.json)

    await asyncio.gather(*(send(worker) for worker in range(connections)))
    outcome.seconds = time.monotonic() - began
