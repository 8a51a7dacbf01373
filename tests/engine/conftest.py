import pytest

from tests.engine.stateful import Histories


@pytest.fixture
def histories(request: pytest.FixtureRequest) -> Histories:
    return Histories(request.config.getoption("histories"))
