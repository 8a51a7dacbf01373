"""Money: when a budget is used up, work stops before the next step."""

import asyncio
from collections.abc import Callable
from decimal import Decimal

import pytest

from lineshaft import Agent, BudgetExceeded, Lineshaft, NewTask, TaskContext
from lineshaft.agent.money import Account
from lineshaft.engine.feed.wakeups import POLL_SUBSCRIBED
from lineshaft.model.states import Status
from lineshaft.types.work import RemainingBudgets
from tests.agent.helpers import AT_ONCE, at_work, attempts, drain, engine_of, one

ZERO = Decimal(0)


def account(
    spent: str, *, max_cost: str | None = None, remaining: RemainingBudgets | None = None, at: str = "0"
) -> Account:
    made = Account(None if max_cost is None else Decimal(max_cost))
    if remaining is not None:
        made.learn(remaining, Decimal(at))
    made.add(Decimal(spent), 0, 0)
    return made


@pytest.mark.parametrize(
    "fine",
    [
        account("0"),
        account("5"),
        account("0.99", max_cost="1"),
        account("0", max_cost="0"),
        account("0", remaining=RemainingBudgets(agent=ZERO, dag=ZERO)),
        # What is reserved is there, whatever is left besides.
        account("0.5", max_cost="1", remaining=RemainingBudgets(agent=ZERO, dag=ZERO)),
        account("0.5", remaining=RemainingBudgets(task=Decimal("0.51"))),
    ],
)
def test_a_step_may_run_while_money_is_left(fine: Account) -> None:
    fine.check_next_step()


@pytest.mark.parametrize(
    ("broke", "whose"),
    [
        (account("1", max_cost="1"), "The task may cost 1 USD and has cost 1"),
        (account("0.01", max_cost="0"), "The task may cost 0 USD"),
        (account("1", remaining=RemainingBudgets(agent=ZERO)), "The agent's budget is used up"),
        (account("1", remaining=RemainingBudgets(dag=ZERO)), "The DAG's budget is used up"),
        (account("0", remaining=RemainingBudgets(agent=Decimal(-1))), "The agent's budget is used up: -1"),
        (account("0.5", remaining=RemainingBudgets(task=Decimal("0.5"))), "max_total_cost_usd"),
        (account("0.5", remaining=RemainingBudgets(task=Decimal("0.25")), at="0.25"), "max_total_cost_usd"),
    ],
)
def test_no_step_runs_when_no_money_is_left(broke: Account, whose: str) -> None:
    with pytest.raises(BudgetExceeded, match=whose):
        broke.check_next_step()


def spender(agent: Agent, cost: str = "0.4") -> list[int]:
    """A handler that spends in each of ten steps; returns the list of those that ran."""
    ran: list[int] = []

    @agent.task("spend")
    async def spend(ctx: TaskContext) -> None:
        for number in range(10):

            def paid(number: int = number) -> None:
                ran.append(number)
                ctx.spend(Decimal(cost), tokens_input=100, tokens_output=10)

            await ctx.step(f"step {number}", paid)

    return ran


async def test_a_budget_that_doesnt_count_is_a_warning(
    shaft: Lineshaft, caplog: pytest.LogCaptureFixture
) -> None:
    for budget in (1, 1, 2.5):
        agent = Agent("a", budget_usd=budget)

        @agent.task("work")
        async def work(ctx: TaskContext) -> None: ...

        await agent.run(shaft, until_idle=True)

    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    # A busy machine may be the reason of others.
    (warning,) = [text for text in warnings if "budget" in text]
    assert warning == (
        "budget_usd=2.5 is ignored: agent 'a' has a budget of 1 USD. "
        "To change it: lineshaft agents change a --budget USD"
    )
    assert (await shaft.get_agent("a")).budget_usd == 1


async def test_a_task_stops_at_its_own_maximum(shaft: Lineshaft) -> None:
    agent = Agent("a", budget_usd=100)
    ran = spender(agent)

    task = await one(shaft, agent, "spend", max_cost_usd=1)

    assert ran == [0, 1, 2]
    assert (task.status, task.failure_category) == (Status.DEAD_LETTERED, "budget_exceeded")
    assert (task.cost_usd, task.tokens_used.input) == (Decimal("1.2"), 300)
    view = await engine_of(shaft).fleet.read("a")
    assert (view.spent_usd, view.reserved_usd) == (Decimal("1.2"), ZERO)


async def test_a_task_stops_when_its_agent_has_nothing_left(shaft: Lineshaft) -> None:
    """It waits for money, whichever comes first: the next step, or the answer to a heartbeat."""
    agent = Agent("a", budget_usd=1)
    ran = spender(agent)

    task = await one(shaft, agent, "spend")

    assert (ran, task.status, task.attempts) == ([0, 1, 2], Status.READY, 0)
    assert task.cost_usd == Decimal("1.2")
    assert [past.outcome for past in await attempts(shaft, task.id)] == ["released"]


async def test_a_task_stops_when_its_dag_has_nothing_left(shaft: Lineshaft) -> None:
    agent = Agent("a", max_concurrent_tasks=1)
    ran = spender(agent)
    dag = await shaft.submit_dag("d", [NewTask("spend", key="x")], budget_ceiling_usd=1)

    await drain(shaft, agent)

    task = await shaft.get(dag.tasks["x"].id)
    assert (ran, task.status, task.attempts) == ([0, 1, 2], Status.READY, 0)
    assert (await shaft.get_dag(dag)).spent_usd == Decimal("1.2")


async def test_all_attempts_together(shaft: Lineshaft) -> None:
    agent = Agent("a")
    ran: list[str] = []

    @agent.task("spend")
    async def spend(ctx: TaskContext) -> None:
        for number in range(3):
            name = f"{ctx.attempt}.{number}"

            def paid(name: str = name) -> None:
                ran.append(name)
                ctx.spend(0.4)

            await ctx.step(name, paid)
            if ctx.attempt == 1:
                raise RuntimeError

    task = await one(shaft, agent, "spend", max_total_cost_usd=1, retry=AT_ONCE)

    assert ran == ["1.0", "2.0", "2.1"]
    assert (task.failure_category, task.cost_usd) == ("budget_exceeded", Decimal("1.2"))


@pytest.mark.parametrize("spent", [1, 3])
async def test_spending_and_returning_is_no_way_around_the_total(shaft: Lineshaft, spent: int) -> None:
    agent = Agent("a")

    @agent.task("spend")
    async def spend(ctx: TaskContext) -> str:
        ctx.spend(spent)
        return "done"

    task = await one(shaft, agent, "spend", max_total_cost_usd=1)

    over = (Status.DEAD_LETTERED, "budget_exceeded")
    assert (task.status, task.failure_category) == (over if spent > 1 else (Status.COMPLETED, None))
    assert task.cost_usd == spent


async def test_what_is_reserved_for_a_task_is_not_missing_from_its_agents_budget(shaft: Lineshaft) -> None:
    """All of the budget is reserved for the task, whose steps may use it."""
    agent = Agent("a", budget_usd=1)
    ran = spender(agent, "0.1")

    task = await one(shaft, agent, "spend", max_total_cost_usd=1)

    assert (len(ran), task.status, task.cost_usd) == (10, Status.COMPLETED, Decimal(1))


async def test_tasks_of_one_agent_see_what_the_others_spend(shaft: Lineshaft) -> None:
    """Without reservations; each overspends by at most one step."""
    agent = Agent("a", budget_usd=2, max_concurrent_tasks=4)
    ran = spender(agent)
    await shaft.submit_many([NewTask("spend") for _ in range(4)])

    await drain(shaft, agent)

    assert len(ran) <= 5 + 4
    view = await engine_of(shaft).fleet.read("a")
    assert view.spent_usd == Decimal("0.4") * len(ran)


@pytest.mark.parametrize("bad", [-1, float("nan"), "much"])
async def test_invalid_amounts_are_refused(shaft: Lineshaft, bad: float) -> None:
    agent = Agent("a")
    agent.task("t")(_spending(bad))

    task = await one(shaft, agent, "t", max_attempts=1)

    assert "spend: must be an amount in US dollars" in (task.failure_reason or "")


def _spending(amount: float) -> Callable[[TaskContext], None]:
    def handler(ctx: TaskContext) -> None:
        ctx.spend(amount)

    return handler


@pytest.mark.database_only("what wakes an agent of this process")
async def test_released_money_is_used_at_once(shaft: Lineshaft) -> None:
    """An agent with free slots waits only for its own budget."""
    agent = Agent("a", budget_usd=1, max_concurrent_tasks=3)

    @agent.task("x")
    async def x() -> None:
        await asyncio.sleep(0)

    tasks = await shaft.submit_many([NewTask("x", max_cost_usd=0.6) for _ in range(3)])
    async with at_work(agent, shaft=shaft):
        for task in tasks:
            await shaft.wait(task, POLL_SUBSCRIBED / 2)
