"""The claims of calls, verified by their tokens and, if the caller is bound to an agent, by their holders."""

from collections.abc import Callable, Iterable

from lineshaft.engine.caller import Caller
from lineshaft.errors import ForbiddenError, LineshaftError, NotFoundError, StaleClaimError
from lineshaft.model.storable import check_storable, is_storable
from lineshaft.server.service import Call
from lineshaft.types.protocol import ItemOfClaim
from lineshaft.types.work import ClaimRef

Verify = Callable[[ItemOfClaim], ClaimRef]


async def verifier(call: Call, items: Iterable[ItemOfClaim | LineshaftError]) -> Verify:
    """A function that returns the claim of one of the items; it raises unless the caller holds it."""
    engine, bound = call.service.engine, call.caller.agent_id
    tokens = await engine.claim_key.tokens()
    claims = {
        (item.id, item.claim_token): tokens.find(item.id, item.claim_token)
        for item in items
        if not isinstance(item, LineshaftError) and item.claim_token is not None
    }
    invalid = [task_id for (task_id, _), claim in claims.items() if claim is None and is_storable(task_id)]
    existing = await engine.claims.existing(invalid) if invalid else set()
    # The agent of a claim never changes: it still is the same when the call is carried out.
    held = [] if bound is None else [claim for claim in claims.values() if claim is not None]
    holders = await engine.claims.holders(held) if held else {}

    def verify(item: ItemOfClaim) -> ClaimRef:
        # Checked here, so that one invalid id is rejected alone and not with the whole batch.
        check_storable(id=item.id)
        claim = claims[item.id, item.claim_token or ""]
        if claim is None:
            raise _invalid(item.id) if item.id in existing else NotFoundError(f"There is no task {item.id}.")
        _check_holder(call.caller, claim, holders.get(claim))
        return claim

    return verify


def _invalid(task_id: str) -> LineshaftError:
    return StaleClaimError(
        f"The claim_token is not valid for task {task_id}. Send the claim_token that the claim of this task "
        "returned, unchanged. Without one, stop working on this task."
    )


def _check_holder(caller: Caller, claim: ClaimRef, holder: str | None) -> None:
    if caller.agent_id is not None and holder not in {None, caller.agent_id}:
        raise ForbiddenError(
            f"The token {caller.name!r} is bound to agent {caller.agent_id!r}, but this claim of task "
            f"{claim.id} is of agent {holder!r}. Use a token of that agent."
        )
