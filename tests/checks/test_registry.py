"""The registry: methods that a task may name, the user's own checks, and the settings."""

import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from lineshaft.checks import registry
from lineshaft.checks.command import CheckCommand
from lineshaft.checks.registry import Checks
from lineshaft.checks.verdict import MAX_REASON, MAX_REASONS, CandidateOutput, NoVerdict, Verdict, rejected
from lineshaft.errors import InvalidInputError, SettingsError
from lineshaft.model.tasks import Gate
from lineshaft.settings import Settings
from tests.checks.candidate import candidate


def is_long(schema: Any, candidate: CandidateOutput) -> Verdict:
    return Verdict(passed=True) if len(candidate.text) >= schema else rejected("too short")


async def asks_elsewhere(schema: Any, candidate: CandidateOutput) -> bool:
    return bool(candidate.data == schema)


def test_faults_name_their_place() -> None:
    """R-095: a single gate by field name, several gates by their number."""
    checks = Checks(commands={"tests": CheckCommand(("true",))})

    assert checks.faults([Gate("json-schema", {"type": "object"}), Gate("human"), Gate("regex", "a")]) == []
    assert checks.faults([Gate("test-pass", {"command": "tests"})]) == []
    assert [place for place, _ in checks.faults([Gate("prayer")])] == ["validation"]
    assert [place for place, _ in checks.faults([Gate("regex", "(")])] == ["validation_schema"]
    places = [place for place, _ in checks.faults([Gate("human"), Gate("regex", "("), Gate("luck")])]
    assert places == ["validation[1].schema", "validation[2].method"]


def test_an_unknown_method_is_reported_with_the_known_ones() -> None:
    ((_, fault),) = Checks().faults([Gate("json_schema")])

    assert fault == "must be one of human, json-schema, llm-judge, none, regex, test-pass, got 'json_schema'"
    assert Checks().faults([Gate("decision-report")]), "that one is asked for by require_decision_report"


def test_too_many_gates() -> None:
    assert Checks().faults([Gate("human")] * 20) == []
    assert Checks().faults([Gate("human")] * 21) != []


async def test_custom_checks() -> None:
    """A plain function runs immediately, an asynchronous one in the validator."""
    checks = Checks()
    checks.register(
        "long", is_long, fault=lambda schema: None if isinstance(schema, int) else "must be a number"
    )
    checks.register("asked", asks_elsewhere)

    assert checks.faults([Gate("long", 3), Gate("asked")]) == []
    assert checks.faults([Gate("long", "3")]) == [("validation_schema", "must be a number")]
    assert (checks.is_instant("long"), checks.is_instant("asked"), checks.is_instant("nobody")) == (
        True,
        False,
        False,
    )
    assert checks.check_now("long", 9, candidate("abc")).reasons == ("too short",)
    assert (await checks.check("asked", "abc", candidate("abc"))).passed
    assert not (await checks.check("asked", "abc", candidate("x"))).passed
    assert "long" not in Checks().names, "one registry knows nothing of another"


@pytest.mark.parametrize("name", ["regex", "none", "human", "decision-report"])
def test_names_that_are_already_used(name: str) -> None:
    with pytest.raises(InvalidInputError, match="already"):
        Checks().register(name, is_long)


async def test_a_check_that_breaks_gives_no_verdict() -> None:
    """The output may be good: the attempt doesn't fail."""

    async def breaks(_: Any, __: CandidateOutput) -> bool:
        raise KeyError("oops")

    checks = Checks()
    checks.register("long", is_long)
    checks.register("breaks", breaks)

    with pytest.raises(NoVerdict, match="the check long failed: TypeError"):
        checks.check_now("long", "x", candidate("abc"))
    with pytest.raises(NoVerdict, match="the check breaks failed: KeyError"):
        await checks.check("breaks", None, candidate("abc"))


def test_an_output_nested_too_deeply() -> None:
    """Hostile input: as deep as the database can store."""
    output = b'{"data": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"

    verdict = Checks().check_now("regex", "x", CandidateOutput("t", 1, "code", "x", b"{}", output))

    assert verdict.reasons == ("the output is nested too deeply to be checked",)


def test_reasons_are_shortened_and_storable() -> None:
    """Hostile input: NUL, lone surrogates, and long text."""
    verdict = rejected(*["a\0b\ud800" + "x" * 9_000] * 50)

    assert len(verdict.reasons) == MAX_REASONS
    assert len(verdict.reasons[0]) == MAX_REASON
    assert verdict.reasons[0].startswith("a\N{REPLACEMENT CHARACTER}b?xx")


# Settings.


def test_checks_from_settings(tmp_path: Path) -> None:
    path = tmp_path / "commands.yaml"
    path.write_text("tests: {argv: [make, test]}\n")
    checks = Checks.from_settings(
        Settings(validation_commands=path, judge_url="http://localhost/v1", judge_model="m")
    )

    assert (
        checks.faults([Gate("test-pass", {"command": "tests"}), Gate("llm-judge", {"criteria": "x"})]) == []
    )
    plain = Checks.from_settings(Settings())
    assert (
        len(plain.faults([Gate("test-pass", {"command": "tests"}), Gate("llm-judge", {"criteria": "x"})]))
        == 2
    )


@pytest.mark.parametrize(
    ("settings", "address", "model"),
    [
        ({"judge_url": "http://a/v1", "judge_model": "m", "judge_api_key": "k"}, ("http://a/v1", "k"), "m"),
        # The key of one address is never sent to another.
        ({"judge_url": "http://a/v1", "judge_model": "m", "llm_api_key": "k"}, ("http://a/v1", None), "m"),
        ({"llm_url": "http://b/v1", "llm_model": "n", "llm_api_key": "k"}, ("http://b/v1", "k"), "n"),
        (
            {"judge_model": "m", "llm_url": "http://b/v1", "llm_model": "n", "llm_api_key": "k"},
            ("http://b/v1", "k"),
            "m",
        ),
        ({"judge_model": "openai:gpt-5-mini"}, (None, None), "openai:gpt-5-mini"),
    ],
)
def test_whose_model_judges(settings: dict[str, Any], address: tuple[Any, Any], model: str) -> None:
    """A model for judges, otherwise that of the installation."""
    judge = registry.judge_of(Settings(**settings))

    assert judge is not None
    assert ((judge.config.url, judge.config.api_key), judge.config.model) == (address, model)


@pytest.mark.parametrize(
    ("half", "said"),
    [
        ({"judge_url": "http://localhost/v1"}, "LINESHAFT_JUDGE_URL needs a model too"),
        ({"judge_model": "m"}, "Nothing says where the model 'm' is"),
    ],
)
def test_half_a_judge(half: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Checks.from_settings(Settings(**half))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: None, "must return True, False or a Verdict, got None"),
        (lambda: "yes", "must return True, False or a Verdict, got 'yes'"),
        (lambda: Verdict(passed=True, cost_usd=Decimal("NaN")), "cost_usd: must be an amount in US dollars"),
        (lambda: Verdict(passed=True, cost_usd=Decimal(-1)), "cost_usd: must be an amount in US dollars"),
        (lambda: Verdict(passed=True, score=math.nan), "score: must be a number"),
    ],
)
async def test_an_invalid_result_gives_no_verdict(answer: Callable[[], Any], said: str) -> None:
    """Hostile input, or a check that returns nothing: it is repeated, and the fault is logged."""
    checks = Checks()
    checks.register("at once", lambda _, __: answer())

    async def takes_its_time(_: Any, __: CandidateOutput) -> Any:
        return answer()

    checks.register("slow", takes_its_time)

    with pytest.raises(NoVerdict, match=said):
        checks.check_now("at once", None, candidate())
    with pytest.raises(NoVerdict, match=said):
        await checks.check("slow", None, candidate())
