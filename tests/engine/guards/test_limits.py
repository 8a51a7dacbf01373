"""Limits of the installation are rows: every process obeys them, and what people set stays."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.actor import acting_as
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.guards.servers import ThisServer
from lineshaft.errors import InvalidInputError, UnavailableError
from lineshaft.model.tasks import NewTask
from lineshaft.settings import Settings
from lineshaft.types.limits import Limits
from tests.races.helpers import held, race
from tests.world import World, ref

CHANGES = "SELECT data FROM lineshaft.events WHERE kind = 'limits.changed' ORDER BY seq"


async def started(dsn: str, *, server: str | None = "one:8001", **limits: Any) -> Limits:
    """The limits after a process with these settings has started."""
    async with Engine(dsn, max_connections=2, rules=Rules(limits=limits), server=server) as engine:
        return await engine.limits.read()


async def test_a_servers_setting_applies_when_it_starts(
    world: World, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each application is logged and an event; nothing that stays as it is."""
    for value in (5, 6, 6, 5):
        assert (await started(dsn, daily_budget_usd=Decimal(value))).daily_budget_usd == value
    assert (await started(dsn)).daily_budget_usd == 5, "an unset variable changes nothing"
    assert (await started(dsn, server="two:8001", daily_budget_usd=Decimal("7.50"))).by_hand == []

    changes = [row["data"] for row in world.rows(CHANGES)]
    assert {each["actor"] for each in changes} == {"settings"}
    assert [(each["server"], each["limits"]["daily_budget_usd"]) for each in changes] == [
        ("one:8001", {"from": None, "to": "5"}),
        ("one:8001", {"from": "5", "to": "6"}),
        ("one:8001", {"from": "6", "to": "5"}),
        ("two:8001", {"from": "5", "to": "7.5"}),
    ]
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 4
    assert logged[-1] == "daily_budget_usd is 7.5 now, and was 5: as LINESHAFT_DAILY_BUDGET_USD says"


async def test_what_a_person_has_set_stays_whatever_servers_start(
    world: World, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the value that is in force, and no limit at all; until it is returned to the settings."""
    await started(dsn, daily_budget_usd=Decimal(50))
    with acting_as("ann"):
        await world.engine.limits.patch({"daily_budget_usd": Decimal(1)}, reason="emergency")
    caplog.clear()

    for value in (50, 40, 50):
        limits = await started(dsn, daily_budget_usd=Decimal(value))
        assert (limits.daily_budget_usd, limits.by_hand) == (Decimal(1), ["daily_budget_usd"])
        (warning,) = [record.getMessage() for record in caplog.records]
        assert f"daily_budget_usd is 1, LINESHAFT_DAILY_BUDGET_USD says {value}" in warning
        caplog.clear()
    for amount in (Decimal(1), None):
        await world.engine.limits.patch({"daily_budget_usd": amount})
        for server in ("one:8001", None):
            assert (
                await started(dsn, server=server, daily_budget_usd=Decimal(50))
            ).daily_budget_usd == amount

    with acting_as("ann"):
        returned = await world.engine.limits.patch({}, from_settings=["daily_budget_usd"], reason="over")
    assert returned.by_hand == []
    assert (await started(dsn, daily_budget_usd=Decimal(50))).daily_budget_usd == 50
    changes = [row["data"] for row in world.rows(CHANGES)][-2:]
    assert changes[0] == {
        "limits": {},
        "from_settings": ["daily_budget_usd"],
        "actor": "ann",
        "reason": "over",
    }
    assert changes[1]["limits"]["daily_budget_usd"] == {"from": None, "to": "50"}


async def test_a_limit_returns_to_what_the_last_server_says(world: World, clock: MovableClock) -> None:
    """At once, if one that runs has the setting; one that fell silent doesn't count."""
    names = ["daily_budget_usd", "crash_cost_fraction", "breakers"]
    policy = msgspec.json.encode({"defaults": {"failureThreshold": 3}, "overrides": {}})
    values = {"daily_budget_usd": Decimal(50), "crash_cost_fraction": 0.5, "breakers": policy}
    one = ThisServer(world.engine.database, "one:8001", "1.0", values)
    await one.report()
    clock.advance(1)
    await ThisServer(world.engine.database, "two:8001", "1.0", {"daily_budget_usd": Decimal(40)}).report()
    changes = {"daily_budget_usd": 1, "velocity_usd": 2, "crash_cost_fraction": 0, "breakers": None}
    before = await world.engine.limits.patch(changes)
    assert [server.name for server in before.servers] == ["two:8001", "one:8001"]
    assert before.disagreements == {"daily_budget_usd": [("two:8001", "40"), ("one:8001", "50")]}
    assert set(before.by_hand) == {"velocity_usd", *names}

    after = await world.engine.limits.patch({}, from_settings=[*names, "velocity_usd"])

    assert (after.daily_budget_usd, after.crash_cost_fraction) == (Decimal(40), Decimal("0.5"))
    assert after.velocity_usd == 2, "no server says anything: it stays until one does"
    assert after.by_hand == []
    assert world.row("SELECT breakers FROM lineshaft.limits")["breakers"]["defaults"] == {
        "failureThreshold": 3
    }
    clock.advance(91)
    await one.report()
    assert [server.name for server in (await world.engine.limits.read()).servers] == ["one:8001"]
    await world.engine.limits.patch({"daily_budget_usd": 1})
    returned = await world.engine.limits.patch({}, from_settings=["daily_budget_usd"])
    assert returned.daily_budget_usd == 50
    await one.remove()
    assert (await world.engine.limits.read()).servers == []


async def test_what_people_set_with_older_versions_stays(world: World, dsn: str) -> None:
    """They write the value only; a server of an older version records that it applied its setting."""
    world.connection.execute("UPDATE lineshaft.limits SET daily_budget_usd = 3")
    assert (await started(dsn, daily_budget_usd=Decimal(50))).daily_budget_usd == 3
    await world.engine.limits.patch({}, from_settings=["daily_budget_usd"])
    assert (await started(dsn, daily_budget_usd=Decimal(50))).daily_budget_usd == 50

    await world.engine.limits.patch({"daily_budget_usd": 1})
    world.connection.execute(
        "UPDATE lineshaft.limits SET daily_budget_usd = 40, applied = applied || %s::jsonb",
        ['{"daily_budget_usd": "40"}'],
    )
    restored = await started(dsn, daily_budget_usd=Decimal(50))
    assert (restored.daily_budget_usd, restored.by_hand) == (Decimal(1), ["daily_budget_usd"])

    world.connection.execute("UPDATE lineshaft.limits SET daily_budget_usd = 40")
    assert (await started(dsn, daily_budget_usd=Decimal(50))).daily_budget_usd == 40, "a person set it back"


async def test_another_process_obeys_the_row_and_warns(
    world: World, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    await world.engine.limits.patch({"daily_budget_usd": Decimal(3)})

    same = await started(dsn, server=None, daily_budget_usd=Decimal(3))
    assert not caplog.records
    other = await started(dsn, server=None, daily_budget_usd=Decimal(900), velocity_usd=Decimal(2))
    again = await started(dsn, server=None, velocity_usd=Decimal(5))

    assert same.daily_budget_usd == other.daily_budget_usd == 3
    assert other.velocity_usd == again.velocity_usd == 2, "where there is none it sets it"
    applied, *warnings = [record.getMessage() for record in caplog.records]
    assert applied == "velocity_usd is 2 now, and was None: as LINESHAFT_COST_VELOCITY_USD says"
    assert [warning.split(": ", 1)[1].split(".")[0] for warning in warnings] == [
        "daily_budget_usd",
        "velocity_usd",
    ]


async def test_thresholds_of_breakers_follow_the_file(world: World, dsn: str, tmp_path: Path) -> None:
    """A file that says the defaults replaces others; one that can't be read changes nothing."""
    path = tmp_path / "breakers.yaml"
    rules = []
    for text in ("defaults: {failureThreshold: 3}", "defaults: [", "defaults: {}"):
        path.write_text(text)
        rules.append(Rules.of(Settings(circuit_breakers=path)))
    thresholds = []
    for each in rules:
        async with Engine(dsn, max_connections=2, rules=each, server="one:8001"):
            row = world.row("SELECT breakers FROM lineshaft.limits")
            thresholds.append(row["breakers"]["defaults"]["failureThreshold"])

    assert thresholds == [3, 3, 5]
    assert len(world.rows(CHANGES)) == 2


async def test_a_second_process_without_the_setting_is_bound_by_it(
    dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-237: row 1 in two engines; 1 USD for everybody."""
    rules = Rules(limits={"daily_budget_usd": Decimal(1)})
    async with (
        Engine(dsn, clock=clock, rules=rules, server="one:8001") as one,
        Engine(dsn, clock=clock) as two,
    ):
        first, second = World(one, connection, clock), World(two, connection, clock)
        ann, bob = await first.agent("ann"), await second.agent("bob")
        await first.submit(*(NewTask("code", max_cost_usd=0.6) for _ in range(9)))

        task = await first.take(ann)
        assert await second.claim(bob, 5) == []
        await first.complete(task, spent="0.6")
        assert await second.claim(bob, 5) == []
        await two.limits.patch({"daily_budget_usd": Decimal("1.2")})
        assert len(await second.claim(bob, 5)) == 1
        assert await first.claim(ann, 5) == []


async def test_limits_are_exact(world: World) -> None:
    await world.engine.limits.patch({"daily_budget_usd": Decimal(10)})
    agent = await world.agent()
    await world.submit(NewTask("code", max_cost_usd=2.5), NewTask("code"))
    tasks = await world.claim(agent, 2)
    priced = next(task for task in tasks if task.max_cost_usd)
    free = next(task for task in tasks if not task.max_cost_usd)
    await world.complete(free, spent="0.000001")
    await world.heartbeat(agent.id, agent.incarnation, [ref(priced)])

    limits = await world.engine.limits.read()

    assert (limits.spent_today_usd, limits.reserved_usd) == (Decimal("0.000001"), Decimal("2.5"))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"daily_budget_usd": -1}, "daily_budget_usd: must be an amount in US dollars"),
        ({"velocity_window_sec": 0}, "velocity_window_sec"),
        ({"velocity_action": "explode"}, "velocity_action: must be stop or pause, got 'explode'"),
        ({"crash_cost_fraction": 1.1}, "crash_cost_fraction"),
        ({"daily": 1}, "daily: unknown limit"),
    ],
)
async def test_invalid_limits_change_nothing(world: World, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        await world.engine.limits.patch({"default_max_cost_usd": 3, **changes})

    assert error in str(raised.value)
    assert (await world.engine.limits.read()).default_max_cost_usd is None
    assert world.rows(CHANGES) == []


async def test_two_servers_start_at_once(dsn: str, connection: psycopg.Connection) -> None:
    """Each value is applied once, one server after the other."""
    with held(dsn, "SELECT FROM lineshaft.limits FOR UPDATE") as holder:
        starts = (started(dsn, daily_budget_usd=Decimal(1)), started(dsn, velocity_usd=Decimal(2)))
        await race(connection, holder, *starts)

    limits = await started(dsn)
    assert (limits.daily_budget_usd, limits.velocity_usd) == (Decimal(1), Decimal(2))
    assert len(connection.execute(CHANGES).fetchall()) == 2


async def test_an_engine_that_cannot_apply_its_limits_closes_its_connections(dsn: str) -> None:
    """Tasks of an open pool ignore their cancellation: a program that ends in this moment would hang."""
    read_only = make_conninfo(dsn, options="-c default_transaction_read_only=on")
    engine = Engine(read_only, rules=Rules(limits={"daily_budget_usd": Decimal(5)}), server="one:8001")

    with pytest.raises(UnavailableError):
        await engine.__aenter__()

    assert engine.database.is_closed


async def test_only_limits_return_to_the_settings(world: World) -> None:
    with pytest.raises(
        InvalidInputError, match="from_settings: unknown limit 'daily'; there are daily_budget_usd"
    ):
        await world.engine.limits.patch({}, from_settings=["daily"])
    with pytest.raises(InvalidInputError, match="daily_budget_usd can't be set and returned"):
        await world.engine.limits.patch({"daily_budget_usd": 1}, from_settings=["daily_budget_usd"])
    assert world.rows(CHANGES) == []
