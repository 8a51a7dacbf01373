"""Content hashes are stable, and values without a canonical form are rejected."""

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.errors import InvalidInputError
from lineshaft.model.idempotency import MAX_DEPTH, canonical_json, content_hash

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
documents = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


def shuffled(value: Any) -> Any:
    """The same content with every dictionary in the opposite order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [shuffled(item) for item in value]
    return value


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_the_hash_is_the_sha256_of_canonical_json() -> None:
    """R-171, U8: sorted keys, compact, UTF-8, over type and payload together."""
    expected = hashlib.sha256('{"payload":{"a":[1,null],"ü":"é"},"type":"eng-backend"}'.encode()).digest()

    assert content_hash("eng-backend", {"ü": "é", "a": [1, None]}) == expected


def test_type_and_payload_are_both_hashed() -> None:
    """F-14: the payload alone doesn't distinguish tasks of different types."""
    assert len({content_hash(t, p) for t in ("a", "b") for p in ({}, {"x": 1}, {"x": "1"}, None)}) == 8


@given(documents)
def test_order_of_keys_does_not_matter(document: Any) -> None:
    """R-171."""
    assert content_hash("t", shuffled(document)) == content_hash("t", document)


@given(documents)
def test_it_survives_a_round_trip_through_json(document: Any) -> None:
    """U8: a task sent again over HTTP has the same hash."""
    assert content_hash("t", json.loads(json.dumps(document))) == content_hash("t", document)


@given(documents, documents)
def test_different_content_has_different_hashes(one: Any, other: Any) -> None:
    """U8: hashes are equal only for equal JSON."""
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)

    assert (content_hash("t", one) == content_hash("t", other)) == same


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_it_is_the_same_in_every_process(seed: str) -> None:
    """F-14: unlike Python's hash, which is salted per process."""
    program = (
        "from lineshaft.model.idempotency import content_hash;"
        "print(content_hash('t', {k: {k: 1} for k in sorted({'a', 'b', 'ü'}, key=hash)}).hex())"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        check=True,
        text=True,
    ).stdout.strip()

    assert found == content_hash("t", {key: {key: 1} for key in ("a", "b", "ü")}).hex()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"a": float("nan")}, "number that JSON can't hold"),
        ([float("inf")], "number that JSON can't hold"),
        (-float("inf"), "number that JSON can't hold"),
        pytest.param({"a": 10**5000}, "number that JSON can't hold", id="huge"),
        ({"a": {1: "x"}}, r"content\.payload\.a: keys must be text, got 1"),
        ({"a": [{None: "x"}]}, r"content\.payload\.a\[0\]: keys must be text, got None"),
        ({"a": {True: 1, "b": 2}}, "keys must be text, got True"),
        ({"a": b"x"}, r"content\.payload\.a: must be a JSON value, got bytes"),
        ({"a": {1, 2}}, "must be a JSON value, got set"),
        ("\ud800", "lone surrogate"),
        ({"\udfff": 1}, "lone surrogate"),
        pytest.param({10**5000: 1}, "keys must be text, got a number of thousands", id="huge key"),
    ],
)
def test_a_value_without_a_canonical_form_is_rejected(payload: object, message: str) -> None:
    """R-171: the error names the place."""
    with pytest.raises(InvalidInputError, match=message):
        content_hash("t", payload)


def test_nesting_has_a_limit_and_a_clear_error() -> None:
    """General: hostile depth ends in InvalidInputError, never in RecursionError."""
    assert canonical_json(nested(MAX_DEPTH + 1)) == b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1)
    deep_objects: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        deep_objects = {"a": deep_objects}
    assert canonical_json(deep_objects).count(b"{") == MAX_DEPTH + 1
    with pytest.raises(InvalidInputError, match="nested deeper"):
        canonical_json({"a": deep_objects})
    for depth in (MAX_DEPTH + 2, 100_000):
        with pytest.raises(InvalidInputError, match=f"nested deeper than {MAX_DEPTH} levels"):
            canonical_json(nested(depth))


def test_recursive_content_is_rejected() -> None:
    endless: dict[str, Any] = {}
    endless["self"] = [endless, endless]

    with pytest.raises(InvalidInputError, match="nested deeper"):
        canonical_json(endless)
