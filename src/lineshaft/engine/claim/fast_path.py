"""The fast path: shorter statements for tasks without locks or money, and when to try them.

They cost the server a third of the full statements, which handle everything that these leave.
"""

from collections.abc import Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from lineshaft.engine.claim.rows import claimed_tasks
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.pipeline import pipelined, row_type
from lineshaft.types.work import ClaimedTask

_SQL = catalog.load(__name__)
#: After a failure the fast path is skipped this often, and twice as often after each further one: a fleet
#: whose tasks have locks or money should not pay for both, and a fleet that has changed be noticed.
_FIRST_SKIPS, _MOST_SKIPS = 25, 1_600


class FastPath:
    def __init__(self, first_skips: int = _FIRST_SKIPS, most_skips: int = _MOST_SKIPS) -> None:
        self._first_skips = first_skips
        self._most_skips = most_skips
        #: By caller: how often to skip it still, and how often in all.
        self._skips: dict[str, tuple[int, int]] = {}

    def is_open(self, caller: str = "") -> bool:
        left, whole = self._skips.get(caller, (0, 0))
        if left:
            self._skips[caller] = left - 1, whole
        return not left

    def tried(self, caller: str = "", *, worked: bool) -> None:
        if worked:
            self._skips.pop(caller, None)
            return
        _, before = self._skips.get(caller, (0, 0))
        whole = min(2 * before, self._most_skips) if before else self._first_skips
        self._skips[caller] = whole, whole


class FastClaim(NamedTuple):
    tasks: list[ClaimedTask]
    has_room: bool
    #: There is something to weigh: `claim_tasks` must decide.
    weigh: bool = False
    #: Other claims took some of the best tasks: there may be more.
    contested: bool = False
    #: Other transactions hold everything that is claimable.
    missed: bool = False
    #: There were fewer tasks than asked for, but the delay of another one has passed.
    due: bool = False
    #: Everything was paused after these tasks were claimed: they are to be handed back.
    paused: bool = False
    #: Outputs that were recorded together with this claim, by task: they need not be read.
    outputs: Mapping[str, bytes | None] = MappingProxyType({})

    @property
    def is_all(self) -> bool:
        return not (self.weigh or self.contested or self.missed)


async def claim_fast(connection: Connection, parameters: Mapping[str, Any]) -> FastClaim:
    statement = _SQL["claim_fast"]
    (rows,) = await pipelined(connection, (statement, parameters), named=False)
    row = row_type(statement)
    rows.sort(key=itemgetter(row._fields.index("n")))
    first = row._make(rows[0])
    tasks: list[ClaimedTask] = []
    if first.id is not None:
        tasks = claimed_tasks(
            row._fields,
            rows,
            started=parameters["start"],
            claimed_at=first.now,
            claim_ttl_sec=first.claim_ttl_sec,
        )
    return FastClaim(tasks, first.has_room, first.weigh, first.contested, first.missed, first.due)
