"""A person's decision about a dead letter."""

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
    #: Retry with another spec.
    MODIFY_AND_RETRY = "modify_and_retry"
    #: Cancel the task, and the tasks that depend on it.
    CANCEL = "cancel"
    #: Cancel, and hide from lists.
    DELETE = "delete"
    #: Another person must decide: it stays a dead letter, and an alert is raised.
    ESCALATE = "escalate"


RETRIES = frozenset({Resolution.RETRY, Resolution.MODIFY_AND_RETRY})


class ResolutionRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    resolution: str
    reviewer: str
    note: str | None = None
    #: The earliest start of a retry.
    not_before: datetime | None = None
    #: The complete new spec for `modify_and_retry`.
    spec: Mapping[str, Any] | None = None

    def check(self) -> Resolution:
        """Return the resolution, or raise InvalidInputError with all faults."""
        faults: list[tuple[str, str]] = []
        found = next((known for known in Resolution if known == self.resolution), None)
        if found is None:
            faults.append(
                ("resolution", f"must be one of {', '.join(Resolution)}, got {shown(self.resolution)}")
            )
        if not _is_text(self.reviewer, MAX_REVIEWER) or not self.reviewer.strip():
            faults.append(("reviewer", f"must be a name of 1 to {MAX_REVIEWER} characters"))
        if self.note is not None and not _is_text(self.note, MAX_NOTE):
            faults.append(("note", f"must be a text of at most {MAX_NOTE} characters"))
        if self.not_before is not None and found not in RETRIES:
            faults.append(("not_before", "is only valid for retry and modify_and_retry"))
        if self.not_before is not None and self.not_before.tzinfo is None:
            faults.append(("not_before", f"must have a time zone, got {self.not_before.isoformat()}"))
        if found is Resolution.MODIFY_AND_RETRY and self.spec is None:
            faults.append(("spec", "is required for modify_and_retry: the complete new spec"))
        if self.spec is not None and found is not Resolution.MODIFY_AND_RETRY:
            faults.append(("spec", "is only valid for modify_and_retry"))
        if faults or found is None:
            raise InvalidInputError(errors=faults)
        return found


def _is_text(value: object, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most and is_storable(value)
