"""A person's decision about a dead letter."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import shown
from lineshaft.model.open_enum import OpenEnum
from lineshaft.model.storable import is_storable

MAX_REVIEWER = 200
MAX_NOTE = 10_000
#: In place of the names of steps.
ALL_STEPS = "all"


class Resolution(OpenEnum):
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
    #: Names of recorded steps that run again, or "all"; only for retry and modify_and_retry.
    forget_steps: list[str] | str | None = None

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
        if fault := self._forget_fault(found):
            faults.append(("forget_steps", fault))
        if faults or found is None:
            raise InvalidInputError(errors=faults)
        return found

    def _forget_fault(self, resolution: Resolution | None) -> str | None:
        wanted = self.forget_steps
        if wanted is None:
            return None
        if resolution is not None and resolution not in RETRIES:
            return "is only valid for retry and modify_and_retry"
        if isinstance(wanted, str):
            return None if wanted == ALL_STEPS else f'must be a list of names or "all", got {shown(wanted)}'
        if not wanted or not all(name and is_storable(name) for name in wanted):
            return 'must be a list of one or more names of steps, or "all"'
        return None


def _is_text(value: object, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most and is_storable(value)
