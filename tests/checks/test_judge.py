"""llm-judge: scores and thresholds, and a judge behind a real HTTP server."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.checks.judge import JudgeCheck, Judgement
from lineshaft.checks.openai_judge import MAX_OUTPUT, OpenAIJudge
from lineshaft.checks.verdict import CandidateOutput, NoVerdict
from tests.checks.candidate import candidate
from tests.checks.judge_server import JudgeServer, judge_server

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
    assert "LINESHAFT_JUDGE_URL" in (JudgeCheck(None).fault(CRITERIA) or "")


@pytest.mark.parametrize("score", [math.nan, -0.1, 1.5, True, "0.5"])
async def test_invalid_scores(score: Any) -> None:
    with pytest.raises(NoVerdict, match="from 0 to 1") as caught:
        await JudgeCheck(Fixed(score)).check(CRITERIA, candidate("x"))
    assert caught.value.cost_usd == Decimal("0.01")


# Behind an OpenAI-compatible API.


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as running:
        yield running


async def test_the_request_follows_the_openai_api(server: JudgeServer) -> None:
    judge = OpenAIJudge(server.url, "gpt-4o-mini", "sk-secret")

    found = await judge.judge("Is it short?", candidate({"answer": 42}, spec={"goal": "an answer"}))

    assert (found.score, found.reasons, found.model) == (0.9, ("clear",), "gpt-4o-mini")
    (request,) = server.requests
    assert (request["path"], request["model"]) == ("/v1/chat/completions", "gpt-4o-mini")
    assert request["response_format"] == {"type": "json_object"}
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    question = request["messages"][1]["content"]
    assert "Is it short?" in question
    assert '"answer": 42' in question
    assert "an answer" in question
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in repr(judge)


async def test_without_a_key_none_is_sent(server: JudgeServer) -> None:
    await OpenAIJudge(server.url, "m").judge("?", candidate("x"))

    assert "Authorization" not in server.headers[0]


async def test_a_long_output_is_truncated_with_a_note(server: JudgeServer) -> None:
    await OpenAIJudge(server.url, "m").judge("?", candidate("x" * (2 * MAX_OUTPUT)))

    question = server.requests[0]["messages"][1]["content"]
    assert len(question) < MAX_OUTPUT + 1_000
    assert question.endswith("… (truncated)")


@pytest.mark.parametrize(
    ("usage", "model", "cost"),
    [
        ({"prompt_tokens": 1, "completion_tokens": 1, "cost": 0.0042}, "any", Decimal("0.0042")),
        ({"prompt_tokens": 1_000_000, "completion_tokens": 0}, "gpt-4o-mini", Decimal("0.15")),
        ({"prompt_tokens": 1_000, "completion_tokens": 1}, "a-model-that-nobody-knows", None),
        ({"cost": "much"}, "any", None),
        ({"cost": -1}, "any", None),
        (None, "gpt-4o-mini", None),
        ("lots", "gpt-4o-mini", None),
    ],
)
async def test_the_cost_of_a_call(server: JudgeServer, usage: Any, model: str, cost: Decimal | None) -> None:
    """From the response, otherwise from the price list; unknown is not the same as zero."""
    server.usage, server.model = usage, model

    assert (await OpenAIJudge(server.url, model).judge("?", candidate("x"))).cost_usd == cost


@pytest.mark.parametrize(
    "content",
    ['```json\n{"score": 0.5}\n```', 'Here you are: {"score": 0.5}', '{"score": 0.5, "more": {"a": 1}}'],
)
async def test_text_around_the_json_is_ignored(server: JudgeServer, content: str) -> None:
    server.content = content

    assert (await OpenAIJudge(server.url, "m").judge("?", candidate("x"))).score == 0.5


@pytest.mark.parametrize(
    "content", ["I like it", '{"reasons": []}', '{"score": "high"}', '{"score": 1, "reasons": 7}', "{"]
)
async def test_an_unreadable_response_still_costs(server: JudgeServer, content: str) -> None:
    server.content, server.usage = content, {"cost": 0.5}

    with pytest.raises(NoVerdict, match="can't read the judge's response") as caught:
        await OpenAIJudge(server.url, "m").judge("?", candidate("x"))

    assert caught.value.cost_usd == Decimal("0.5")


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}']
)
async def test_responses_that_are_not_from_an_openai_api(server: JudgeServer, body: bytes) -> None:
    server.body = body

    with pytest.raises(NoVerdict, match="the judge's response"):
        await OpenAIJudge(server.url, "m").judge("?", candidate("x"))


async def test_an_unreachable_judge_gives_no_verdict(server: JudgeServer) -> None:
    """It is repeated later; no message contains the key."""
    server.status, server.body = 429, b'{"error": "slow down"}'
    with pytest.raises(NoVerdict, match=r"HTTP 429.*slow down"):
        await OpenAIJudge(server.url, "m", "sk-secret").judge("?", candidate("x"))
    with pytest.raises(NoVerdict, match="can't be reached") as caught:
        await OpenAIJudge("http://127.0.0.1:9/v1", "m", "sk-secret").judge("?", candidate("x"))
    assert "sk-secret" not in str(caught.value)
