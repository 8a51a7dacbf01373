"""The pages of the dashboard, one file per area."""

from lineshaft.dashboard.pages import (
    agents,
    approvals,
    costs,
    dags,
    dead_letter_decisions,
    dead_letters,
    guards,
    new,
    overview,
    quotas,
    sources,
    task,
    task_actions,
    task_files,
    tasks,
)

AREAS = tuple(
    module.pages
    for module in (
        overview,
        tasks,
        task,
        task_actions,
        task_files,
        dags,
        # Before the page of a letter.
        dead_letter_decisions,
        dead_letters,
        approvals,
        agents,
        guards,
        quotas,
        sources,
        costs,
        new,
    )
)
