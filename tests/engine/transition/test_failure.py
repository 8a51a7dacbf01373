"""Ending badly, or not yet: what a failed attempt comes to."""

from decimal import Decimal

import pytest

from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask, OutputContract, RetrySpec
from lineshaft.types.work import Spent
from tests.world import World, cost


@pytest.mark.parametrize(
    ("preset", "uniform", "delays"),
    [
        ("factory", 0.5, [10, 20]),
        ("factory", 0.0, [5, 10]),
        ("factory", 0.999, [14.99, 29.98]),
        ("loki", 0.0, [60, 120]),
        ("officeplane", 0.0, [5, 25, 125]),
    ],
)
async def test_delays_by_preset(world: World, preset: str, uniform: float, delays: list[float]) -> None:
    """R-112, R-113, R-114, U2, U3, F-7: from the immutable base; then the dead letters."""
    agent = await world.agent()
    task_id = await world.one(preset=preset, output=OutputContract(require_decision_report=False))
    seen = []

    for _ in delays:
        task = await world.take(agent)
        assert await world.fail(task, uniform=lambda: uniform) is Status.RETRYING
        seen.append(round(world.waits(task_id), 6))
        assert await world.engine.revive.retry(task_id) is Status.READY
    last = await world.fail(await world.take(agent))

    assert seen == delays
    assert last is Status.DEAD_LETTERED
    assert world.end(task_id)["attempts"] == len(delays) + 1


async def test_a_failed_attempt_is_recorded(world: World) -> None:
    """R-110, R-120, R-121, R-027, R-024, U11, F-9: history, money, and nothing left in the agent's hands."""
    agent = await world.agent(budget_usd=10)
    dag = await world.dag(NewTask("code", key="a", max_cost_usd=1, model_preferences=["x"]))
    task = await world.take(agent)
    world.age(seconds=12)

    spent = Spent(Decimal("0.3"), 10, 5)
    assert await world.fail(task, "segfault", spent=spent) is Status.RETRYING

    (attempt,) = world.attempts(task.id)
    assert (attempt["epoch"], attempt["number"], attempt["outcome"]) == (1, 1, "failed")
    assert (attempt["agent_id"], attempt["model"], attempt["error"]) == (agent.id, "x", "segfault")
    assert (attempt["category"], attempt["cost_usd"], attempt["tokens_input"]) == (
        "crash",
        Decimal("0.3"),
        10,
    )
    assert (attempt["ended_at"] - attempt["started_at"]).total_seconds() == 12
    live = world.live(task.id)
    held = ("agent_id", "model", "claimed_at", "started_at", "heartbeat_at", "lease_until", "limit_at")
    assert [live[name] for name in held] == [None] * len(held)
    assert (live["attempts"], live["last_category"], live["cost_usd"]) == (1, "crash", Decimal("0.3"))
    assert live["tokens_output"] == 5
    assert world.kinds(task.id)[-2:] == ["task.failed", "task.retry_scheduled"]
    assert world.dag_row(dag.id)["spent_usd"] == world.agent_row(agent)["spent_usd"] == Decimal("0.3")


async def test_costs_add_up_over_attempts(world: World) -> None:
    """R-024, R-130: 0.12 + 0.31 + 0.08 = 0.51."""
    agent = await world.agent()
    task_id = await world.one()
    for amount in ("0.12", "0.31", "0.08"):
        await world.fail(await world.take(agent), spent=cost(amount))
        if world.status(task_id) == "RETRYING":
            await world.engine.revive.retry(task_id)

    letter = world.row("SELECT * FROM lineshaft.dead_letter")
    assert (letter["task_id"], letter["total_cost_usd"]) == (task_id, Decimal("0.51"))
    assert (letter["reviewed"], letter["resolution"], letter["epoch"]) == (False, None, 3)
    assert world.end(task_id)["cost_usd"] == Decimal("0.51")


async def test_a_rate_limit_uses_no_attempt(world: World) -> None:
    """U13, R-212, R-216: recognized by text or category; the provider's wait, else doubled from 60 s."""
    agent = await world.agent()
    task_id = await world.one()
    waits = []
    for error, details in (
        ("HTTP 429 Too Many Requests", {}),
        ("slow down", {"category": "rate_limit"}),
        ("rate limit", {"retry_after_sec": 7}),
        ("rate limit", {"retry_after_sec": -7}),
        ("rate limit", {"retry_after_sec": 1e9}),
        ("429, Retry-After: 33", {}),
    ):
        task = await world.take(agent)
        assert await world.fail(task, error, uniform=lambda: 0.0, **details) is Status.RETRYING
        waits.append(world.waits(task_id))
        world.age(hours=1)  # claims are left alone for half as long
        if waits[-1] > 3_600:
            await world.engine.slowdowns.end(f"agent:{agent.id}")
        await world.engine.revive.retry(task_id)

    assert waits == [60, 120, 7, 0, 691_200, 33]
    live = world.live(task_id)
    # Five of them are short, or nobody knows how long they last.
    assert (live["attempts"], live["rate_limits"], live["long_waits"]) == (0, 5, 1)
    assert {attempt["outcome"] for attempt in world.attempts(task_id)} == {"rate_limited"}
    assert "task.rate_limited" in world.kinds(task_id)
    assert "task.failed" not in world.kinds(task_id)


@pytest.mark.parametrize(
    ("error", "end"), [("rate limit", "RETRYING"), ("insufficient quota", "DEAD_LETTERED")]
)
async def test_after_ten_waits_a_rate_limit_counts(world: World, error: str, end: str) -> None:
    """U13, R-217: as a failed attempt, and the waits start again; a spent quota is a dead letter."""
    agent = await world.agent()
    task_id = await world.one()
    for n in range(10):
        assert await world.fail(await world.take(agent), error) is Status.RETRYING
        assert world.live(task_id)["rate_limits"] == n + 1
        world.age(hours=1)
        await world.engine.revive.retry(task_id)

    assert await world.fail(await world.take(agent), error) == end

    if end == "RETRYING":
        live = world.live(task_id)
        assert (live["attempts"], live["rate_limits"]) == (1, 0)
    assert world.attempts(task_id)[-1]["outcome"] == "failed"


async def test_a_poison_pill(world: World) -> None:
    """R-136, F-26: three failures with two agents; the same agent thrice is none."""
    one, two = await world.agent(), await world.agent()
    poison = await world.one("poison", max_attempts=9)
    clumsy = await world.one("clumsy", max_attempts=9)
    for agent in (one, one, two):
        assert world.status(poison) == "READY"
        await world.fail(await world.take(agent, types=["poison"]))
        if world.status(poison) == "RETRYING":
            await world.engine.revive.retry(poison)
        await world.fail(await world.take(one, types=["clumsy"]))
        await world.engine.revive.retry(clumsy)

    assert world.statuses([poison, clumsy]) == ["DEAD_LETTERED", "READY"]
    assert world.row("SELECT * FROM lineshaft.dead_letter")["poison_pill"] is True


async def test_the_poison_flag_is_set_also_when_attempts_run_out(world: World) -> None:
    """R-136, F-26: whichever reason comes first."""
    task_id = await world.one(max_attempts=3)
    for _ in range(3):
        await world.fail(await world.take())
        if world.status(task_id) == "RETRYING":
            await world.engine.revive.retry(task_id)

    assert world.row("SELECT * FROM lineshaft.dead_letter")["poison_pill"] is True


@pytest.mark.parametrize(
    ("retry", "category", "end"),
    [
        (None, "auth_failure", "DEAD_LETTERED"),
        (None, "invalid_input", "DEAD_LETTERED"),
        (None, "timeout", "RETRYING"),
        (None, "strange", "RETRYING"),
        (RetrySpec(retry_on=("timeout",)), "strange", "DEAD_LETTERED"),
        (RetrySpec(retry_on=("auth_failure",)), "auth_failure", "RETRYING"),
        (RetrySpec(no_retry_on=("crash",)), None, "DEAD_LETTERED"),
        (RetrySpec(no_retry_on=("rate_limit",)), "rate_limit", "DEAD_LETTERED"),
    ],
)
async def test_what_is_worth_another_attempt(
    world: World, retry: RetrySpec | None, category: str | None, end: str
) -> None:
    """R-118, F-25."""
    await world.one(retry=retry)

    assert await world.fail(await world.take(), category=category) == end


async def test_strategies(world: World) -> None:
    """R-115, F-24: fixed and immediate, and a cap on what grows."""
    agent = await world.agent()
    for spec, delay in (
        (RetrySpec(strategy="fixed", initial_delay_sec=7, jitter=False), 7.0),
        (RetrySpec(strategy="immediate"), 0.0),
        (RetrySpec(initial_delay_sec=500, max_delay_sec=90), 90.0),
    ):
        task_id = await world.one(retry=spec)
        await world.fail(await world.take(agent))
        assert world.waits(task_id) == delay


async def test_fallback_models_from_the_second_failure(world: World) -> None:
    """R-117, F-28: another lane; a revived task starts with its own preferences again."""
    x, y = await world.agent(models_available=("x",)), await world.agent(models_available=("y",))
    task_id = await world.one(model_preferences=["x"], fallback_models=["y"])
    for _ in range(2):
        assert await world.claim(y) == []
        await world.fail(await world.take(x))
        await world.engine.revive.retry(task_id)

    assert await world.claim(x) == []
    task = await world.take(y)
    assert task.model == "y"
    assert await world.fail(task) is Status.DEAD_LETTERED
    await world.engine.revive.retry(task_id)
    assert await world.claim(y) == []
    assert (await world.take(x)).model == "x"


async def test_the_total_over_all_attempts(world: World) -> None:
    """R-238: reached, so no other attempt is worth trying."""
    agent = await world.agent()
    task_id = await world.one(max_total_cost_usd=0.5, max_attempts=9)
    await world.fail(await world.take(agent), spent=cost("0.3"))
    await world.engine.revive.retry(task_id)

    assert await world.fail(await world.take(agent), spent=cost("0.2")) is Status.DEAD_LETTERED
    logged = world.rows("SELECT data FROM lineshaft.events WHERE kind = 'task.dead_lettered'")
    assert logged[0]["data"]["because"] == "budget_exceeded"


async def test_an_error_of_any_bytes_is_recorded(world: World) -> None:
    """R-110: what a broken program writes must not keep its task from failing."""
    agent = await world.agent()
    await world.one()
    task = await world.take(agent)

    assert await world.fail(task, "a\0b\ud800" + "x" * 20_000, category="my\0own") is Status.RETRYING

    (attempt,) = world.attempts(task.id)
    assert attempt["error"].startswith("a\ufffdb?x")
    assert len(attempt["error"]) == 10_000
    assert attempt["category"] == "my\ufffdown"


async def test_a_claim_can_fail_before_it_is_started(world: World) -> None:
    """R-034."""
    agent = await world.agent()
    await world.one()
    (task,) = await world.claim(agent, start=False)

    assert await world.fail(task) is Status.RETRYING
    assert world.attempts(task.id)[0]["started_at"] is None
