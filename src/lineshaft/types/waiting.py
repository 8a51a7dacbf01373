"""Waiting tasks by reason."""

from datetime import datetime

from msgspec import Struct

from lineshaft.model.states import Status
from lineshaft.types.stats import ReasonCode


class WaitingReason(Struct, frozen=True, kw_only=True):
    """Tasks that wait for the same reason. One with several reasons counts under the first that `why` has."""

    #: None: they are runnable, and the next free agent takes them in their turn.
    code: ReasonCode | None
    count: int
    exact: bool
    #: Since when the oldest of them waits; of tasks that were never READY, since its submission.
    oldest_at: datetime | None
    #: When the first of them is due: of retries and scheduled tasks.
    next_at: datetime | None
    #: Types with the most of them first; at most 20.
    types: list[str]
    #: The states that they are in: with the types, the filter of a list that shows them.
    statuses: list[Status]
    #: The reason in words, of the largest group; None: it differs from task to task, see `why`.
    detail: str | None


class Waiting(Struct, frozen=True, kw_only=True):
    as_of: datetime
    #: The largest first.
    reasons: list[WaitingReason]
