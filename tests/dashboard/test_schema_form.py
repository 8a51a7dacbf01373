"""Forms that are made from a JSON Schema: what is entered becomes exactly the JSON that was meant."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lineshaft.checks import json_schema
from lineshaft.checks.verdict import CandidateOutput
from lineshaft.dashboard.schema_form import (
    MAX_FIELDS,
    FormError,
    Kind,
    as_json,
    fields_of,
    json_field,
    place_of,
    texts_of,
    value_of,
)

#: The machine may be busy.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# A schema of one value, and a value that it allows.
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=8)
KEYS = st.text(st.sampled_from("ab~/. é\"<'&"), min_size=1, max_size=6)
WHOLE = st.integers(-(10**30), 10**30)
ANY = st.recursive(
    st.none() | st.booleans() | WHOLE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def _choice(values: list[Any]) -> st.SearchStrategy[tuple[Any, Any]]:
    return st.sampled_from(values).map(lambda value: ({"enum": values}, value))


def _choices(values: list[str]) -> st.SearchStrategy[tuple[Any, Any]]:
    chosen = st.lists(st.sampled_from(values), unique=True)
    return chosen.map(lambda some: ({"type": "array", "items": {"type": "string", "enum": values}}, some))


SIMPLE = st.one_of(
    TEXT.map(lambda value: ({"type": "string"}, value)),
    TEXT.map(lambda value: ({"type": "string", "maxLength": 5_000}, f"{value}\n{value}")),
    TEXT.map(lambda value: ({"type": ["string", "null"]}, value)),
    TEXT.map(lambda value: ({"anyOf": [{"type": "string"}, {"type": "null"}]}, value)),
    TEXT.map(lambda value: ({"$ref": "#/$defs/Name"}, value)),
    st.booleans().map(lambda value: ({"type": "boolean"}, value)),
    WHOLE.map(lambda value: ({"type": "integer"}, value)),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda value: ({"type": "number"}, value)),
    st.lists(ANY.filter(lambda value: value != ""), min_size=1, max_size=4, unique_by=as_json).flatmap(
        _choice
    ),
    st.lists(TEXT, min_size=1, max_size=4, unique=True).flatmap(_choices),
    st.lists(TEXT, max_size=4).map(lambda value: ({"type": "array", "items": {"type": "string"}}, value)),
    ANY.map(lambda value: (True, value)),
    st.lists(WHOLE, max_size=3).map(lambda value: ({"type": "array", "items": {"type": "integer"}}, value)),
)


def _is_visible(value: Any) -> bool:
    """Whether a form shows anything for an optional value."""
    if isinstance(value, dict):
        return any(map(_is_visible, value.values()))
    return value is not None and value != []


@st.composite
def objects(draw: st.DrawFn, *, depth: int = 0) -> tuple[Any, Any]:
    """An object with a schema; properties that aren't required may be missing from it."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    value: dict[str, Any] = {}
    key, part = "", None
    for key in draw(st.lists(KEYS, min_size=1, max_size=5, unique=True)):
        is_nested = depth < 2 and draw(st.integers(0, 4)) == 0
        properties[key], part = draw(objects(depth=depth + 1) if is_nested else SIMPLE)
        if draw(st.booleans()):
            required.append(key)
            value[key] = part
        # A form can't tell an optional value that is empty from one that is missing.
        elif _is_visible(part) and draw(st.booleans()):
            value[key] = part
    if not value and depth:
        required.append(key)
        value[key] = part
    return {"type": "object", "properties": properties, "required": required}, value


def entered(fields: Any, value: Any) -> list[tuple[str, str]]:
    return [(name, text) for name, texts in texts_of(fields, value).items() for text in texts]


@_PATIENT
@given(objects() | SIMPLE)
def test_what_a_form_shows_is_what_it_sends(made: tuple[Any, Any]) -> None:
    schema, value = made
    schema = {**schema, "$defs": {"Name": {"type": "string"}}} if isinstance(schema, dict) else schema
    fields = fields_of(schema)

    again = value_of(fields, entered(fields, value))

    assert as_json(again) == as_json(value) or again == value
    assert len({field.name for field in fields}) == len(fields)


@_PATIENT
@given(ANY | st.fixed_dictionaries({"type": ANY, "properties": ANY, "required": ANY, "enum": ANY}))
def test_any_json_in_place_of_a_schema_makes_a_form(schema: Any) -> None:
    fields = fields_of(schema)

    assert fields
    texts_of(fields)
    with suppress(FormError):
        value_of(fields, [])


INVOICE = {
    "type": "object",
    "required": ["vendor", "amount", "paid", "terms", "address"],
    "properties": {
        "amount": {"type": "number", "minimum": 0, "maximum": 100, "description": "In USD."},
        "vendor": {"type": "string", "title": "Vendor", "minLength": 2, "maxLength": 80},
        "paid": {"type": "boolean"},
        "seats": {"type": "integer", "default": 5},
        "terms": {"oneOf": [{"const": "m", "title": "monthly"}, {"const": "y", "title": "yearly"}]},
        "due": {"type": "string", "format": "date"},
        "mail": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "comment": {"type": "string"},
        "address": {
            "type": "object",
            "title": "Billing address",
            "required": ["city"],
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "city": {"type": "string"}},
        },
        "second": {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}},
        "extra": {"type": "object"},
    },
}
ENTERED = [
    ("data/vendor", "Acme"),
    ("data/amount", "12.50"),
    ("data/paid", "false"),
    ("data/terms", '"y"'),
    ("data/seats", "7"),
    ("data/tags", "a\n\n b \n"),
    ("data/comment", ""),
    ("data/address/city", "Bern"),
]


def test_each_kind_of_value_has_its_field() -> None:
    fields = {field.name: field for field in fields_of(INVOICE)}

    assert {name: field.kind for name, field in fields.items()} == {
        "data/vendor": Kind.TEXT,
        "data/amount": Kind.NUMBER,
        "data/paid": Kind.BOOLEAN,
        "data/terms": Kind.CHOICE,
        "data/seats": Kind.INTEGER,
        "data/due": Kind.DATE,
        "data/mail": Kind.EMAIL,
        "data/tags": Kind.LINES,
        "data/comment": Kind.LONG_TEXT,
        "data/extra": Kind.JSON,
        "data/address/city": Kind.TEXT,
        "data/address/zip": Kind.TEXT,
        "data/second/city": Kind.TEXT,
    }
    assert list(fields)[:4] == ["data/amount", "data/vendor", "data/paid", "data/seats"], (
        "as the schema has them"
    )
    assert list(fields)[-1] == "data/extra", "optional JSON comes last"
    amount, vendor, city = fields["data/amount"], fields["data/vendor"], fields["data/address/city"]
    assert (amount.help, amount.minimum, amount.maximum, amount.must_be_filled) == ("In USD.", 0, 100, True)
    assert (vendor.label, vendor.min_length, vendor.max_length) == ("Vendor", 2, 80)
    assert (city.section, city.must_be_filled) == ("Billing address", True)
    assert not fields["data/second/city"].must_be_filled, "the object around it is optional"
    assert fields["data/address/zip"].pattern == "^[0-9]{5}$"
    assert fields["data/terms"].choices == (('"m"', "monthly"), ('"y"', "yearly"))


def test_what_is_entered_is_typed_and_empty_fields_are_left_out() -> None:
    answer = value_of(fields_of(INVOICE), ENTERED)

    assert answer == {
        "vendor": "Acme",
        "amount": 12.5,
        "paid": False,
        "terms": "y",
        "seats": 7,
        "tags": ["a", "b"],
        "address": {"city": "Bern"},
    }
    assert json_schema.check(INVOICE, _candidate(answer)).passed


def _candidate(data: Any) -> CandidateOutput:
    output = as_json({"data": data, "artifacts": None, "decision_report": None}).encode()
    return CandidateOutput("task_1", 1, "errand", "", b"{}", output)


def test_each_fault_is_at_its_field() -> None:
    wrong = {
        "data/amount": "much",
        "data/paid": "maybe",
        "data/terms": '"z"',
        "data/seats": "1.5",
        "data/extra": "{",
        "data/second/city": "",
    }
    with pytest.raises(FormError) as error:
        value_of(fields_of(INVOICE), [*wrong.items(), ("data/address/zip", "3000")])

    assert {name: fault.split(",")[0].split(":")[0] for name, fault in error.value.faults.items()} == {
        "data/vendor": "is required",
        "data/amount": "must be a number",
        "data/paid": "must be yes or no",
        "data/terms": "must be one of the choices",
        "data/seats": "must be a whole number",
        "data/extra": "must be JSON",
        "data/address/city": "is required",
    }


@pytest.mark.parametrize("text", ["nan", "inf", "1e999", "1_000", "٣", "1" * 5_000, "0x10"])
def test_text_that_json_has_no_number_for_is_refused(text: str) -> None:
    for kind in ("integer", "number"):
        with pytest.raises(FormError):
            value_of(fields_of({"type": kind}), [("data", text)])


def test_a_required_value_that_may_be_null_is_null_when_empty() -> None:
    schema = {
        "properties": {"a": {"type": ["integer", "null"]}, "b": {"type": ["string", "null"]}},
        "required": ["a"],
    }

    assert value_of(fields_of(schema), [("data/a", ""), ("data/b", " ")]) == {"a": None}


def test_a_schema_that_no_fields_fit_is_answered_as_json() -> None:
    many = {"properties": {f"p{n}": {"type": "string"} for n in range(MAX_FIELDS + 1)}}
    for schema in (None, True, {}, {"anyOf": [{"type": "string"}, {"type": "object"}]}, many):
        (field,) = fields_of(schema)
        assert (field.kind, field.path, field.name) == (Kind.JSON, (), "data")
        assert value_of([field], [("data", '{"any": [1]}')]) == {"any": [1]}

    (whole,) = [json_field({"default": {"a": 1}, **INVOICE})]
    assert texts_of([whole]) == {"data": ['{\n  "a": 1\n}']}


def test_fields_start_with_their_defaults() -> None:
    assert texts_of(fields_of(INVOICE))["data/seats"] == ["5"]
    assert texts_of(fields_of(INVOICE))["data/vendor"] == []


def test_a_reason_of_the_gate_belongs_to_the_field_that_it_names() -> None:
    fields = fields_of(INVOICE)
    reasons = json_schema.check(
        INVOICE, _candidate({"vendor": "A", "tags": [1], "address": {"zip": "x"}})
    ).reasons
    found: dict[str | None, list[str]] = {}
    for reason in reasons:
        name, text = place_of(fields, reason)
        found.setdefault(name, []).append(text)

    assert set(found) == {"data/vendor", "data/tags", "data/address/zip", None}
    assert found["data/vendor"] == ['"A" is shorter than 2 characters']
    assert all("output.data" in text for text in found[None]), (
        "those about an object are about the whole answer"
    )
