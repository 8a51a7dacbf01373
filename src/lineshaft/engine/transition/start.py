"""Starting claimed tasks: CLAIMED to RUNNING."""

from collections.abc import Sequence

from lineshaft.engine.live.task_locks import claim_columns, has_duplicate_tasks
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.pipeline import pipelined
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.model.states import Status
from lineshaft.types.work import ClaimRef, Moved

_SQL = catalog.load(__name__)


class Starts:
    def __init__(self, transitions: Transitions) -> None:
        self._database = transitions.database
        self._locks = transitions.locks

    async def start(self, claims: Sequence[ClaimRef]) -> list[Moved]:
        if has_duplicate_tasks(claims):
            return [result for claim in claims for result in await self.start([claim])]
        call = _SQL["start_tasks"], {**self._database.now, **claim_columns(claims)}
        (rows,) = await self._database.run_alone(lambda own: pipelined(own, call, named=False))
        results = {task_id: Moved(task_id, Status.RUNNING) for (task_id,) in rows}
        rest = [claim for claim in claims if claim.id not in results]
        if rest:
            refused = await self._database.run(
                lambda own: self._locks.refuse(own, rest, "start", repeated=[Status.RUNNING])
            )
            results |= {result.id: result for result in refused}
        return [results[claim.id] for claim in claims]
