from collections.abc import AsyncIterator

import psycopg
import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.rules import Rules
from tests.engine.stateful import Histories
from tests.invariants import check_invariants
from tests.world import World


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


@pytest.fixture
async def world(engine: Engine, connection: psycopg.Connection, clock: MovableClock) -> AsyncIterator[World]:
    """The engine; after the test, a check that everything is consistent."""
    yield World(engine, connection, clock)
    check_invariants(connection)
