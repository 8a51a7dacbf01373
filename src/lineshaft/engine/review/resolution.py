"""A decision about a dead letter on its way into the database."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lineshaft.engine.postgres.literals import json_text
from lineshaft.model.reviews import Resolution
from lineshaft.model.spec_change import SpecChange

#: So many changed places are named in an event; the whole change is in the table review.
_NAMED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    resolution: Resolution
    #: None: a retry by hand, past the desk.
    reviewer: str | None = None
    note: str | None = None
    not_before: datetime | None = None
    spec_before: bytes | None = None
    spec_change: bytes | None = None
    changed: tuple[SpecChange, ...] = ()

    def parameters(self) -> dict[str, Any]:
        return {
            "resolution": self.resolution,
            "reviewer": self.reviewer,
            "note": self.note,
            "not_before": self.not_before,
            "spec_before": json_text(self.spec_before),
            "spec_change": json_text(self.spec_change),
        }

    def told(self, task_id: str, *, root: str | None = None) -> dict[str, Any]:
        """For the event of one task; `root` is the one that was decided about, if that is another."""
        told: dict[str, Any] = {"resolution": self.resolution}
        for name in ("reviewer", "note", "not_before"):
            if (value := getattr(self, name)) is not None:
                told[name] = value
        if root is not None and root != task_id:
            told["with"] = root
        elif self.changed:
            told["changed"] = [change.path for change in self.changed[:_NAMED]]
        return told


BY_HAND = Review(resolution=Resolution.RETRY)
