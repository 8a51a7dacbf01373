"""What a check is given, and what it says."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

import msgspec

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import money
from lineshaft.model.storable import replace_unstorable

MAX_REASONS = 10
MAX_REASON = 4_000
NOTHING = Decimal(0)


class NoVerdict(Exception):  # noqa: N818 - nothing is wrong with the output; there is just no answer yet
    """The check could not be made. It is tried again later."""

    def __init__(self, message: str, *, cost_usd: Decimal | None = NOTHING) -> None:
        """`cost_usd`: what was spent all the same."""
        self.cost_usd = None if cost_usd is None else money(cost_usd, "cost_usd")
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Verdict:
    passed: bool
    #: Why not; each stands for itself, because the next attempt is told them.
    reasons: tuple[str, ...] = ()
    score: float | None = None
    #: What the check itself cost. None: it cost something, but nobody knows how much.
    cost_usd: Decimal | None = NOTHING
    #: Which model judged.
    model: str | None = None

    def __post_init__(self) -> None:
        short = tuple(replace_unstorable(_shortened(reason)) for reason in self.reasons[:MAX_REASONS])
        object.__setattr__(self, "reasons", short)
        if self.cost_usd is not None:
            money(self.cost_usd, "cost_usd")  # refuses what is none; recorded as it was said
        if self.score is not None and not math.isfinite(self.score):
            raise InvalidInputError(errors=[("score", f"must be a number, got {self.score}")])


PASSED = Verdict(passed=True)


def refused(*reasons: str) -> Verdict:
    return Verdict(passed=False, reasons=reasons or ("no reason was given",))


@dataclass(frozen=True)
class CandidateOutput:
    """An output as its agent handed it in, and the task that it is for."""

    task_id: str
    epoch: int
    type: str
    title: str
    #: JSON.
    spec: bytes
    #: JSON: {data, artifacts, decision_report}.
    output: bytes

    @cached_property
    def _parts(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = msgspec.json.decode(self.output)
        return found

    @property
    def data(self) -> Any:
        return self._parts.get("data")

    @property
    def artifacts(self) -> Any:
        return self._parts.get("artifacts")

    @property
    def decision_report(self) -> Any:
        return self._parts.get("decision_report")

    @cached_property
    def spec_data(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = msgspec.json.decode(self.spec)
        return found

    @cached_property
    def text(self) -> str:
        """The data as text: itself if it is one, else its JSON."""
        return self.data if isinstance(self.data, str) else msgspec.json.encode(self.data).decode()


def _shortened(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 1] + "…"
