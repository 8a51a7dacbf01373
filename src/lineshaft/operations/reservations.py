"""Reservations: a handler acquires what it may use of the rates of a key, uses it, and settles."""

from typing import Annotated

from msgspec import Meta

from lineshaft.errors import StaleClaimError
from lineshaft.operations import examples
from lineshaft.operations.operation import Engine, operation
from lineshaft.types import Scope
from lineshaft.types.request import Name, Request
from lineshaft.types.reservations import (
    MAX_ACQUIRE_WAIT_SEC,
    NewReservation,
    Reservation,
    Settlement,
    Units,
)
from lineshaft.types.work import ClaimRef

_CLAIM = {"claim_token": examples.CLAIM_TOKEN, "task_id": "task_01J8K2M3N4P5Q6R7S8T9V0W1X2"}
_CODES = ("not_found", "stale_claim", "invalid_transition")


class OfClaim(Request, frozen=True, kw_only=True):
    claim_token: str
    task_id: str


class Acquire(OfClaim, frozen=True, kw_only=True):
    key: Name
    #: One request where `requests` isn't stated.
    units: Units = Units()
    wait_sec: Annotated[float, Meta(ge=0, le=MAX_ACQUIRE_WAIT_SEC)] = 0.0
    #: A repeated call with this key returns the same reservation.
    idempotency_key: Name | None = None


@operation(
    "POST /v1/quotas/acquire",
    Scope.AGENT,
    # A repeated call without a key books again.
    repeatable=lambda request: request.idempotency_key is not None,
    codes=(*_CODES, "rate_limited"),
    example={**_CLAIM, "key": "model:gpt-x", "units": {"tokens": 2000}, "wait_sec": 30},
)
async def acquire(engine: Engine, request: Acquire) -> Reservation:
    """Reserve units of the rates of a key, all of them or none.

    Without room within `wait_sec`: 429 `rate_limited`, and `Retry-After` says when there is. More than a
    quota ever allows: 422. `reservation` is null if no quota of the key counts any of the units. A
    reservation ends with its claim; until it is settled, it counts in full.
    """
    new = NewReservation(await _claim(engine, request), request.key, request.units, request.idempotency_key)
    return Reservation(await engine.reservations.acquire(new, wait_sec=request.wait_sec))


class Settle(OfClaim, frozen=True, kw_only=True):
    #: As acquired; null: nothing is settled.
    reservation: Name | None
    #: What was used; what isn't stated stays as it was reserved.
    units: Units = Units()
    #: What the provider says it has left: the quota has no more than that from now on.
    remaining: Units = Units()


@operation(
    "POST /v1/quotas/settle",
    Scope.AGENT,
    repeatable=True,
    codes=_CODES,
    example={**_CLAIM, "reservation": "reservation_01J8K2M3N4P5Q6R7S8T9V0W1X2", "units": {"tokens": 1480}},
)
async def settle(engine: Engine, request: Settle) -> None:
    """Book what was used in place of what was reserved. It may be repeated: the last call counts."""
    claim = await _claim(engine, request)
    await engine.reservations.settle(Settlement(claim, request.reservation, request.units, request.remaining))


async def _claim(engine: Engine, request: OfClaim) -> ClaimRef:
    claim = (await engine.claim_key.tokens()).find(request.task_id, request.claim_token)
    if claim is None:
        raise StaleClaimError(
            f"The claim_token is not valid for task {request.task_id}. Send the claim_token that the claim "
            "of this task returned, unchanged."
        )
    return claim
