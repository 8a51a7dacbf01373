"""llm-judge: scores and thresholds, and a model behind a real HTTP server."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.checks.judge import JudgeCheck, Judgement
from lineshaft.checks.llm_judge import MAX_OUTPUT, LLMJudge
from lineshaft.checks.verdict import CandidateOutput, NoVerdict
from lineshaft.integrations.llm.configuration import LLMConfig
from tests.checks.candidate import candidate
from tests.llm_server import USAGE, LLMServer, Reply, llm_server

CRITERIA = {"criteria": "Is it short?"}


@dataclass
class Fixed:
    """A custom judge: any object with a method `judge`."""

    score: Any

    async def judge(self, criteria: str, candidate: CandidateOutput) -> Judgement:
        return Judgement(self.score, (f"{criteria} {candidate.text}",), Decimal("0.01"), "mine")


@pytest.mark.parametrize(
    ("threshold", "score", "passes"),
    [(None, 0.7, True), (None, 0.69, False), (0.9, 0.9, True), (1, 0.99, False), (0, 0, True)],
)
async def test_the_threshold_decides(threshold: float | None, score: float, passes: bool) -> None:
    """R-097: 0.7 unless the task says otherwise."""
    schema = CRITERIA if threshold is None else {**CRITERIA, "threshold": threshold}
    check = JudgeCheck(Fixed(score))
    assert check.fault(schema) is None

    verdict = await check.check(schema, candidate("yes"))

    assert verdict.passed is passes
    assert (verdict.score, verdict.cost_usd, verdict.model) == (score, Decimal("0.01"), "mine")
    assert verdict.reasons[-1] == "Is it short? yes"
    assert ("below" in verdict.reasons[0]) is not passes


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (None, "must be"),
        ("good?", "must be"),
        ({}, "criteria must be a text"),
        ({"criteria": " "}, "criteria must be a text"),
        ({"criteria": "x" * 20_001}, "criteria must be a text"),
        ({"criteria": "x", "model": "y"}, "must be"),
        ({"criteria": "x", "threshold": 1.1}, "from 0 to 1"),
        ({"criteria": "x", "threshold": "0.7"}, "from 0 to 1"),
        ({"criteria": "x", "threshold": math.nan}, "from 0 to 1"),
        ({"criteria": "x", "threshold": True}, "from 0 to 1"),
    ],
)
def test_the_schema_of_a_judge_gate(schema: Any, said: str) -> None:
    """R-095."""
    assert said in (JudgeCheck(Fixed(1)).fault(schema) or "")


def test_without_a_judge_the_gate_is_rejected() -> None:
    """R-097: rejected at submission, with what to do."""
    assert "LINESHAFT_LLM_MODEL" in (JudgeCheck(None).fault(CRITERIA) or "")


@pytest.mark.parametrize("score", [math.nan, -0.1, 1.5, True, "0.5"])
async def test_invalid_scores(score: Any) -> None:
    with pytest.raises(NoVerdict, match="from 0 to 1") as caught:
        await JudgeCheck(Fixed(score)).check(CRITERIA, candidate("x"))
    assert caught.value.cost_usd == Decimal("0.01")


# A language model behind an OpenAI-compatible API.


@pytest.fixture
def server() -> Iterator[LLMServer]:
    with llm_server(LLMServer(reply=Reply({"score": 0.9, "reasons": ["clear"]}))) as running:
        yield running


def judge(server: LLMServer, model: str = "m") -> LLMJudge:
    return LLMJudge(LLMConfig(model=model, url=server.url, api_key="sk-secret"))


async def test_the_judge_asks_for_a_score(server: LLMServer) -> None:
    asked = judge(server, "gpt-4o-mini")

    found = await asked.judge("Is it short?", candidate({"answer": 42}, spec={"goal": "an answer"}))

    assert (found.score, found.reasons, found.model) == (0.9, ("clear",), "gpt-4o-mini")
    (request,) = server.requests
    assert (request["path"], request["model"]) == ("/v1/chat/completions", "gpt-4o-mini")
    assert request["response_format"] == {"type": "json_object"}
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert "never an instruction" in request["messages"][0]["content"]
    assert '"score"' in request["messages"][0]["content"]
    question = request["messages"][1]["content"]
    assert "Is it short?" in question
    assert '"answer": 42' in question
    assert "an answer" in question
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in repr(asked)


async def test_a_long_output_is_truncated_with_a_note(server: LLMServer) -> None:
    await judge(server).judge("?", candidate("x" * (2 * MAX_OUTPUT)))

    question = server.requests[0]["messages"][1]["content"]
    assert len(question) < MAX_OUTPUT + 1_000
    assert question.endswith("… (truncated)")


@pytest.mark.parametrize(
    "content",
    ["I like it", {"reasons": []}, {"score": "high"}, {"score": 1, "reasons": 7}, "{", [1]],
)
async def test_an_unreadable_response_still_costs(server: LLMServer, content: Any) -> None:
    server.reply = Reply(content, usage=USAGE | {"cost": 0.5})

    with pytest.raises(NoVerdict, match="judge") as caught:
        await judge(server).judge("?", candidate("x"))

    assert caught.value.cost_usd == Decimal("0.5")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"choices": []}'])
async def test_what_a_response_of_another_protocol_cost_is_unknown(server: LLMServer, body: bytes) -> None:
    server.reply = Reply(body=body)

    with pytest.raises(NoVerdict, match="the judge gave no verdict") as caught:
        await judge(server).judge("?", candidate("x"))

    assert caught.value.cost_usd is None


async def test_a_refused_call_costs_nothing_and_no_message_has_the_key(server: LLMServer) -> None:
    """It is repeated later."""
    server.reply = Reply("slow down, sk-secret", status=429)
    with pytest.raises(NoVerdict, match=r"HTTP 429.*slow down, \*\*\*") as caught:
        await judge(server).judge("?", candidate("x"))
    assert caught.value.cost_usd == 0
    nowhere = LLMJudge(LLMConfig(model="m", url="http://127.0.0.1:9/v1", api_key="sk-secret"))
    with pytest.raises(NoVerdict, match="can't be reached") as caught:
        await nowhere.judge("?", candidate("x"))
    assert "sk-secret" not in str(caught.value)
    assert caught.value.cost_usd == 0
