"""Where agents ask for work, and wait for it without a database connection."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import NamedTuple

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from lineshaft.engine.agents import Present
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.lane_directory import Interest
from lineshaft.engine.feed.wakeups import Waiter
from lineshaft.server.routes import requests
from lineshaft.server.service import Service
from lineshaft.types.work import Claim

#: How often one looks again that has no room, and waits all the same.
_FULL_HANDS_SEC = 5.0
#: What the task is called that watches whether a client has left.
DEPARTURE = "lineshaft departure"


class Found(NamedTuple):
    claim: Claim
    slowdown_until: datetime | None = None


async def find_work(
    service: Service, agent_id: str, asked: requests.Claim, departure: "asyncio.Task[None]"
) -> Found:
    """Claim, waiting for up to `wait_sec` until there is something, or the client has left."""
    claim = await _claim(service, agent_id, asked)
    if claim.tasks:
        return Found(claim)
    present = await _present(service, agent_id, asked)
    if not asked.wait_sec:
        if present.is_back:
            # An agent that was taken for offline gets no work; now it may.
            claim = await _claim(service, agent_id, asked)
        return Found(claim, present.slowdown_until)
    async with _waiter(service, present, asked) as waiter:
        departure.add_done_callback(lambda _: waiter.close())
        claim = await _wait(service, agent_id, asked, waiter, departure)
    if claim.tasks or departure.done():
        return Found(claim)
    return Found(claim, (await _present(service, agent_id, asked)).slowdown_until)


async def _claim(service: Service, agent_id: str, asked: requests.Claim) -> Claim:
    async with service.turns:
        return await service.engine.claims.claim(
            agent_id, asked.incarnation, limit=asked.limit, types=asked.types
        )


async def _present(service: Service, agent_id: str, asked: requests.Claim) -> Present:
    async with service.turns:
        return await service.engine.fleet.present(agent_id, asked.incarnation)


async def _wait(
    service: Service, agent_id: str, asked: requests.Claim, waiter: Waiter, departure: "asyncio.Task[None]"
) -> Claim:
    """Look whenever there may be something, until the time is up, the client has left or the server stops."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + asked.wait_sec
    while True:
        claim = await _claim(service, agent_id, asked)
        if len(claim.tasks) == asked.limit:
            # There may be more than it could take.
            waiter.pass_on()
        elif claim.leaves_some:
            waiter.decline()
        left = ends - loop.time()
        if claim.tasks or left <= 0:
            return claim
        if not departure.done() and not service.stopping.is_set():
            # Nobody tells an agent that its own hands are free again.
            pause = service.wakeups.poll_interval
            await waiter.wait(min(left, pause if claim.has_room else min(pause, _FULL_HANDS_SEC)))
        if departure.done() or service.stopping.is_set():
            return Claim()


@contextlib.asynccontextmanager
async def _waiter(service: Service, present: Present, asked: requests.Claim) -> AsyncIterator[Waiter]:
    types = present.types if asked.types is None else asked.types
    interest = Interest(types, present.capabilities, present.models_available)
    await service.directory.enter(interest)
    with service.directory.waiter(interest) as waiter:
        yield waiter


@contextlib.contextmanager
def telling(engine: Engine, claim: Claim, departure: "asyncio.Task[None]") -> Iterator[None]:
    """Around what makes the answer: if the client won't get it, the tasks go back."""
    with engine.undelivered.release_if_undelivered(claim.tasks):
        yield
        if departure.done():
            raise ClientDisconnect


@contextlib.asynccontextmanager
async def departure_of(receive: Receive) -> "AsyncIterator[asyncio.Task[None]]":
    """Done when the client has left. Its request was read to the end, so nothing else can come."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.create_task(watch(), name=DEPARTURE)
    try:
        yield watching
    finally:
        watching.cancel()
        await asyncio.wait({watching})
