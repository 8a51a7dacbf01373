"""What a person decides about a dead letter (R-132)."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import Struct

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import shown
from lineshaft.model.storable import is_storable

MAX_REVIEWER = 200
MAX_NOTE = 10_000


class Resolution(StrEnum):
    #: Try again with fresh counters; with `not_before`, later.
    RETRY = "retry"
    #: The same with another spec.
    MODIFY_AND_RETRY = "modify_and_retry"
    #: Not needed any more, nor is what waits for it.
    CANCEL = "cancel"
    #: Cancelled, and out of the lists.
    DELETE = "delete"
    #: Somebody else must decide: it stays where it is, and people are alerted.
    ESCALATE = "escalate"


RETRIES = frozenset({Resolution.RETRY, Resolution.MODIFY_AND_RETRY})


class ResolutionRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    resolution: str
    reviewer: str
    note: str | None = None
    #: A retry starts no sooner.
    not_before: datetime | None = None
    #: The whole spec that `modify_and_retry` puts in place of the old one.
    spec: Mapping[str, Any] | None = None

    def check(self) -> Resolution:
        """Refuse what makes no sense, with every fault found."""
        faults: list[tuple[str, str]] = []
        found = next((known for known in Resolution if known == self.resolution), None)
        if found is None:
            faults.append(
                ("resolution", f"must be one of {', '.join(Resolution)}, got {shown(self.resolution)}")
            )
        if not _is_text(self.reviewer, MAX_REVIEWER) or not self.reviewer.strip():
            faults.append(("reviewer", f"must be a name of 1 to {MAX_REVIEWER} characters: who decides?"))
        if self.note is not None and not _is_text(self.note, MAX_NOTE):
            faults.append(("note", f"must be a text of at most {MAX_NOTE} characters"))
        if self.not_before is not None and found not in RETRIES:
            faults.append(("not_before", "is for retry and modify_and_retry only"))
        if self.not_before is not None and self.not_before.tzinfo is None:
            faults.append(("not_before", f"must have a time zone, got {self.not_before.isoformat()}"))
        if found is Resolution.MODIFY_AND_RETRY and self.spec is None:
            faults.append(("spec", "is needed for modify_and_retry: the whole spec as it shall be"))
        if self.spec is not None and found is not Resolution.MODIFY_AND_RETRY:
            faults.append(("spec", "is for modify_and_retry only"))
        if faults or found is None:
            raise InvalidInputError(errors=faults)
        return found


def _is_text(value: object, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most and is_storable(value)
