from collections.abc import AsyncIterator, Iterator

import pytest

from lineshaft import Lineshaft, SyncLineshaft
from tests.client.helpers import engine_beside


@pytest.fixture
async def shaft(where: str, dsn: str) -> AsyncIterator[Lineshaft]:
    async with Lineshaft(where, max_connections=4) as opened, engine_beside(opened, dsn):
        yield opened


@pytest.fixture
def blocking(where: str, dsn: str) -> Iterator[SyncLineshaft]:
    with SyncLineshaft(where, max_connections=4) as opened:
        beside = engine_beside(opened.shaft, dsn)
        opened.loop.run(beside.__aenter__())
        yield opened
        opened.loop.run(beside.__aexit__(None, None, None))
