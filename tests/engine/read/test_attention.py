"""What needs a person."""

from decimal import Decimal

import psycopg

from lineshaft.clock import MovableClock
from lineshaft.model.tasks import NewTask, OutputContract
from lineshaft.types import Attention
from lineshaft.types.work import Spent
from tests.engine.review.test_dead_letters import decision
from tests.world import World


async def test_a_quiet_installation(world: World, clock: MovableClock) -> None:
    assert await world.engine.read.attention() == Attention(
        as_of=clock.now(),
        dead_letters=0,
        approvals=0,
        open_breakers=[],
        slowdowns=[],
        paused=[],
        daily_budget_usd=None,
        spent_today_usd=Decimal(0),
        reserved_usd=Decimal(0),
        agents_active=0,
        agents_draining=0,
        agents_offline=0,
        dags_over_budget=0,
    )


async def test_everything_that_needs_a_person(world: World, clock: MovableClock) -> None:
    engine = world.engine
    await world.agent("gone")
    clock.advance(3_600)
    agent = await world.agent("worker")
    await engine.limits.patch({"daily_budget_usd": Decimal(50)})
    # Two dead letters, one of them decided.
    await world.one()
    await world.kill(agent)
    await world.one()
    last = await world.kill(agent)
    await engine.dead_letters.resolve(last, decision("cancel"))
    # An output and a task for people.
    await world.one(output=OutputContract(validation="human"))
    await world.complete(await world.take(agent), "draft", spent="2")
    await world.one(required_capabilities=("human",))
    # Two DAGs that may not go on.
    for _ in range(2):
        await world.dag(NewTask("code", max_cost_usd=5), NewTask("code", max_cost_usd=5), ceiling=6)
        task = await world.take(agent)
        await world.fail(task, "it broke", category="auth_failure", spent=Spent(Decimal(5)))
        assert await world.claim(agent) == []
    await engine.breakers.open("code")
    await engine.slowdowns.slow_down("model:x", 60, "429")
    await engine.pauses.pause("*")

    found = await engine.read.attention()

    assert (found.dead_letters, found.approvals, found.dags_over_budget) == (3, 2, 2)
    assert (found.open_breakers, found.paused) == (["code"], ["*"])
    assert found.slowdowns == ["model:x"]
    money = (found.daily_budget_usd, found.spent_today_usd, found.reserved_usd)
    assert money == (Decimal(50), Decimal(12), Decimal(0))
    assert (found.agents_active, found.agents_draining, found.agents_offline) == (1, 0, 1)
    assert found.agents_lost == 1, "it fell silent"


async def test_counts_end_at_a_thousand(world: World, connection: psycopg.Connection) -> None:
    connection.execute(
        "INSERT INTO lineshaft.dead_letter"
        " (task_id, epoch, dead_lettered_at, total_cost_usd, category, error, pattern)"
        " SELECT 'task_' || n, 1, now(), 0, 'crash', 'x', 'x' FROM generate_series(1, 1500) AS n"
    )

    assert (await world.engine.read.attention()).dead_letters == 1_000
