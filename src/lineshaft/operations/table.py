"""The table: every operation that an engine carries out."""

from lineshaft.operations import (
    agents,
    artifacts,
    dags,
    events,
    guards,
    health,
    quotas,
    reservations,
    review,
    sources,
    stats,
    task_types,
    tasks,
    tokens,
    work,
)
from lineshaft.operations.operation import operations_in

#: A server matches its routes in this order: the most frequent calls first.
OPERATIONS = operations_in(
    *(
        work,
        reservations,
        agents,
        tasks,
        dags,
        events,
        artifacts,
        review,
        guards,
        quotas,
        task_types,
        sources,
        stats,
        tokens,
        health,
    )
)
