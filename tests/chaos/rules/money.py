"""Money adds up, to the last digit."""

from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal

from tests.chaos.evidence import Evidence
from tests.chaos.rules.keeping import completions


def agents_spent_what_their_claims_cost(evidence: Evidence) -> Iterator[str]:
    by_agent: dict[str | None, Decimal] = defaultdict(Decimal)
    by_task: dict[str, Decimal] = defaultdict(Decimal)
    for attempt in evidence.attempts:
        by_agent[attempt.agent_id] += attempt.cost_usd
        by_task[attempt.task_id] += attempt.cost_usd
    for task in evidence.tasks.values():
        # A claim that completed its task has no row among the attempts.
        by_agent[task.agent_id] += task.cost_usd - by_task[task.id]
    for agent in evidence.agents:
        if agent.spent_usd != by_agent[agent.id]:
            yield f"{agent.id} has spent {agent.spent_usd}, but its claims cost {by_agent[agent.id]}"


def no_agent_spends_more_than_its_budget(evidence: Evidence) -> Iterator[str]:
    """No attempt of the workload costs more than its task's limit, so nothing may be overdrawn."""
    for purse in (*evidence.agents, *evidence.dags):
        if purse.limit_usd is not None and purse.spent_usd + purse.reserved_usd > purse.limit_usd:
            yield (
                f"{purse.id} has spent {purse.spent_usd} and reserved {purse.reserved_usd}, "
                f"but may spend {purse.limit_usd}"
            )


def costs_are_what_agents_reported(evidence: Evidence) -> Iterator[str]:
    """The attempt that completed a task costs what its completion said."""
    others: dict[str, Decimal] = defaultdict(Decimal)
    for attempt in evidence.attempts:
        task = evidence.tasks.get(attempt.task_id)
        if task is not None and attempt.epoch != task.epoch:
            others[attempt.task_id] += attempt.cost_usd
    for _, item, answer in completions(evidence):
        task = evidence.tasks.get(item["task"])
        if answer.status != "COMPLETED" or task is None or item["cost"] is None:
            continue
        cost = task.cost_usd - others[task.id]
        if cost != Decimal(item["cost"]):
            yield f"{task.id}: claim {task.epoch} cost {item['cost']}, but {cost} was booked"
