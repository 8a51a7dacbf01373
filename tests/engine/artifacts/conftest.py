from collections.abc import AsyncIterator

import pytest

from lineshaft.artifacts.store import Store
from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from tests.artifact_stores import place, store

__all__ = ["place", "store"]


@pytest.fixture
async def engine(dsn: str, clock: MovableClock, store: Store) -> AsyncIterator[Engine]:
    async with Engine(dsn, clock=clock, store=store, max_artifact_bytes=64 << 20) as opened:
        yield opened
