"""Changes of a task that was submitted."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import money
from lineshaft.model.fields import CHECKS, LIMIT_CHECKS

#: Fields of a change that a dead letter may have, before it is retried.
LIMITS = ("max_cost_usd", "max_total_cost_usd", "max_attempts", "max_duration_sec")
_REMOVABLE = frozenset({"deadline", "max_cost_usd", "max_total_cost_usd"})


class TaskChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays as it is."""

    priority: int | UnsetType = UNSET
    #: None removes it.
    deadline: datetime | UnsetType | None = UNSET
    #: Replace all tags.
    tags: Sequence[str] | UnsetType = UNSET
    #: None: no limit.
    max_cost_usd: Decimal | float | UnsetType | None = UNSET
    max_total_cost_usd: Decimal | float | UnsetType | None = UNSET
    max_attempts: int | UnsetType = UNSET
    max_duration_sec: float | UnsetType = UNSET

    def wanted(self) -> dict[str, Any]:
        """The given fields, checked like those of a submission, as they are stored."""
        given = {name: value for name, value in asdict(self).items() if value is not UNSET}
        faults = [
            (name, fault)
            for name, value in given.items()
            if not (value is None and name in _REMOVABLE) and (fault := _CHECKS[name](value))
        ]
        if faults:
            raise InvalidInputError(errors=faults)
        return {name: _stored(name, value) for name, value in given.items()}


_CHECKS: Mapping[str, Any] = {**CHECKS, **LIMIT_CHECKS}


def _stored(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name == "tags":
        return list(dict.fromkeys(value))
    return money(value) if name.endswith("_usd") else value
