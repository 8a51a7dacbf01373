"""A claim as clients hold it: the task's id and the claim's epoch, opaque to them.

It fences, it doesn't authenticate: a token that is not of the claim in force is refused, whoever sends it.
Every server makes the same one, so an agent may go on at another server, or after a restart.
"""

import re

from lineshaft.types.work import ClaimRef

_TOKEN = re.compile(r"(?P<epoch>[1-9][0-9]{0,8})\.(?P<id>.+)", re.DOTALL)
#: No claim has it.
_NO_EPOCH = -1


def token_of(task_id: str, epoch: int) -> str:
    return f"{epoch}.{task_id}"


def claim_of(task_id: str, token: str) -> ClaimRef:
    """The claim that a token stands for; one that is none, or another task's, is as good as an old one."""
    match = _TOKEN.fullmatch(token)
    held = match is not None and match["id"] == task_id
    return ClaimRef(task_id, int(match["epoch"]) if match and held else _NO_EPOCH)
