"""The input and the result of a check."""

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


class NoVerdict(Exception):  # noqa: N818 - not an error of the output: there is no result yet
    """The check could not be made. It is repeated later."""

    def __init__(self, message: str, *, cost_usd: Decimal | None = NOTHING) -> None:
        """`cost_usd`: what was spent nevertheless; None: an unknown amount."""
        self.cost_usd = None if cost_usd is None else money(cost_usd, "cost_usd")
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Verdict:
    passed: bool
    #: Why the output was rejected; each is a complete sentence, because the next attempt receives them.
    reasons: tuple[str, ...] = ()
    score: float | None = None
    #: The cost of the check itself. None: an unknown amount.
    cost_usd: Decimal | None = NOTHING
    #: The model that judged.
    model: str | None = None

    def __post_init__(self) -> None:
        short = tuple(replace_unstorable(_shortened(reason)) for reason in self.reasons[:MAX_REASONS])
        object.__setattr__(self, "reasons", short)
        if self.cost_usd is not None:
            money(self.cost_usd, "cost_usd")  # only validates: the exact amount is recorded
        if self.score is not None and not math.isfinite(self.score):
            raise InvalidInputError(errors=[("score", f"must be a number, got {self.score}")])


PASSED = Verdict(passed=True)


def rejected(*reasons: str) -> Verdict:
    return Verdict(passed=False, reasons=reasons or ("no reason given",))


@dataclass(frozen=True)
class CandidateOutput:
    """An output as its agent submitted it, and its task."""

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
        """The data itself if it is a string, otherwise its JSON."""
        return self.data if isinstance(self.data, str) else msgspec.json.encode(self.data).decode()


def _shortened(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 1] + "…"
