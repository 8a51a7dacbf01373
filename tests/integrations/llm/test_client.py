"""The client of language models, against a real HTTP server with OpenAI's protocol."""

import asyncio
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelRequestTimeout
from pydantic_ai.messages import ModelResponse
from pydantic_ai.usage import RequestUsage

from lineshaft.agent.outcome import of_exception
from lineshaft.errors import SettingsError
from lineshaft.integrations.llm.client import LLMClient, json_in
from lineshaft.integrations.llm.configuration import LLMConfig, Price, read_prices
from lineshaft.integrations.llm.errors import (
    LLMAnswerError,
    LLMAuthError,
    LLMError,
    LLMRateLimited,
    LLMRequestError,
    LLMTimeout,
    LLMUnavailable,
)
from lineshaft.settings import Settings
from tests.llm_server import USAGE, LLMServer, Reply, llm_server

KEY = "sk-secret-key-of-the-endpoint"
UNKNOWN = "an-unknown-model"


@pytest.fixture
def server() -> Iterator[LLMServer]:
    with llm_server() as running:
        yield running


def client(server: LLMServer, model: str = UNKNOWN, **options: Any) -> LLMClient:
    return LLMClient(LLMConfig(model=model, url=server.url, api_key=KEY, **options))


# Asking.


async def test_a_question_and_its_answer(server: LLMServer) -> None:
    answer = await client(server, "gpt-4o-mini").ask("What?", instructions="Be brief.")

    assert (answer.value, answer.text, answer.model) == ("hello", "hello", "gpt-4o-mini")
    assert (answer.tokens_input, answer.tokens_output) == (1_000, 100)
    assert answer.cost_usd == Decimal("0.00021")
    (request,) = server.requests
    assert [(one["role"], one["content"]) for one in request["messages"]] == [
        ("system", "Be brief."),
        ("user", "What?"),
    ]
    assert "response_format" not in request
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("schema", "content", "value"),
    [
        ({"type": "object"}, {"a": 1}, {"a": 1}),
        ({"type": "object"}, '```json\n{"a": {"b": [1]}}\n```', {"a": {"b": [1]}}),
        ({"type": "object"}, 'Here you are: {"a": 1} Anything else?', {"a": 1}),
        ({"type": "array"}, "```\n[1, {}]\n```", [1, {}]),
        ({"type": "number"}, "7", 7),
    ],
)
async def test_json(server: LLMServer, schema: dict[str, Any], content: Any, value: Any) -> None:
    server.reply = Reply(content)

    answer = await client(server).ask("What?", schema=schema)

    assert answer.value == value
    (request,) = server.requests
    # The APIs' JSON mode is for objects only.
    assert ("response_format" in request) is (schema["type"] == "object")
    assert f'"type":"{schema["type"]}"' in request["messages"][0]["content"]


@pytest.mark.parametrize(
    ("content", "why"), [("I would rather not.", "stop"), ("", "stop"), ('{"a": [1, 2', "length")]
)
async def test_an_answer_without_json_says_what_it_cost(server: LLMServer, content: str, why: str) -> None:
    server.reply = Reply(content, usage=USAGE | {"cost": 0.25}, finish_reason=why)

    with pytest.raises(LLMAnswerError, match="has no JSON") as caught:
        await client(server).ask("What?", schema={"type": "object"})

    assert (caught.value.cost_usd, caught.value.answer) == (Decimal("0.25"), content)
    assert ("cut off" in str(caught.value)) is (why == "length")


def test_json_in_a_text() -> None:
    with pytest.raises(ValueError, match="it is empty"):
        json_in(" ")
    assert json_in('[{"a": 1}] {') == [{"a": 1}]


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/octet-stream"])
async def test_an_endpoint_that_leaves_out_what_nobody_reads(server: LLMServer, kind: str) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    body = json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": usage}).encode()
    server.reply = Reply(body=body, headers={"Content-Type": kind})

    answer = await client(server).ask("What?")

    assert (answer.text, answer.model) == ("hi", UNKNOWN)
    assert (answer.tokens_input, answer.tokens_output, answer.cost_usd) == (3, 4, None)


# What a call costs.


@pytest.mark.parametrize(
    ("usage", "model", "cost"),
    [
        (USAGE | {"cost": 0.0042}, UNKNOWN, Decimal("0.0042")),
        (USAGE | {"cost": 0}, UNKNOWN, Decimal(0)),
        ({"prompt_tokens": 1_000_000, "completion_tokens": 0}, "gpt-4o-mini", Decimal("0.15")),
        (USAGE, UNKNOWN, None),
        (USAGE | {"cost": "much"}, UNKNOWN, None),
        (USAGE | {"cost": -1}, UNKNOWN, None),
        (USAGE | {"cost": float("inf")}, UNKNOWN, None),
        (None, "gpt-4o-mini", None),
        ("lots", "gpt-4o-mini", None),
        ({"prompt_tokens": 5}, "gpt-4o-mini", None),
        ({"prompt_tokens": "many", "completion_tokens": 7}, "gpt-4o-mini", None),
        ({"cost": 0.5}, UNKNOWN, Decimal("0.5")),
    ],
)
async def test_the_cost_of_a_call(server: LLMServer, usage: Any, model: str, cost: Decimal | None) -> None:
    """From the response, otherwise from the list of prices; unknown is not the same as nothing."""
    server.reply = Reply(usage=usage)

    assert (await client(server, model).ask("What?")).cost_usd == cost


async def test_the_operators_prices_win(server: LLMServer, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(
        f"gpt-4o-mini: {{input: 1, output: 2.5}}\n{UNKNOWN}: {{input: 10, output: 0, cached_input: 1}}\n"
    )
    prices = read_prices(path)
    server.reply = Reply(usage=USAGE | {"cost": 5})

    assert (await client(server, "gpt-4o-mini", prices=prices).ask("?")).cost_usd == Decimal("0.00125")
    server.reply = Reply(usage=USAGE | {"prompt_tokens_details": {"cached_tokens": 900}})
    assert (await client(server, prices=prices).ask("?")).cost_usd == Decimal("0.0019")
    # Without usage there is nothing to multiply.
    server.reply = Reply(usage=None)
    assert (await client(server, prices=prices).ask("?")).cost_usd is None
    # The response names a version of the model that was asked for.
    server.reply = Reply(model="something-else-20260101")
    assert (await client(server, prices=prices).ask("?")).cost_usd == Decimal("0.01")


def test_a_response_of_a_known_provider_has_its_price() -> None:
    config = LLMConfig(model="anthropic:claude-haiku-4-5", prices={"openai:x": Price(Decimal(1), Decimal(1))})
    usage = RequestUsage(input_tokens=1_000_000)
    response = ModelResponse(parts=[], usage=usage, model_name="claude-haiku-4-5", provider_name="anthropic")

    assert LLMClient(config).cost(response) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("m: 5", "Expected `object`"),
        ("m: {input: 1}", "missing required field `output`"),
        ("m: {input: -1, output: 1}", "at least 0"),
        ("m: {input: 1, output: 1, monthly: 9}", "unknown field `monthly`"),
        ("m: [", ""),
    ],
)
def test_prices_that_cant_be_used(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "prices.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match="LINESHAFT_LLM_PRICES names") as caught:
        read_prices(path)
    assert said in str(caught.value)
    assert "per million tokens" in str(caught.value)


# Refusals and failures.


@pytest.mark.parametrize(
    ("reply", "kind", "category", "cost"),
    [
        (Reply("slow down", status=429), LLMRateLimited, "rate_limit", 0),
        (Reply("overloaded", status=529), LLMRateLimited, "rate_limit", 0),
        (Reply("insufficient_quota", status=402), LLMRateLimited, "rate_limit", 0),
        (Reply("broken", status=500), LLMUnavailable, "error", 0),
        (Reply("away", status=503), LLMUnavailable, "error", 0),
        (Reply("who?", status=401), LLMAuthError, "auth_failure", 0),
        (Reply("no", status=403), LLMAuthError, "auth_failure", 0),
        (Reply("no such model", status=404), LLMRequestError, "invalid_input", 0),
        (Reply("too long", status=400), LLMRequestError, "invalid_input", 0),
        (Reply(body=b"<html>"), LLMAnswerError, "invalid_output", None),
        (Reply(body=b"[]"), LLMAnswerError, "invalid_output", None),
        (Reply(body=b"{}"), LLMAnswerError, "invalid_output", None),
        (Reply(body=b'{"choices": []}'), LLMAnswerError, "invalid_output", None),
        (Reply("x" * 1_000, cut_after=50), LLMUnavailable, "error", None),
    ],
)
async def test_failures(
    server: LLMServer, reply: Reply, kind: type[LLMError], category: str, cost: int | None
) -> None:
    """Each has a class, the category of the attempt that it ends, and what was spent; it is asked once."""
    server.reply = reply

    with pytest.raises(LLMError) as caught:
        await client(server).ask("What?")

    assert type(caught.value) is kind
    assert caught.value.cost_usd == cost
    assert len(server.requests) == 1
    outcome = of_exception(caught.value)
    assert (outcome.category, outcome.retry_after_sec) == (category, None)
    assert outcome.error == str(caught.value)


async def test_an_endpoint_that_isnt_there() -> None:
    nowhere = LLMClient(LLMConfig(model="m", url="http://127.0.0.1:9/v1"))
    with pytest.raises(LLMUnavailable, match="'m' can't be reached") as caught:
        await nowhere.ask("What?")
    assert caught.value.cost_usd == 0


async def test_silence(server: LLMServer) -> None:
    """What a call costs that arrived and wasn't answered is unknown."""
    over = Event()
    server.reply = Reply(hold=over)
    try:
        with pytest.raises(LLMTimeout, match=r"timed out after 0\.2 seconds") as caught:
            await client(server, timeout_sec=0.2).ask("What?")
    finally:
        over.set()
    assert caught.value.cost_usd is None
    assert of_exception(caught.value).category == "timeout"


async def test_an_agent_has_the_same_deadline_and_no_retries_of_its_own(server: LLMServer) -> None:
    over = Event()
    server.reply = Reply(hold=over)
    agent = Agent(client(server, timeout_sec=0.2).model())
    try:
        with pytest.raises(ModelRequestTimeout) as caught:
            await agent.run("What?")
    finally:
        over.set()
    assert of_exception(caught.value).category == "timeout"
    server.reply = Reply("busy", status=503)
    with pytest.raises(LLMUnavailable):
        await agent.run("What?")
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("headers", "text", "wait_sec"),
    [
        ({"Retry-After": "7"}, "slow down", 7),
        ({}, "limit reached, resets in 4h 30m", 16_200),
        ({"X-RateLimit-Remaining-Tokens": "0", "X-RateLimit-Reset-Tokens": "6m0s"}, "slow down", 360),
    ],
)
@pytest.mark.parametrize("status", [429, 529])
async def test_a_rate_limit_says_when_to_try_again(
    server: LLMServer, status: int, headers: dict[str, str], text: str, wait_sec: float
) -> None:
    server.reply = Reply(text, status=status, headers=headers)
    before = datetime.now(UTC)

    with pytest.raises(LLMRateLimited) as caught:
        await client(server).ask("What?")

    at = caught.value.retry_at
    assert at is not None
    assert timedelta(0) <= at - before - timedelta(seconds=wait_sec) < timedelta(minutes=1)
    outcome = of_exception(caught.value)
    assert outcome.retry_after_sec == pytest.approx(wait_sec, abs=60)


# Fallback models.


async def test_fallback_models_are_asked_in_their_order(server: LLMServer) -> None:
    def answer(request: dict[str, Any]) -> Reply:
        return Reply("busy", status=503) if request["model"] in {"a", "b"} else Reply("done")

    server.answer = answer
    asked = client(server, "a", fallback_models=("b", "c", "d"))

    answered = await asked.ask("What?")

    assert (answered.text, answered.model) == ("done", "c")
    assert [request["model"] for request in server.requests] == ["a", "b", "c"]
    # Whoever names a model gets that one.
    with pytest.raises(LLMUnavailable):
        await asked.ask("What?", model="b")
    assert [request["model"] for request in server.requests][3:] == ["b"]


@pytest.mark.parametrize(
    ("replies", "kind", "wait_sec"),
    [
        (
            (
                Reply("l", status=429, headers={"Retry-After": "90"}),
                Reply("l", status=429, headers={"Retry-After": "30"}),
            ),
            LLMRateLimited,
            30,
        ),
        (
            (Reply("l", status=429, headers={"Retry-After": "90"}), Reply("who?", status=401)),
            LLMRateLimited,
            90,
        ),
        ((Reply("who?", status=401), Reply("broken", status=500)), LLMUnavailable, None),
        ((Reply("who?", status=401), Reply("what?", status=404)), LLMRequestError, None),
    ],
)
async def test_when_no_model_answers(
    server: LLMServer, replies: tuple[Reply, Reply], kind: type[LLMError], wait_sec: float | None
) -> None:
    """The failure counts that is most likely to pass; its text names all models."""
    server.plan(*replies)

    with pytest.raises(LLMError, match=r"'a'.*; .*'b'") as caught:
        await client(server, "a", fallback_models=("b",)).ask("What?")

    assert type(caught.value) is kind
    assert caught.value.retry_after_sec == (None if wait_sec is None else pytest.approx(wait_sec, abs=20))


# Where models are.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"model": "gpt-5"},
            "Nothing says where the model 'gpt-5' is. Name its provider, as in openai:gpt-5",
        ),
        ({"model": "openai:gpt-5", "fallback_models": ("b",)}, "Nothing says where the model 'b' is"),
        ({"model": "m", "url": "http://me:secret@host/v1"}, "must be a plain address"),
        ({"model": "m", "url": "http://host/v1?key=secret"}, "Put the key into LINESHAFT_LLM_API_KEY"),
    ],
)
def test_a_configuration_that_cant_be_used(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        LLMConfig(**options)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("openai:gpt-5-mini", "'openai:gpt-5-mini' can't be used: Set the `OPENAI_API_KEY`"),
        ("anthropic:claude-haiku-4-5", "Set the `ANTHROPIC_API_KEY`"),
        ("opnai:gpt-5", "Unknown provider: opnai"),
        ("groq:llama", r"needs a package: pip install 'pydantic-ai-slim\[groq\]'"),
    ],
)
def test_a_model_that_cant_be_used(monkeypatch: pytest.MonkeyPatch, model: str, said: str) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(SettingsError, match=said):
        LLMClient(LLMConfig(model=model)).model()


def test_without_a_model() -> None:
    with pytest.raises(SettingsError, match="Set LINESHAFT_LLM_MODEL"):
        LLMClient.from_settings(Settings()).model()


async def test_a_provider_in_the_name_wins_over_the_endpoint(
    server: LLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of the endpoint goes nowhere else, and other keys don't go to the endpoint."""
    with llm_server() as openai:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
        monkeypatch.setenv("OPENAI_BASE_URL", openai.url)
        monkeypatch.setenv("OPENAI_ORG_ID", "org-of-openai")
        asked = client(server, "openai-chat:gpt-4o-mini")

        assert (await asked.ask("What?")).cost_usd == Decimal("0.00021")
        await asked.ask("What?", model="llama3.2:3b")

    assert [headers["Authorization"] for headers in openai.headers] == ["Bearer sk-of-openai"]
    assert [headers["Authorization"] for headers in server.headers] == [f"Bearer {KEY}"]
    assert server.requests[0]["model"] == "llama3.2:3b"
    assert "org-of-openai" not in str(server.headers)


# Keys.


@pytest.mark.parametrize("status", [200, 400, 401, 404, 429, 500, 529])
async def test_a_key_that_is_echoed_is_in_no_error_and_no_log(
    server: LLMServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("OTHER_API_KEY", "another-key")
    server.reply = Reply(f"your key {KEY} or another-key", status=status, finish_reason="length")
    caplog.set_level(logging.DEBUG)
    asked = client(server)

    with pytest.raises(LLMError) as caught:
        await asked.ask("What?", schema={"type": "object"})

    outcome = of_exception(caught.value)
    seen = f"{caught.value!r} {outcome} {caplog.text} {asked!r} {asked.config!r} {asked.model()!r}"
    if status != 200:  # what the model says is its answer
        assert KEY not in seen
        assert "another-key" not in seen
        assert caught.value.__cause__ is None
    assert KEY not in f"{asked!r} {asked.config!r} {caplog.text}"


async def test_calls_at_the_same_time_and_from_two_event_loops(server: LLMServer) -> None:
    asked = client(server)
    answers = await asyncio.gather(*(asked.ask(f"{n}?") for n in range(10)))
    other = await asyncio.to_thread(asyncio.run, asked.ask("another loop?"))

    assert {answer.text for answer in [*answers, other]} == {"hello"}
    assert len(server.requests) == 11
