"""Two people who change one source: the second is refused, unless it has seen the first one's change."""

import psycopg

from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.actor import acting_as
from lineshaft.errors import InvalidTransitionError
from lineshaft.types.sources import NewSource, Source, SourceFields, SourceKind
from tests.races.helpers import held, race


def weekly(day: str) -> NewSource:
    template = {"task": {"type": "report"}}
    return NewSource(name="weekly", kind=SourceKind.SCHEDULE, cron=f"0 9 * * {day}", template=template)


async def test_of_two_changes_of_one_version_at_the_same_time_one_is_refused(
    engines: tuple[Engine, Engine], dsn: str
) -> None:
    one, two = engines
    read = await one.sources.create(weekly("MON"))

    async def save() -> Source | str:
        try:
            with acting_as("ann"):
                return (await one.sources.put(weekly("TUE"), version=read.version))[0]
        except InvalidTransitionError as error:
            return str(error)

    async def limit() -> Source | str:
        try:
            with acting_as("bob"):
                return await two.sources.patch("weekly", SourceFields(max_open=3), version=read.version)
        except InvalidTransitionError as error:
            return str(error)

    with (
        held(dsn, "SELECT FROM lineshaft.source WHERE name = %s FOR UPDATE", "weekly") as holder,
        psycopg.connect(dsn, autocommit=True) as look,
    ):
        results = await race(look, holder, save(), limit())

    (stored,) = (result for result in results if isinstance(result, Source))
    (refusal,) = (result for result in results if isinstance(result, str))
    assert stored.updated_by is not None
    assert f"was changed by {stored.updated_by} at " in refusal
    assert f"it has version {stored.version}, and your change is based on version {read.version}" in refusal
    assert await two.sources.get("weekly") == stored
    assert (stored.cron, stored.max_open) in {("0 9 * * TUE", None), ("0 9 * * MON", 3)}
    # With the new version the change goes through.
    both = await two.sources.patch(
        "weekly", SourceFields(cron="0 9 * * TUE", max_open=3), version=stored.version
    )
    assert (both.cron, both.max_open, both.version > stored.version) == ("0 9 * * TUE", 3, True)
