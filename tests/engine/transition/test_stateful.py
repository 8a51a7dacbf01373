"""The whole lifecycle with every guard on, in any order Hypothesis can think of.

A run of all tests goes through a few histories, the same each time. For more, and other ones, this and
`test_money_sums.py` take `--histories 200`.
"""

import pytest

from tests.conftest import NewDatabase
from tests.engine.stateful import Histories
from tests.engine.transition.gated_machine import Gated


@pytest.mark.timeout(0)
def test_any_history_of_the_lifecycle(new_database: NewDatabase, histories: Histories) -> None:
    Gated.new_database = new_database
    histories.run(Gated, few=8, steps=25)
