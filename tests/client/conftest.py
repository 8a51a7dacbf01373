from collections.abc import AsyncIterator, Iterator

import pytest

from lineshaft import Lineshaft, SyncLineshaft


@pytest.fixture
async def shaft(dsn: str) -> AsyncIterator[Lineshaft]:
    async with Lineshaft(dsn, max_connections=4) as opened:
        yield opened


@pytest.fixture
def blocking(dsn: str) -> Iterator[SyncLineshaft]:
    with SyncLineshaft(dsn, max_connections=4) as opened:
        yield opened
