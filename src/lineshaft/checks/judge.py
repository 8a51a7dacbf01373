"""The `llm-judge` check: a judge scores an output.

A judge returns a score from 0 to 1 and its reasons; the task names the criteria and the minimum score. A
judge is any object with a method `judge`; `llm_judge` has one that asks a language model.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Protocol

from msgspec import Struct

from lineshaft.checks.verdict import CandidateOutput, NoVerdict, Verdict

DEFAULT_THRESHOLD = 0.7
MAX_CRITERIA = 20_000


class Judgement(Struct, frozen=True):
    #: From 0 to 1.
    score: float
    reasons: tuple[str, ...] = ()
    #: None: unknown.
    cost_usd: Decimal | None = None
    model: str | None = None


class Judge(Protocol):
    async def judge(self, criteria: str, candidate: CandidateOutput) -> Judgement:
        """Score an output, or raise `NoVerdict` if that isn't possible now."""
        ...


class JudgeCheck(Struct, frozen=True):
    judge: Judge | None

    def fault(self, schema: Any) -> str | None:
        if self.judge is None:
            return (
                "no judge is configured: set LINESHAFT_LLM_MODEL, or LINESHAFT_JUDGE_MODEL for a model of "
                "its own (and LINESHAFT_JUDGE_URL for an OpenAI-compatible API), and install lineshaft[llm]"
            )
        if not isinstance(schema, dict) or not schema.keys() <= {"criteria", "threshold"}:
            return 'must be {"criteria": TEXT}, optionally with a threshold'
        criteria, threshold = schema.get("criteria"), schema.get("threshold")
        if not isinstance(criteria, str) or not criteria.strip() or len(criteria) > MAX_CRITERIA:
            return f"criteria must be a text of 1 to {MAX_CRITERIA} characters"
        if threshold is not None and not _is_score(threshold):
            return f"threshold must be a number from 0 to 1, got {str(threshold)[:100]}"
        return None

    async def check(self, schema: Mapping[str, Any], candidate: CandidateOutput) -> Verdict:
        if self.judge is None:
            raise NoVerdict("no judge is configured on this node")
        given = schema.get("threshold")
        threshold = DEFAULT_THRESHOLD if given is None else given
        found = await self.judge.judge(schema["criteria"], candidate)
        if not _is_score(found.score):
            raise NoVerdict(
                f"the judge's score must be from 0 to 1, got {found.score!r}", cost_usd=found.cost_usd
            )
        passed = found.score >= threshold
        reasons = found.reasons
        if not passed:
            reasons = (f"the judge's score is {found.score:g}, below {threshold:g}", *reasons)
        return Verdict(passed, reasons, found.score, found.cost_usd, found.model)


def _is_score(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and not math.isnan(value)
        and 0 <= value <= 1
    )
