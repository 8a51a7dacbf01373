"""Limits of the installation are rows: every process obeys them, and settings change them only once."""

from decimal import Decimal
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.actor import acting_as
from lineshaft.engine.guards.rules import Rules
from lineshaft.errors import InvalidInputError, UnavailableError
from lineshaft.model.tasks import NewTask
from lineshaft.types.limits import Limits
from tests.races.helpers import held, race
from tests.world import World, ref

CHANGES = "SELECT data FROM lineshaft.events WHERE kind = 'limits.changed' ORDER BY seq"


async def started(dsn: str, *, by_server: bool = True, **limits: Any) -> Limits:
    """The limits after a process with these settings has started."""
    async with Engine(dsn, max_connections=2, rules=Rules(limits=limits), by_server=by_server) as engine:
        return await engine.limits.read()


async def test_a_servers_setting_applies_once(world: World, dsn: str) -> None:
    """A change by hand survives a restart with the same setting; another value is applied."""
    assert (await started(dsn, daily_budget_usd=Decimal(5))).daily_budget_usd == 5
    with acting_as("ann"):
        await world.engine.limits.patch({"daily_budget_usd": Decimal(7)}, reason="a busy day")

    assert (await started(dsn, daily_budget_usd=Decimal(5))).daily_budget_usd == 7
    assert (await started(dsn)).daily_budget_usd == 7, "an unset variable changes nothing"
    assert (await started(dsn, daily_budget_usd=Decimal("5.00"))).daily_budget_usd == 7, "the same amount"
    assert (await started(dsn, daily_budget_usd=Decimal(6))).daily_budget_usd == 6
    assert (await started(dsn, daily_budget_usd=Decimal(5))).daily_budget_usd == 5

    changes = [row["data"] for row in world.rows(CHANGES)]
    assert [(each["actor"], each["limits"]["daily_budget_usd"]) for each in changes] == [
        ("settings", {"from": None, "to": "5"}),
        ("ann", {"from": "5", "to": "7"}),
        ("settings", {"from": "7", "to": "6"}),
        ("settings", {"from": "6", "to": "5"}),
    ]


async def test_a_limit_removed_by_hand_stays_removed(world: World, dsn: str) -> None:
    await started(dsn, daily_budget_usd=Decimal(5))
    await world.engine.limits.patch({"daily_budget_usd": None})

    for by_server in (True, False):
        found = await started(dsn, by_server=by_server, daily_budget_usd=Decimal(5))
        assert found.daily_budget_usd is None


async def test_another_process_obeys_the_row_and_warns(
    world: World, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    await world.engine.limits.patch({"daily_budget_usd": Decimal(3)})

    same = await started(dsn, by_server=False, daily_budget_usd=Decimal(3))
    assert not caplog.records
    other = await started(dsn, by_server=False, daily_budget_usd=Decimal(900), velocity_usd=Decimal(2))

    assert same.daily_budget_usd == other.daily_budget_usd == 3
    assert other.velocity_usd == 2, "where there is none it sets it"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        "These settings differ from the limits of the installation, which count: daily_b"
    )


async def test_a_second_process_without_the_setting_is_bound_by_it(
    dsn: str, connection: psycopg.Connection, clock: MovableClock
) -> None:
    """R-237: row 1 in two engines; 1 USD for everybody."""
    rules = Rules(limits={"daily_budget_usd": Decimal(1)})
    async with Engine(dsn, clock=clock, rules=rules, by_server=True) as one, Engine(dsn, clock=clock) as two:
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
    engine = Engine(read_only, rules=Rules(limits={"daily_budget_usd": Decimal(5)}), by_server=True)

    with pytest.raises(UnavailableError):
        await engine.__aenter__()

    assert engine.database.is_closed
