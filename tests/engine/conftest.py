from collections.abc import AsyncIterator

import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.rules import Rules
from tests.engine.stateful import Histories


@pytest.fixture
def histories(request: pytest.FixtureRequest) -> Histories:
    return Histories(request.config.getoption("histories"))


@pytest.fixture
def rules() -> Rules:
    """What the operator decides; a module may have its own."""
    return Rules()


@pytest.fixture
async def engine(dsn: str, clock: MovableClock, rules: Rules) -> AsyncIterator[Engine]:
    async with Engine(dsn, clock=clock, max_connections=4, rules=rules) as opened:
        yield opened
