"""Money adds up, to the last digit: what claims reported, up to their ceilings, and what people corrected."""

from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal

from tests.chaos.evidence import Evidence
from tests.chaos.rules.keeping import completions


def _corrected(evidence: Evidence) -> dict[str, Decimal]:
    """By task."""
    found: dict[str, Decimal] = defaultdict(Decimal)
    for correction in evidence.corrections:
        found[correction.task_id] += correction.amount_usd
    return found


def agents_spent_what_their_claims_cost(evidence: Evidence) -> Iterator[str]:
    by_agent: dict[str | None, Decimal] = defaultdict(Decimal)
    by_task = _corrected(evidence)
    for correction in evidence.corrections:
        by_agent[correction.agent_id] += correction.amount_usd
    for attempt in evidence.attempts:
        by_agent[attempt.agent_id] += attempt.cost_usd
        by_task[attempt.task_id] += attempt.cost_usd
    for task in evidence.tasks.values():
        # A claim that completed its task has no row among the attempts.
        by_agent[task.agent_id] += task.cost_usd - by_task[task.id]
    for agent in evidence.agents:
        if agent.spent_usd != by_agent[agent.id]:
            yield f"{agent.id} has spent {agent.spent_usd}, but its claims cost {by_agent[agent.id]}"


def days_have_spent_what_all_tasks_cost(evidence: Evidence) -> Iterator[str]:
    cost = sum((task.cost_usd for task in evidence.tasks.values()), Decimal(0))
    if evidence.spent_usd is not None and evidence.spent_usd != cost:
        yield f"{evidence.spent_usd} was spent on all days, but all tasks cost {cost}"


def no_agent_spends_more_than_its_budget(evidence: Evidence) -> Iterator[str]:
    """No attempt of the workload costs more than its task's limit, so nothing may be overdrawn.

    Except by what is absurd, which counts up to the ceiling of the claim, and by what people add.
    """
    excess: dict[str | None, Decimal] = defaultdict(Decimal)
    for dispute in evidence.disputes:
        for name in (dispute.agent_id, _dag(evidence, dispute.task_id)):
            excess[name] += dispute.ceiling_usd
    for correction in evidence.corrections:
        for name in (correction.agent_id, _dag(evidence, correction.task_id)):
            excess[name] += max(correction.amount_usd, Decimal(0))
    for purse in (*evidence.agents, *evidence.dags):
        if (
            purse.limit_usd is not None
            and purse.spent_usd + purse.reserved_usd > purse.limit_usd + excess[purse.id]
        ):
            yield (
                f"{purse.id} has spent {purse.spent_usd} and reserved {purse.reserved_usd}, "
                f"but may spend {purse.limit_usd}"
            )


def _dag(evidence: Evidence, task_id: str) -> str | None:
    task = evidence.tasks.get(task_id)
    return None if task is None else task.dag_id


def costs_are_what_agents_reported(evidence: Evidence) -> Iterator[str]:
    """The attempt that completed a task costs what its completion said, up to its ceiling."""
    others = _corrected(evidence)
    ceilings = {(dispute.task_id, dispute.epoch): dispute.ceiling_usd for dispute in evidence.disputes}
    for attempt in evidence.attempts:
        task = evidence.tasks.get(attempt.task_id)
        if task is not None and attempt.epoch != task.epoch:
            others[attempt.task_id] += attempt.cost_usd
    for _, item, answer in completions(evidence):
        task = evidence.tasks.get(item["task"])
        if answer.status != "COMPLETED" or task is None or item["cost"] is None:
            continue
        cost = task.cost_usd - others[task.id]
        reported = Decimal(item["cost"])
        if cost != min(reported, ceilings.get((task.id, task.epoch), reported)):
            yield f"{task.id}: claim {task.epoch} cost {reported}, but {cost} was booked"
