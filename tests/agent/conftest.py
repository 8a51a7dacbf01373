from collections.abc import AsyncIterator

import pytest

from lineshaft import Lineshaft
from tests.client.helpers import engine_beside
from tests.invariants import check_invariants


@pytest.fixture
async def shaft(where: str, dsn: str) -> AsyncIterator[Lineshaft]:
    """The queue; afterwards the invariants are checked."""
    async with Lineshaft(where, max_connections=6) as opened, engine_beside(opened, dsn):
        yield opened
    check_invariants(dsn)
