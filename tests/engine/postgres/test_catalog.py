"""Named statements: read, checked, and all of them valid against the migrated schema."""

from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

import lineshaft.engine
from lineshaft.engine.feed.events import EventRow
from lineshaft.engine.postgres import catalog

ENGINE = Path(lineshaft.engine.__file__).parent
STEMS = sorted(
    str(path.relative_to(ENGINE).with_suffix(""))
    for path in ENGINE.rglob("*.sql")
    if path.stem not in {"schema", "fragments"} and path.parent.name != "migrations"
)
#: Makes what the others only read; its statements are exercised by the tests of migrations.
CREATES = {("postgres/migrate", "create_schema"), ("postgres/migrate", "create_table")}


class Nulls(dict[str, None]):
    """Every parameter is NULL."""

    def __missing__(self, key: str) -> None:
        return None


NULLS = Nulls()


def test_every_statement_fits_the_schema(connection: psycopg.Connection) -> None:
    """Each runs with every parameter NULL and is rolled back: names and types are checked.

    The search path is empty: statements also run in callers' transactions, whatever theirs is.
    """
    connection.execute("SET search_path = ''")
    faults: list[str] = []
    for stem in STEMS:
        for name, statement in catalog.load(f"lineshaft.engine.{stem.replace('/', '.')}").items():
            if (stem, name) in CREATES:
                continue
            try:
                # A NOT NULL violation shows that the statement itself is valid.
                with suppress(psycopg.errors.NotNullViolation), connection.transaction(force_rollback=True):
                    connection.execute(statement, NULLS)
            except psycopg.Error as error:
                faults.append(f"{stem} {name}: {error}")
    assert faults == []


@pytest.mark.parametrize("name", ["read_recent", "read_span", "read_task"])
def test_rows_that_are_read_by_position_have_their_columns_in_order(
    connection: psycopg.Connection, name: str
) -> None:
    statement = catalog.load("lineshaft.engine.feed.events")[name]

    cursor = connection.execute(statement, NULLS)

    assert cursor.description is not None
    assert tuple(column.name for column in cursor.description) == EventRow._fields


def test_comments_stay_here_and_the_name_goes_along() -> None:
    parsed = catalog.parse(
        "-- about this file\n\n-- name: a\n-- why\nSELECT 1;\n\n-- name: b\nSELECT\n  2\n", source="x"
    )

    assert parsed == {"a": "/* lineshaft a */ SELECT 1", "b": "/* lineshaft b */ SELECT\n  2"}


def test_a_fragment_is_included() -> None:
    parsed = catalog.parse("-- name: a\nSELECT\n    -- include: notify_lanes\nFROM b", source="x")

    assert parsed["a"].startswith("/* lineshaft a */ SELECT\nCASE\n    WHEN current_setting(")
    assert parsed["a"].endswith("\nFROM b")


def test_a_file_may_have_its_own_fragments() -> None:
    parsed = catalog.parse("-- fragment: f\nWHERE x\n\n-- name: a\nSELECT 1\n-- include: f", source="x")

    assert parsed == {"a": "/* lineshaft a */ SELECT 1\nWHERE x"}


def test_a_module_loads_the_file_beside_it() -> None:
    text = (ENGINE / "claim" / "claims.sql").read_text()

    assert catalog.load("lineshaft.engine.claim.claims") == catalog.parse(text, source="claims.sql")


def test_each_file_belongs_to_a_module() -> None:
    assert [stem for stem in STEMS if not (ENGINE / stem).with_suffix(".py").is_file()] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-- name: a\nSELECT interval '%(ttl)s seconds'", "placeholder inside quotes"),
        ("-- name: a\nSELECT 'it''s %(ttl)s'", "placeholder inside quotes"),
        ("-- name: a\nSELECT 1 WHERE x LIKE 'a%'", "lone percent sign"),
        ("-- name: a\nSELECT 1\n-- name: a\nSELECT 2", "two statements named a"),
        ("SELECT 1", "is before the first"),
        ("-- name: a\n-- nothing", "a is empty"),
        ("-- name: a\nSELECT\n  -- include: unheard_of", "unknown fragment unheard_of"),
    ],
)
def test_what_would_go_wrong_silently_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        catalog.parse(text, source="x.sql")
