"""Claim tokens: a claim as clients hold it, opaque to them.

A token is the epoch of the claim and the task's id. It fences: a token of another claim is refused. Every
server makes the same one, so an agent can continue at another server, or after a restart.
"""

import re

from lineshaft.model.storable import check_storable
from lineshaft.types.work import ClaimRef

_TOKEN = re.compile(r"(?P<epoch>[1-9][0-9]{0,8})\.(?P<id>.+)", re.DOTALL)
#: No claim has it.
_NO_EPOCH = -1


def token_of(task_id: str, epoch: int) -> str:
    return f"{epoch}.{task_id}"


def claim_of(task_id: str, token: str) -> ClaimRef:
    """The claim with this token; one that is invalid, or another task's, counts as stale."""
    # Checked here, so that one invalid id is rejected alone and not with the whole batch.
    check_storable(id=task_id)
    match = _TOKEN.fullmatch(token)
    epoch = int(match["epoch"]) if match is not None and match["id"] == task_id else _NO_EPOCH
    return ClaimRef(task_id, epoch, token)
