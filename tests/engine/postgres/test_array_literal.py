"""Arrays are sent as text of our own making: PostgreSQL must read what was meant."""

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lineshaft.engine.postgres.literals import array_literal

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def read(connection: psycopg.Connection, literal: str, kind: str) -> list[object]:
    row = connection.execute(f"SELECT %s::{kind}[]".encode(), [literal]).fetchone()
    assert row is not None
    return list(row[0])


@QUICK
@given(
    values=st.lists(st.none() | TEXTS | st.sampled_from(["NULL", "null", "", '"', "\\", "a,b", "{}", '","']))
)
def test_texts(connection: psycopg.Connection, values: list[str | None]) -> None:
    assert read(connection, array_literal(values), "text") == values


@QUICK
@given(values=st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_numbers(connection: psycopg.Connection, values: list[int | None]) -> None:
    assert read(connection, array_literal(values), "bigint") == values


@pytest.mark.parametrize("values", [[True, False], [None, True], [True]])
def test_flags(connection: psycopg.Connection, values: list[bool | None]) -> None:
    assert read(connection, array_literal(values), "boolean") == values
