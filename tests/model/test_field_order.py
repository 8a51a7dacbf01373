"""The order of a schema's properties: kept beside them, gone again when the schema is read."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.model.field_order import ORDER, restored, with_order

NAMES = st.text("abyzö", min_size=1, max_size=3)
SCHEMAS = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "number"])}),
    lambda inner: st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=4)},
        optional={"$defs": st.dictionaries(NAMES, inner, max_size=2)},
    ),
    max_leaves=8,
)


def as_jsonb(value: Any) -> Any:
    """As PostgreSQL keeps it: keys are sorted by their length, then by their bytes."""
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: (len(name.encode()), name.encode()))
        return {name: as_jsonb(value[name]) for name in names}
    return [as_jsonb(item) for item in value] if isinstance(value, list) else value


def properties_in(schema: Any) -> list[Any]:
    """Names of properties in their order, with those of the schemas in them."""
    names = [(name, properties_in(part)) for name, part in schema.get("properties", {}).items()]
    return [names, sorted((name, properties_in(part)) for name, part in schema.get("$defs", {}).items())]


@given(SCHEMAS)
def test_what_is_read_is_what_was_submitted(schema: dict[str, Any]) -> None:
    stored = msgspec.json.encode(as_jsonb(with_order(schema)))
    read = msgspec.json.decode(restored(stored) or b"")
    assert read == schema
    assert properties_in(read) == properties_in(schema)


def test_an_order_that_is_kept_anyway_is_not_listed() -> None:
    schema: dict[str, Any] = {"properties": {"a": {}, "b": {}, "cc": {}}}
    assert with_order(schema) == schema
    assert ORDER in with_order({"properties": {"cc": {}, "a": {}}})
