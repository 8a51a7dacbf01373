"""The verdict on a run: every rule, and what breaks it."""

from collections.abc import Callable, Iterator
from itertools import islice

from tests.chaos.evidence import Evidence
from tests.chaos.rules import feed, holding, instances, keeping, money, order

Rule = Callable[[Evidence], Iterator[str]]
#: How many violations of each rule are reported.
_TOLD = 10


def tables_agree(evidence: Evidence) -> Iterator[str]:
    """Counters, sums, locks and states, as tests/invariants.py has them."""
    for rule, rows in evidence.broken_rules.items():
        yield f"{rule}: {len(rows)} rows, such as {rows[0]}"


RULES: dict[str, Rule] = {
    "no accepted task is lost": keeping.accepted_tasks_exist,
    "nothing comes from nowhere": keeping.nothing_comes_from_nowhere,
    "everything comes to an end": keeping.everything_comes_to_an_end,
    "one recorded outcome": keeping.one_outcome,
    "whatever was answered is so": keeping.answers_are_true,
    "a refused claim changes nothing": order.refusals_change_nothing,
    "recorded steps don't run again": keeping.steps_run_once,
    "a claim belongs to one agent": holding.claims_belong_to_one,
    "an incarnation is one process": instances.an_incarnation_is_one_process,
    "attempts name their process": instances.attempts_name_their_process,
    "only dead processes are reported": instances.only_dead_processes_are_reported,
    "one claim at a time": holding.one_claim_at_a_time,
    "one holder of a document": holding.one_holder_of_a_document,
    "dependents start after dependencies": order.dependents_start_after_dependencies,
    "handlers begin after dependencies": order.handlers_begin_after_dependencies,
    "inputs are recorded outputs": order.inputs_are_recorded_outputs,
    "events follow the state machine": order.events_follow_the_state_machine,
    "readers see each event once": feed.readers_see_each_event_once,
    "readers see causes first": feed.readers_see_causes_first,
    "agents spent what their claims cost": money.agents_spent_what_their_claims_cost,
    "no agent spends more than its budget": money.no_agent_spends_more_than_its_budget,
    "days have spent what all tasks cost": money.days_have_spent_what_all_tasks_cost,
    "costs are what agents reported": money.costs_are_what_agents_reported,
    "tables agree": tables_agree,
}


def check(evidence: Evidence) -> dict[str, list[str]]:
    """What breaks each rule; an empty list: it holds."""
    return {name: list(islice(rule(evidence), _TOLD)) for name, rule in RULES.items()}
