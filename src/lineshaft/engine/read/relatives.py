"""What is around a task, for a page about it: dependencies, dependents, children, recorded steps. Bounded."""

from datetime import datetime
from decimal import Decimal

from msgspec import Raw, Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.snapshot import Reader, Row
from lineshaft.model.states import Status

#: So many of each kind are read.
MOST_RELATIVES = 100
MOST_STEPS = 200
#: Tasks that a cancellation would reach are counted up to this many.
MOST_CANCELLED = 1_000
#: Larger results of steps and checkpoints are left out.
MOST_DATA_BYTES = 20_000

_SQL = catalog.load(__name__)


class Relative(Struct, frozen=True):
    id: str
    title: str
    type: str
    key: str | None
    status: Status


class Recorded(Struct, frozen=True):
    """The result of a step, or a checkpoint."""

    name: str
    #: The claim under which it was recorded.
    epoch: int
    recorded_at: datetime
    cost_usd: Decimal
    #: Bytes of its JSON.
    size: int
    #: None: too large to be shown.
    data_json: Raw | None


class Relatives(Struct, frozen=True):
    """At most `MOST_RELATIVES` of each kind, and the newest `MOST_STEPS` steps."""

    upstream: list[Relative]
    downstream: list[Relative]
    children: list[Relative]
    #: Other tasks that would be cancelled with this one, counted up to `MOST_CANCELLED`.
    cancelled_with: int
    steps: list[Recorded]
    checkpoint: Recorded | None


async def read_relatives(reader: Reader, task_id: str) -> Relatives:
    bounds = {"id": task_id, "most": MOST_RELATIVES}
    data = {"id": task_id, "most_bytes": MOST_DATA_BYTES}
    sent = [await reader.send(_SQL[name], **bounds) for name in ("upstream", "downstream", "children")]
    cancelled = await reader.send(_SQL["cancelled_with"], id=task_id, most=MOST_CANCELLED + 1)
    steps = await reader.send(_SQL["recorded_steps"], **data, most=MOST_STEPS)
    checkpoint = await reader.send(_SQL["checkpoint"], **data)
    upstream, downstream, children = [
        [Relative(**{**row, "status": Status(row["status"])}) for row in await cursor.fetchall()]
        for cursor in sent
    ]
    (counted,) = await cancelled.fetchall()
    recorded = [_recorded(row) for row in await steps.fetchall()]
    saved = [
        _recorded({**row, "name": "checkpoint", "cost_usd": Decimal(0)})
        for row in await checkpoint.fetchall()
    ]
    return Relatives(upstream, downstream, children, counted["n"], recorded, saved[0] if saved else None)


def _recorded(row: Row) -> Recorded:
    return Recorded(
        name=row["name"],
        epoch=row["epoch"],
        recorded_at=row["recorded_at"],
        cost_usd=row["cost_usd"],
        size=row["size"] or 0,
        data_json=None if row["data"] is None else Raw(row["data"]),
    )
