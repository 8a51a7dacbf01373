from collections.abc import AsyncIterator

import pytest

from lineshaft import Lineshaft
from tests.store.invariants import check_invariants


@pytest.fixture
async def shaft(dsn: str) -> AsyncIterator[Lineshaft]:
    """The queue, and afterwards the proof that whatever agents did left everything consistent."""
    async with Lineshaft(dsn, max_connections=6) as opened:
        yield opened
    check_invariants(dsn)
