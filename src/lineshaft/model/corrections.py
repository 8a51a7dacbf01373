"""How the correction of a task's cost is divided among its claims, and so among the agents that made them."""

from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

_NOTHING = Decimal(0)


class ClaimCost(NamedTuple):
    """What one claim of a task has cost, with earlier corrections."""

    epoch: int
    agent_id: str | None
    cost_usd: Decimal
    #: What the claim reported beyond its ceiling, without a decision.
    disputed_usd: Decimal


#: For a task that was never claimed.
_NO_CLAIM = ClaimCost(0, None, _NOTHING, _NOTHING)


def shares(claims: Sequence[ClaimCost], difference: Decimal) -> list[tuple[ClaimCost, Decimal]]:
    """The part of a difference that each claim takes; `claims` are the newest first.

    What is added goes to claims that reported it and to the newest; what is taken away comes from the newest
    claims that cost something, so that no agent gets back more than it was charged.
    """
    parts: list[tuple[ClaimCost, Decimal]] = []
    rest = difference
    for claim in claims:
        part = min(rest, claim.disputed_usd) if difference > 0 else max(rest, -claim.cost_usd)
        if part:
            parts.append((claim, part))
            rest -= part
    if rest:
        parts.append((claims[0] if claims else _NO_CLAIM, rest))
    return parts
