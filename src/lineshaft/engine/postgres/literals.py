"""Values formatted for the database where the driver is slower or unsuitable."""

from collections.abc import Sequence
from typing import cast

import msgspec


def array_literal(values: Sequence[object]) -> str:
    """PostgreSQL's text form of an array.

    Arrays of different lengths can't be elements of one array parameter, and for long arrays this is many
    times faster than the driver.
    """
    if not values:
        return "{}"
    nones = values.count(None)
    if nones == len(values):
        return "{" + "NULL," * (nones - 1) + "NULL}"
    kinds = {type(value) for value in values}
    if kinds == {int}:
        return "{" + ",".join(map(str, values)) + "}"
    if kinds == {str}:
        # Mostly ids, which need no escapes: one check for all of them.
        joined = '","'.join(cast("Sequence[str]", values))
        if "\\" not in joined and joined.count('"') == 2 * (len(values) - 1):
            return '{"' + joined + '"}'
    return "{" + ",".join([_element(value) for value in values]) + "}"


def column_literal(values: Sequence[object]) -> str | None:
    """For one of several arrays in an `unnest`, which pads shorter ones with NULLs."""
    return None if values.count(None) == len(values) else array_literal(values)


def _element(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f'"\\\\x{value.hex()}"'
    if not isinstance(value, str):
        return str(value)
    if "\\" in value or '"' in value:
        value = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{value}"'


def json_text(json: bytes | None) -> str | None:
    """For a parameter of type jsonb: bytes would be bytea."""
    return None if json is None else json.decode()


def raw_json(json: bytes | None) -> msgspec.Raw | None:
    """For a part of a larger JSON text."""
    return None if json is None else msgspec.Raw(json)
