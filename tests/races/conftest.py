from collections.abc import AsyncIterator

import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.types import NewAgent
from tests.invariants import check_invariants
from tests.races.helpers import patient


@pytest.fixture
async def engines(dsn: str, clock: MovableClock) -> AsyncIterator[tuple[Engine, Engine]]:
    """Two nodes on one database; afterwards everything must be consistent."""
    place = patient(dsn)
    async with Engine(place, clock=clock) as one, Engine(place, clock=clock) as two:
        for agent in ("a1", "a2"):
            await one.fleet.register(NewAgent(id=agent, max_concurrent_tasks=100))
        yield one, two
    check_invariants(dsn)
