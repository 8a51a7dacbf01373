"""The pages of the dashboard, one file per area."""

from lineshaft.dashboard.pages import (
    agents,
    approvals,
    costs,
    dags,
    dead_letters,
    guards,
    new,
    overview,
    sources,
    task,
    tasks,
)

AREAS = tuple(
    module.pages
    for module in (
        overview,
        tasks,
        task,
        dags,
        dead_letters,
        approvals,
        agents,
        guards,
        sources,
        costs,
        new,
    )
)
