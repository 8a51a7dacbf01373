"""What a program writes, as its agent reads it."""

import asyncio
import os
from functools import partial

from lineshaft.agent.exec.process import Inflow


async def test_a_flood_of_output_does_not_block_the_event_loop() -> None:
    """There is always more to read; heartbeats, time limits and other tasks go on."""
    endless = os.open("/dev/zero", os.O_RDONLY)
    flow = Inflow(endless, partial(os.close, endless))
    turns = chunks = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    going_on = asyncio.create_task(others())
    async for _ in flow.chunks():
        chunks += 1
        if chunks == 20:
            break
    going_on.cancel()
    flow.close()

    assert turns >= 19
