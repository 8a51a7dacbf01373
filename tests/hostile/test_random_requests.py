"""A few hundred random requests. `make fuzz` sends many more."""

from lineshaft.server.app import OPERATIONS
from tests.fuzz.run import Outcome, fuzz, tokens_of_all_scopes
from tests.hostile.conftest import Serving


async def test_random_requests_do_no_harm(serving: Serving) -> None:
    outcome = Outcome()
    with serving() as target:
        tokens = await tokens_of_all_scopes(target.client)
        async with target.unharmed():
            await fuzz(target, tokens, requests=250, seed=1, outcome=outcome)

    assert outcome.faults == []
    assert outcome.statuses[200] + outcome.statuses[201] > 25, "not all are refused at once"
    assert len(outcome.operations) > len(OPERATIONS) / 2
