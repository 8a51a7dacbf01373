"""json-schema: what passes, what is rejected and why, and hostile schemas."""

import time
from typing import Any

import pytest

from lineshaft.checks import json_schema
from lineshaft.checks.verdict import Verdict
from tests.checks.candidate import candidate

PAGE = {
    "type": "object",
    "required": ["url"],
    "properties": {
        "url": {"type": "string", "format": "uri"},
        "hits": {"type": "array", "items": {"type": "integer"}},
    },
}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptions come from another process, which a busy machine may start slowly."""
    monkeypatch.setattr(json_schema, "DESCRIPTION_SEC", 60.0)
    monkeypatch.setattr(json_schema, "LONGEST_SEC", 60.0)


def test_an_output_that_conforms() -> None:
    """R-095."""
    assert json_schema.fault(PAGE) is None
    assert json_schema.check(PAGE, candidate({"url": "https://example.org", "hits": [1, 2]})).passed


@pytest.mark.usefixtures("patient")
def test_each_fault_is_reported_with_its_place() -> None:
    """R-098: the next attempt receives all of them."""
    verdict = json_schema.check(PAGE, candidate({"url": "nowhere", "hits": [1, "two"]}))

    assert not verdict.passed
    places = sorted(reason.partition(":")[0] for reason in verdict.reasons)
    assert places == ["output.data.hits[1]", "output.data.url"]


@pytest.mark.usefixtures("patient")
def test_with_references_only_the_first_fault_is_reported() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}

    verdict = json_schema.check(tree, candidate({"child": {"child": {"leaf": 1}}}))

    assert verdict.reasons == (
        "output.data.child.child: Additional properties are not allowed ('leaf' was unexpected)",
    )


@pytest.mark.parametrize("schema", [True, {}, {"$ref": "#/$defs/a", "$defs": {"a": True}}])
def test_schemas_that_accept_everything(schema: Any) -> None:
    assert json_schema.fault(schema) is None
    assert json_schema.check(schema, candidate({"any": "thing"})).passed


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (None, "must be a JSON Schema"),
        ("^a", "must be a JSON Schema"),
        ([], "must be a JSON Schema"),
        ({"type": "strin"}, "not a valid JSON Schema"),
        ({"properties": {"a": {"minLength": "x"}}}, "/properties/a/minLength"),
        ({"pattern": "("}, "not a valid JSON Schema"),
        ({"$schema": "https://example.org/mine"}, "not a valid JSON Schema"),
        ({"$ref": "#/$defs/nobody"}, "not a valid JSON Schema"),
        ({"$ref": "#nobody"}, "not a valid JSON Schema"),
    ],
)
def test_invalid_schemas(schema: Any, said: str) -> None:
    """R-095: reported at submission."""
    assert said in (json_schema.fault(schema) or "")


@pytest.mark.parametrize(
    "ref",
    ["http://127.0.0.1:9/x", "https://example.org/s#/a", "file:///etc/passwd", "//host/x", "other.json"],
)
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_nothing_is_fetched_or_read(ref: str, keyword: str) -> None:
    """Hostile input: `$ref` to http and file, anywhere in the schema."""
    for schema in (
        {keyword: ref},
        {"properties": {"enum": {"items": [{"anyOf": [{keyword: ref}]}]}}},
        {"$defs": {"a": {keyword: ref}}},
        {"dependentSchemas": {"const": {keyword: ref}}},
    ):
        fault = json_schema.fault(schema)
        assert fault is not None
        assert repr(ref) in fault
        assert "#/$defs/NAME" in fault


def test_names_and_data_that_look_like_references() -> None:
    """A property named `$ref`, and data."""
    assert json_schema.fault({"properties": {"$ref": {"type": "string"}}}) is None
    assert json_schema.fault({"const": {"$ref": "http://example.org"}}) is None
    assert json_schema.fault({"enum": [{"$ref": "http://example.org"}]}) is None


@pytest.mark.parametrize("depth", [101, 900, 100_000])
def test_schemas_nested_too_deeply(depth: int) -> None:
    """Hostile input: nested 100,000 deep."""
    schema: Any = True
    for _ in range(depth):
        schema = {"not": schema}

    fault = json_schema.fault(schema)

    assert fault is not None
    assert "nested" in fault or "recursion" in fault


def test_schemas_that_are_too_long() -> None:
    schema = {"enum": ["x" * json_schema.MAX_BYTES]}

    assert f"at most {json_schema.MAX_BYTES} bytes" in (json_schema.fault(schema) or "")


def doubling(levels: int) -> dict[str, Any]:
    """Each level refers twice to the next one: 2^levels parts in all."""
    part: dict[str, Any] = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": part | {f"d{levels}": {"type": "integer"}}}


def test_references_that_multiply() -> None:
    """Hostile input: fifty definitions that expand exponentially."""
    assert json_schema.fault(doubling(5)) is None
    for schema in (doubling(50), doubling(2_000)):
        assert "parts with its references expanded" in (json_schema.fault(schema) or "")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"allOf": [{"properties": {"a": {"$ref": "#"}}}] * 2, "not": {"const": 1}},
        {"anyOf": [{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}] * 2},
    ],
)
def test_recursive_schemas_terminate(schema: dict[str, Any]) -> None:
    """Hostile input: with recursive data."""
    data: Any = 1
    for _ in range(60):
        data = {"a": data}
    started = time.monotonic()

    assert json_schema.fault(schema) is None
    json_schema.check(schema, candidate(data))

    # 2^60 steps would take centuries.
    assert time.monotonic() - started < 30


def test_patterns_with_exponential_backtracking() -> None:
    """Hostile input: matching is linear; look-around, which can't be, is rejected."""
    schema = {"pattern": "^(a+)+$"}
    started = time.monotonic()

    assert not json_schema.check(schema, candidate("a" * 100_000 + "b")).passed

    assert time.monotonic() - started < 30
    assert json_schema.fault({"pattern": "(?=a)b"}) is not None
    assert json_schema.fault({"pattern": "(a{1000}){1000}"}) is not None


@pytest.mark.slow("allocates until a limit")
def test_a_description_that_takes_too_much_memory_is_left_out() -> None:
    """The verdict is known: it doesn't match."""
    array = {"type": "array", "items": {"$ref": "#"}}
    data: Any = 1
    for _ in range(40):
        data = [data]

    verdict = json_schema.check({"anyOf": [array, {**array, "minItems": 1}, {"const": 5}]}, candidate(data))

    assert verdict.reasons == ("output.data doesn't match the schema",)


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["a"] * 201, "at most 200 patterns"),
        (["a" * 6_000] * 2, "at most 10000 characters"),
        (["[ab]\\w"] * 101, "at most 200 classes"),
        (["(?i)[ab]"] * 21, "at most 20 classes"),
        (["\\pL{30}x"] * 100, "2097152 bytes in sum"),
    ],
)
def test_patterns_are_limited_in_sum(patterns: list[str], said: str) -> None:
    """In `pattern` and in `patternProperties`."""
    half = len(patterns) // 2
    named = {f"{pattern}{n}": True for n, pattern in enumerate(patterns[:half])}
    schema = {"patternProperties": named, "allOf": [{"pattern": pattern} for pattern in patterns[half:]]}

    assert said in (json_schema.fault(schema) or "")


def test_usual_patterns_are_allowed() -> None:
    usual = ["^[a-z0-9-]+$", "^\\d{4}-\\d{2}-\\d{2}$", "^\\p{Lu}\\w*$", "(?i)^https?://"]

    assert json_schema.fault({"allOf": [{"pattern": pattern} for pattern in usual * 10]}) is None


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("data", [[1, 2, 3], [1, "two", 3]])
def test_a_long_check_runs_in_a_separate_process(monkeypatch: pytest.MonkeyPatch, data: list[Any]) -> None:
    schema = {"items": {"anyOf": [{"const": number} for number in range(500)]}}
    here = json_schema.check(schema, candidate(data))
    check_in_process, calls = json_schema._check_in_process, []

    def counted(schema: bytes, data: Any) -> Verdict:
        calls.append(data)
        return check_in_process(schema, data)

    monkeypatch.setattr(json_schema, "_check_in_process", counted)
    monkeypatch.setattr(json_schema, "MAX_HERE", 500)

    apart = json_schema.check(schema, candidate(data))

    assert apart == here
    assert len(calls) == 1
    assert apart.passed is ("two" not in data)


def test_a_check_that_takes_too_long_rejects_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"items": {"anyOf": [{"const": number} for number in range(2_000)]}}
    monkeypatch.setattr(json_schema, "LONGEST_SEC", 0.01)

    verdict = json_schema.check(schema, candidate([2_000] * 10_000))

    assert not verdict.passed
    assert "within 0.01 s" in verdict.reasons[0]
